// Policies that decide nothing: the engine's tests pass with each of them, because no result
// depends on how an engine waits.
//
//   TEST_PROGRESS_POLICY=yield build/bin/tests/shm_engine_test
#pragma once

#include <sched.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "lockstep/comm/shm/progress_policy.h"

namespace lockstep::shm::for_test {

// Always yields or always sleeps, and wakes the engine's thread for every operation.
template <bool kParks>
class PlainPolicy final : public ProgressPolicy {
 public:
  static std::unique_ptr<ProgressPolicy> make(const Group&) {
    return std::make_unique<PlainPolicy>();
  }

  void progressed() override {}
  bool pause(std::uint64_t) override {
    if (!kParks) ::sched_yield();
    return kParks;
  }
  void started(const Ticket&, ProgressHost& host) override { host.wake_thread(); }
  bool takes_over() override { return true; }
  void park_thread(std::unique_lock<std::mutex>& lock, ProgressHost& host) override {
    host.sleep_thread(lock, std::chrono::hours(1), [] { return false; });
  }
  void waited_for(const Ticket&, std::mutex&) override {}
};

// What the tests run with; null: the adaptive one.
inline PolicyFactory policy_under_test() {
  const char* const name = std::getenv("TEST_PROGRESS_POLICY");
  if (name == nullptr) return nullptr;
  if (std::string(name) == "yield") return PlainPolicy<false>::make;
  if (std::string(name) == "park") return PlainPolicy<true>::make;
  throw std::runtime_error("TEST_PROGRESS_POLICY is neither yield nor park");
}

}  // namespace lockstep::shm::for_test
