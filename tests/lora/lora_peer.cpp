// What peft_test.py compares with PEFT: `lora_peer JOB...`, JSON files that name folders,
// which it does one after another.
//
//   {"model": DIR,            a Hugging Face folder
//    "adapter": DIR,          an adapter to begin with
//    "steps": 20, "lr": 0.01, AdamW on the batches of `ids`
//    "ids": FILE,             safetensors, "ids" [steps, batch, time]; the logits are the first's
//    "merge": true,           before the logits are computed
//    "dtype": "bfloat16",     the base's
//    "nf4": true,             the linear layers of its blocks
//    "save": DIR,             the adapter
//    "out": FILE}             safetensors with "losses" and "logits"
//
//   {"matrices": FILE,        safetensors
//    "out": FILE}             safetensors with NAME.bytes and the decoded NAME.float32, ...
#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/io/tensors.h"
#include "lockstep/models/lora.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/nn/nf4.h"
#include "lockstep/optim/algorithms.h"

namespace {

using namespace lockstep;

class Job {
 public:
  explicit Job(const std::string& file) : root_(load_document(file)) {}
  std::string text(const char* key) const {
    const Entry* entry = root_.find(key);
    return entry == nullptr ? std::string() : as_string(entry->value, key);
  }
  double real(const char* key) const {
    const Entry* entry = root_.find(key);
    return entry == nullptr ? 0 : as_real(entry->value, key);
  }
  bool flag(const char* key) const {
    const Entry* entry = root_.find(key);
    return entry != nullptr && as_bool(entry->value, key);
  }

 private:
  Node root_;
};

void write(const std::string& path, const at::Tensor& losses, const at::Tensor& logits) {
  io::FileWriter file(path);
  io::write_safetensors(
      file, {io::bytes_of_tensor("losses", losses), io::bytes_of_tensor("logits", logits)});
  file.finish();
}

// The bytes of NF4 of each matrix in a file, and what they are decoded to.
void encode(const Job& job) {
  io::FileWriter to(job.text("out"));
  const io::SafetensorsFile file(job.text("matrices"));
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const io::TensorEntry& entry : file.tensors()) {
    const at::Tensor matrix = io::tensor_of(file, entry), bytes = nn::to_nf4(matrix);
    all.emplace_back(entry.name + ".bytes", bytes);
    for (const auto& [name, type] :
         {std::pair("float32", at::kFloat), {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}})
      all.emplace_back(entry.name + "." + name, nn::from_nf4(bytes, matrix.size(1), type));
  }
  std::vector<io::TensorBytes> list;
  for (const auto& [name, tensor] : all) list.push_back(io::bytes_of_tensor(name, tensor));
  io::write_safetensors(to, list);
  to.finish();
}

void run(const Job& job) {
  if (!job.text("matrices").empty()) return encode(job);
  const bool half = job.text("dtype") == "bfloat16";
  const models::CausalLmPtr model = models::load_pretrained(
      job.text("model"), {.dtype = half ? at::kBFloat16 : at::kFloat, .nf4 = job.flag("nf4")});
  const models::LoraConfig config = models::load_adapter(*model, job.text("adapter"));
  const io::SafetensorsFile file(job.text("ids"));
  const at::Tensor ids = io::tensor_of(file, file.at("ids"));
  const auto steps = static_cast<std::int64_t>(job.real("steps"));
  optim::AdamW optimizer(model->parameters(), {.lr = job.real("lr"), .weight_decay = 0.01});
  at::Tensor losses = torch::zeros({steps});
  model->train();
  for (std::int64_t step = 0; step < steps; ++step) {
    const at::Tensor batch = ids[step];
    const at::Tensor logits = model->forward(batch.slice(1, 0, -1)).to(at::kFloat);
    at::Tensor loss = models::next_token_loss(logits, batch.slice(1, 1).contiguous());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses[step] = loss.detach();
  }
  model->eval();
  if (job.flag("merge")) models::merge_lora(*model);
  const torch::NoGradGuard no_grad;
  write(job.text("out"), losses, model->forward(ids[0]).to(at::kFloat).contiguous());
  if (job.flag("merge")) models::unmerge_lora(*model);
  if (!job.text("save").empty()) models::save_adapter(*model, config, job.text("save"));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  torch::set_num_threads(1);
  try {
    for (int i = 1; i < argc; ++i) run(Job(argv[i]));
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
