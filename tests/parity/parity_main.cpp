// The C++ side of the parity proof; oracle.py is the other, parity_test.py compares the files.
//
//   parity train INPUTS CASES OUT      every case of a file, as a rank of whatever world started it
//   parity single INPUTS OUT           optimizers and GPT, in one process
//   parity optimizers INPUTS OUT       the optimizers on the GPU

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "lockstep/comm/device.h"
#include "lockstep/lockstep.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/optim/rule_state.h"
#include "lockstep/parallel/activation_checkpoint.h"

namespace parity {
namespace {

// ---------------------------------------------------------------- models

// The models of oracle.py, operation for operation, under the same parameter names. GPT is the
// library's own.
struct Mlp : torch::nn::Module {
  Mlp() {
    net = register_module("net", torch::nn::Sequential(torch::nn::Linear(20, 64), torch::nn::ReLU(),
                                                       torch::nn::Linear(64, 10)));
  }
  at::Tensor forward(const at::Tensor& x) { return net->forward(x); }

  torch::nn::Sequential net;
};

struct ConvNet : torch::nn::Module {
  ConvNet() {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    register_module("conv2", conv2);
    register_module("bn2", bn2);
    register_module("fc", fc);
  }
  at::Tensor forward(const at::Tensor& images) {
    auto x = torch::max_pool2d(torch::relu(bn1(conv1(images))), 2);
    x = torch::relu(bn2(conv2(x)));
    return fc(x.mean({2, 3}));
  }

  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(3, 8, 3).padding(1)};
  torch::nn::BatchNorm2d bn1{8};
  torch::nn::Conv2d conv2{torch::nn::Conv2dOptions(8, 16, 3).padding(1)};
  torch::nn::BatchNorm2d bn2{16};
  torch::nn::Linear fc{16, 10};
};

// Uses one head or both, as the caller chooses.
struct Branches : torch::nn::Module {
  Branches() {
    register_module("trunk", trunk);
    register_module("head_a", head_a);
    register_module("head_b", head_b);
  }
  at::Tensor forward(const at::Tensor& input, const std::string& heads) {
    const auto x = torch::relu(trunk(input));
    if (heads == "a") return head_a(x);
    if (heads == "b") return head_b(x);
    return head_a(x) + head_b(x);
  }

  torch::nn::Linear trunk{20, 64};
  torch::nn::Linear head_a{64, 10};
  torch::nn::Linear head_b{64, 10};
};

// Like heads_of() in oracle.py.
std::string heads_of(int micro_step, int rank) {
  const int kind = micro_step % 5;
  if (kind == 0) return "ab";
  if (kind == 1 || kind == 3) return (rank + kind / 2) % 2 == 0 ? "a" : "b";
  return kind == 2 ? "b" : "a";
}

// ---------------------------------------------------------------- files

// Tensors as raw files beside an index.txt, as oracle.py writes and reads them.
at::ScalarType dtype_of(const std::string& name) {
  if (name == "float32") return at::kFloat;
  if (name == "int64") return at::kLong;
  throw std::runtime_error("dtype " + name);
}

const char* name_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return "float32";
  if (dtype == at::kLong) return "int64";
  throw std::runtime_error(std::string("dtype ") + c10::toString(dtype));
}

using Tensors = std::map<std::string, at::Tensor>;

Tensors read_tensors(const std::filesystem::path& directory) {
  std::ifstream index(directory / "index.txt");
  Tensors tensors;
  for (std::string line; std::getline(index, line);) {
    std::istringstream fields(line);
    std::string name, dtype;
    fields >> name >> dtype;
    std::vector<std::int64_t> sizes;
    for (std::int64_t size = 0; fields >> size;) sizes.push_back(size);
    auto tensor = torch::empty(sizes, dtype_of(dtype));
    std::ifstream file(directory / (name + ".bin"), std::ios::binary);
    file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
    if (!file) throw std::runtime_error("cannot read " + name);
    tensors[name] = tensor;
  }
  if (tensors.empty()) throw std::runtime_error("no tensors in " + directory.string());
  return tensors;
}

void write_tensors(const std::filesystem::path& directory, const Tensors& tensors) {
  std::filesystem::create_directories(directory);
  std::ofstream index(directory / "index.txt");
  for (const auto& [name, tensor] : tensors) {
    const auto data = tensor.detach().cpu().contiguous();
    index << name << ' ' << name_of(data.scalar_type());
    for (const auto size : data.sizes()) index << ' ' << size;
    index << '\n';
    std::ofstream file(directory / (name + ".bin"), std::ios::binary);
    file.write(static_cast<const char*>(data.data_ptr()),
               static_cast<std::streamsize>(data.nbytes()));
    if (!file) throw std::runtime_error("cannot write " + name);
  }
  index.flush();
  if (!index) throw std::runtime_error("cannot write the index in " + directory.string());
}

// ---------------------------------------------------------------- several ranks

using lockstep::models::Gpt;
using lockstep::models::GptConfig;

constexpr int kSteps = 10;
constexpr int kOptimizerSteps = 20;
const GptConfig kGpt{.n_layer = 2, .n_head = 2, .n_embd = 32, .vocab_size = 61, .n_positions = 16};

// One line of the cases file: name=value pairs, as Case.line() writes them.
class Case {
 public:
  explicit Case(const std::string& line) {
    std::istringstream fields(line);
    for (std::string field; fields >> field;) {
      const auto equals = field.find('=');
      values_[field.substr(0, equals)] = field.substr(equals + 1);
    }
  }
  const std::string& text(const std::string& key) const { return values_.at(key); }
  int number(const std::string& key) const { return std::stoi(values_.at(key)); }

  int steps(int rank, int world) const {
    if (text("join") == "first") return kSteps - 2 * (world - 1 - rank);
    if (text("join") == "last") return kSteps - 2 * rank;
    return kSteps;
  }

 private:
  std::map<std::string, std::string> values_;
};

std::vector<Case> read_cases(const std::string& path) {
  std::vector<Case> cases;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) cases.emplace_back(line);
  if (cases.empty()) throw std::runtime_error("no cases in " + path);
  return cases;
}

void load(torch::nn::Module& module, const std::string& model, const Tensors& inputs) {
  const torch::NoGradGuard no_grad;
  for (auto& item : module.named_parameters()) {
    item.value().copy_(inputs.at(model + "-" + item.key()));
  }
  for (auto& item : module.named_buffers()) {
    item.value().copy_(inputs.at(model + "-" + item.key()));
  }
}

Tensors state_of(const torch::nn::Module& module) {
  Tensors state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) state[item.key()] = item.value();
  return state;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        std::vector<at::Tensor> parameters) {
  using namespace lockstep::optim;
  if (name == "sgd") {
    return std::make_unique<SGD>(std::move(parameters),
                                 SGDOptions{.lr = 0.05, .momentum = 0.9, .weight_decay = 1e-3});
  }
  return std::make_unique<AdamW>(std::move(parameters),
                                 AdamWOptions{.lr = 1e-3, .weight_decay = 1e-2});
}

lockstep::DdpOptions ddp_options(const Case& c) {
  lockstep::DdpOptions options;
  options.find_unused_parameters = c.number("find_unused") != 0;
  options.static_graph = c.number("static_graph") != 0;
  options.gradient_as_bucket_view = c.number("bucket_view") != 0;
  if (const double cap = std::stod(c.text("bucket_cap_mb")); cap > 0) options.bucket_cap_mb = cap;
  return options;
}

// A batch of one rank; with merge, those of that many ranks as one.
at::Tensor batch_of(const at::Tensor& data, int micro_step, int rank, int merge) {
  if (merge > 0) return data[micro_step].slice(0, 0, merge).flatten(0, 1).clone();
  return data[micro_step][rank].clone();
}

template <typename Module>
Tensors train(const Case& c, lockstep::World& world, const Tensors& inputs, Module net) {
  const auto& model_name = c.text("model");
  const auto& x = inputs.at(model_name + "-x");
  const auto& y = inputs.at(model_name + "-y");
  load(*net, model_name, inputs);
  lockstep::DistributedDataParallel model{net, world, ddp_options(c)};
  const auto optimizer = make_optimizer(c.text("optimizer"), model.parameters());
  const int accumulate = c.number("accumulate"), merge = c.number("merge");

  const auto loss_of = [&](int at) {
    const auto input = batch_of(x, at, world.rank(), merge);
    const auto target = batch_of(y, at, world.rank(), merge);
    if constexpr (std::is_same_v<Module, Gpt>) {
      return lockstep::models::next_token_loss(model(input), target);
    } else if constexpr (std::is_same_v<Module, std::shared_ptr<Branches>>) {
      return torch::cross_entropy_loss(model(input, heads_of(at, world.rank())), target);
    } else {
      return torch::cross_entropy_loss(model(input), target);
    }
  };
  std::vector<at::Tensor> losses;
  const auto loop = [&] {
    for (int step = 0; step < c.steps(world.rank(), world.size()); ++step) {
      for (int micro = 0; micro < accumulate; ++micro) {
        std::optional<lockstep::NoSync> no_sync;
        if (micro < accumulate - 1) no_sync.emplace(model.no_sync());
        auto loss = loss_of(step * accumulate + micro);
        if (accumulate > 1) loss = loss / accumulate;
        loss.backward();
        losses.push_back(loss.detach());
      }
      optimizer->step();
      optimizer->zero_grad();
    }
  };
  if (c.text("join") == "none") {
    loop();
  } else {
    model.join(loop);
  }
  model.verify_replicas();
  auto result = state_of(*net);
  result["losses"] = torch::stack(losses);
  return result;
}

Tensors train(const Case& c, lockstep::World& world, const Tensors& inputs) {
  const auto& name = c.text("model");
  if (name == "mlp") return train(c, world, inputs, std::make_shared<Mlp>());
  if (name == "conv") return train(c, world, inputs, std::make_shared<ConvNet>());
  if (name == "branches") return train(c, world, inputs, std::make_shared<Branches>());
  Gpt gpt{kGpt};
  if (c.number("checkpoint") != 0) gpt->run_blocks_with(lockstep::checkpoint);
  return train(c, world, inputs, gpt);
}

int run_cases(const std::string& directory, const std::string& cases, const std::string& out) {
  return lockstep::run(
      [&](lockstep::World& world) {
        const auto inputs = read_tensors(directory);
        for (const auto& c : read_cases(cases)) {
          const auto place =
              std::filesystem::path(out) / c.text("name") / fmt::format("rank{}", world.rank());
          auto result = train(c, world, inputs);
          // Replicas are equal: verify_replicas() was called.
          if (!world.is_leader()) result = {{"losses", result.at("losses")}};
          write_tensors(place, result);
        }
      },
      {.device = c10::Device(c10::kCPU)});
}

// ---------------------------------------------------------------- one process

// The steps of run_optimizers() in oracle.py.
template <typename Optimizer, typename Options>
void run_optimizer(const Tensors& inputs, const Options& options,
                   const std::filesystem::path& place) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; inputs.count(fmt::format("optim-param-{}", i)) != 0; ++i) {
    parameters.push_back(
        inputs.at(fmt::format("optim-param-{}", i)).clone().set_requires_grad(true));
  }
  Optimizer optimizer{parameters, options};
  for (int step = 0; step < kOptimizerSteps; ++step) {
    if (step == kOptimizerSteps / 2) optimizer.options().lr *= 0.25;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const bool skipped = i == parameters.size() - 2 && step % 3 == 2;
      parameters[i].mutable_grad() =
          skipped ? at::Tensor() : inputs.at(fmt::format("optim-grad-{}", i))[step].clone();
    }
    optimizer.step();
  }
  Tensors result;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    result[fmt::format("param-{}", i)] = parameters[i];
    const lockstep::optim::RuleState* const state =
        lockstep::optim::find_state(optimizer, parameters[i]);
    if (state == nullptr) continue;
    if (state->step.defined()) result[fmt::format("step-{}", i)] = state->step;
    for (std::size_t k = 0; k < state->names.size(); ++k)
      result[fmt::format("{}-{}", state->names[k], i)] = state->tensors[k];
  }
  write_tensors(place, result);
}

void run_gpt(const Tensors& inputs, const std::filesystem::path& place) {
  Gpt gpt{kGpt};
  load(*gpt, "gpt", inputs);
  const auto logits = gpt(inputs.at("gpt-x")[0][0].clone());
  const auto loss = lockstep::models::next_token_loss(logits, inputs.at("gpt-y")[0][0].clone());
  loss.backward();
  Tensors result{{"logits", logits}, {"loss", loss}};
  for (const auto& item : gpt->named_parameters()) result[item.key()] = item.value().grad();
  write_tensors(place, result);
}

void run_optimizers(const Tensors& inputs, const std::filesystem::path& out) {
  using lockstep::optim::AdamW;
  using lockstep::optim::AdamWOptions;
  using lockstep::optim::SGD;
  using lockstep::optim::SGDOptions;
  const std::map<std::string, AdamWOptions> adamw{
      {"adamw", {.lr = 0.01}},
      {"adamw-betas", {.lr = 0.1, .betas = {0.8, 0.95}, .eps = 1e-6, .weight_decay = 0.1}},
      {"adamw-no-decay", {.lr = 0.01, .weight_decay = 0}}};
  const std::map<std::string, SGDOptions> sgd{
      {"sgd", {.lr = 0.1}},
      {"sgd-decay", {.lr = 0.1, .weight_decay = 0.1}},
      {"sgd-momentum", {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}},
      {"sgd-dampening", {.lr = 0.1, .momentum = 0.9, .dampening = 0.3}},
      {"sgd-nesterov", {.lr = 0.1, .momentum = 0.9, .nesterov = true}}};
  for (const auto& [name, options] : adamw) run_optimizer<AdamW>(inputs, options, out / name);
  for (const auto& [name, options] : sgd) run_optimizer<SGD>(inputs, options, out / name);
}

int run_single(const std::filesystem::path& directory, const std::filesystem::path& out) {
  run_optimizers(read_tensors(directory / "optimizers"), out);
  run_gpt(read_tensors(directory / "training"), out / "gpt");
  return 0;
}

int run_on_gpu(const std::filesystem::path& directory, const std::filesystem::path& out) {
  lockstep::load_cuda();
  auto inputs = read_tensors(directory / "optimizers");
  for (auto& [name, tensor] : inputs) tensor = tensor.to(at::kCUDA);
  run_optimizers(inputs, out);
  return 0;
}

}  // namespace
}  // namespace parity

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 4 && args[0] == "train")
    return lockstep::cli::end_at_once(parity::run_cases(args[1], args[2], args[3]));
  if (args.size() == 3 && args[0] == "single") return parity::run_single(args[1], args[2]);
  if (args.size() == 3 && args[0] == "optimizers") return parity::run_on_gpu(args[1], args[2]);
  fmt::print(stderr,
             "usage: parity train INPUTS CASES OUT | parity single|optimizers INPUTS OUT\n");
  return 2;
}
