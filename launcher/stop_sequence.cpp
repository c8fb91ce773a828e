#include "launcher/stop_sequence.h"

#include <algorithm>

namespace lockstep::launch {

using std::chrono::milliseconds;

void StopSequence::begin(milliseconds head_start, milliseconds grace) {
  if (stage_ != Stage::kIdle) return;
  kill_time_ = EventLoop::Clock::now() + head_start + grace;
  stage_ = Stage::kWarned;
  if (head_start.count() == 0) return skip_head_start();
  timer_.start(head_start, [this] {
    skip_head_start();
    steps_.terminate();
  });
}

void StopSequence::skip_head_start() {
  if (stage_ != Stage::kWarned) return;
  stage_ = Stage::kAsked;
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

}  // namespace lockstep::launch
