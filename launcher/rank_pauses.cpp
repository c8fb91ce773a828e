#include "launcher/rank_pauses.h"

#include <fmt/format.h>

#include <utility>

namespace lockstep::launch {

using std::chrono::milliseconds;

void PauseWatch::stopped(int signal, Clock::time_point now) {
  reported_ = false;
  ++unreported_;
  const bool news = ++stops_ <= kFirst || now - last_ >= kEvery;
  if (news) report(signal, now);
  await(signal, news ? bound_ : bound_ / 2);
}

void PauseWatch::continued() {
  timer_.cancel();
  if (std::exchange(reported_, false)) handlers_.continued();
}

void PauseWatch::report(int signal, Clock::time_point now) {
  reported_ = true;
  last_ = now;
  const int before = std::exchange(unreported_, 0) - 1;
  handlers_.report(
      signal, before > 0 ? fmt::format(" (and {} times since the last such line)", before) : "",
      stops_ == kFirst ? ". Later ones are reported once a minute." : "");
}

void PauseWatch::await(int signal, milliseconds time) {
  timer_.start(time, [this, signal] {
    if (handlers_.look()) return;
    if (reported_) return handlers_.overdue(signal);
    report(signal, Clock::now());
    await(signal, bound_ - bound_ / 2);
  });
}

}  // namespace lockstep::launch
