// LiveRun: the launcher's view of a run in progress: a growing record, findings, snapshots.
//
// Observes the supervisor (launch/run_observer.h). Its own thread reads the ranks' ledgers,
// processes, control groups and GPUs four times a second, makes an interval every 250 ms in the
// first seconds of an attempt and of its steps and once a second after that, and applies the rules
// (monitor/diagnosis.h). Ranks need not cooperate: a program without a ledger still has processor
// time, memory, page faults, threads and GPU.
//
//   LiveRun run({.doctor = true});
//   return launch::supervise(plan, &run);
//
// Bounded: the newest 600 intervals and 50 lines of each rank, 500 points of each series. The
// supervisor's thread calls RunObserver's functions; all other functions may be called by any
// thread of that process, wait only for a short lock, and return copies.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "launcher/run_observer.h"
#include "lockstep/monitor/run_view.h"

namespace lockstep::dashboard {

class LiveRun;

// Called in the supervising process when the run begins; its result is destroyed after the run has
// ended. The page's server is one: it gets snapshots of the LiveRun that is passed.
using Companion = std::function<std::shared_ptr<void>(LiveRun&)>;

struct LiveRunOptions {
  bool doctor = false;       // findings on stderr, and a summary at the end
  std::string record_dir{};  // where the record is written (run_record.h); empty: nowhere
  std::function<std::vector<monitor::Finding>(const monitor::RunRecord&)> diagnose =
      monitor::diagnose;
  monitor::GpuSamplerOptions gpus{};
  std::vector<Companion> companions{};
};

class LiveRun : public launch::RunObserver {
 public:
  // SystemError when the record's folder cannot be made.
  explicit LiveRun(LiveRunOptions options = {});
  ~LiveRun() override;  // waits for its thread for two seconds at most
  LiveRun(const LiveRun&) = delete;
  LiveRun& operator=(const LiveRun&) = delete;

  monitor::RunView view() const;
  std::string snapshot_json() const { return monitor::snapshot_json(view()); }
  // Whether all ranks of this host run, none of them stopped by a signal.
  bool ready() const;

  void left_behind() override;
  void run_started(const launch::LaunchPlan& plan) override;
  void attempt_started(const launch::AttemptStarted& attempt) override;
  void rank_started(const launch::RankStarted& rank) override;
  void output_line(int rank, launch::OutputKind kind, std::string_view line) override;
  void output_progress(int rank, launch::OutputKind kind, std::string_view line) override;
  void rank_ended(const launch::RankEnded& rank) override;
  void ranks_stalled(const launch::RanksStalled& stall) override;
  void attempt_ended(int attempt) override;
  std::vector<std::string> tick() override;
  std::vector<std::string> run_ended(const launch::RunEnded& run) override;

 private:
  struct State;
  void stop();

  std::vector<Companion> not_started_;  // moved out of the options, so that no other owner is left
  const LiveRunOptions options_;
  std::shared_ptr<State> state_;
  std::vector<std::shared_ptr<void>> companions_;
};

}  // namespace lockstep::dashboard
