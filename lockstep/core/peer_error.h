// What a rank throws because another rank threw it first: an error of the same kind, so that all
// ranks catch the same. A report takes it for a consequence.
//
//   throw detail::PeerError(UsageError("world", "rank {}: {}", rank, text), rank);
#pragma once

#include <utility>

namespace lockstep::detail {

class FromPeer {
 public:
  explicit FromPeer(int rank) : rank_(rank) {}
  virtual ~FromPeer() = default;
  int rank() const { return rank_; }

 private:
  int rank_;
};

template <typename Kind>
class PeerError final : public Kind, public FromPeer {
 public:
  PeerError(Kind error, int rank) : Kind(std::move(error)), FromPeer(rank) {}
};

}  // namespace lockstep::detail
