#include "launcher/worker_group.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <utility>

#include "launcher/process.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/rendezvous/rank_env.h"

namespace lockstep::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kOrphanGrace{1000};         // after a success
constexpr milliseconds kOrphanFailureGrace{5000};  // after a failure
constexpr milliseconds kCauseHeadStart{1000};      // for the failed rank to exit by itself
// From the notification to SIGTERM, for programs that read the control descriptor.
constexpr milliseconds kReportHeadStart{100};
constexpr std::size_t kLastLines = 20;
constexpr std::size_t kTailLines = 200;  // of which most may belong to the stack

double seconds_of(milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

// ---------------------------------------------------------------- the stop, and what is left

void StopSequence::begin(milliseconds head_start, milliseconds grace) {
  if (stage_ != Stage::kIdle) return;
  kill_time_ = EventLoop::Clock::now() + head_start + grace;
  stage_ = Stage::kNotified;
  if (head_start.count() == 0) return skip_head_start();
  timer_.start(head_start, [this] {
    skip_head_start();
    steps_.terminate();
  });
}

void StopSequence::skip_head_start() {
  if (stage_ != Stage::kNotified) return;
  stage_ = Stage::kTerminated;
  timer_.start(*time_left(), [this] { steps_.overdue(); });
}

void StopSequence::kill() {
  if (stage_ == Stage::kKilled) return;
  stage_ = Stage::kKilled;
  kill_time_ = EventLoop::Clock::now();
  timer_.start(kKillTimeout, [this] { steps_.abandon(); });
}

std::optional<milliseconds> StopSequence::time_left() const {
  if (stage_ == Stage::kIdle) return std::nullopt;
  const auto left = std::chrono::ceil<milliseconds>(kill_time_ - EventLoop::Clock::now());
  return std::max(left, milliseconds(0));
}

namespace {

// A stopped process receives nothing but SIGKILL until it is continued.
void signal_and_continue(pid_t pid, int number) {
  signal_below(::getpid(), pid, number);
  if (number != SIGKILL) signal_below(::getpid(), pid, SIGCONT);
}

}  // namespace

std::vector<pid_t> Orphans::find() const {
  std::set<pid_t> living;
  for (const RankRecord& rank : ranks_)
    if (rank.life.alive()) living.insert(rank.pid);
  return descendants_of(::getpid(), living);
}

void Orphans::signal(int number) {
  for (const pid_t pid : find()) {
    const pid_t group = group_of(pid);
    if (std::ranges::any_of(ranks_, [group](const RankRecord& rank) {
          return rank.life.alive() && rank.pid == group;
        }))
      continue;
    signal_and_continue(pid, number);
    signalled_.insert(pid);
  }
}

// A second SIGTERM may interrupt what the first one started, such as saving a checkpoint. So this
// skips processes in the group of a rank that was signalled.
void Orphans::terminate_once() {
  for (const pid_t pid : find()) {
    const pid_t group = group_of(pid);
    const bool with_its_rank = std::ranges::any_of(ranks_, [group](const RankRecord& rank) {
      return rank.pid == group && rank.life.was(RankLife::kSignalled);
    });
    if (!with_its_rank && signalled_.insert(pid).second) signal_and_continue(pid, SIGTERM);
  }
}

void Orphans::sweep(std::chrono::milliseconds grace) {
  terminate_once();
  timer_.start(grace, [this] { kill(kRounds); });
}

void Orphans::kill(int rounds) {
  signal(SIGKILL);
  handlers_.reap();
  if (no_children_left()) return handlers_.gone();
  if (rounds == 0) return give_up();
  timer_.start(kRound, [this, rounds] { kill(rounds - 1); });
}

void Orphans::give_up() {
  const auto left = descendants_of(::getpid());
  handlers_.say(
      left.empty()
          ? "[launch] what the ranks have started is left behind: without /proc it is not found. "
            "Mount /proc where the launcher runs."
          : fmt::format("[launch] what cannot be killed is left behind: {} (first: pid {}). The "
                        "kernel is probably waiting for a device or a file system, or a debugger "
                        "holds it.",
                        left.size() == 1 ? "1 process" : fmt::format("{} processes", left.size()),
                        left.front()));
  handlers_.gone();
}

// ---------------------------------------------------------------- the group

WorkerGroup::WorkerGroup(GroupSetup& setup, GroupInfo info, GroupEvents events)
    : setup_(setup),
      info_(std::move(info)),
      events_(std::move(events)),
      attempt_{info_.attempt, setup.plan.node_rank, setup.host, shell_text(setup.plan.command), {}},
      stop_(setup.loop, {.terminate = [this] { terminate(); },
                         .overdue =
                             [this] {
                               if (all_ended()) return;
                               setup_.console.say(fmt::format(
                                   "[launch] {:.1f} s after SIGTERM some ranks are still there; "
                                   "sending SIGKILL.",
                                   seconds_of(setup_.plan.shutdown_timeout)));
                               kill_now();
                             },
                         .abandon = [this] { abandon(); }}),
      orphans_(setup.loop, ranks_,
               {.reap = [this] { reap_orphans(); },
                .gone = [this] { finish(); },
                .say = [this](const std::string& text) { setup_.console.say(text); }}),
      exit_timer_(setup.loop),
      early_exit_timer_(setup.loop) {}

const std::string& WorkerGroup::error_file(int local_rank) const {
  return ranks_.at(static_cast<std::size_t>(local_rank)).error_file;
}

// ---------------------------------------------------------------- start

void WorkerGroup::start() {
  attempt_.started = EventLoop::Clock::now();
  const LaunchPlan& plan = setup_.plan;
  if (plan.stall_timeout.count() > 0) {
    stalls_ = std::make_unique<StallWatch>(
        setup_.loop,
        StallOptions{plan.stall_timeout, setup_.layout.world_size > plan.nproc_per_node},
        StallEvents{[this](const StallReport& stall) { on_stall(stall); },
                    [this](const std::string& line) {
                      if (log::enabled(log::Level::kInfo)) setup_.console.say(line);
                    }});
  }
  make_directories(info_.directory);
  const auto open_filtered = [this](const char* name) {
    const std::string path = info_.directory + "/" + name;
    return Fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  };
  if (!plan.duplicate_stdout_filters.empty()) filtered_[0] = open_filtered("filtered_stdout.log");
  if (!plan.duplicate_stderr_filters.empty()) filtered_[1] = open_filtered("filtered_stderr.log");
  for (int local_rank = 0; local_rank < plan.nproc_per_node; ++local_rank)
    ranks_.push_back({.rank = setup_.layout.first_rank + local_rank, .local_rank = local_rank});
  for (RankRecord& rank : ranks_) {
    workers_.push_back(std::make_unique<Worker>(setup_, info_, rank));
    Worker& worker = *workers_.back();
    try {
      worker.start(filtered_, stalls_ || setup_.observed, [this, &worker] { on_exit(worker); });
      // A single rank does not wait for another.
      if (stalls_ && worker.ledger && setup_.layout.world_size > 1)
        stalls_->add({rank.rank, rank.pid, worker.ledger.get(), rank.error_file + ".stack"});
    } catch (const std::exception& error) {
      RankFailure failure = describe(rank, attempt_);
      failure.cause = error.what();
      failure.code = dynamic_cast<const UsageError*>(&error) != nullptr ? kUsageCode : 126;
      failure.restartable = false;
      return fail(std::move(failure));
    }
  }
}

// ---------------------------------------------------------------- stalls

void WorkerGroup::show_stall(const StallReport& stall) {
  setup_.console.say(stall.text);
  std::ofstream(info_.directory + "/stall.log", std::ios::app) << stall.full_text << '\n';
  for (const auto& worker : workers_) worker->save_ledger();
  setup_.observed.notify(
      [&](RunObserver& observer) { observer.ranks_stalled({stall.cause, stall.text}); });
}

void WorkerGroup::on_stall(const StallReport& stall) {
  show_stall(stall);
  if (setup_.plan.stall_action != StallAction::kStop || !stall.sure || !watching()) return;
  const auto behind = std::ranges::find_if(ranks_, [&](const RankRecord& rank) {
    return stall.behind.empty() ? rank.life.alive() : rank.rank == stall.behind.front();
  });
  if (behind != ranks_.end() && behind->life.alive())
    fail_alive(*behind, "stalled. " + stall.cause, 1);
}

// ---------------------------------------------------------------- watch

void WorkerGroup::on_exit(Worker& worker) {
  RankRecord& rank = worker.record;
  const double now = unix_time_s();  // before it is reaped: ranks that notice that fail later
  rank.ending = worker.process.reap();
  setup_.loop.forget(worker.process.pidfd());
  // A debugger has not released it yet; SIGCHLD follows then.
  if (!rank.ending) return;
  // A stalled rank failed when that was noticed, though its victims may have ended before it.
  if (!rank.life.was(RankLife::kFailed)) rank.ended_at = now;
  worker.release();
  if (stalls_) stalls_->remove(rank.rank);
  if (!rank.ended_ok()) worker.save_ledger();
  const bool early = body_mark::take(rank.error_file) && rank.ended_ok();
  rank.life.move(early ? RankLife::kExitedEarly : RankLife::kEnded);
  report_end(rank);
  if (early) on_early_exit(rank);
  if (!rank.ended_ok() && watching()) fail(describe(*first_to_fail(ranks_), attempt_));
  maybe_sweep();
}

// The exit is a failure only if other ranks still run after monitor_interval; they may all exit so.
void WorkerGroup::on_early_exit(const RankRecord& rank) {
  if (phase_ != Phase::kRunning || early_exit_timer_.pending()) return;
  early_exit_timer_.start(setup_.plan.monitor_interval, [this, &rank] {
    if (watching() && !all_ended()) fail(describe(rank, attempt_));
  });
}

void WorkerGroup::report_end(const RankRecord& rank) {
  setup_.observed.notify([&](RunObserver& observer) {
    if (!rank.ending) return observer.rank_ended({rank.rank, "could not be killed", true});
    // A stalled rank ends only because the launcher ends it, but it is the cause.
    const bool cause = failure_ && failure_->rank == rank.rank;
    const bool failed = cause || rank.life.now() == RankLife::kExitedEarly ||
                        (!rank.ended_ok() && !rank.life.was_told_to_end());
    observer.rank_ended({rank.rank, rank.cause.empty() ? rank.ending->text() : rank.cause, failed});
  });
}

void WorkerGroup::on_child_signal() {
  for (const auto& worker : workers_)
    while (const auto pause = worker->process.poll_pause()) on_pause(*worker, *pause);
  reap_orphans();
  if (phase_ == Phase::kSweeping && no_children_left()) finish();
}

// Only reports it: whoever has stopped the rank may continue it.
void WorkerGroup::on_pause(const Worker& worker, const Pause& pause) {
  const RankRecord& rank = worker.record;
  if (phase_ != Phase::kRunning) {
    if (pause.stopped) worker.process.signal_group(SIGCONT);
  } else if (pause.stopped) {
    setup_.console.say(fmt::format(
        "[launch] rank {} (pid {}) on {} was stopped by {}. Continue it with: kill -CONT {}",
        rank.rank, rank.pid, setup_.host, signal_name(pause.signal), rank.pid));
  } else {
    setup_.console.say(fmt::format("[launch] rank {} continues.", rank.rank));
  }
}

void WorkerGroup::reap_orphans() {
  for (;;) {
    siginfo_t info{};
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return;
    const auto rank = std::ranges::find_if(workers_, [&](const auto& worker) {
      return worker->alive() && worker->record.pid == info.si_pid;
    });
    if (rank != workers_.end()) {
      on_exit(**rank);
    } else {
      ::waitid(P_PID, static_cast<id_t>(info.si_pid), &info, WEXITED | WNOHANG);
    }
  }
}

// ---------------------------------------------------------------- stop

void WorkerGroup::fail(RankFailure failure) {
  failure_ = std::move(failure);
  // Posted, because stop_for() must not run within the current event.
  setup_.loop.post([this] { events_.failed(*failure_); });
}

void WorkerGroup::fail_alive(RankRecord& rank, std::string cause, int code) {
  rank.life.move(RankLife::kFailed);
  rank.cause = std::move(cause);
  rank.code = code;
  rank.ended_at = unix_time_s();
  fail(describe(rank, attempt_));
}

void WorkerGroup::begin_stopping(milliseconds head_start) {
  phase_ = Phase::kStopping;
  stalls_.reset();
  stop_.begin(head_start, setup_.plan.shutdown_timeout);
}

// SIGTERM follows the notification after a moment, so that a program that has read it does not take
// the signal for a request to save.
void WorkerGroup::stop_for(const RankFailure& failure) {
  if (phase_ != Phase::kRunning) return;
  // All ranks have received the forwarded signal that the failed rank handled, and may be saving.
  const bool asked = failure.stopped && forwarded_;
  const bool heard = !asked && notify(failure);
  const milliseconds head_start = asked   ? setup_.plan.shutdown_timeout
                                  : heard ? kReportHeadStart
                                          : milliseconds(0);
  begin_stopping(head_start);
  sweep_grace_ = kOrphanFailureGrace;
  for (const auto& worker : workers_)
    if (worker->record.rank == failure.rank) let_exit(*worker);
  if (head_start.count() == 0) terminate();
  maybe_sweep();
}

// False if no rank can have read the notification.
bool WorkerGroup::notify(const RankFailure& failure) {
  const std::string line = control_line(failure);
  bool heard = false;
  for (const auto& worker : workers_)
    if (worker->record.rank != failure.rank) heard |= worker->notify(line);
  return heard;
}

// Lets the failed rank, which is exiting, exit with its own code.
void WorkerGroup::let_exit(Worker& cause) {
  if (!cause.alive() || cause.record.life.was(RankLife::kFailed)) return;
  exiting_ = &cause;
  exit_timer_.start(kCauseHeadStart, [this, &cause] {
    if (cause.alive()) cause.signal(SIGTERM);
  });
}

void WorkerGroup::terminate() {
  if (phase_ != Phase::kStopping) return;
  orphans_.signal(SIGTERM);
  signal_ranks(SIGTERM, exiting_);
}

void WorkerGroup::request_stop(int signal) {
  if (phase_ == Phase::kOver) return;
  if (phase_ == Phase::kRunning) {
    begin_stopping();
    sweep_grace_ = setup_.plan.shutdown_timeout;
  }
  stop_requests_.insert(signal);
  if (signal == SIGTERM) stop_.skip_head_start();  // no second SIGTERM
  orphans_.signal(signal);
  signal_ranks(signal);
  maybe_sweep();
}

void WorkerGroup::forward(int signal) {
  forwarded_ = true;
  for (const auto& worker : workers_) {
    if (!worker->alive()) continue;
    const pid_t leader = worker->record.pid;
    std::vector<pid_t> processes = descendants_of(leader);
    processes.insert(processes.begin(), leader);
    bool handled = false;
    for (const pid_t pid : processes) {
      if (group_of(pid) == leader && handles_signal(pid, signal))
        handled |= signal_below(::getpid(), pid, signal);
    }
    if (!handled)
      setup_.console.say(fmt::format(
          "[launch] {} is not forwarded to rank {} (pid {}): it does not handle that signal, which "
          "would end it. Send SIGTERM to stop the run.",
          signal_name(signal), worker->record.rank, leader));
  }
}

void WorkerGroup::kill_now() {
  if (phase_ == Phase::kRunning) begin_stopping();
  stop_.kill();
  signal_ranks(SIGKILL);
  orphans_.signal(SIGKILL);
  if (phase_ == Phase::kSweeping) orphans_.kill(Orphans::kRounds);
  maybe_sweep();
}

// A rank that waits inside the kernel, or is held by a debugger, does not even react to SIGKILL. It
// counts as ended, and the sweep reports that it is still there.
void WorkerGroup::abandon() {
  for (const auto& worker : workers_) {
    if (!worker->alive()) continue;
    worker->release();
    worker->record.life.move(RankLife::kAbandoned);
    report_end(worker->record);
  }
  maybe_sweep();
}

void WorkerGroup::signal_ranks(int number, const Worker* except) {
  for (const auto& worker : workers_)
    if (worker->alive() && worker.get() != except) worker->signal(number);
}

bool WorkerGroup::all_ended() const {
  return std::ranges::none_of(ranks_, [](const RankRecord& rank) { return rank.life.alive(); });
}

void WorkerGroup::maybe_sweep() {
  // stop_for() must come first if a failure was reported.
  if (phase_ == Phase::kSweeping || phase_ == Phase::kOver || !all_ended()) return;
  if (phase_ == Phase::kRunning && failure_) return;
  phase_ = Phase::kSweeping;
  setup_.loop.post([this] { sweep(); });
}

void WorkerGroup::sweep() {
  reap_orphans();
  if (no_children_left()) return finish();
  const bool waited = std::ranges::any_of(
      ranks_, [](const RankRecord& rank) { return rank.life.now() == RankLife::kAbandoned; });
  if (stop_.killed()) return orphans_.kill(waited ? 1 : Orphans::kRounds);
  const auto left = stop_.time_left();  // none: the ranks were not stopped
  const auto grace = std::min(sweep_grace_, left ? setup_.plan.shutdown_timeout : kOrphanGrace);
  orphans_.sweep(std::min(grace, left.value_or(grace)));
}

void WorkerGroup::finish() {
  if (phase_ == Phase::kOver) return;
  phase_ = Phase::kOver;
  stop_.cancel();
  orphans_.cancel();
  exit_timer_.cancel();
  early_exit_timer_.cancel();
  for (const auto& worker : workers_)
    for (auto* stream : {&worker->out, &worker->err})
      if (*stream) (*stream)->close_now();
  setup_.loop.post([this] { events_.ended(); });
}

// ---------------------------------------------------------------- outcome

std::optional<RankFailure> WorkerGroup::outcome() const {
  const RankRecord* stopping =
      failure_ ? nullptr : failed_stopping(ranks_, stop_requests_, stop_.killed());
  const RankRecord* first = !failure_ || failure_->restartable ? first_to_fail(ranks_) : nullptr;
  if (!failure_ && stopping == nullptr &&
      (first == nullptr || first->life.now() != RankLife::kExitedEarly))
    return std::nullopt;
  if (stopping != nullptr) first = stopping;
  RankFailure failure = first != nullptr ? describe(*first, attempt_) : *failure_;
  if (stopping != nullptr) {
    failure.cause = fmt::format("{} when it was asked to stop ({})", stopping->ending->text(),
                                signal_name(*stop_requests_.begin()));
    failure.code = stopping->ending->exit_code();
    failure.restartable = false;
  }
  std::vector<RankView> views;
  for (const auto& worker : workers_) {
    if (!worker->ledger || !worker->ledger->opened()) continue;
    views.push_back({.ledger = worker->ledger->read()});
    views.back().ledger.rank = worker->record.rank;
  }
  failure.standing = standing_of(views, failure.rank, ledger::monotonic_ns());
  const auto index = static_cast<std::size_t>(failure.local_rank);
  if (index < workers_.size() && workers_[index]->err && !failure.stopped)
    add_last_lines(failure, workers_[index]->err->last_lines(kTailLines), kLastLines);
  add_others(failure, ranks_);
  return failure;
}

std::vector<RankFailure> WorkerGroup::errors() const {
  std::vector<RankFailure> all;
  for (const RankRecord& rank : ranks_)
    if (rank.ending && !rank.ended_ok() && rank.ending->exit_code() != kStoppedCode)
      all.push_back(describe(rank, attempt_));
  return all;
}

}  // namespace lockstep::launch
