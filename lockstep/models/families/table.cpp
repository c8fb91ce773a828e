// The families that there are, and those that programs make from values of their own.
#include "lockstep/models/families/shared.h"
#include "lockstep/models/family.h"

namespace lockstep::models {

const std::vector<const Family*>& known_families() {
  static const std::vector<const Family*> all{
      &families::gpt2(),    &families::llama(),  &families::phi3(),
      &families::qwen2(),   &families::qwen3(),  &families::mistral(),
      &families::mixtral(), &families::gemma2(), &families::starcoder2(),
  };
  return all;
}

FamilyConfig::FamilyConfig(const GptConfig& c)
    : FamilyConfig(families::gpt2(), families::options_of(c)) {}

FamilyConfig::FamilyConfig(const LlamaConfig& c)
    : FamilyConfig(c.fused_projections ? families::phi3() : families::llama(),
                   families::options_of(c)) {}

}  // namespace lockstep::models
