// A C++ user's program: writes archives with torch::save into a directory, and on stdout what is in
// them, one tensor per line: archive, name, type, shape, bytes as hexadecimal digits.
//
//   archive_peer DIR
#include <torch/torch.h>

#include <cstdio>
#include <limits>
#include <string>
#include <vector>

namespace {

void dump(const std::string& archive, const std::string& name, const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().contiguous();
  std::string shape, digits;
  for (const auto size : dense.sizes()) shape += (shape.empty() ? "" : ",") + std::to_string(size);
  const auto* bytes = static_cast<const unsigned char*>(dense.const_data_ptr());
  for (std::size_t i = 0; i < dense.nbytes(); ++i) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", bytes[i]);
    digits += two;
  }
  std::printf("%s\t%s\t%s\t%s\t%s\n", archive.c_str(), name.c_str(),
              c10::toString(dense.scalar_type()), shape.c_str(), digits.c_str());
}

struct NetImpl : torch::nn::Module {
  NetImpl() : body(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 2)) {
    register_module("body", body);
    // Values in which a byte could be lost.
    const double nan = std::numeric_limits<double>::quiet_NaN();
    odd = register_parameter("odd", at::tensor({-0.0, 1e-310, nan, 0.1}, at::kDouble));
    turned = register_parameter("turned", at::rand({3, 2}).t());
    frozen = register_parameter("frozen", at::rand({2}).to(at::kBFloat16), false);
    half = register_buffer("half", at::rand({5}).to(at::kHalf));
    mask = register_buffer("mask", at::arange(3).ne(1));
    none = register_buffer("none", at::empty({0, 3}));
    one = register_buffer("one", at::scalar_tensor(7, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    return body->forward(x).sum() + turned.sum() + odd[3].to(at::kFloat);
  }
  torch::nn::Sequential body;
  at::Tensor odd, turned, frozen, half, mask, none, one;
};
TORCH_MODULE(Net);

void dump_module(const std::string& archive, const std::string& prefix, const Net& net) {
  for (const auto& item : net->named_parameters()) dump(archive, prefix + item.key(), item.value());
  for (const auto& item : net->named_buffers()) dump(archive, prefix + item.key(), item.value());
}

void dump_number(const std::string& archive, const std::string& name, double number) {
  dump(archive, name, at::scalar_tensor(number, at::kDouble));
}

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

// Parameters by their number over both groups; one of them has no state.
void dump_adamw(const std::string& archive, const std::string& prefix, torch::optim::AdamW& adamw) {
  std::int64_t number = 0, group_number = 0;
  for (auto& group : adamw.param_groups()) {
    for (const auto& parameter : group.params()) {
      const std::string name = prefix + "state." + std::to_string(number++) + ".";
      const auto found = adamw.state().find(parameter.unsafeGetTensorImpl());
      if (found == adamw.state().end()) continue;
      const auto& state = static_cast<const torch::optim::AdamWParamState&>(*found->second);
      dump(archive, name + "step", at::scalar_tensor(state.step(), at::kLong));
      dump(archive, name + "exp_avg", state.exp_avg());
      dump(archive, name + "exp_avg_sq", state.exp_avg_sq());
    }
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
    const std::string name = prefix + "param_groups." + std::to_string(group_number++) + ".";
    dump_number(archive, name + "lr", options.lr());
    dump_number(archive, name + "eps", options.eps());
    dump_number(archive, name + "weight_decay", options.weight_decay());
    dump(archive, name + "betas",
         at::tensor({std::get<0>(options.betas()), std::get<1>(options.betas())}, at::kDouble));
    dump(archive, name + "amsgrad", at::scalar_tensor(options.amsgrad(), at::kBool));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string place = argv[1] + std::string("/");
  torch::manual_seed(11);
  Net net;
  std::vector<at::Tensor> body = net->body->parameters(), rest{net->turned, net->frozen};
  const auto options = [](double lr) {
    return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(lr).eps(1e-7));
  };
  Groups groups;
  groups.emplace_back(body, options(0.125));
  groups.emplace_back(rest, options(0.1));
  torch::optim::AdamW adamw(groups, torch::optim::AdamWOptions(1.0));
  torch::optim::SGD sgd({net->turned}, torch::optim::SGDOptions(0.25).momentum(0.5));
  for (int step = 0; step < 3; ++step) {
    adamw.zero_grad();
    net->forward(at::rand({6, 3})).backward();
    adamw.step();
    sgd.step();
  }
  torch::save(net, place + "module.pt");
  dump_module("module.pt", "", net);
  torch::save(adamw, place + "adamw.pt");
  dump_adamw("adamw.pt", "", adamw);
  torch::save(sgd, place + "sgd.pt");
  const auto& momentum = static_cast<const torch::optim::SGDParamState&>(
      *sgd.state().at(net->turned.unsafeGetTensorImpl()));
  dump("sgd.pt", "state.0.momentum_buffer", momentum.momentum_buffer());
  const std::vector<at::Tensor> list{at::arange(3), at::rand({2, 2})};
  torch::save(list, place + "list.pt");
  for (std::size_t i = 0; i < list.size(); ++i) dump("list.pt", std::to_string(i), list[i]);
  // What a user's own save function makes: an archive of archives, and a string.
  torch::serialize::OutputArchive all, of_net, of_adamw;
  net->save(of_net);
  adamw.save(of_adamw);
  all.write("model", of_net);
  all.write("optimizer", of_adamw);
  all.write("epoch", c10::IValue(std::int64_t{5}));
  all.write("note", c10::IValue("of Monday"));
  all.save_to(place + "all.pt");
  dump_module("all.pt", "model.", net);
  dump_adamw("all.pt", "optimizer.", adamw);
  dump("all.pt", "epoch", at::scalar_tensor(5, at::kLong));
  return 0;
}
