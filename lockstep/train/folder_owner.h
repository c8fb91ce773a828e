// Ownership of output_dir: one run at a time trains there, and no other run's checkpoints are
// replaced or deleted unless overwrite_output_dir says so.
// The newest checkpoint is the one with the highest step. If this run does not continue that one, a
// later resume would take it instead of this run's own, or this run would replace it. So the run is
// refused.
//
// A Trainer holds its lock from the beginning of train() to its end. save_checkpoint() and resume()
// are functions without an object that lives as long as the run, so the process remembers for them
// which directories it holds and which checkpoints there are its own:
//
//   LoopDirectory& own = LoopDirectory::hold("out");          // UsageError: another run has it
//   own.make_way(40, /*overwrite=*/false);                    // before step 40 is saved
//   own.saved(40);
//
// On the rank that writes. One thread per directory.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "lockstep/io/directory.h"

namespace lockstep::train {

struct RunStart {
  std::string checkpoint{};  // the folder that the run continues from; empty: it starts again
  std::int64_t step = -1;
  bool newest = false;  // of those that are whole: any later one cannot be used, and is replaced
};

// Whether start.checkpoint is a checkpoint in output_dir, by any path or link.
bool continues_in(const std::string& output_dir, const RunStart& start);
// The checkpoints in output_dir that a run with this start does not continue: all of them, or those
// of later steps than the requested one. The highest step comes first.
std::vector<io::NumberedDir> other_checkpoints(const std::string& output_dir,
                                               const RunStart& start);
// Throws UsageError with their names and a remedy; does nothing if there are none.
void refuse_others(const std::string& output_dir, const std::vector<io::NumberedDir>& others);
// Deletes and logs them. For a checkpoint that is a link, only the link.
void remove_others(const std::vector<io::NumberedDir>& others);
// Deletes an earlier run's record, output_dir/monitor. A record that has only run.json is this
// run's: `lockstep run --record` writes that file before the ranks start.
void remove_record(const std::string& output_dir);

// Waits a few seconds for a run that is ending; UsageError if it trains on. Holders with the same
// `token` share. A directory held by a user's loop in this process is taken over.
io::FolderLock lock_output_dir(const std::string& folder, const std::string& token);
// A token that no other process has.
std::string new_lock_token();

class LoopDirectory {
 public:
  // Locked until the process ends, or until a Trainer in it takes the directory over.
  static LoopDirectory& hold(const std::string& directory);

  // `start.checkpoint` is empty where there was nothing to resume from.
  void resumed(const RunStart& start);
  // The step of the checkpoint in the directory that the run continues from; 0: it continues none.
  std::int64_t first_step() const { return first_step_; }
  // Before `step` is saved: removes or refuses (UsageError) the checkpoints that this run neither
  // wrote nor continues, and its own of later steps.
  void make_way(std::int64_t step, bool overwrite) const;
  void saved(std::int64_t step) { written_.insert(step); }

 private:
  std::string directory_;
  io::FolderLock lock_;
  std::int64_t first_step_ = 0;
  // Checkpoints of this run that earlier starts wrote: those below the step it resumed from, and
  // damaged ones that resume() skipped. Noted once, because the one it resumed from may be deleted.
  std::set<std::string> continued_;  // paths
  std::set<std::int64_t> written_;   // steps
};

}  // namespace lockstep::train
