// Continues a text, token by token, with a cache of keys and values.
//
//   auto model = lockstep::models::load_pretrained("gpt2");
//   auto next = lockstep::models::generate(*model, {464, 3290}, {.max_new_tokens = 10});
//
// Temperature 0 takes the likeliest token each time, as transformers' generate(do_sample=False)
// does. The options have transformers' names and meanings, and are applied in its order: penalty,
// temperature, top_k, top_p. One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lockstep/models/causal_lm.h"

namespace lockstep::models {

struct GenerateOptions {
  std::int64_t max_new_tokens = 20;
  double temperature = 0;
  std::int64_t top_k = 0;  // samples among so many of the likeliest tokens; 0: among all
  double top_p = 1;        // samples among the likeliest tokens that have this share together
  // Divides the positive logits of tokens already in the text, and multiplies negative ones.
  double repetition_penalty = 1;
  std::uint64_t seed = 0;           // the same seed gives the same tokens
  std::vector<std::int64_t> eos{};  // tokens that end the text; they are part of the result
  // Called with the new tokens after each of them; true ends the text. For stop_strings.
  std::function<bool(const std::vector<std::int64_t>& made)> stop{};
};

// Returns the new tokens. Computes without gradients and in evaluation mode, and restores the
// model's mode. UsageError for no ids, ids outside of the vocabulary, and more tokens than GPT-2
// has positions.
std::vector<std::int64_t> generate(CausalLm& model, const std::vector<std::int64_t>& ids,
                                   const GenerateOptions& options = {});

}  // namespace lockstep::models
