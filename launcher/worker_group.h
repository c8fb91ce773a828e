// The ranks of one attempt on this host: started together, watched, and ended together.
//
// A group is over only when nothing is left of it. First the ranks themselves end (asked by
// SIGTERM, then made to), then whatever they had started in the background, which by then are
// children of the supervisor (see supervisor_guard.h). Until all that is gone, ended() is not
// called and no next attempt can begin.
//
//   running -> stopping (a failure anywhere, or a stop request) -> sweeping -> over
//
// A rank is a Worker (worker.h) in a state of RankLife (rank_life.h). The times of a stop
// (stop_sequence.h), what ranks leave behind (orphans.h) and which of them is to blame
// (rank_record.h) are parts of their own; this brings them together.
//
//   WorkerGroup group(setup, place, {.failed = notify_all, .ended = decide});
//   group.start();
//
// Owned by the supervisor and called by its one thread; events come from the event loop.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launcher/rank_record.h"
#include "launcher/report.h"
#include "launcher/stall_watch.h"
#include "launcher/stop_sequence.h"
#include "launcher/worker.h"

namespace lockstep::launch {

struct GroupEvents {
  std::function<void(const RankFailure&)> failed;  // the first failure here, once
  std::function<void()> ended;                     // nothing is left, once
};

class WorkerGroup {
 public:
  WorkerGroup(GroupSetup& setup, GroupInfo place, GroupEvents events);
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  // A program that cannot be executed is a failure like any other, but not restartable.
  void start();
  // SIGCHLD: ranks that were stopped or continued, and orphans to be reaped.
  void on_child_signal();
  // Notifies every rank but the failed one, then (a moment later where one may listen) SIGTERM,
  // grace, SIGKILL.
  void stop_for(const RankFailure& failure);
  // A stop request: the signal as it came, then grace, SIGKILL. A later one is passed on as well.
  void pass_on(int signal);
  // A signal that is not a request to stop: to every process of the ranks that handles it.
  // A process that its default action would end, such as a shell around the program, is spared.
  void forward(int signal);
  void kill_now();
  bool asked_to_stop() const { return !passed_on_.empty(); }
  bool over() const { return phase_ == Phase::kOver; }

  // After the end: the first cause, with all that is known now. Nothing when all went well or the
  // end was asked for. Without a call of `failed`: a rank that failed while it was asked to stop;
  // or one that left its world early with code 0, which is the cause only if another host's rank
  // fails because of it.
  std::optional<RankFailure> outcome() const;
  // Every rank that has ended with an error, and what it says about it.
  std::vector<RankFailure> errors() const;
  const std::string& error_file(int local_rank) const;

 private:
  enum class Phase { kRunning, kStopping, kSweeping, kOver };

  void on_exit(Worker& worker);
  void on_left(const RankRecord& rank);
  void on_pause(const Worker& worker, const Pause& pause);
  void show_stall(const StallReport& stall);
  void on_stall(const StallReport& stall);
  void report_end(const RankRecord& rank);
  void reap_orphans();
  bool watching() const { return phase_ == Phase::kRunning && !failure_; }

  void fail(RankFailure failure);
  void fail_alive(RankRecord& rank, std::string cause, int code);
  void begin_stopping(std::chrono::milliseconds head_start = {});
  bool notify(const RankFailure& failure);
  void spare(Worker& cause);
  void terminate();
  void abandon();
  void signal_ranks(int number, const Worker* except = nullptr);
  void maybe_sweep();
  void sweep();
  void finish();
  bool all_ended() const;

  GroupSetup& setup_;
  GroupInfo place_;
  GroupEvents events_;
  AttemptInfo attempt_;
  Phase phase_ = Phase::kRunning;
  std::vector<RankRecord> ranks_;  // by local rank
  std::vector<std::unique_ptr<Worker>> workers_;
  std::unique_ptr<StallWatch> stalls_;  // while the ranks run
  Fd filtered_[2];
  std::optional<RankFailure> failure_;  // this host's
  const Worker* spared_ = nullptr;      // the cause, while it may end by itself
  bool forwarded_ = false;
  std::set<int> passed_on_;  // requests to stop
  std::chrono::milliseconds sweep_grace_{1000};
  StopSequence stop_;
  Orphans orphans_;
  Timer spared_timer_;
  Timer left_timer_;
};

}  // namespace lockstep::launch
