// Worlds of threads for the engine's tests: every rank an engine, all in one process.
//
//   run_ranks(3, {}, [](Engine& engine) { engine.barrier()->wait(); });
//
// What a rank throws is rethrown, unless the test asks for every rank's outcome (outcomes()).
#pragma once

#include <sched.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/shm/engine.h"
#include "lockstep/comm/shm/progress_policy.h"
#include "lockstep/core/error.h"

namespace lockstep::shm::for_test {

// A policy that decides nothing: it always yields or always sleeps, and wakes the engine's thread
// for every operation. The engine's tests pass with both kinds, because no result depends on how an
// engine waits.
//
//   TEST_PROGRESS_POLICY=yield build/bin/tests/shm_engine_test
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

// Rings and chunks that a few kilobytes fill.
inline constexpr EngineOptions kTiny{.small_bytes = 1024, .chunk_bytes = 4096, .ring_bytes = 4096};

// A store in this process's memory.
class MapStore final : public KeyValueStore {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    std::unique_lock lock(mutex_);
    const bool found =
        changed_.wait_until(lock, deadline.time(), [&] { return values_.count(key) != 0; });
    if (!found) throw TimeoutError("kv", "nobody set " + key);
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

inline Deadline soon(int seconds = 60) {
  return Deadline::after(std::chrono::seconds(seconds));
}

inline std::unique_ptr<Engine> make_engine(KeyValueStore& kv, int rank, int size,
                                           EngineOptions options = {}) {
  options.policy = policy_under_test();
  EngineResult made = Engine::make(kv, {rank, size}, options, soon());
  if (!made.engine) throw std::runtime_error("no engine: " + made.unavailable_reason);
  return std::move(made.engine);
}

using Body = std::function<void(Engine&)>;

// What each rank threw; null for those that did not.
inline std::vector<std::exception_ptr> outcomes(int size, const EngineOptions& options,
                                                const Body& body) {
  MapStore kv;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto engine = make_engine(kv, rank, size, options);
        body(*engine);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

inline void run_ranks(int size, const EngineOptions& options, const Body& body) {
  for (const auto& error : outcomes(size, options, body))
    if (error) std::rethrow_exception(error);
}

inline std::string text_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

template <typename Error>
bool is(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Error&) {
    return true;
  } catch (...) {
  }
  return false;
}

}  // namespace lockstep::shm::for_test
