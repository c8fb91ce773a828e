// Compares the ranks' ledgers: which rank is behind in a stall, and the table that shows it.
//
// All ranks of a group number its collectives alike. So the rank that others wait for lacks a
// number that they have. If all have it, the ranks diverged at the first number under which they
// called different operations, or the same operation from different places of the program.
//
//   const StallReport report = describe_stall(views, {.quiet_s = 30.4, .stall_s = 30});
//   console.say(report.text);
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/ledger_file.h"

namespace lockstep::launch {

// The kernel's state of a rank's process, from /proc: does it run, and if not, what does it wait
// for? What cannot be read is unknown, never an error.
struct RankState {
  char state = '?';     // of the thread: R, S, D, T, t (traced), Z, as in /proc; ?: gone
  std::string waits{};  // "futex", "read of /data/train.bin"; empty: it runs, or not known
  double cpu_s = 0;     // of all threads, since the process started

  bool stopped() const { return state == 'T' || state == 't'; }
  bool known() const { return state != '?'; }
  std::string text() const;  // "S waiting in read of /data/train.bin"
};

RankState read_rank_state(pid_t pid, pid_t thread);
double cpu_seconds(pid_t pid);  // of all threads; 0 if it is gone
// Whether an address is in a file that the process has mapped and whose name has such a prefix.
bool in_library(pid_t pid, const std::vector<std::uint64_t>& addresses,
                const std::vector<std::string>& name_prefixes);

// All that the launcher can see of a rank.
struct RankView {
  ledger::Snapshot ledger;
  RankState process = {};  // unknown when read from a file
  double cpu_share = 0;    // fraction of a core, since its last progress
  std::vector<std::string> stack = {};
  std::string no_stack = {};   // why there is none
  bool device_waits = false;   // its device waits for an operation: see find_device_waits()
  bool perhaps_waits = false;  // the device waits, or computes: the launcher cannot see which
  bool in_driver = false;      // its stack is in a CUDA library, which may use CPU time to wait

  bool waits() const { return surely_waits() || perhaps_waits; }
  bool surely_waits() const;  // an operation is under way
  bool busy() const;          // it runs or its CPU time grows, and it does not wait
  bool in_startup() const;    // it has not connected to its world
};

// Sets device_waits and perhaps_waits. The end of an operation that is enqueued on a device's
// stream (nccl) is not known. Once every rank has enqueued it, no rank waits for another; until
// then the devices of those that have wait. `other_hosts`: ranks elsewhere may not have enqueued
// it, so all ranks here may be waiting.
void find_device_waits(std::vector<RankView>& ranks, bool other_hosts);

// Whether all ranks of the world have enqueued the same last operation in the same step. Then
// either they compute after it or their devices never finish it, which ledgers alone do not show.
bool at_one_enqueued_call(const std::vector<RankView>& ranks);
// If so, and the stacks of all ranks are in a CUDA library, sets perhaps_waits and returns true.
bool find_stuck_devices(std::vector<RankView>& ranks);

// The first collective of a group that is not equal on all ranks.
struct CollectiveMismatch {
  enum class Kind { kOperation, kMissing, kPlace };
  Kind kind = Kind::kOperation;
  std::string group;
  std::uint64_t sequence = 0;
  std::vector<int> odd;  // the ranks in the minority, ascending
};

std::optional<CollectiveMismatch> first_mismatch(const std::vector<RankView>& ranks,
                                                 CollectiveMismatch::Kind kind);
// The ranks that the others wait for; empty if that is not known.
std::vector<int> ranks_behind(const std::vector<RankView>& ranks);

struct StallInfo {
  double quiet_s = 0;
  double stall_s = 0;
  std::uint64_t now_ns = 0;  // on the ledgers' clock
  bool other_hosts = false;  // the world has ranks elsewhere
};

struct StallReport {
  std::vector<int> behind;
  std::string cause;  // one sentence
  // False if a long computation on the devices, or of another host's ranks in a group of their own,
  // would look the same, or a rank is still starting, which has a deadline of its own.
  bool sure = true;
  std::string text;       // many lines, but no more than a screen
  std::string full_text;  // the same with every frame of the stacks
};
StallReport describe_stall(const std::vector<RankView>& ranks, const StallInfo& info);

// Only the table and the calls that differ, also of ranks that have ended.
std::string ledger_table(const std::vector<RankView>& ranks, std::uint64_t now_ns);
// For the failure report: a rank's step, phase and last operation, and the call that differs.
std::vector<std::string> standing_of(const std::vector<RankView>& ranks, int rank,
                                     std::uint64_t now_ns);
// "#31 all_reduce (Float, 4.0 KiB)"
std::string operation_text(const ledger::Record& record);

}  // namespace lockstep::launch
