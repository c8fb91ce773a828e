// What a Trainer records of its run, into output_dir/monitor (lockstep/monitor/run_record.h).
//
//   const auto recorder = start_recording(run, loop);   // until it is destroyed
//   end_recording(run, "");
#pragma once

#include <memory>
#include <string>

#include "lockstep/monitor/rank_recorder.h"
#include "lockstep/train/loop.h"

namespace lockstep::train {

// Collective, once output_dir is this run's. Rank 0 writes the facts, every rank has a recorder;
// null where record_run is false. A folder that cannot be written is reported and not an error.
std::unique_ptr<monitor::RankRecorder> start_recording(RunContext& run, const Loop& loop);

// Writes down, on rank 0, that the run has ended, or why it failed. What has neither was killed.
// The end of a run that failed is its process's, since a launcher may start it again.
void end_recording(const RunContext& run, const std::string& failure);

}  // namespace lockstep::train
