// torch.distributed.monitored_barrier: a barrier that names the ranks that did not arrive.
//
// It goes through the group's store and not through the engine, which a timeout breaks for good.
// One key per rank and one for rank 0's answer hold the number of the last barrier, so that the
// store does not grow. The messages begin as gloo's do, because programs match them.
#pragma once

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "lockstep/core/deadline.h"

namespace lockstep::python {

// One thread at a time, the same number of calls on every rank.
class MonitoredBarrier {
 public:
  MonitoredBarrier(c10::intrusive_ptr<c10d::Store> store, std::string prefix, int rank, int size)
      : store_(std::move(store)), prefix_(std::move(prefix)), rank_(rank), size_(size) {}

  // Throws c10::DistBackendError. `all`: rank 0 names every absent rank, not only the first one.
  void wait(std::chrono::milliseconds timeout, bool all) {
    const Deadline deadline = Deadline::after(timeout);
    ++round_;
    store_->set(key(rank_), std::to_string(round_));
    if (rank_ == 0) {
      collect(timeout, deadline, all);
    } else if (!arrives(prefix_ + "answer", deadline)) {
      fail(
          fmt::format("Rank {} successfully reached monitoredBarrier, but received errors while "
                      "waiting for send/recv from rank 0: no answer in {} ms. Please check rank 0 "
                      "logs for faulty rank.",
                      rank_, timeout.count()));
    }
  }

 private:
  void collect(std::chrono::milliseconds timeout, const Deadline& deadline, bool all) {
    std::vector<int> absent;
    for (int rank = 1; rank < size_ && (all || absent.empty()); ++rank) {
      const bool too_late = deadline.expired();  // before that rank is waited for at all
      if (arrives(key(rank), deadline)) continue;
      if (too_late && !all) fail(exhausted(timeout, rank));
      absent.push_back(rank);
    }
    if (!absent.empty())
      fail(fmt::format("{} {} failed to pass monitoredBarrier in {} ms",
                       absent.size() > 1 ? "Ranks" : "Rank", fmt::join(absent, ", "),
                       timeout.count()));
    store_->set(prefix_ + "answer", std::to_string(round_));
  }

  std::string exhausted(std::chrono::milliseconds timeout, int next) const {
    std::vector<int> passed(static_cast<std::size_t>(next - 1));
    std::iota(passed.begin(), passed.end(), 1);
    return fmt::format(
        "Rank {} timed out in monitoredBarrier after {} ms.\n{}", rank_, timeout.count(),
        passed.empty() ? "No ranks successfully processed in monitoredBarrier."
                       : fmt::format("Successfully processed ranks: {}", fmt::join(passed, ", ")));
  }

  std::string key(int rank) const { return fmt::format("{}{}", prefix_, rank); }

  // Whether the key holds this round's number, or a later one, before the deadline. Looks at least
  // once, even after it.
  bool arrives(const std::string& name, const Deadline& deadline) {
    auto pause = std::chrono::microseconds(100);
    while (true) {
      if (store_->check({name})) {
        const std::string text = store_->get_to_str(name);
        std::uint64_t round = 0;
        std::from_chars(text.data(), text.data() + text.size(), round);
        if (round >= round_) return true;
      }
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(5000));
    }
  }

  [[noreturn]] static void fail(const std::string& text) {
    throw c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, text);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  const int rank_;
  const int size_;
  std::uint64_t round_ = 0;
};

}  // namespace lockstep::python
