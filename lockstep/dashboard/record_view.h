// A recorded run (monitor/run_record.h, metrics.jsonl) as the dashboard shows one that lasts.
//
//   const LiveView view = view_of_record("out/run");
//   fmt::print("{}", terminal_view(parse_snapshot(live_snapshot_json(view))));
#pragma once

#include <string>

#include "lockstep/dashboard/live_view.h"

namespace lockstep::dashboard {

// A record to which nothing was added for this long is of a run that is over. After an hour a line
// comes every ten seconds, on a shared file system later.
inline constexpr double kRecordIdle_s = 60;

// UsageError where there is no record, or one that cannot be read.
LiveView view_of_record(const std::string& directory);

}  // namespace lockstep::dashboard
