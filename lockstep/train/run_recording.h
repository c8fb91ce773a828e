// What a Trainer records of its run, into output_dir/monitor (lockstep/monitor/run_record.h).
//
//   const auto recorder = start_recording(run, loop);   // until it is destroyed
#pragma once

#include <memory>

#include "lockstep/monitor/rank_recorder.h"
#include "lockstep/train/loop.h"

namespace lockstep::train {

// Collective, once output_dir is this run's. Rank 0 writes the facts, every rank has a recorder;
// null where record_run is false. A folder that cannot be written is reported and not an error.
std::unique_ptr<monitor::RankRecorder> start_recording(RunContext& run, const Loop& loop);

}  // namespace lockstep::train
