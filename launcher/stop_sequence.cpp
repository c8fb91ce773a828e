#include "launcher/stop_sequence.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "launcher/process.h"

namespace lockstep::launch {

using std::chrono::milliseconds;

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

}  // namespace lockstep::launch
