// The start-up check of a world: do all ranks have the same world size, program and options?
//
// Every rank publishes a Handshake in a store that all ranks can reach. Rank 0 compares them and
// publishes the outcome, so either all ranks continue or all throw the same error. It names every
// rank that differs from rank 0, not only the first, because all of them need fixing. Ranks on one
// host are counted where no launcher has numbered them.
//
//   RankInfo place = check_start(store, handshake, {.size = n, .timeout = limit});
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/rendezvous/key_value_store.h"

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
