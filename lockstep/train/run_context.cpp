#include "lockstep/train/run_context.h"

#include <fmt/format.h>

#include <cstring>

#include "lockstep/core/error.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/optim/amp.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/effective_batch.h"

namespace lockstep::train {

bool says_out_of_memory(const char* text) {
  for (const char* phrase : {"out of memory", "can't allocate memory", "not enough memory",
                             "CUBLAS_STATUS_ALLOC_FAILED"})
    if (std::strstr(text, phrase) != nullptr) return true;
  return false;
}

LossOutput RunContext::forward(const data::Batch& batch) const {
  const optim::Autocast autocast(world.device(), arguments.bf16   ? at::kBFloat16
                                                 : arguments.fp16 ? at::kHalf
                                                                  : at::kFloat);
  const std::string recipe = fp8_recipe_name(arguments);
  const nn::Fp8Autocast fp8(recipe.empty() ? std::nullopt
                                           : std::optional(nn::fp8_recipe_of(recipe)));
  if (parallelism) parallelism->before_forward();
  return task.loss(batch);
}

void RunContext::out_of_memory(const std::string& what, Phase phase) const {
  const std::string first_line = what.substr(0, what.find('\n'));
  if (phase == Phase::kEvaluation)
    throw Error(
        "trainer",
        fmt::format("rank {}: out of memory in the evaluation at step {} ({}). {}", world.rank(),
                    state.global_step, first_line, evaluation_memory_advice(arguments)));
  throw Error("trainer", fmt::format("rank {}: out of memory in step {} ({}). {}", world.rank(),
                                     state.global_step + 1, first_line,
                                     out_of_memory_advice(arguments, batch_ranks())));
}

}  // namespace lockstep::train
