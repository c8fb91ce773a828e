// Which rank is behind, and the table that shows it: the ranks' ledgers side by side.
//
// Collectives of one group have the same numbers on all of its ranks. So the rank that others wait
// for lacks a number that they have; and where all have it, the first number under which the ranks
// called different operations, or the same one from different places of the program, shows where
// their ways parted.
//
//   const StallReport report = describe_stall(views, {.quiet_s = 30.4, .stall_s = 30});
//   console.say(report.text);
//
// Plain values and free functions; nothing is owned.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/ledger_file.h"

namespace lockstep::launch {

// What the kernel knows about a rank's process: does it run, and if not, what does it wait for?
//
//   const RankState state = read_rank_state(pid, thread);
//   console.say(state.text());    // "S waiting in read of /data/train.bin"
//
// Free functions that read /proc; what cannot be read is unknown, never an error.

struct RankState {
  char state = '?';     // of the thread: R, S, D, T, t (traced), Z, as in /proc; ?: gone
  std::string waits{};  // "futex", "read of /data/train.bin"; empty: it runs, or not known
  double cpu_s = 0;     // all its threads together, since it began

  bool stopped() const { return state == 'T' || state == 't'; }
  bool known() const { return state != '?'; }
  std::string text() const;
};

RankState read_rank_state(pid_t pid, pid_t thread);
double cpu_seconds(pid_t pid);  // all its threads together; 0 when it is gone
// Whether one of the addresses is in a file that the process has mapped under such a name.
bool in_library(pid_t pid, const std::vector<std::uint64_t>& addresses,
                const std::vector<std::string>& beginnings_of_names);

// A rank as the launcher sees it from outside.
struct RankView {
  ledger::Snapshot ledger;
  RankState process = {};  // unknown when read from a file
  double cpu_share = 0;    // fraction of a core, since the last movement
  std::vector<std::string> stack = {};
  std::string no_stack = {};   // why there is none
  bool device_waits = false;   // waits for an operation on its stream: see find_device_waits()
  bool perhaps_waits = false;  // the same, or it computes after it: that cannot be seen from here
  bool in_driver = false;      // its stack is in a CUDA library, which may wait and use CPU time

  bool waits() const { return surely_waits() || perhaps_waits; }
  bool surely_waits() const;  // an operation of it is under way
  bool busy() const;          // it runs or its CPU time grows, and it waits for nobody
  bool in_startup() const;    // it has not connected to its world
};

// An operation that was left to a device's stream (nccl) does not say when it has ended. Once every
// rank has enqueued it, no rank waits for another; where one has not, the others' devices wait.
// `other_hosts`: ranks that are not seen here may not have enqueued it, so all may be waiting.
void find_device_waits(std::vector<RankView>& ranks, bool other_hosts);

// All ranks of the world have enqueued the same operation last, in the same step. They compute
// after it, or their devices never finish it: the ledgers alone do not say which.
bool at_one_enqueued_call(const std::vector<RankView>& ranks);
// With their stacks: when that is the case and all of them are in a CUDA library, all of them may
// be waiting, and true is returned.
bool find_stuck_devices(std::vector<RankView>& ranks);

// The first call of a group that is not the same on all ranks.
struct Difference {
  enum class Kind { kOperation, kMissing, kPlace };
  Kind kind = Kind::kOperation;
  std::string group;
  std::uint64_t sequence = 0;
  std::vector<int> odd;  // the smaller part of those that disagree, by rank
};

std::optional<Difference> first_difference(const std::vector<RankView>& ranks,
                                           Difference::Kind kind);
// The ranks that the others wait for; empty where that cannot be seen from here.
std::vector<int> ranks_behind(const std::vector<RankView>& ranks);

struct StallInfo {
  double quiet_s = 0;
  double stall_s = 0;
  std::uint64_t now_ns = 0;  // as in the ledgers
  bool other_hosts = false;  // the world has ranks elsewhere
};

struct StallReport {
  std::vector<int> behind;
  std::string cause;  // one sentence
  // False: a long computation on the devices would look the same, so would one of another host's
  // ranks in a group of their own, or a rank is in its start-up, which has a deadline of its own.
  bool sure = true;
  std::string text;       // many lines, ready to print; a screen of them
  std::string full_text;  // the same with every frame of the stacks
};
StallReport describe_stall(const std::vector<RankView>& ranks, const StallInfo& info);

// Only the table and the calls that differ; also for ranks that have ended.
std::string ledger_table(const std::vector<RankView>& ranks, std::uint64_t now_ns);
// For a failure report: step, phase and last operation of a rank, and the call that differs.
std::vector<std::string> standing_of(const std::vector<RankView>& ranks, int rank,
                                     std::uint64_t now_ns);
// "#31 all_reduce (Float, 4.0 KiB)"
std::string operation_text(const ledger::Record& record);

}  // namespace lockstep::launch
