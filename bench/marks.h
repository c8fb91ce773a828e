// Measures times between points of a program: in a CUDA device's stream, or by a CPU's clock.
//
//   Marks marks(device);
//   for (int i = 0; i <= steps; ++i) {
//     if (i > 0) step();
//     marks.add();
//   }
//   const std::vector<double> ms = marks.between();   // waits for the device
//
// Adding a mark does not wait, so a device that is ahead of its host stays ahead. One thread.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <utility>
#include <vector>

namespace lockstep::bench {

class Marks {
 public:
  explicit Marks(c10::Device device) : device_(device) {}

  void add() {
    if (!device_.is_cuda()) {
      times_.push_back(std::chrono::steady_clock::now());
      return;
    }
    const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    c10::Event event(c10::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
    event.record(guard.getStream(device_));
    events_.push_back(std::move(event));
  }

  // Milliseconds from each mark to the next.
  std::vector<double> between() const {
    std::vector<double> ms;
    if (!events_.empty()) events_.back().synchronize();
    for (std::size_t i = 1; i < events_.size(); ++i)
      ms.push_back(events_[i - 1].elapsedTime(events_[i]));
    for (std::size_t i = 1; i < times_.size(); ++i)
      ms.push_back(std::chrono::duration<double, std::milli>(times_[i] - times_[i - 1]).count());
    return ms;
  }

 private:
  c10::Device device_;
  std::vector<c10::Event> events_;
  std::vector<std::chrono::steady_clock::time_point> times_;
};

}  // namespace lockstep::bench
