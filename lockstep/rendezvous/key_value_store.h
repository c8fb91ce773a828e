// The key-value store that all ranks of a world share: c10d's, the launcher's, or a map in tests.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "lockstep/core/deadline.h"

namespace lockstep {

// Each key is set once, by one rank, and read by any. get() waits until the key is set, and throws
// if the deadline passes or the store is lost. Called by one thread.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
};

// A store with counters that start at 0; add() returns the sum.
class CountingStore : public KeyValueStore {
 public:
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
  virtual bool check(const std::string& key) = 0;
};

// Polls until `ready` (true) or the deadline (false), at growing intervals: a store has no events.
template <typename Ready>
bool poll_until(const Ready& ready, const Deadline& deadline,
                std::chrono::microseconds longest_pause = std::chrono::microseconds(5000)) {
  for (std::chrono::microseconds pause(100); !ready();
       pause = std::min(pause * 3 / 2, longest_pause)) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace lockstep
