// Watches a run while it lasts: what the supervisor reports about its ranks, as it happens.
//
//   struct Endings : RunObserver {
//     void rank_ended(const RankEnded& rank) override { count += rank.failed; }
//     int count = 0;
//   };
//   return supervise(plan, &endings);
//
// Every function but left_behind() is called by the supervisor's one thread, in the supervising
// process, which is a fork of the caller (supervisor_guard.h): threads are started in
// run_started(), and nothing that is noted reaches the caller's own copy. A function must return at
// once. An exception ends the observation, not the run: it is reported and the observer is not
// called again.
#pragma once

#include <sys/types.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launcher/plan.h"
#include "lockstep/core/ledger_file.h"

namespace lockstep::launch {

struct AttemptStarted {
  int attempt = 0;
  int world_size = 1;
  int first_rank = 0;  // this host's
  int local_ranks = 1;
};

struct RankStarted {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = -1;  // of the process that was started; the ledger may name one below it
  // Null where it could not be made. May be read by any thread, and after the rank's end.
  std::shared_ptr<const ledger::File> ledger{};
  // Files that the rank writes itself (--redirects); empty: its lines come by output_line().
  std::string out_file{};
  std::string err_file{};
};

struct RankEnded {
  int rank = 0;
  // "exited with code 3", "killed by SIGKILL", or what the launcher failed it for while it was
  // alive: "stalled. Rank 1 is behind: ..."
  std::string outcome{};
  bool failed = false;  // false for those that were ended because another one failed
};

struct RanksStalled {
  std::string cause{};  // "Rank 1 is behind: it is stopped (kill -CONT 4712 continues it)."
  std::string text{};   // the table, as it is printed
};

struct RunEnded {
  int code = 0;
  std::string cause{};  // of a failure: "rank 1 on n2 failed: killed by SIGKILL"
  std::string hint{};   // what often leads to it, in sentences; empty: not known
};

enum class OutputKind { kOut, kErr };

class RunObserver {
 public:
  virtual ~RunObserver() = default;

  // In the caller's process, once the supervising one has been forked off: to release what only the
  // supervisor uses, such as a socket that would stay open after it ends.
  virtual void left_behind() {}
  virtual void run_started(const LaunchPlan&) {}
  virtual void attempt_started(const AttemptStarted&) {}
  virtual void rank_started(const RankStarted&) {}
  virtual void output_line(int /*rank*/, OutputKind, std::string_view /*line*/) {}
  // The newest state of a line that has not ended, at most 4 KiB of it; the next line of its
  // stream, ended or not, replaces it. After a carriage return, only what follows it.
  virtual void output_progress(int /*rank*/, OutputKind, std::string_view /*line*/) {}
  virtual void rank_ended(const RankEnded&) {}
  virtual void ranks_stalled(const RanksStalled&) {}
  virtual void attempt_ended(int /*attempt*/) {}
  // A few times a second: what is to be printed on the launcher's stderr.
  virtual std::vector<std::string> tick() { return {}; }
  // Once, before the launcher's own report; it may take a second or two.
  virtual std::vector<std::string> run_ended(const RunEnded&) { return {}; }
};

// The supervisor's access to its observer, if there is one.
class Observed {
 public:
  Observed(RunObserver* observer, std::function<void(const std::string&)> say)
      : observer_(observer), say_(std::move(say)) {}

  explicit operator bool() const { return observer_ != nullptr; }

  template <typename Call>
  void notify(Call&& call) {
    if (observer_ == nullptr) return;
    try {
      call(*observer_);
    } catch (const std::exception& error) {
      observer_ = nullptr;
      say_(std::string("[launch] the run continues without what observes it, which failed: ") +
           error.what());
    }
  }

 private:
  RunObserver* observer_;
  std::function<void(const std::string&)> say_;
};

}  // namespace lockstep::launch
