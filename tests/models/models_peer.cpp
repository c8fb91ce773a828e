// The C++ side of models_oracle_test.py.
//
//   models_peer CASES        every folder in CASES/good and CASES/bad: a Hugging Face model, with
//                            inputs.safetensors beside it
//   models_peer resnet DEPTH FOLDER   the network of FOLDER/model.safetensors on its inputs: logits
//                            in training (with loss, gradients, statistics) and in evaluation
//
// A good one gives, in the same folder: out.safetensors (logits, also of training mode and in
// bfloat16, loss, gradients, losses of five steps), generated.txt, and the model saved as saved/,
// sharded/ and half/. A bad one gives error.txt.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/io/tensors.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/models/resnet.h"

namespace {

namespace fs = std::filesystem;
namespace io = lockstep::io;
using namespace lockstep::models;

using Tensors = std::map<std::string, at::Tensor>;

Tensors read_tensors(const fs::path& path) {
  const io::SafetensorsFile file(path.string());
  Tensors all;
  for (const io::TensorEntry& entry : file.tensors()) all[entry.name] = io::tensor_of(file, entry);
  return all;
}

void write_tensors(const fs::path& path, Tensors tensors) {
  std::vector<io::TensorBytes> all;
  for (auto& [name, tensor] : tensors) {
    tensor = tensor.detach().contiguous();
    all.push_back(io::bytes_of_tensor(name, tensor));
  }
  io::FileWriter file(path.string());
  io::write_safetensors(file, all);
  file.finish();
}

// What a cache gives piece by piece, for comparison with the whole.
at::Tensor in_pieces(CausalLm& model, const at::Tensor& ids) {
  const torch::NoGradGuard no_grad;
  KvCache cache(3);  // grows
  std::vector<at::Tensor> logits;
  std::int64_t at = 0;
  for (const std::int64_t length : {std::int64_t{4}, std::int64_t{1}, std::int64_t{3}}) {
    logits.push_back(model.forward(ids.narrow(1, at, length), &cache));
    at += length;
  }
  for (; at < ids.size(1); ++at) logits.push_back(model.forward(ids.narrow(1, at, 1), &cache));
  return torch::cat(logits, 1);
}

// Losses of a few steps of gradient descent.
at::Tensor trained_losses(const fs::path& folder, const at::Tensor& ids,
                          const at::Tensor& targets) {
  const CausalLmPtr model = load_pretrained(folder.string());
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05));
  std::vector<double> losses;
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = model->loss(ids, targets);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return torch::tensor(losses, at::kDouble);
}

void run_good(const fs::path& folder) {
  const Tensors inputs = read_tensors(folder / "inputs.safetensors");
  const at::Tensor ids = inputs.at("ids");
  const CausalLmPtr model = load_pretrained(folder.string());
  const at::Tensor logits = model->forward(ids);
  const at::Tensor loss = model->loss(ids, inputs.at("targets"));
  loss.backward();
  Tensors out{{"logits", logits}, {"loss", loss}, {"pieces", in_pieces(*model, ids)}};
  for (const auto& item : model->named_parameters())
    out["grad." + item.key()] = item.value().grad();

  model->train();
  torch::manual_seed(5);
  out["training"] = model->forward(ids);
  model->eval();

  save_pretrained(*model, (folder / "saved").string());
  save_pretrained(*model, (folder / "sharded").string(), {.max_shard_bytes = 20'000});
  const auto sharded = load_pretrained((folder / "sharded").string());
  out["reloaded"] = sharded->forward(ids);

  const auto half = load_pretrained(folder.string(), {.dtype = at::kBFloat16});
  out["half"] = half->forward(ids);
  save_pretrained(*half, (folder / "half").string());

  out["losses"] = trained_losses(folder, ids, inputs.at("targets"));
  write_tensors(folder / "out.safetensors", out);

  const at::Tensor prompt = inputs.at("prompt");
  const std::vector<std::int64_t> start(prompt.data_ptr<std::int64_t>(),
                                        prompt.data_ptr<std::int64_t>() + prompt.numel());
  const auto made =
      generate(*model, start, {.max_new_tokens = 16, .eos = model->config().eos_token_ids});
  std::ofstream(folder / "generated.txt") << fmt::format("{}", fmt::join(made, " "));
}

void run_resnet(std::int64_t depth, const fs::path& folder) {
  const Tensors inputs = read_tensors(folder / "inputs.safetensors");
  const Tensors weights = read_tensors(folder / "model.safetensors");
  ResNet net{ResNetConfig{.depth = depth, .num_classes = 7}};
  net->to(inputs.at("images").scalar_type());
  {
    const torch::NoGradGuard no_grad;
    for (auto& item : net->named_parameters()) item.value().copy_(weights.at(item.key()));
    for (auto& item : net->named_buffers()) item.value().copy_(weights.at(item.key()));
  }
  Tensors out;
  net->eval();
  out["evaluated"] = net(inputs.at("images"));
  net->train();
  out["trained"] = net(inputs.at("images"));
  const at::Tensor loss = torch::cross_entropy_loss(out["trained"], inputs.at("labels"));
  loss.backward();
  out["loss"] = loss;
  for (const auto& item : net->named_parameters()) out["grad." + item.key()] = item.value().grad();
  for (const auto& item : net->named_buffers()) out["state." + item.key()] = item.value();
  write_tensors(folder / "out.safetensors", out);
}

std::vector<fs::path> folders(const fs::path& parent) {
  std::vector<fs::path> all;
  for (const auto& entry : fs::directory_iterator(parent)) all.push_back(entry.path());
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  if (argc == 4) {
    run_resnet(std::stoll(argv[2]), argv[3]);
    return 0;
  }
  if (argc != 2) return 2;
  const fs::path cases = argv[1];
  for (const fs::path& folder : folders(cases / "good")) {
    try {
      run_good(folder);
    } catch (const std::exception& e) {
      fmt::print(stderr, "{}: {}\n", folder.filename().string(), e.what());
      return 1;
    }
  }
  for (const fs::path& folder : folders(cases / "bad")) {
    std::string said = "nothing was refused";
    try {
      load_pretrained(folder.string());
    } catch (const lockstep::UsageError& e) {
      said = e.what();
    }
    std::ofstream(folder / "error.txt") << said;
  }
  return 0;
}
