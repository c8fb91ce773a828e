#include "lockstep/comm/shm/messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "lockstep/core/disagreement.h"

namespace lockstep::shm {
namespace {

// Lengths stand at multiples of this, so that one never wraps around the ring's end; a message is
// padded to the next multiple.
constexpr std::uint64_t kUnit = 16;

// Bytes are shown to the other side in pieces, so that both sides copy at the same time.
std::uint64_t piece_of(const Layout& layout) {
  return layout.ring_bytes() / 4;
}

void write(Ring& ring, std::size_t size, std::uint64_t at, const std::byte* from, std::size_t n) {
  const std::size_t place = at % size;
  const std::size_t first = std::min(n, size - place);
  if (first != 0) std::memcpy(ring.data() + place, from, first);
  if (n > first) std::memcpy(ring.data(), from + first, n - first);
}

void read(Ring& ring, std::size_t size, std::uint64_t at, std::byte* to, std::size_t n) {
  const std::size_t place = at % size;
  const std::size_t first = std::min(n, size - place);
  if (first != 0) std::memcpy(to, ring.data() + place, first);
  if (n > first) std::memcpy(to + first, ring.data(), n - first);
}

}  // namespace

Message::Message(const Group&, const Deadline& deadline, const Ends& e)
    : Ticket(deadline), ends(e) {}

std::uint64_t Message::left() const {
  return (ends.bytes + kUnit - 1) / kUnit * kUnit - moved;
}

std::size_t Message::real(std::uint64_t advance) const {
  return moved < ends.bytes ? std::min<std::size_t>(advance, ends.bytes - moved) : 0;
}

std::string Message::text() const {
  return fmt::format("{} of {} bytes {} rank {}", ends.sending ? "send" : "recv", ends.bytes,
                     ends.sending ? "to" : "from", ends.peer);
}

Messages::Messages(const Group& group)
    : group_(group),
      sends_(static_cast<std::size_t>(group.size())),
      receives_(static_cast<std::size_t>(group.size())) {}

void Messages::add(const std::shared_ptr<Message>& message) {
  auto& lines = message->ends.sending ? sends_ : receives_;
  lines[static_cast<std::size_t>(message->ends.peer)].push_back(message);
  ++pending_;
}

bool Messages::pump(Completions& completions) {
  bool moved = false;
  for (std::size_t peer = 0; peer < sends_.size() && pending_ > 0; ++peer) {
    if (!sends_[peer].empty())
      moved |= pump_sends(static_cast<int>(peer), sends_[peer], completions);
    if (!receives_[peer].empty())
      moved |= pump_receives(static_cast<int>(peer), receives_[peer], completions);
  }
  return moved;
}

bool Messages::pump_sends(int peer, Line& line, Completions& completions) {
  const std::size_t size = group_.layout().ring_bytes();
  Ring& ring = group_.layout().ring(group_.own(), peer);
  bool any = false;
  std::uint64_t passed = 0;
  while (!line.empty() && passed < size) {
    Message& message = *line.front();
    const std::uint64_t written = ring.written.load(std::memory_order_relaxed);  // only we write it
    const std::uint64_t room = size - (written - ring.taken.load());
    std::uint64_t advance = 0;
    if (!message.announced && room >= kUnit) {
      const std::uint64_t bytes = message.ends.bytes;
      std::memcpy(ring.data() + written % size, &bytes, sizeof bytes);
      message.announced = true;
      advance = kUnit;
    } else if (message.announced && room > 0) {
      advance = std::min({message.left(), room, piece_of(group_.layout())});
      write(ring, size, written, message.ends.data + message.moved, message.real(advance));
      message.moved += advance;
    }
    if (advance > 0) {
      ring.written.store(written + advance);
      passed += advance;
      group_.wake_peer(peer);
      any = true;
    }
    if (message.announced && message.left() == 0) {
      const auto finished = line.front();
      line.pop_front();
      --pending_;
      completions.finish(*finished);
      any = true;
    } else if (advance == 0) {
      break;
    }
  }
  return any;
}

bool Messages::pump_receives(int peer, Line& line, Completions& completions) {
  const std::size_t size = group_.layout().ring_bytes();
  Ring& ring = group_.layout().ring(group_.view(peer), group_.rank());
  bool any = false;
  std::uint64_t passed = 0;
  while (!line.empty() && passed < size) {
    Message& message = *line.front();
    const std::uint64_t taken = ring.taken.load(std::memory_order_relaxed);  // only we write it
    const std::uint64_t there = ring.written.load() - taken;
    std::uint64_t advance = 0;
    if (!message.announced && there >= kUnit) {
      std::uint64_t bytes = 0;
      std::memcpy(&bytes, ring.data() + taken % size, sizeof bytes);
      if (bytes != message.ends.bytes)
        throw Disagreement("shm",
                           fmt::format("rank {} sent {} bytes to rank {}, which expects {}. Both "
                                       "sides of a message must name the same size.",
                                       peer, bytes, group_.rank(), message.ends.bytes));
      message.announced = true;
      advance = kUnit;
    } else if (message.announced && there > 0) {
      advance = std::min({message.left(), there, piece_of(group_.layout())});
      read(ring, size, taken, message.ends.data + message.moved, message.real(advance));
      message.moved += advance;
    }
    if (advance > 0) {
      ring.taken.store(taken + advance);
      passed += advance;
      group_.wake_peer(peer);
      any = true;
    }
    if (message.announced && message.left() == 0) {
      const auto finished = line.front();
      line.pop_front();
      --pending_;
      completions.finish(*finished);
      any = true;
    } else if (advance == 0) {
      break;
    }
  }
  return any;
}

const Message* Messages::with(int rank) const {
  const auto at = static_cast<std::size_t>(rank);
  if (!sends_[at].empty()) return sends_[at].front().get();
  return receives_[at].empty() ? nullptr : receives_[at].front().get();
}

const Message* Messages::most_urgent() const {
  const Message* urgent = nullptr;
  for (const auto* lines : {&sends_, &receives_}) {
    for (const Line& line : *lines) {
      for (const auto& message : line) {
        if (urgent == nullptr || message->deadline().time() < urgent->deadline().time())
          urgent = message.get();
      }
    }
  }
  return urgent;
}

std::vector<std::shared_ptr<Message>> Messages::take_all() {
  std::vector<std::shared_ptr<Message>> all;
  for (auto* lines : {&sends_, &receives_}) {
    for (Line& line : *lines) {
      all.insert(all.end(), line.begin(), line.end());
      line.clear();
    }
  }
  pending_ = 0;
  return all;
}

}  // namespace lockstep::shm
