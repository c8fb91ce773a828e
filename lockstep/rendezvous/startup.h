// The start-up check of a world: do all ranks have the same world size, program and options?
//
// Every rank publishes a Handshake in a store that all ranks can reach. Rank 0 compares them and
// publishes the outcome, so either all ranks continue or all throw the same error. It names every
// rank that differs from rank 0, not only the first, because all of them need fixing. Ranks on one
// host are counted where no launcher has numbered them.
//
//   RankInfo place = check_start(store, handshake, {.size = n, .timeout = limit});
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/deadline.h"

namespace lockstep {

// The store that all ranks of a world share: c10d's, the launcher's, or a map in tests. Each key is
// set once, by one rank, and read by any. get() waits until the key is set, and throws if the
// deadline passes or the store is lost. Called by one thread.
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

namespace lockstep::detail {

// A rank's number on its host, the number of ranks there, and the host's number. A negative number,
// or a size of 0, is not known.
struct RankInfo {
  int local_rank = -1;
  int local_size = 0;
  int node = -1;

  bool known() const { return local_rank >= 0 && local_size > 0 && node >= 0; }
  bool operator==(const RankInfo&) const = default;
};

struct Handshake {
  int rank = 0;
  RankInfo place = {};
  std::string world_size = {};
  std::string program = {};  // the build
  std::string options = {};  // a digest of the user's options
  std::string device = {};   // type and backend
  std::string debug = {};    // "on" or "off": debug mode sends extra messages, so all must agree
  std::string host = {};     // the name, for messages
  std::string machine = {};  // equal for ranks of one machine, and different otherwise
  std::string gpu = {};      // the physical GPU; empty: none
  std::string address = {};  // where other ranks reach it; empty: chosen by interface
  std::string refusal = {};  // why this rank cannot take part; empty: it takes part

  std::string text() const;
  static Handshake parse(const std::string& text);
};

// What is wrong, in sentences; "" if nothing is. The handshakes are those received so far, in any
// order; rank 0's values are the right ones. `share_device`: several ranks may use one GPU. If a
// rank refuses to take part, only its reason is reported: it does not know the other values yet.
std::string contradictions(const std::vector<Handshake>& handshakes, bool share_device);

// True if world sizes differ or two processes have the same rank: then more processes may be
// starting than rank 0 expects.
bool miscounted(const std::vector<Handshake>& handshakes);

// Every rank's place: as it was given, or counted over equal machines. The handshakes must not
// contradict each other.
std::map<int, RankInfo> count_ranks(const std::vector<Handshake>& handshakes);

// "rank 3", "ranks 1-4, 7", at most about a dozen numbers, then "and 40 more".
std::string name_ranks(std::vector<int> ranks);

struct StartupOptions {
  int size = 1;
  bool share_device = false;  // several ranks may use one GPU
  std::chrono::milliseconds timeout{0};
};
using StartupStore = std::shared_ptr<CountingStore>;

// Collective. Returns this rank's place: as it was given, or counted over hosts. Throws UsageError
// if the ranks contradict each other, TimeoutError naming the ranks that are missing, and CommError
// if the launcher announces a failure meanwhile.
RankInfo check_start(const StartupStore& store, const Handshake& handshake,
                     const StartupOptions& options);

// Tells the other ranks why this one cannot take part (handshake.refusal). Returns when they know,
// or after the timeout.
void report_refusal(const StartupStore& store, const Handshake& handshake,
                    const StartupOptions& options);

}  // namespace lockstep::detail
