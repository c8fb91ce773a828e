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
#pragma once

#include <map>
#include <string>
#include <vector>

namespace lockstep::detail {

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

}  // namespace lockstep::detail
