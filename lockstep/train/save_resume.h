// Checkpoints of a training loop of your own: one call saves, one call resumes.
//
//   const lockstep::CheckpointParts parts{
//       .module = net.get(), .optimizer = &optimizer, .loader = &loader,
//       .accumulation = 4};
//   std::int64_t step = 0, epoch = 0;
//   if (const auto resumed = lockstep::resume("out", world, parts)) {
//     step = resumed->step;
//     epoch = resumed->epoch;        // loader.epoch(epoch) continues in its middle
//   }
//   ...                              // after an optimizer step:
//   lockstep::save_checkpoint("out", world, parts, {.step = step, .save_total_limit = 2});
//
// The folder is out/checkpoint-<step>/, the Trainer's format (lockstep/train/checkpoint.h): it gets
// its name when it is complete and on the disk, `lockstep checkpoint verify|show|diff` read it, and
// any number of ranks resumes from it. Rank 0 writes, all ranks read: on several hosts `directory`
// is on a shared file system. A model that FullyShard has divided is written by all ranks, each its
// own rows, and read in the same way: nothing is gathered, and the folder is the same.
//
// One run at a time: from its first save_checkpoint() or resume() on, the process of rank 0 holds
// `directory` until it ends, and another run there is refused (UsageError). The process is the run:
// what it has saved there is its own.
//
// Collective, even in failure: what one rank throws, all ranks throw with its message, and the
// world can still be used. One thread per directory. Nothing is owned: parts point to what the loop
// uses, and what is null is neither saved nor restored.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/mesh.h"
#include "lockstep/data/loader.h"
#include "lockstep/optim/amp.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/schedule.h"
#include "lockstep/train/task.h"
#include "lockstep/train/trainer_state.h"

namespace torch::optim {
class LRScheduler;
}

namespace lockstep {

struct CheckpointParts {
  torch::nn::Module* module = nullptr;  // required; the one that was wrapped, not the wrapper
  // State and learning rates; replicated and sharded optimizers can resume each other's state.
  // torch::optim's own optimizers have no names for their state: use AdamW, Adam or SGD of
  // lockstep::optim, the same rules with Python's names and bits.
  optim::Optimizer* optimizer = nullptr;
  data::Loader* loader = nullptr;  // the position in the epoch
  // Micro-batches of a step (WindowOptions::micro_batches). Recorded, and compared: a different
  // effective batch than the saved one is a warning.
  std::int64_t accumulation = 1;
  // A schedule has no state; a difference to the saved one is a warning. One that needs the number
  // of steps is made after resume() (see steps_left) and set then.
  const optim::Schedule* schedule = nullptr;
  // A torch scheduler, such as torch::optim::StepLR: its number of steps is saved. Other state of a
  // user-defined class is not.
  torch::optim::LRScheduler* scheduler = nullptr;
  optim::GradScaler* scaler = nullptr;
  bool rng = true;           // the generators of every rank
  ModelFiles model_files{};  // where a part of the module is saved: adapters
};

struct SaveOptions {
  std::int64_t step = 0;       // optimizer steps taken; the same on every rank
  std::int64_t epoch = 0;      // for a loop without a loader
  int save_total_limit = 0;    // checkpoints to retain; 0: all
  std::string retain{};        // one that the limit does not delete: the best model's folder
  train::Metrics metrics{};    // numbers of this step, in the log_history of its folder
  std::string model_config{};  // JSON, the folder's config.json; empty: no such file
  // Delete other runs' checkpoints in the directory, and those of later steps, instead of refusing.
  bool overwrite_output_dir = false;
};

// Saves after an optimizer step, when no gradients are accumulated: a checkpoint does not have
// them. Durable on return, on every rank; returns the folder. UsageError where `directory` has
// checkpoints that this run neither wrote nor resumed from, or of higher steps: the highest step
// would be resumed from; and where ranks' models differ and no wrapper keeps them equal. Throws for
// a full disk too; older checkpoints are not harmed.
std::string save_checkpoint(const std::string& directory, Mesh mesh, const CheckpointParts& parts,
                            const SaveOptions& options);

struct ResumeOptions {
  // Resumes from this folder, instead of the newest in `directory` that verifies to the last byte.
  std::string checkpoint{};
};

struct Resumed {
  std::string path;
  std::int64_t step = 0;
  std::int64_t epoch = 0;       // the one to continue with: the next, if the saved one was complete
  std::int64_t world_size = 0;  // in the run that saved: the ranks that divided the samples
  train::Metrics metrics;
};

// Restores all parts, and says where the loop continues; nothing where there is no checkpoint to
// resume from. Folders that are damaged are skipped with a warning. Make it the last call before
// the loop: drawing random numbers after it changes the run. UsageError for a checkpoint of another
// model, dataset or optimizer; some parts may be restored by then.
std::optional<Resumed> resume(const std::string& directory, Mesh mesh, const CheckpointParts& parts,
                              const ResumeOptions& options = {});

// The number of optimizer steps from here, in the middle of `epoch`, to the end of `epochs` epochs.
// An epoch's number of steps depends on the number of ranks, so a schedule's total_steps is step +
// steps_left(parts, epoch, epochs), after resume(). UsageError without a loader.
std::int64_t steps_left(const CheckpointParts& parts, std::int64_t epoch, std::int64_t epochs);

}  // namespace lockstep
