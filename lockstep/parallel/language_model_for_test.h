// Language models of four small blocks and their texts, for tests that train them on a mesh.
//
//   const auto net = small_model(/*tied=*/true, 7);     // the same values for the same seed
//   net->loss(text(k, rank).narrow(1, 0, 8), text(k, rank).narrow(1, 1, 8));
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/data/window.h"
#include "lockstep/models/causal_lm.h"
#include "lockstep/models/pretrained.h"
#include "lockstep/parallel/parallelism.h"

namespace lockstep::testing {

inline constexpr int kLayers = 4;
inline constexpr std::int64_t kVocabulary = 37;  // no number of ranks divides it

// GPT with a tied head, and Llama without. Their widths are no multiples of ranks, either.
inline models::CausalLmPtr small_model(bool tied, std::uint64_t seed = 7) {
  static std::mutex drawing;  // from the process's one generator
  const std::lock_guard lock(drawing);
  torch::manual_seed(seed);
  if (tied)
    return models::make_causal_lm({.model = models::GptConfig{.n_layer = kLayers,
                                                              .n_head = 2,
                                                              .n_embd = 18,
                                                              .vocab_size = kVocabulary,
                                                              .n_positions = 12}});
  return models::make_causal_lm({.model = models::LlamaConfig{.vocab_size = kVocabulary,
                                                              .hidden_size = 16,
                                                              .intermediate_size = 27,
                                                              .num_hidden_layers = kLayers,
                                                              .num_attention_heads = 4,
                                                              .num_key_value_heads = 2}});
}

// Micro-batch `k` of a rank that sees samples of its own.
inline at::Tensor text(int k, int rank) {
  auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(10 * k + rank));
  return at::randint(0, kVocabulary, {2, 9}, random, at::kLong);
}

// The text as a batch: inputs, and as targets the next token of each.
inline data::Batch text_batch(int k, int rank, bool targets = true) {
  const at::Tensor ids = text(k, rank);
  data::Batch batch{.data = ids.narrow(1, 0, 8), .target = ids.narrow(1, 1, 8)};
  if (targets) batch.tokens = 16;
  return batch;
}

// Runs `count` micro-batches from the first one on as a window. Returns their mean loss over all
// ranks. `empty`: micro-batch 1 of the first rank has no targets.
inline double run_texts(Parallelism& way, models::CausalLm& net, int first, int count,
                        bool empty = false) {
  World& ranks = way.mesh().batch();
  std::vector<data::Batch> batches;
  for (int k = first; k < first + count; ++k)
    batches.push_back(text_batch(k, ranks.rank(), !(empty && k == 1 && ranks.rank() == 0)));
  const data::Window window(batches, ranks);
  const auto loss = [&net](const data::Batch& batch) { return net.loss(batch.data, batch.target); };
  const std::vector<at::Tensor> losses = way.run_window(passes_of(window, loss));
  double mean = 0;
  for (std::size_t i = 0; i < losses.size(); ++i)
    mean += losses[i].item<double>() * window[i].weight.item<double>();
  return all_reduce(ranks, mean, ReduceOp::kAvg);
}

// All parameters as one vector.
inline at::Tensor flat(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& each : module.parameters()) all.push_back(each.detach().flatten());
  return at::cat(all);
}

}  // namespace lockstep::testing
