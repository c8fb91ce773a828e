// CheckpointManager: the checkpoints of a run: the one to continue from, saving, durability, and
// loading of the best model.
//
//   CheckpointManager checkpoints(run, control);
//   const io::FolderLock alone = checkpoints.lock();
//   const std::string path = checkpoints.choose();
//   checkpoints.open(/*only_last=*/false);
//   checkpoints.end_previous();               // one save in flight
//   checkpoints.save(position, optimizer, tokens);   // written beside the training
//   checkpoints.collect();                    // outcomes since; errors surface here
//
// Every rank has one; ranks that write have a writer (async_saver.h). Functions named collective
// are called on all ranks identically. One thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/train/async_saver.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/folder_owner.h"
#include "lockstep/train/run_control.h"
#include "lockstep/train/train_optimizer.h"

namespace lockstep::train {

class CheckpointManager {
 public:
  CheckpointManager(RunContext& run, RunControl& control) : run_(run), control_(control) {}

  // Collective. One run at a time in an output_dir: the lock is held until the run ends, and taken
  // before anything there is touched.
  io::FolderLock lock();
  // Collective. The folder that resume_from_checkpoint stands for; empty: a new run. An attempt
  // that the launcher has restarted continues where the previous one ended, unless the user has set
  // never. UsageError, before anything is written, where output_dir has checkpoints that the run
  // does not continue.
  std::string choose();
  // Restores state, best model and durable step. The caller restores the data position.
  void resume(const Checkpoint& checkpoint);
  // Prepares writing into output_dir. `only_last`: nothing is saved before the run's end.
  void open(bool only_last);
  // Whether it continues from a checkpoint in output_dir, and so continues that run's metrics.
  bool continues_in_place() const { return in_place_; }

  // Parameters and optimizer state may change from here on.
  void wait_copied();
  // Collective: waits for the previous save only.
  void end_previous();
  // Collective.
  void save(const DataPosition& position, TrainOptimizer& optimizer,
            std::int64_t tokens_not_logged);
  bool saved() const { return saved_step_ == run_.state.global_step; }
  // Has this step saved again: its checkpoint does not yet record that it is the best.
  void best_found();
  // The outcomes of saves; their errors surface here, at the next step.
  void collect();

  // Collective, at the end: everything is written, and all ranks know what.
  void finish();
  // The newest complete checkpoint, also one that was resumed from; on ranks that write.
  const std::string& newest() const { return newest_; }
  // Collective. All ranks load the best model, or none does.
  void load_best();
  // Waits until nothing is being written any more.
  void close() { saver_.reset(); }

 private:
  void begin_at(const RunStart& start);
  void claim_output_dir() const;
  std::chrono::duration<double> wait_for_saves(bool last);
  void take(const SaveOutcome& ended);
  CheckpointContents contents(const DataPosition& position, TrainOptimizer& optimizer,
                              const std::vector<std::string>& random);

  RunContext& run_;
  RunControl& control_;
  std::unique_ptr<AsyncSaver> saver_;  // on ranks that write
  std::int64_t saved_step_ = -1;
  RunStart start_{};
  bool in_place_ = false;
  std::shared_ptr<void> whole_;  // parameters, until the save has copied them
  // On ranks that write.
  std::string newest_;
  std::string durable_best_;
};

}  // namespace lockstep::train
