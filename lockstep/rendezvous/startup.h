// The start-up conversation of a world. Every rank publishes its Handshake in a store that all can
// reach; rank 0 compares them and publishes how it ended, so all ranks continue or all throw the
// same.
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

// What the ranks exchange at start-up, and the checks on it.
//
// Every process publishes a Handshake; rank 0 reads them all. contradictions() says what does not
// fit together, naming every rank that differs from rank 0 and not only the first, because all of
// them need fixing. count_ranks() finds out which ranks share a host where no launcher says so.
//
//   std::string problem = contradictions(handshakes, share_device);   // "" when all is well
//   RankInfo mine = count_ranks(handshakes).at(rank);
//
// Pure functions; the text stays short enough to read with any number of ranks.

// A rank's number on its host, the number of ranks there, and the host's number. Negative, or 0 for
// the size: not known.
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
  std::string debug = {};    // "on" sends a message of its own before every operation
  std::string host = {};     // for people
  std::string machine = {};  // equal only on the same machine
  std::string gpu = {};      // the physical GPU; empty: none
  std::string address = {};  // where the others reach it; empty: chosen by interface
  std::string refusal = {};  // why it came only to say that it does not take part; empty: it does

  std::string text() const;
  static Handshake parse(const std::string& text);
};

// What is wrong, in sentences, or "". One Handshake per process that came, in any order; rank 0's
// decides what is right. `share_device`: several ranks may use one GPU. Where a rank refuses to
// take part, only its reason is reported: it never got far enough to know the rest.
std::string contradictions(const std::vector<Handshake>& handshakes, bool share_device);

// Could more processes be on their way than rank 0 knows of? True when world sizes differ or two
// processes have the same rank.
bool miscounted(const std::vector<Handshake>& handshakes);

// Every rank's place, by rank: as it was given, and otherwise counted over equal machines. The
// ranks must not contradict each other.
std::map<int, RankInfo> count_ranks(const std::vector<Handshake>& handshakes);

// "rank 3", "ranks 1-4, 7", at most some dozen numbers, then "and 40 more".
std::string name_ranks(std::vector<int> ranks);

struct StartupOptions {
  int size = 1;
  bool share_device = false;  // several ranks may use one GPU
  std::chrono::milliseconds timeout{0};
};
using StartupStore = std::shared_ptr<CountingStore>;

// Collective. Returns this rank's place: as it was given, and otherwise counted over hosts. Throws
// UsageError where the ranks contradict each other, TimeoutError naming those that did not come,
// and CommError when the launcher announces a failure meanwhile.
RankInfo check_start(const StartupStore& store, const Handshake& handshake,
                     const StartupOptions& options);

// For a rank that comes only to say why it does not take part (handshake.refusal): returns when the
// others know, or after the timeout.
void report_refusal(const StartupStore& store, const Handshake& handshake,
                    const StartupOptions& options);

}  // namespace lockstep::detail
