// Models and machines of the plan's tests.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "observe/plan/strategy.h"

namespace lockstep::plan {

inline constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

inline Model gpt2() {
  return {.config = models::CausalLmConfig{.model = models::GptConfig{}}, .length = 1024};
}

inline Model gpt_1b3() {
  const models::GptConfig sizes{.n_layer = 24, .n_head = 16, .n_embd = 2048, .n_positions = 2048};
  return {.config = models::CausalLmConfig{.model = sizes}, .length = 2048};
}

inline Model phi3() {
  const models::LlamaConfig sizes{.vocab_size = 32064,
                                  .hidden_size = 3072,
                                  .intermediate_size = 8192,
                                  .fused_projections = true};
  return {.config = models::CausalLmConfig{.model = sizes}, .length = 512};
}

inline models::LoraConfig lora(std::int64_t r, models::ModuleNames targets) {
  models::LoraConfig config{.r = r, .lora_alpha = 2.0 * static_cast<double>(r)};
  config.target_modules = std::move(targets);
  return config;
}

inline Card card_of(double gib) {
  Card card = parse_devices("H100").card;
  card.memory_bytes = static_cast<std::uint64_t>(gib * kGiB);
  return card;
}

inline Machine machine_of(double gib) {
  return {.card = card_of(gib), .cluster = parse_link("nvlink", card_of(gib), 8), .speed = {}};
}

}  // namespace lockstep::plan
