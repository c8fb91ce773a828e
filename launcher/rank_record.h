// What is known of one rank of an attempt, and which rank is to blame for the attempt's end.
//
// The rank that is seen to die first is often a victim: see report.h. All of it is read from the
// records, after the fact.
//
//   const RankRecord* first = first_to_fail(ranks);
//   if (first != nullptr) report(describe(*first, info));
//
// Plain values and free functions; nothing is owned.
#pragma once

#include <sys/types.h>

#include <optional>
#include <set>
#include <span>
#include <string>

#include "launcher/event_loop.h"
#include "launcher/process.h"
#include "launcher/rank_life.h"
#include "launcher/report.h"

namespace lockstep::launch {

struct RankRecord {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = -1;  // until it has started
  std::string error_file = {};
  RankLife life = {};
  std::optional<Ending> ending = {};
  double ended_at = 0;     // seconds since the epoch; for one that the launcher failed, when it did
  std::string cause = {};  // what the launcher failed it for while it was alive
  int code = 0;            // the exit code for that

  bool ended_ok() const { return ending && ending->ok(); }
};

// The earliest of those that failed. A rank that says itself that another one failed first is the
// cause only where no other is known. Null where none has failed.
const RankRecord* first_to_fail(std::span<const RankRecord> ranks);

// The rank that did not end as the requests to stop, which are signals, asked it to; null where all
// did. `killed`: SIGKILL followed.
const RankRecord* failed_stopping(std::span<const RankRecord> ranks, const std::set<int>& requests,
                                  bool killed);

// The attempt that the ranks belong to.
struct AttemptInfo {
  int number = 0;
  int node = 0;
  std::string host = {};
  std::string program = {};
  EventLoop::Clock::time_point started = {};
};
RankFailure describe(const RankRecord& rank, const AttemptInfo& attempt);

// How the other ranks of this host ended: before the failure, after it, or because of it.
void add_others(RankFailure& failure, std::span<const RankRecord> ranks);

}  // namespace lockstep::launch
