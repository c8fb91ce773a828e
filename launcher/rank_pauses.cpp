#include "launcher/rank_pauses.h"

#include <fmt/format.h>

#include <utility>

namespace lockstep::launch {

using std::chrono::milliseconds;

bool RankPauses::stopped(Clock::time_point now) {
  reported_ = false;
  ++unreported_;
  return ++stops_ <= kFirst || now - last_ >= kEvery;
}

std::string RankPauses::report(Clock::time_point now) {
  reported_ = true;
  last_ = now;
  const int before = std::exchange(unreported_, 0) - 1;
  return before > 0 ? fmt::format(" (and {} times since the last such line)", before) : "";
}

void PauseWatch::stopped(int signal) {
  const bool news = pauses_.stopped(EventLoop::Clock::now());
  if (news) report(signal);
  await(signal, news ? bound_ : bound_ / 2);
}

void PauseWatch::continued() {
  timer_.cancel();
  if (pauses_.continued()) handlers_.continued();
}

void PauseWatch::report(int signal) {
  const std::string earlier = pauses_.report(EventLoop::Clock::now());
  handlers_.report(
      signal, earlier,
      pauses_.stops() == RankPauses::kFirst ? ". Later ones are reported once a minute." : "");
}

void PauseWatch::await(int signal, milliseconds time) {
  timer_.start(time, [this, signal] {
    if (handlers_.look()) return;
    if (pauses_.reported()) return handlers_.overdue(signal);
    report(signal);
    await(signal, bound_ - bound_ / 2);
  });
}

}  // namespace lockstep::launch
