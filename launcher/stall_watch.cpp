#include "launcher/stall_watch.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "launcher/process.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"

namespace lockstep::launch {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;

constexpr int kMedianSteps = 10;
constexpr std::size_t kStepsRemembered = 33;
constexpr milliseconds kStackWait{400};  // for all ranks together
constexpr milliseconds kStackPoll{10};
constexpr std::size_t kPythonStackBytes = 64u << 10;

milliseconds interval_for(milliseconds stall_time) {
  return std::clamp(stall_time / 20, milliseconds(20), milliseconds(250));
}

// The process that opened the ledger; it may be a child of the one that was started.
pid_t process_of(const WatchedRank& rank) {
  const pid_t pid = rank.ledger->pid();
  return pid > 0 && is_below(::getpid(), pid) ? pid : rank.pid;
}

std::vector<std::string> python_lines(const std::string& path) {
  std::vector<std::string> lines;
  try {
    lines = lines_of(read_file(path, kPythonStackBytes));
    std::erase(lines, "");
  } catch (const std::exception&) {  // there is no such file
  }
  return lines;
}

// The current view of a rank, without its stack.
RankView view_of(const WatchedRank& rank) {
  RankView view;
  view.ledger = rank.ledger->read();
  view.ledger.rank = rank.rank;
  const pid_t pid = process_of(rank);
  view.process = read_rank_state(pid, view.ledger.thread > 0 ? view.ledger.thread : pid);
  return view;
}

}  // namespace

StallWatch::StallWatch(EventLoop& loop, const StallOptions& options, StallEvents events)
    : options_(options), events_(std::move(events)), quiet_since_(Clock::now()), timer_(loop) {
  look_later();
}

void StallWatch::look_later() {
  timer_.start(interval_for(options_.stall_time), [this] { look(); });
}

void StallWatch::add(const WatchedRank& rank) {
  ranks_.push_back({.rank = rank});
}

void StallWatch::remove(int rank) {
  std::erase_if(ranks_, [&](const Watched& watched) { return watched.rank.rank == rank; });
  reset(Clock::now());
}

milliseconds StallWatch::stall_time() const {
  if (steps_ns_.empty()) return options_.stall_time;
  std::vector<std::uint64_t> sorted(steps_ns_.begin(), steps_ns_.end());
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<long>(sorted.size() / 2),
                   sorted.end());
  constexpr std::uint64_t kDay_ns = 24ull * 3600 * 1'000'000'000;
  const std::uint64_t median_ns = std::min(sorted[sorted.size() / 2], kDay_ns);
  return std::max(options_.stall_time, milliseconds(kMedianSteps * median_ns / 1'000'000));
}

bool StallWatch::moved() {
  bool any = false;
  for (Watched& watched : ranks_) {
    const ledger::File& file = *watched.rank.ledger;
    const std::uint64_t heartbeat = file.heartbeat();
    any |= std::exchange(watched.heartbeat, heartbeat) != heartbeat;
    const std::int64_t step = file.step();
    if (std::exchange(watched.step, step) == step || file.step_ns() == 0) continue;
    steps_ns_.push_back(file.step_ns());
    if (steps_ns_.size() > kStepsRemembered) steps_ns_.pop_front();
  }
  return any;
}

// Starts to compare CPU time.
void StallWatch::begin_quiet(Clock::time_point now) {
  compared_since_ = now;
  for (Watched& watched : ranks_) watched.cpu_s = cpu_seconds(process_of(watched.rank));
}

void StallWatch::look() {
  look_later();
  const auto now = Clock::now();
  if (moved()) return reset(now);
  if (!watches() || reported_ == Reported::kStall) return;
  const auto limit = stall_time();
  const auto since = std::max(quiet_since_, judged_);
  if (!compared_since_ && now - since >= limit / 4) begin_quiet(now);
  if (now - since >= limit) judge();
}

// False if no rank has opened its ledger (the program does not use Lockstep) or all have ended
// training, so that none waits for another.
bool StallWatch::watches() const {
  return std::ranges::any_of(ranks_, [](const Watched& watched) {
    const ledger::File& file = *watched.rank.ledger;
    return file.opened() && file.phase() != ledger::Phase::kEnded;
  });
}

// A rank has made progress.
void StallWatch::reset(Clock::time_point now) {
  reported_ = Reported::kNothing;
  said_busy_ = false;
  compared_since_.reset();
  quiet_since_ = now;
}

std::vector<RankView> StallWatch::views() const {
  std::vector<RankView> views;
  const auto now = Clock::now();
  const duration<double> compared = now - compared_since_.value_or(now);
  for (const Watched& watched : ranks_) {
    RankView view = view_of(watched.rank);
    if (compared.count() > 0)
      view.cpu_share = (view.process.cpu_s - watched.cpu_s) / compared.count();
    views.push_back(std::move(view));
  }
  find_device_waits(views, options_.other_hosts);
  return views;
}

void StallWatch::judge() {
  const std::vector<RankView> seen = views();
  const auto opened = [](const RankView& view) { return view.ledger.pid != 0; };
  const bool waits = std::ranges::any_of(seen, [](const RankView& view) { return view.waits(); });
  const bool stopped = std::ranges::any_of(
      seen, [&](const RankView& view) { return opened(view) && view.process.stopped(); });
  const bool busy =
      std::ranges::any_of(seen, [&](const RankView& view) { return opened(view) && view.busy(); });
  judged_ = Clock::now();
  perhaps_busy_ = !waits && !stopped && busy;
  if (perhaps_busy_ && !at_one_enqueued_call(seen)) return report_busy();
  begin_report(seen);
}

void StallWatch::begin_report(const std::vector<RankView>& seen) {
  reported_ = Reported::kStall;
  for (std::size_t i = 0; i < ranks_.size(); ++i) ask(ranks_[i], seen[i]);
  collect(Clock::now() + kStackWait);
}

void StallWatch::report_busy() {
  reported_ = Reported::kBusy;
  compared_since_.reset();
  if (std::exchange(said_busy_, true)) return;
  const duration<double> quiet = judged_ - quiet_since_;
  events_.busy(fmt::format(
      "[launch] no rank has begun or ended an operation or a step for {:.1f} s; they are busy "
      "(CPU time grows) and none waits for another.",
      quiet.count()));
}

void StallWatch::ask(Watched& watched, const RankView& view) {
  watched.stacks = watched.rank.ledger->stacks_taken();
  watched.no_stack.clear();
  const ledger::Snapshot& seen = view.ledger;
  if (view.process.stopped()) {
    watched.no_stack = "none, because it is stopped and cannot be asked";
  } else if (seen.stack_signal < SIGRTMIN || seen.stack_signal > SIGRTMAX ||
             !handles_signal(seen.pid, seen.stack_signal)) {
    watched.no_stack = "none, because it has no handler for the request";
  } else {
    if (!watched.rank.python_stack.empty()) [[maybe_unused]]
      const int result = ::truncate(watched.rank.python_stack.c_str(), 0);
    if (!signal_thread_below(::getpid(), seen.pid, seen.thread, seen.stack_signal))
      watched.no_stack = "none, because it cannot be signalled";
  }
}

void StallWatch::collect(Clock::time_point until) {
  const bool all = std::ranges::all_of(ranks_, [](const Watched& watched) {
    return !watched.no_stack.empty() || watched.rank.ledger->stacks_taken() != watched.stacks;
  });
  if (all || Clock::now() >= until) return report();
  timer_.start(kStackPoll, [this, until] { collect(until); });
}

void StallWatch::report() {
  look_later();
  if (moved()) {  // while the stacks were collected
    reset(Clock::now());
    return;
  }
  std::vector<RankView> seen = views();
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    RankView& view = seen[i];
    view.no_stack = ranks_[i].no_stack;
    if (view.no_stack.empty() && view.ledger.stacks_taken == ranks_[i].stacks)
      view.no_stack =
          fmt::format("none, because it did not answer within {} ms", kStackWait.count());
    if (!view.no_stack.empty()) continue;
    view.in_driver =
        in_library(process_of(ranks_[i].rank), view.ledger.stack, {"libcuda", "libnccl"});
    view.stack = python_lines(ranks_[i].rank.python_stack);
    if (!view.stack.empty()) continue;
    for (const std::uint64_t frame : view.ledger.stack)
      view.stack.push_back(view.ledger.place(frame));
  }
  const bool stuck = find_stuck_devices(seen);
  if (perhaps_busy_ && !stuck) return report_busy();
  const duration<double> stall = stall_time();
  const duration<double> quiet = Clock::now() - quiet_since_;
  const StallReport report = describe_stall(seen, {.quiet_s = quiet.count(),
                                                   .stall_s = stall.count(),
                                                   .now_ns = ledger::monotonic_ns(),
                                                   .other_hosts = options_.other_hosts});
  events_.stalled(report);
}

}  // namespace lockstep::launch
