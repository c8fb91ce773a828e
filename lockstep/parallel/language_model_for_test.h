// Language models of four small blocks and their texts, for tests that train them on a mesh.
//
//   const auto net = small_model(/*tied=*/true, 7);     // the same values for the same seed
//   net->loss(text(k, rank).narrow(1, 0, 8), text(k, rank).narrow(1, 1, 8));
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "lockstep/models/causal_lm.h"
#include "lockstep/models/pretrained.h"

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

// All parameters as one vector.
inline at::Tensor flat(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& each : module.parameters()) all.push_back(each.detach().flatten());
  return at::cat(all);
}

}  // namespace lockstep::testing
