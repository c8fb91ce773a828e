// The ranks of one attempt on this host: started together, supervised, and ended together.
//
//   running -> stopping (after a failure anywhere, or a stop request) -> sweeping -> over
//
// A group is over only when none of its processes is left. First the ranks end, by SIGTERM and then
// SIGKILL, then the processes that they left behind, which have become children of the supervisor
// (process.h). Only then is ended() called, and another attempt may start.
//
// A rank is a Worker (worker.h) with a RankRecord (rank_record.h), which also determines the cause
// of a failure.
//
//   WorkerGroup group(setup, info, {.failed = notify_all, .ended = decide});
//   group.start();
//
// Owned by the supervisor and called by its one thread; events come from the event loop.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launcher/event_loop.h"
#include "launcher/rank_record.h"
#include "launcher/report.h"
#include "launcher/stall_watch.h"
#include "launcher/worker.h"

namespace lockstep::launch {

// The times of a stop, between notification, SIGTERM and SIGKILL:
//
//   kIdle ──> kNotified ──> kTerminated ──> kKilled
//             head start    grace           until the ranks are abandoned
//
// At the end of each stage its step is called. A stage may end earlier, and is never entered again.
// StopSequence only measures the times; its owner implements the steps.
//
//   StopSequence stop(loop, {.terminate = ..., .overdue = ..., .abandon = ...});
//   stop.begin(100ms, 30s);     // SIGTERM after the head start, SIGKILL after the grace
class StopSequence {
 public:
  enum class Stage { kIdle, kNotified, kTerminated, kKilled };
  struct Steps {
    std::function<void()> terminate;  // after the head start
    std::function<void()> overdue;    // after the grace
    std::function<void()> abandon;    // SIGKILL has not ended all ranks
  };
  static constexpr std::chrono::milliseconds kKillTimeout{5000};  // for SIGKILL to end a process

  StopSequence(EventLoop& loop, Steps steps) : steps_(std::move(steps)), timer_(loop) {}

  // Without a head start, `terminate` is not called: the caller signals the ranks itself.
  void begin(std::chrono::milliseconds head_start, std::chrono::milliseconds grace);
  // The caller has signalled the ranks, so `terminate` is not called. No-op unless kNotified.
  void skip_head_start();
  // From any stage; `abandon` follows after kKillTimeout.
  void kill();
  void cancel() { timer_.cancel(); }  // the ranks have ended

  bool killed() const { return stage_ == Stage::kKilled; }
  Stage stage() const { return stage_; }
  // The time until SIGKILL; 0 after it, none before begin().
  std::optional<std::chrono::milliseconds> time_left() const;

 private:
  Steps steps_;
  Stage stage_ = Stage::kIdle;
  EventLoop::Clock::time_point kill_time_;
  Timer timer_;
};

// Ends the processes that ranks have started and left behind. They are found below the supervisor,
// which is their subreaper (process.h). A live rank ends its own processes.
//
//   Orphans orphans(loop, ranks, {.reap = reap_all, .gone = finish, .say = print});
//   orphans.sweep(1s);              // once no rank is alive: SIGTERM, grace, SIGKILL
class Orphans {
 public:
  struct Handlers {
    std::function<void()> reap;  // reaps the children that have exited
    std::function<void()> gone;  // no orphan is left, or those that are cannot be killed
    std::function<void(const std::string&)> say;
  };
  // `ranks` must outlive it.
  Orphans(EventLoop& loop, const std::vector<RankRecord>& ranks, Handlers handlers)
      : ranks_(ranks), handlers_(std::move(handlers)), timer_(loop) {}

  // Call this before signalling the ranks: their children, which become orphans when they die, get
  // the signal with the group.
  void signal(int number);
  void sweep(std::chrono::milliseconds grace);
  // Sends SIGKILL until no orphan is left, at most `rounds` times; then names those that are left.
  void kill(int rounds);
  void cancel() { timer_.cancel(); }

  static constexpr int kRounds = 100;
  static constexpr std::chrono::milliseconds kRound{50};

 private:
  std::vector<pid_t> find() const;
  void terminate_once();
  void give_up();

  const std::vector<RankRecord>& ranks_;
  Handlers handlers_;
  std::set<pid_t> signalled_;
  Timer timer_;
};

struct GroupEvents {
  std::function<void(const RankFailure&)> failed;  // the first failure here, once
  std::function<void()> ended;                     // nothing is left, once
};

class WorkerGroup {
 public:
  WorkerGroup(GroupSetup& setup, GroupInfo info, GroupEvents events);
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  // A program that cannot be executed is a failure that is not restartable.
  void start();
  // SIGCHLD: handles ranks that were stopped or continued, and reaps orphans.
  void on_child_signal();
  // Stops all ranks after a failure: notifies those that have not failed, then sends SIGTERM (after
  // a moment, if a rank may have been notified), and after the grace SIGKILL.
  void stop_for(const RankFailure& failure);
  // A stop request: forwards the signal, and after the grace sends SIGKILL. Later requests are
  // forwarded too.
  void request_stop(int signal);
  // Forwards a signal that does not request a stop to every process of the ranks that handles it.
  // It would end others, such as a shell around the program.
  void forward(int signal);
  void kill_now();
  bool asked_to_stop() const { return !stop_requests_.empty(); }
  bool over() const { return phase_ == Phase::kOver; }

  // After the end: the failure that was the cause, with all details; none after a success or a
  // requested stop. Without a call of `failed`, a rank that failed while it was stopped, or one
  // that exited early with code 0: that is the cause only if a rank of another host fails because
  // of it.
  std::optional<RankFailure> outcome() const;
  // The errors of all ranks that have failed.
  std::vector<RankFailure> errors() const;
  const std::string& error_file(int local_rank) const;

 private:
  enum class Phase { kRunning, kStopping, kSweeping, kOver };

  void on_exit(Worker& worker);
  void on_early_exit(const RankRecord& rank);
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
  void let_exit(Worker& cause);
  void terminate();
  void abandon();
  void signal_ranks(int number, const Worker* except = nullptr);
  void maybe_sweep();
  void sweep();
  void finish();
  bool all_ended() const;

  GroupSetup& setup_;
  GroupInfo info_;
  GroupEvents events_;
  AttemptInfo attempt_;
  Phase phase_ = Phase::kRunning;
  std::vector<RankRecord> ranks_;  // by local rank
  std::vector<std::unique_ptr<Worker>> workers_;
  std::unique_ptr<StallWatch> stalls_;  // while the ranks run
  Fd filtered_[2];
  std::optional<RankFailure> failure_;  // of this host
  const Worker* exiting_ = nullptr;     // the failed rank, while it may exit by itself
  bool forwarded_ = false;
  std::set<int> stop_requests_;  // their signals
  std::chrono::milliseconds sweep_grace_{1000};
  StopSequence stop_;
  Orphans orphans_;
  Timer exit_timer_;
  Timer early_exit_timer_;
};

}  // namespace lockstep::launch
