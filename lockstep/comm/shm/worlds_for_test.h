// Worlds of threads for the engine's tests: every rank an engine, all in one process.
//
//   run_ranks(3, {}, [](Engine& engine) { engine.barrier()->wait(); });
//
// What a rank throws is rethrown, unless the test asks for every rank's outcome (outcomes()).
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm/shm/engine.h"
#include "lockstep/comm/shm/policies_for_test.h"
#include "lockstep/core/error.h"

namespace lockstep::shm::for_test {

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
