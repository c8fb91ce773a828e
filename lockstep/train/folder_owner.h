// Ownership of output_dir: one run at a time trains there, and no other run's files are replaced or
// deleted.
//
// A Trainer holds its lock from the beginning of train() to its end. save_checkpoint() and resume()
// are functions without an object that lives as long as the run, so the process remembers for them
// which directories it holds and which checkpoints there are its own:
//
//   LoopDirectory& own = LoopDirectory::hold("out");          // UsageError: another run has it
//   const std::string place = own.archive_others(40);         // before step 40 is saved
//   own.saved(40);
//
// On the rank that writes. One thread per directory.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "lockstep/io/folder_lock.h"
#include "lockstep/train/previous_run.h"

namespace lockstep::train {

// Waits a few seconds for a run that is ending. UsageError: another run trains there. `token` names
// those who may share it. A directory that a user's loop in this process holds is taken over.
io::FolderLock lock_output_dir(const std::string& folder, const std::string& token);
// A token that no other process has.
std::string new_lock_token();

class LoopDirectory {
 public:
  // Locked until the process ends, or until a Trainer in it takes the directory over.
  static LoopDirectory& hold(const std::string& directory);

  // `start.checkpoint` is empty where there was nothing to resume from.
  void resumed(const RunStart& start) { start_ = start; }
  const RunStart& start() const { return start_; }
  // Moves the checkpoints that this run neither wrote nor has below its start, and those of the
  // steps that it repeats. Returns the new place; empty: nothing was there. SystemError.
  std::string archive_others(std::int64_t step);
  void saved(std::int64_t step) { written_.insert(step); }

 private:
  std::string directory_;
  io::FolderLock lock_;
  RunStart start_;
  std::set<std::int64_t> written_;  // steps
};

}  // namespace lockstep::train
