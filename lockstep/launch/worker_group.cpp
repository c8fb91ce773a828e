#include "lockstep/launch/worker_group.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <limits>
#include <utility>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/terminal.h"
#include "lockstep/launch/rank_pauses.h"
#include "lockstep/launch/worker_env.h"
#include "lockstep/rendezvous/inside.h"
#include "lockstep/rendezvous/store_channel.h"

namespace lockstep::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kOrphanGrace{1000};         // after a success
constexpr milliseconds kOrphanFailureGrace{5000};  // after a failure
constexpr milliseconds kCauseHeadStart{1000};
// Between the line on the control descriptors and SIGTERM, for programs that listen there.
constexpr milliseconds kReportHeadStart{100};
constexpr milliseconds kSweepRound{50};
constexpr int kSweepRounds = 100;
constexpr std::size_t kLastLines = 20;
constexpr std::size_t kTailLines = 200;  // most of which may be the stack

void make_directories(const std::string& path) {
  std::error_code problem;
  std::filesystem::create_directories(path, problem);
  if (problem) throw SystemError("launch", "cannot create the directory " + path, problem.value());
}

double wall_clock() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

struct WorkerGroup::Worker {
  int local_rank = 0;
  std::string error_file;
  std::unique_ptr<RankOutput> output;
  Fd control;                            // writing end
  std::shared_ptr<ledger::File> ledger;  // null: none
  Process process;
  std::optional<Ending> ending;
  double ended_at = 0;
  bool left_early = false;    // with code 0, while its body had not returned
  bool notified = false;      // knows that another one failed: its own end is no news after that
  bool asked_to_end = false;  // the same, by a signal to its group before it ended
  std::string forced_cause;   // what we failed it for while it was alive
  int forced_code = 0;
  EventLoop::TimerId stopped_timer = 0;
  RankPauses pauses;
  bool abandoned = false;  // SIGKILL did not end it

  bool running() const { return process.alive() && !abandoned; }
  bool ends_for_us() const { return notified || asked_to_end; }
};

WorkerGroup::WorkerGroup(GroupSetup& setup, GroupInfo place, GroupEvents events)
    : setup_(setup), place_(std::move(place)), events_(std::move(events)) {}

void WorkerGroup::cancel_timers() {
  for (EventLoop::TimerId* timer :
       {&term_timer_, &kill_timer_, &late_timer_, &abandon_timer_, &sweep_timer_, &left_timer_})
    setup_.loop.cancel(*timer);
}

WorkerGroup::~WorkerGroup() {
  cancel_timers();
  for (const auto& worker : workers_) {
    setup_.loop.cancel(worker->stopped_timer);
    if (worker->running()) setup_.loop.forget(worker->process.pidfd());
  }
}

int WorkerGroup::rank_of(const Worker& worker) const {
  return setup_.layout.first_rank + worker.local_rank;
}

const std::string& WorkerGroup::error_file(int local_rank) const {
  return workers_.at(static_cast<std::size_t>(local_rank))->error_file;
}

// ---------------------------------------------------------------- start

void WorkerGroup::start() {
  started_ = EventLoop::Clock::now();
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
  make_directories(place_.directory);
  const auto open_filtered = [this](const char* name) {
    const std::string path = place_.directory + "/" + name;
    return Fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  };
  if (!plan.duplicate_stdout_filters.empty()) filtered_[0] = open_filtered("filtered_stdout.log");
  if (!plan.duplicate_stderr_filters.empty()) filtered_[1] = open_filtered("filtered_stderr.log");
  for (int local_rank = 0; local_rank < plan.nproc_per_node; ++local_rank) {
    workers_.push_back(std::make_unique<Worker>());
    Worker& worker = *workers_.back();
    worker.local_rank = local_rank;
    try {
      start_worker(worker);
    } catch (const std::exception& error) {
      RankFailure failure = describe(worker);
      failure.cause = error.what();
      failure.code = dynamic_cast<const UsageError*>(&error) != nullptr ? 2 : 126;
      failure.restartable = false;
      return fail(std::move(failure));
    }
  }
}

// Only rank 0 draws a progress bar, where a person sees it. The prefix takes some columns.
std::string WorkerGroup::terminal_for(const Worker& worker) const {
  const StreamRoute& route = worker.output->out_route();
  if (rank_of(worker) != 0 || !route.console || !route.file.empty() || !route.filters.empty())
    return {};
  const int columns = terminal::columns(STDOUT_FILENO) - static_cast<int>(route.prefix.size());
  return terminal::describe_pipe(worker.output->child_out(), columns);
}

std::vector<std::string> WorkerGroup::environment_for(const Worker& worker, int control_fd,
                                                      int store_fd) const {
  WorkerInfo place;
  place.local_rank = worker.local_rank;
  place.layout = setup_.layout;
  place.attempt = place_.attempt;
  place.master_addr = place_.master_addr;
  place.master_port = place_.master_port;
  place.error_file = worker.error_file;
  place.control_fd = control_fd;
  place.store_channel = StoreChannel{store_fd, inode_of(store_fd), rank_of(worker),
                                     setup_.layout.world_size, place_.master_port}
                            .text();
  place.interface = setup_.interface;
  place.threads = setup_.threads;
  place.terminal = terminal_for(worker);
  if (worker.ledger) place.ledger = worker.ledger->variable();
  return process_environment(worker_environment(setup_.plan, place));
}

void WorkerGroup::start_worker(Worker& worker) {
  const LaunchPlan& plan = setup_.plan;
  const int local_rank = worker.local_rank;
  const std::string directory = fmt::format("{}/{}", place_.directory, local_rank);
  make_directories(directory);
  worker.error_file = directory + "/error.json";
  OutputRoutes routes;
  routes.source = 2 * local_rank;
  const int rank = rank_of(worker);
  routes.out = route_for(plan, rank, local_rank, Streams::kOut, directory + "/stdout.log");
  routes.err = route_for(plan, rank, local_rank, Streams::kErr, directory + "/stderr.log");
  routes.out.filters = plan.duplicate_stdout_filters;
  routes.out.filtered_fd = filtered_[0].get();
  routes.err.filters = plan.duplicate_stderr_filters;
  routes.err.filtered_fd = filtered_[1].get();
  if (setup_.observed) {
    const auto pass_on = [this, rank](OutputKind kind, auto function) {
      return [this, rank, kind, function](std::string_view line) {
        setup_.observed.notify(
            [&](RunObserver& observer) { (observer.*function)(rank, kind, line); });
      };
    };
    for (const OutputKind kind : {OutputKind::kOut, OutputKind::kErr}) {
      StreamRoute& route = kind == OutputKind::kOut ? routes.out : routes.err;
      route.on_line = pass_on(kind, &RunObserver::output_line);
      route.on_progress = pass_on(kind, &RunObserver::output_progress);
    }
  }
  worker.output = std::make_unique<RankOutput>(setup_.loop, setup_.console, routes);

  Pipe control = make_pipe();
  set_nonblocking(control.write.get());
  const Fd store = place_.store->open_channel(rank_of(worker));
  make_ledger(worker);
  ProcessRequest request;
  request.argv = plan.command;
  request.environment = environment_for(worker, control.read.get(), store.get());
  request.stdout_fd = worker.output->child_out();
  request.stderr_fd = worker.output->child_err();
  request.pass_fds = {control.read.get(), store.get()};
  if (worker.ledger) request.pass_fds.push_back(worker.ledger->fd());
  if (!setup_.cpus.empty()) request.cpus = &setup_.cpus[static_cast<std::size_t>(local_rank)];
  request.signal_mask = setup_.guard.callers_mask;
  request.files = setup_.guard.callers_files;
  worker.process = start_process(request);
  worker.output->close_child_ends();
  worker.control = std::move(control.write);
  if (worker.ledger) worker.ledger->close_fd();
  // A rank alone waits for no other: its pauses are its own.
  if (stalls_ && worker.ledger && setup_.layout.world_size > 1)
    stalls_->add({rank, worker.process.pid(), worker.ledger.get(), worker.error_file + ".stack"});
  setup_.loop.watch(worker.process.pidfd(), EPOLLIN,
                    [this, &worker](std::uint32_t) { on_exit(worker); });
  report_start(worker);
}

// ---------------------------------------------------------------- observer

void WorkerGroup::report_start(const Worker& worker) {
  setup_.observed.notify([&](RunObserver& observer) {
    observer.rank_started({rank_of(worker), worker.local_rank, worker.process.pid(), worker.ledger,
                           worker.output->out_file(), worker.output->err_file()});
  });
}

void WorkerGroup::report_end(const Worker& worker) {
  setup_.observed.notify([&](RunObserver& observer) {
    if (!worker.ending) return observer.rank_ended({rank_of(worker), "could not be killed", true});
    // The run's cause is often alive when it is failed, and then ends because we end it.
    const bool cause = failure_ && failure_->rank == rank_of(worker);
    const bool failed =
        cause || worker.left_early || (!worker.ending->ok() && !worker.ends_for_us());
    const std::string& forced = worker.forced_cause;
    observer.rank_ended({rank_of(worker), forced.empty() ? worker.ending->text() : forced, failed});
  });
}

// ---------------------------------------------------------------- ledgers

void WorkerGroup::make_ledger(Worker& worker) const {
  if (!stalls_ && !setup_.observed) return;
  try {
    worker.ledger = std::make_shared<ledger::File>(
        ledger::File::create({rank_of(worker), setup_.layout.world_size, place_.attempt}));
  } catch (const SystemError& error) {  // the run needs none
    setup_.console.say(fmt::format("[launch] stalls of rank {} will not be explained: {}",
                                   rank_of(worker), error.what()));
  }
}

void WorkerGroup::save_ledger(const Worker& worker) const {
  if (!worker.ledger || !worker.ledger->opened()) return;
  try {
    worker.ledger->save(
        fmt::format("{}/{}/{}", place_.directory, worker.local_rank, ledger::kFileName));
  } catch (const std::exception& error) {
    setup_.console.say(
        fmt::format("[launch] the ledger of rank {} is lost: {}", rank_of(worker), error.what()));
  }
}

void WorkerGroup::show_stall(const StallReport& stall) {
  setup_.console.say(stall.text);
  std::ofstream(place_.directory + "/stall.log", std::ios::app) << stall.full_text << '\n';
  for (const auto& worker : workers_) save_ledger(*worker);
  setup_.observed.notify(
      [&](RunObserver& observer) { observer.ranks_stalled({stall.cause, stall.text}); });
}

void WorkerGroup::on_stall(const StallReport& stall) {
  show_stall(stall);
  if (setup_.plan.stall_action != StallAction::kStop || !stall.sure) return;
  if (phase_ != Phase::kRunning || failure_) return;
  const int behind = stall.behind.empty() ? rank_of(*workers_.front()) : stall.behind.front();
  Worker& worker = *workers_.at(static_cast<std::size_t>(behind - setup_.layout.first_rank));
  worker.forced_cause = "stalled. " + stall.cause;
  worker.forced_code = 1;
  worker.ended_at = wall_clock();
  fail(describe(worker));
}

// ---------------------------------------------------------------- watch

void WorkerGroup::on_exit(Worker& worker) {
  const double now = wall_clock();  // before it vanishes: a rank that sees that fails later
  const auto ending = worker.process.reap();
  // It has ended, but a debugger that holds it has not released it yet; then comes SIGCHLD.
  if (!ending) return setup_.loop.forget(worker.process.pidfd());
  worker.ending = ending;
  // One that we failed while it was alive failed then, though its victims may be gone before it.
  if (worker.forced_cause.empty()) worker.ended_at = now;
  worker.control.reset();
  setup_.loop.forget(worker.process.pidfd());
  setup_.loop.cancel(worker.stopped_timer);
  if (stalls_) stalls_->remove(rank_of(worker));
  if (!ending->ok()) save_ledger(worker);
  worker.left_early = inside::take_mark(worker.error_file) && ending->ok();
  report_end(worker);
  if (worker.left_early) on_left(worker);
  if (!ending->ok() && phase_ == Phase::kRunning && !failure_) fail(describe(*first_to_fail()));
  maybe_sweep();
}

// Its exit alone does not show whether it left the others early or whether all ranks end this way.
void WorkerGroup::on_left(const Worker& worker) {
  if (phase_ != Phase::kRunning || left_timer_ != 0) return;
  left_timer_ = setup_.loop.after(setup_.plan.monitor_interval, [this, &worker] {
    left_timer_ = 0;
    if (phase_ == Phase::kRunning && !failure_ && !all_ended()) fail(describe(worker));
  });
}

void WorkerGroup::on_child_signal() {
  for (const auto& worker : workers_) take_pauses(*worker);
  reap_orphans();
  if (phase_ == Phase::kSweeping && no_children_left()) finish();
}

bool WorkerGroup::take_pauses(Worker& worker) {
  bool any = false;
  for (; const auto pause = worker.process.look_for_pause(); any = true) on_pause(worker, *pause);
  return any;
}

void WorkerGroup::on_pause(Worker& worker, const Pause& pause) {
  setup_.loop.cancel(worker.stopped_timer);
  if (phase_ != Phase::kRunning) {
    if (pause.stopped) worker.process.signal_group(SIGCONT);
    return;
  }
  if (!pause.stopped) {
    if (worker.pauses.continued())
      setup_.console.say(fmt::format("[launch] rank {} continues.", rank_of(worker)));
    return;
  }
  const bool news = worker.pauses.stopped(EventLoop::Clock::now());
  if (news) report_pause(worker, pause.signal);
  // A long pause is reported, however many there were before.
  await_continue(worker, pause.signal, setup_.plan.stopped_timeout / (news ? 1 : 2));
}

void WorkerGroup::report_pause(Worker& worker, int signal) {
  const std::string earlier = worker.pauses.report(EventLoop::Clock::now());
  setup_.console.say(fmt::format(
      "[launch] rank {} (pid {}) on {} was stopped by {}{}; it is failed after {:.1f} s unless it "
      "continues. Continue it with: kill -CONT {}{}",
      rank_of(worker), worker.process.pid(), setup_.host, signal_name(signal), earlier,
      static_cast<double>(setup_.plan.stopped_timeout.count()) / 1000, worker.process.pid(),
      worker.pauses.stops() == RankPauses::kFirst ? ". Later ones are reported once a minute."
                                                  : ""));
}

void WorkerGroup::await_continue(Worker& worker, int signal, milliseconds time) {
  worker.stopped_timer = setup_.loop.after(time, [this, &worker, signal] {
    worker.stopped_timer = 0;
    if (phase_ != Phase::kRunning || failure_ || !worker.running()) return;
    // A rank that was continued shows it itself, which may take a while on a busy machine.
    if (take_pauses(worker)) return;
    const auto bound = setup_.plan.stopped_timeout;
    if (!worker.pauses.reported()) {
      report_pause(worker, signal);
      return await_continue(worker, signal, bound - bound / 2);
    }
    const auto fail_it = [this, &worker, signal,
                          stops = worker.pauses.stops()](const StallReport* stall) {
      if (stall != nullptr) show_stall(*stall);
      fail_stopped(worker, signal, stops);
    };
    // Which ranks wait for it, and where, is known only while they live.
    if (stalls_) return stalls_->report_now(bound / 2, fail_it);
    fail_it(nullptr);
  });
}

// `stops`: does nothing if the rank was stopped again since.
void WorkerGroup::fail_stopped(Worker& worker, int signal, int stops) {
  if (phase_ != Phase::kRunning || failure_ || !worker.running() || take_pauses(worker)) return;
  if (!worker.pauses.is_stopped() || worker.pauses.stops() != stops) return;
  worker.forced_cause =
      fmt::format("stopped by {} for {:.1f} s", signal_name(signal),
                  static_cast<double>(setup_.plan.stopped_timeout.count()) / 1000);
  worker.forced_code = 128 + signal;
  worker.ended_at = wall_clock();
  fail(describe(worker));
}

void WorkerGroup::reap_orphans() {
  for (;;) {
    siginfo_t info{};
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return;
    const auto rank = std::find_if(workers_.begin(), workers_.end(), [&](const auto& worker) {
      return worker->running() && worker->process.pid() == info.si_pid;
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
  // Posted: the answer (stop_for) must not run inside the event that led here.
  setup_.loop.post([this] { events_.failed(*failure_); });
}

void WorkerGroup::begin_stopping(milliseconds pause) {
  phase_ = Phase::kStopping;
  stalls_.reset();
  for (const auto& worker : workers_) setup_.loop.cancel(worker->stopped_timer);
  const auto grace = pause + setup_.plan.shutdown_timeout;
  kill_time_ = EventLoop::Clock::now() + grace;
  kill_timer_ = setup_.loop.after(grace, [this] {
    kill_timer_ = 0;
    if (all_ended()) return;
    setup_.console.say(
        fmt::format("[launch] {:.1f} s after SIGTERM some ranks are still there; "
                    "sending SIGKILL.",
                    static_cast<double>(setup_.plan.shutdown_timeout.count()) / 1000));
    kill_now();
  });
}

// The control line first and SIGTERM a moment later: a program of ours that has read the line no
// longer takes the signal for a request to save.
void WorkerGroup::stop_for(const RankFailure& failure) {
  if (phase_ != Phase::kRunning) return;
  const std::string line = control_line(failure);
  const Worker* cause = nullptr;
  // Every rank here has had the request that the first one followed; the others may be saving.
  const bool asked = failure.stopped && forwarded_;
  bool heard = false;
  for (const auto& worker : workers_) {
    if (rank_of(*worker) == failure.rank) cause = worker.get();
    if (worker.get() == cause || !worker->control || asked) continue;
    // A rank that does not read has a full pipe or none; that is its own loss.
    heard |= ::write(worker->control.get(), line.data(), line.size()) > 0;
    worker->notified = true;
  }
  milliseconds pause{0};
  if (heard) pause = kReportHeadStart;
  if (asked) pause = setup_.plan.shutdown_timeout;
  begin_stopping(pause);
  sweep_grace_ = kOrphanFailureGrace;
  // A rank that has written its error file is on its way out: let it end with its own exit code.
  const bool leaving = cause != nullptr && cause->running() && cause->forced_cause.empty();
  if (leaving) {
    late_timer_ = setup_.loop.after(kCauseHeadStart, [this, index = cause->local_rank] {
      late_timer_ = 0;
      Worker& late = *workers_[static_cast<std::size_t>(index)];
      if (!late.running()) return;
      late.asked_to_end = true;
      late.process.signal_group(SIGTERM);
    });
  }
  const Worker* spared = leaving ? cause : nullptr;
  if (pause.count() > 0) {
    term_timer_ = setup_.loop.after(pause, [this, spared] { terminate(spared); });
  } else {
    terminate(spared);
  }
  maybe_sweep();
}

void WorkerGroup::terminate(const Worker* except) {
  term_timer_ = 0;
  if (phase_ != Phase::kStopping || killing_) return;
  signal_orphans(SIGTERM);
  signal_ranks(SIGTERM, except);
}

void WorkerGroup::pass_on(int signal) {
  if (phase_ == Phase::kOver) return;
  if (phase_ == Phase::kRunning) {
    begin_stopping();
    sweep_grace_ = setup_.plan.shutdown_timeout;
  }
  passed_on_.insert(signal);
  if (signal == SIGTERM) setup_.loop.cancel(term_timer_);  // once is enough
  signal_orphans(signal);
  signal_ranks(signal);
  maybe_sweep();
}

void WorkerGroup::forward(int signal) {
  forwarded_ = true;
  for (const auto& worker : workers_) {
    if (!worker->running()) continue;
    const pid_t leader = worker->process.pid();
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
          signal_name(signal), rank_of(*worker), leader));
  }
}

void WorkerGroup::kill_now() {
  if (phase_ == Phase::kRunning) begin_stopping();
  killing_ = true;
  sweep_grace_ = milliseconds(0);
  signal_ranks(SIGKILL);
  signal_orphans(SIGKILL);
  if (phase_ == Phase::kSweeping) kill_orphans(kSweepRounds);
  maybe_sweep();
  if (phase_ == Phase::kStopping && abandon_timer_ == 0)
    abandon_timer_ = setup_.loop.after(kSweepRound * kSweepRounds, [this] { abandon_ranks(); });
}

// A rank that waits inside the kernel, or that a debugger holds, does not react even to SIGKILL. It
// counts as ended, and kill_orphans says that it is still there.
void WorkerGroup::abandon_ranks() {
  abandon_timer_ = 0;
  for (const auto& worker : workers_) {
    if (!worker->running()) continue;
    setup_.loop.forget(worker->process.pidfd());
    worker->control.reset();
    worker->abandoned = true;
    report_end(*worker);
  }
  maybe_sweep();
}

void WorkerGroup::signal_ranks(int number, const Worker* except) {
  for (const auto& worker : workers_) {
    if (!worker->running() || worker.get() == except) continue;
    worker->asked_to_end = true;
    worker->process.signal_group(number);
    // A stopped process receives nothing but SIGKILL until it is continued.
    if (number != SIGKILL) worker->process.signal_group(SIGCONT);
  }
}

// What ranks that have ended left behind. What a living rank has started is that rank's to end.
std::vector<pid_t> WorkerGroup::orphans() const {
  std::set<pid_t> living;
  for (const auto& worker : workers_) {
    if (worker->running()) living.insert(worker->process.pid());
  }
  return descendants_of(::getpid(), living);
}

// Before the ranks: a rank that dies of its own signal at once turns its children into orphans, and
// those have had the signal with its group.
void WorkerGroup::signal_orphans(int number) {
  for (const pid_t pid : orphans()) {
    const pid_t group = group_of(pid);
    if (std::any_of(workers_.begin(), workers_.end(), [group](const auto& worker) {
          return worker->running() && worker->process.pid() == group;
        }))
      continue;
    signal_below(::getpid(), pid, number);
    if (number != SIGKILL) signal_below(::getpid(), pid, SIGCONT);
    asked_.insert(pid);
  }
}

// A second SIGTERM may cut short what the first one began, such as saving a checkpoint: processes
// in the group of a rank that was asked to end have been asked with it.
void WorkerGroup::ask_orphans_not_yet_asked() {
  for (const pid_t pid : orphans()) {
    const pid_t group = group_of(pid);
    const bool with_its_rank =
        std::any_of(workers_.begin(), workers_.end(), [group](const auto& worker) {
          return worker->process.pid() == group && worker->asked_to_end;
        });
    if (with_its_rank || !asked_.insert(pid).second) continue;
    signal_below(::getpid(), pid, SIGTERM);
    signal_below(::getpid(), pid, SIGCONT);
  }
}

// ---------------------------------------------------------------- sweep

bool WorkerGroup::all_ended() const {
  return std::none_of(workers_.begin(), workers_.end(),
                      [](const auto& worker) { return worker->running(); });
}

void WorkerGroup::maybe_sweep() {
  // A failure that has been reported but not answered yet must not be overtaken by the end.
  if (phase_ == Phase::kSweeping || phase_ == Phase::kOver || !all_ended()) return;
  if (phase_ == Phase::kRunning && failure_) return;
  phase_ = Phase::kSweeping;
  setup_.loop.post([this] { sweep(); });
}

void WorkerGroup::sweep() {
  reap_orphans();
  if (no_children_left()) return finish();
  const bool waited = std::any_of(workers_.begin(), workers_.end(),
                                  [](const auto& worker) { return worker->abandoned; });
  if (killing_) return kill_orphans(waited ? 1 : kSweepRounds);
  ask_orphans_not_yet_asked();
  const bool asked = kill_time_.has_value();  // the ranks were, by us
  milliseconds grace = std::min(sweep_grace_, asked ? setup_.plan.shutdown_timeout : kOrphanGrace);
  if (asked) {
    const auto left = std::chrono::ceil<milliseconds>(*kill_time_ - EventLoop::Clock::now());
    grace = std::clamp(left, milliseconds(0), grace);
  }
  sweep_timer_ = setup_.loop.after(grace, [this] { kill_orphans(kSweepRounds); });
}

void WorkerGroup::kill_orphans(int rounds_left) {
  setup_.loop.cancel(sweep_timer_);
  signal_orphans(SIGKILL);
  reap_orphans();
  if (no_children_left()) return finish();
  if (rounds_left == 0) {
    const auto left = descendants_of(::getpid());
    setup_.console.say(
        left.empty()
            ? "[launch] what the ranks have started is left behind: without /proc it is not found. "
              "Mount /proc where the launcher runs."
            : fmt::format("[launch] what cannot be killed is left behind: {} (first: pid {}). The "
                          "kernel is "
                          "probably waiting for a device or a file system, or a debugger holds it.",
                          left.size() == 1 ? "1 process" : fmt::format("{} processes", left.size()),
                          left.front()));
    return finish();
  }
  sweep_timer_ =
      setup_.loop.after(kSweepRound, [this, rounds_left] { kill_orphans(rounds_left - 1); });
}

void WorkerGroup::finish() {
  if (phase_ == Phase::kOver) return;
  phase_ = Phase::kOver;
  cancel_timers();
  for (const auto& worker : workers_) {
    if (worker->output) worker->output->close_now();
  }
  setup_.loop.post([this] { events_.ended(); });
}

// ---------------------------------------------------------------- outcome

bool WorkerGroup::counts_as_failed(const Worker& worker) const {
  if (!worker.forced_cause.empty()) return true;
  if (worker.ending && worker.ending->ok()) return worker.left_early && !worker.ends_for_us();
  // A rank that died when asked to is a cause only if it had said so before: see first_to_fail.
  if (worker.ending && !worker.ends_for_us()) return true;
  return worker.process.pid() > 0 && read_error_file(worker.error_file).present;
}

constexpr double kHeardLate = 0.25;  // seconds; what a busy launcher may hear later than it was

// A rank that says itself that another one failed first is the cause only where no other is known.
const WorkerGroup::Worker* WorkerGroup::first_to_fail() const {
  const Worker* first = nullptr;
  std::pair<bool, double> first_order;  // a consequence, and when
  for (const auto& worker : workers_) {
    if (!counts_as_failed(*worker)) continue;
    const ErrorFile file = read_error_file(worker->error_file);
    const bool forced = !worker->forced_cause.empty();
    double time = file.present && !forced ? file.time : worker->ended_at;
    // A rank killed from outside, or that just left, leaves no record of when, and a busy launcher
    // hears of it late, perhaps after a victim has already written its file.
    const bool killed =
        worker->ending && worker->ending->by_signal && worker->ending->number == SIGKILL;
    if (!file.present && !forced && (killed || worker->left_early)) time -= kHeardLate;
    const std::pair order(file.consequence && !forced, time);
    if (first != nullptr && order >= first_order) continue;
    first = worker.get();
    first_order = order;
  }
  return first;
}

// Only after a request. Ranks that do as they are asked end with 0, 143 or 128 + the signal's
// number, or die of it; one that ends otherwise has not done what a stop is for, such as saving.
// After Ctrl-C it does not matter: an interrupted program may say what it likes.
const WorkerGroup::Worker* WorkerGroup::failed_stopping() const {
  if (failure_ || passed_on_.empty() || passed_on_.count(SIGINT) != 0) return nullptr;
  double obeyed = std::numeric_limits<double>::infinity();  // when the first died of the request
  for (const auto& worker : workers_) {
    if (worker->ending && worker->ending->by_signal &&
        passed_on_.count(worker->ending->number) != 0)
      obeyed = std::min(obeyed, worker->ended_at);
  }
  const Worker* first = nullptr;
  for (const auto& worker : workers_) {
    if (!worker->ending || worker->ending->ok() || worker->notified) continue;
    if (killing_ && worker->ending->exit_code() == 128 + SIGKILL) continue;  // by us
    const int code = worker->ending->exit_code();
    if (code == 128 + SIGTERM || passed_on_.count(code - 128) != 0) continue;
    const bool crashed = worker->ending->by_signal;
    if (!crashed && worker->ended_at > obeyed) continue;  // it has lost a peer that did as asked
    // A crashed rank takes others with it. Where all fail identically, the lowest rank says why.
    if (first != nullptr && first->ending->by_signal && !crashed) continue;
    const bool sooner = first != nullptr && worker->ended_at + kHeardLate < first->ended_at;
    if (first == nullptr || (crashed && !first->ending->by_signal) || sooner) first = worker.get();
  }
  return first;
}

RankFailure WorkerGroup::describe(const Worker& worker) const {
  RankFailure failure;
  failure.rank = rank_of(worker);
  failure.local_rank = worker.local_rank;
  failure.node = setup_.plan.node_rank;
  failure.pid = worker.process.pid();
  failure.attempt = place_.attempt;
  failure.host = setup_.host;
  failure.time = worker.ended_at > 0 ? worker.ended_at : wall_clock();
  const double now = wall_clock();
  const double age = seconds_since(started_);
  if (!worker.forced_cause.empty()) {
    failure.cause = worker.forced_cause;
    failure.code = worker.forced_code;
  } else if (worker.left_early) {
    failure.cause = kLeftCause;
    failure.code = 1;
  } else if (worker.ending && !worker.asked_to_end) {
    failure.cause = worker.ending->text();
    failure.code = worker.ending->exit_code();
    // The next attempt would be asked in the same wrong way, or undo what somebody has asked for.
    failure.stopped = !worker.ending->by_signal && failure.code == kStoppedCode;
    const bool misused = !worker.ending->by_signal && failure.code == kUsageCode;
    failure.restartable = !failure.stopped && !misused;
  } else {
    failure.cause = "reported an error and was stopped";
    failure.code = 1;
  }
  failure.program = shell_text(setup_.plan.command);
  const ErrorFile file = read_error_file(worker.error_file);
  add_error_file(failure, file);
  if (file.present) failure.error_file = worker.error_file;
  failure.after_s = std::max(0.0, age - (now - failure.time));
  return failure;
}

std::optional<RankFailure> WorkerGroup::outcome() const {
  const Worker* stopping = failed_stopping();
  const Worker* first = !failure_ || failure_->restartable ? first_to_fail() : nullptr;
  if (!failure_ && stopping == nullptr && (first == nullptr || !first->left_early))
    return std::nullopt;
  if (stopping != nullptr) first = stopping;
  RankFailure failure = first != nullptr ? describe(*first) : *failure_;
  if (stopping != nullptr) {
    failure.cause = fmt::format("{} when it was asked to stop ({})", stopping->ending->text(),
                                signal_name(*passed_on_.begin()));
    failure.code = stopping->ending->exit_code();
    failure.restartable = false;
  }
  std::vector<RankView> views;
  for (const auto& worker : workers_) {
    if (!worker->ledger || !worker->ledger->opened()) continue;
    views.push_back({.ledger = worker->ledger->read()});
    views.back().ledger.rank = rank_of(*worker);
  }
  failure.standing = standing_of(views, failure.rank, ledger::monotonic_ns());
  const auto index = static_cast<std::size_t>(failure.local_rank);
  if (index < workers_.size() && workers_[index]->output && !failure.stopped)
    add_last_lines(failure, workers_[index]->output->last_error_lines(kTailLines), kLastLines);
  std::map<std::string, std::vector<int>> victims;
  std::vector<LaterFailure> later;
  for (const auto& worker : workers_) {
    if (worker->ending && worker->ending->ok() && !worker->left_early && !worker->ends_for_us() &&
        worker->ended_at < failure.time)
      failure.ended_before.push_back(rank_of(*worker));
    if (worker->local_rank == failure.local_rank || !worker->ending || worker->ending->ok() ||
        (failure.stopped && worker->ending->exit_code() == kStoppedCode))
      continue;
    // On its own: before any signal of ours, and not because it has heard of the failure.
    const ErrorFile file = read_error_file(worker->error_file);
    const double after_s = std::max(0.0, worker->ended_at - failure.time);
    if (worker->asked_to_end || file.consequence)
      victims[worker->ending->text()].push_back(rank_of(*worker));
    else
      later.push_back({rank_of(*worker), worker->ending->text(), after_s, file.message});
  }
  failure.victims = by_ending(victims);
  failure.others = later_lines(failure, std::move(later));
  return failure;
}

std::vector<RankFailure> WorkerGroup::errors() const {
  std::vector<RankFailure> all;
  for (const auto& each : workers_)
    if (each->ending && !each->ending->ok() && each->ending->exit_code() != kStoppedCode)
      all.push_back(describe(*each));
  return all;
}

}  // namespace lockstep::launch
