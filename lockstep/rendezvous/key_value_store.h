// A place where ranks write what all of them can read. Whatever starts the ranks provides one:
// c10d's, the launcher's, or a test's map.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "lockstep/core/deadline.h"

namespace lockstep {

// Strings by name, readable by all ranks. Each key is set once, by one rank. get() waits until it
// is set and throws when the deadline has passed or the store is lost. Called by one thread.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
};

// A store with counters, which start at 0: add() returns the sum.
class CountingStore : public KeyValueStore {
 public:
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
  virtual bool check(const std::string& key) = 0;
};

// Asks until `ready` (true) or the deadline, less and less often: a store cannot call back.
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
