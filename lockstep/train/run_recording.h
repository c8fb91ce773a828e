// What is recorded about a run, into output_dir/monitor (lockstep/monitor/run_record.h): for a
// Trainer, and for a loop with a RunLog.
//
//   monitor::RunFacts facts = world_facts(world);
//   const Recording recording = start_recording(world, "out", facts);   // until it is destroyed
#pragma once

#include <memory>
#include <string>

#include "lockstep/comm/world.h"
#include "lockstep/monitor/rank_recorder.h"

namespace lockstep::train {

struct Recording {
  monitor::RunFacts facts{};  // as they were written
  std::unique_ptr<monitor::RankRecorder> recorder{};
};

// What is known of every run: ranks, device, backend, threads. It begins now.
monitor::RunFacts world_facts(const World& world);

// Collective, once `folder` is this run's; the launcher looks there from now on. Rank 0 writes the
// facts, every rank has a recorder, unless `record` is false. A folder that cannot be written is
// reported and not an error.
Recording start_recording(World& world, const std::string& folder, const monitor::RunFacts& known,
                          bool record = true);

// On rank 0, writes down that the run has ended, or why it failed. A run with neither was killed. A
// failed run ends with its process, since a launcher may start it again.
void end_recording(const World& world, const std::string& folder, const std::string& failure);

}  // namespace lockstep::train
