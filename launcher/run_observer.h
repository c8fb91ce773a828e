// An observer of a run: the supervisor calls it for each event of its ranks.
//
//   struct Endings : RunObserver {
//     void rank_ended(const RankEnded& rank) override { count += rank.failed; }
//     int count = 0;
//   };
//   return supervise(plan, &endings);
//
// All functions except left_behind() are called by the supervisor's one thread, in a process that
// was forked from the caller's (process.h). So an observer starts its threads in
// run_started(), and the caller's copy does not change. Functions must return quickly. After an
// exception the run continues: the exception is reported and the observer is not called again.
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
  int first_rank = 0;  // of this host
  int local_ranks = 1;
};

struct RankStarted {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = -1;  // of the started process; the ledger may name a child of it
  // Null if it could not be created. May be read by any thread, and after the rank's end.
  std::shared_ptr<const ledger::File> ledger{};
  // Files that the rank writes itself (--redirects); empty: output_line() is called.
  std::string out_file{};
  std::string err_file{};
};

struct RankEnded {
  int rank = 0;
  // "exited with code 3", "killed by SIGKILL", or for a stalled rank "stalled. Rank 1 is behind:
  // ..."
  std::string outcome{};
  bool failed = false;  // false for ranks that ended because another one failed
};

struct RanksStalled {
  std::string cause{};  // "Rank 1 is behind: it is stopped (kill -CONT 4712 continues it)."
  std::string text{};   // the printed table
};

struct RunEnded {
  int code = 0;
  std::string cause{};  // of a failure: "rank 1 on n2 failed: killed by SIGKILL"
  std::string hint{};   // common reasons for it, in sentences; empty: not known
};

enum class OutputKind { kOut, kErr };

class RunObserver {
 public:
  virtual ~RunObserver() = default;

  // In the caller's process, after the fork: to release what only the supervisor uses, such as a
  // socket that would stay open after it ends.
  virtual void left_behind() {}
  virtual void run_started(const LaunchPlan&) {}
  virtual void attempt_started(const AttemptStarted&) {}
  virtual void rank_started(const RankStarted&) {}
  virtual void output_line(int /*rank*/, OutputKind, std::string_view /*line*/) {}
  // An incomplete line, at most 4 KiB, and after a carriage return only what follows that. The next
  // line of its stream, complete or not, replaces it.
  virtual void output_progress(int /*rank*/, OutputKind, std::string_view /*line*/) {}
  virtual void rank_ended(const RankEnded&) {}
  virtual void ranks_stalled(const RanksStalled&) {}
  virtual void attempt_ended(int /*attempt*/) {}
  // Called a few times a second; the lines are printed on the launcher's stderr.
  virtual std::vector<std::string> tick() { return {}; }
  // Called once, before the launcher's own report; may take a second or two.
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
