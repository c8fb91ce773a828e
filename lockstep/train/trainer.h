// Trainer: the training loop for any model and dataset, on any number of ranks.
//
//   lockstep::Trainer trainer{world,
//                             {.module = net.ptr(),
//                              .loss = [&](const auto& batch) {
//                                return torch::cross_entropy_loss(net(batch.data), batch.target);
//                              },
//                              .train_data = dataset},
//                             {.learning_rate = 3e-4, .output_dir = "out"}};
//   const lockstep::TrainResult result = trainer.train();
//   return result.exit_code();               // 143 when a stop signal ended it, and it is saved
//
// Every rank takes the same steps. What could make them diverge (a signal, an observer's flag, a
// bad gradient, the end of the data) is either computed identically by all, or agreed in the step's
// own exchange (run_control.h). Losses stay on the device and are read only at logging steps.
//
// The optimizer is sharded where ranks share memory, otherwise replicated (shard_optimizer). Its
// checkpoints are the same, and train() returns the module with memory of its own.
//
// Constructing does nothing; train() and evaluate() are collectives, called on all ranks
// identically. One thread. Shares module and datasets; the module is moved to the world's device.
#pragma once

#include <memory>

#include "lockstep/comm/mesh.h"
#include "lockstep/train/arguments.h"
#include "lockstep/train/task.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep {

namespace train {
class TrainerImpl;
}

// The settings of the world among the arguments: ddp_backend, ddp_timeout, use_cpu.
WorldOptions world_options(const TrainingArguments& arguments);

// The mesh that `fsdp`, `pipeline_parallel_degree` and `tensor_parallel_degree` define, pipeline x
// data x shard x tensor; a plain world if none is set. A Trainer with a plain world makes it
// itself. Make it first, and then the model under ShardedConstruction
// (lockstep/parallel/fully_shard.h) or PipelinedConstruction (pipeline.h), if no rank is to hold
// the whole model. Collective.
Mesh mesh_for(World world, const TrainingArguments& arguments);

class Trainer {
 public:
  // A World is a mesh too. Throws UsageError for arguments that contradict each other and a task
  // without a module, a loss or data.
  Trainer(Mesh mesh, TrainerTask task, TrainingArguments arguments);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  void add(std::shared_ptr<Observer> observer);

  // Call it once. Resumes according to arguments.resume_from_checkpoint.
  TrainResult train();
  // Means over eval_data, each sample once: "eval_loss", "eval_<name>", ...
  train::Metrics evaluate();

  const train::TrainerState& state() const;

 private:
  std::unique_ptr<train::TrainerImpl> impl_;
};

}  // namespace lockstep
