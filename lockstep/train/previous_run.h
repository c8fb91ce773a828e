// What another run has left in output_dir, moved out of this run's way without losing it.
//
// The newest checkpoint is the one with the highest step. A folder that this run has not written,
// with a higher step than the one it starts from, would be resumed from next time instead of this
// run's own. So such folders get a folder of their own, earlier-<n>, before the first step; so do
// the metrics, runs/ and effective_config.json of a run that this one does not continue from: no
// run's measurements are deleted.
//
//   const std::string folder =
//       archive_previous_run("out", {.checkpoint = "out/checkpoint-40", .step = 40});
//   if (!folder.empty()) log::warning("checkpoint", "moved to {}", folder);
//
// A function on files; one thread per output_dir, on ranks that write.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/io/numbered_dirs.h"

namespace lockstep::train {

struct RunStart {
  std::string checkpoint{};  // the folder that the run continues from; empty: it starts again
  std::int64_t step = -1;
};

// Moves every checkpoint above start.step, or all of them and the metrics where the run starts
// again or continues from a place outside output_dir. Returns the new place; empty: nothing was
// there. SystemError.
std::string archive_previous_run(const std::string& output_dir, const RunStart& start);

// Moves only the metrics, runs/ and the record of a run that does not begin with `start`.
std::string archive_measurements(const std::string& output_dir, const RunStart& start);

// Whether a run with this start has the checkpoint in output_dir behind it: the one that it
// continues from, and lower steps.
bool is_before(const io::NumberedDir& dir, const std::string& output_dir, const RunStart& start);

// Moves the checkpoints for which `is_other` is true, and nothing else: the files of a loop of the
// user's own are the user's.
std::string archive_checkpoints(const std::string& output_dir,
                                const std::function<bool(const io::NumberedDir&)>& is_other);

}  // namespace lockstep::train
