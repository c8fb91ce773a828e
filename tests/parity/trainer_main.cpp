// Our side of hf_trainer_test.py: the Trainer on a small GPT.
//
//   parity_trainer WEIGHTS --dataset_dir data --max_seq_len 48 --max_steps 50 ...
//
// WEIGHTS is a folder with the model.safetensors to begin with and the config.json of its sizes, as
// transformers writes them; the rest are keys of TrainingArguments.
#include <lockstep/run.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/data/token_shards.h"
#include "lockstep/io/safetensors_set.h"
#include "lockstep/io/tensors.h"
#include "lockstep/models/gpt.h"
#include "lockstep/train/config.h"
#include "lockstep/train/trainer.h"

namespace {

using namespace lockstep;

models::Gpt load_gpt(const std::string& folder) {
  const Node sizes = load_document(folder + "/config.json");
  const auto size = [&](std::string_view key) {
    const Entry* entry = sizes.find(key);
    if (entry == nullptr) throw UsageError("parity", "config.json has no {}.", key);
    return as_integer(entry->value, key);
  };
  models::Gpt gpt(models::GptConfig{.n_layer = size("n_layer"),
                                    .n_head = size("n_head"),
                                    .n_embd = size("n_embd"),
                                    .vocab_size = size("vocab_size"),
                                    .n_positions = size("n_positions")});
  const io::SafetensorsSet weights(folder);
  const torch::NoGradGuard no_grad;
  for (const auto& item : gpt->named_parameters())
    item.value().copy_(io::tensor_of(weights.at(item.key())));
  return gpt;
}

void train_gpt(World& world, const std::string& weights, const TrainingArguments& arguments) {
  models::Gpt gpt = load_gpt(weights);
  const auto files = data::token_files(arguments.dataset_dir.value(), "train");
  TrainerTask task;
  task.module = gpt.ptr();
  task.loss = [gpt](const data::Batch& batch) mutable {
    return models::next_token_loss(gpt->forward(batch.data), batch.target);
  };
  // Without a sampler of its own: PyTorch's DistributedSampler, as on the other side.
  task.train_data = std::make_shared<data::TokenShards>(files, arguments.max_seq_len.value());
  Trainer(world, std::move(task), arguments).train();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fputs("usage: parity_trainer WEIGHTS [--key value...]\n", stderr);
    return 2;
  }
  const train::Config config = train::load_config("", {argv + 2, argv + argc});
  WorldOptions options;
  options.backend = config.arguments.ddp_backend.value_or("auto");
  return run([&](World& world) { train_gpt(world, argv[1], config.arguments); }, options);
}
