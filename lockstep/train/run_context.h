// RunContext: what the parts of a Trainer share, and how a batch is computed.
//
// TrainerImpl owns it, each part holds a reference. In `state` and `result`, Loop writes steps and
// epoch, MetricsReporter what was measured, Evaluator which step is the best and CheckpointManager
// what is saved. One thread.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "lockstep/comm/mesh.h"
#include "lockstep/train/arguments.h"
#include "lockstep/train/task.h"

namespace lockstep::train {

// Whether an error's text means that memory is full rather than misused.
bool says_out_of_memory(const char* text);

inline std::uint64_t data_seed(const TrainingArguments& a) {
  return static_cast<std::uint64_t>(a.data_seed.value_or(a.seed));
}

enum class Phase { kTraining, kEvaluation };

struct RunContext {
  Mesh mesh;
  TrainerTask task;
  TrainingArguments arguments;
  World& world = mesh.world();
  TrainerState state{};
  std::shared_ptr<Parallelism> parallelism{};  // from Loop's constructor on
  optim::Optimizer* optimizer = nullptr;       // while there is one
  TrainResult result{};                        // of this call of train(); complete at its end

  // Whether this rank writes checkpoints.
  bool writes() const {
    return arguments.save_on_each_node ? world.local_rank() == 0 : world.is_leader();
  }
  // Ranks over which samples are divided. The others see the same ones as one of these.
  int batch_ranks() const { return mesh.batch().size(); }
  bool at_last_step() const { return state.global_step >= state.max_steps; }

  // The model's parameters are whole while it is held. Collective.
  std::shared_ptr<void> gathered() const { return parallelism ? parallelism->gathered() : nullptr; }
  // The task's loss under autocast. Collective, unless gathered() is held.
  LossOutput forward(const data::Batch& batch) const;

  // Runs `body`; memory that runs out becomes an error that says what to try.
  template <typename Body>
  auto with_memory_advice(Body&& body, Phase phase = Phase::kTraining) const {
    try {
      return body();
    } catch (const std::bad_alloc& e) {
      out_of_memory(e.what(), phase);
    } catch (const c10::Error& e) {
      if (!says_out_of_memory(e.what_without_backtrace())) throw;
      out_of_memory(e.what_without_backtrace(), phase);
    }
  }
  [[noreturn]] void out_of_memory(const std::string& what, Phase phase = Phase::kTraining) const;
};

}  // namespace lockstep::train
