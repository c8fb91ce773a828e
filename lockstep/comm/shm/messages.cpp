#include "lockstep/comm/shm/messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "lockstep/comm/shm/failure.h"

namespace lockstep::shm {
namespace {

// Lengths stand at multiples of this, so that one never wraps around the ring's end; a message is
// padded to the next multiple.
constexpr std::uint64_t kUnit = 16;

// Bytes are shown to the other side in pieces, so that both sides copy at the same time.
std::uint64_t piece_of(const Layout& layout) {
  return layout.ring_bytes() / 4;
}

// Between a message's array and the ring, where the bytes may go around its end.
void copy(const Message& message, Ring& ring, std::size_t size, std::uint64_t at, std::size_t n) {
  std::byte* const array = message.ends.data + message.moved;
  const std::size_t place = at % size;
  const std::size_t first = std::min(n, size - place);
  const auto part = [&](std::byte* in_ring, std::byte* in_array, std::size_t bytes) {
    if (bytes == 0) return;
    if (message.ends.sending)
      std::memcpy(in_ring, in_array, bytes);
    else
      std::memcpy(in_array, in_ring, bytes);
  };
  part(ring.data() + place, array, first);
  part(ring.data(), array + first, n - first);
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
  for (std::size_t peer = 0; peer < sends_.size() && pending_ > 0; ++peer)
    for (Line* line : {&sends_[peer], &receives_[peer]})
      if (!line->empty()) moved |= pump_line(static_cast<int>(peer), *line, completions);
  return moved;
}

// The length first, which the receiver compares with its own.
void Messages::announce(Message& message, std::byte* in_ring) const {
  std::uint64_t bytes = message.ends.bytes;
  if (message.ends.sending)
    std::memcpy(in_ring, &bytes, sizeof bytes);
  else
    std::memcpy(&bytes, in_ring, sizeof bytes);
  if (bytes != message.ends.bytes)
    throw EngineFailure{
        .disagreement = true,
        .text = fmt::format("rank {} sent {} bytes to rank {}, which expects {}. Both sides of a "
                            "message must name the same size.",
                            message.ends.peer, bytes, group_.rank(), message.ends.bytes)};
  message.announced = true;
}

bool Messages::pump_line(int peer, Line& line, Completions& completions) {
  const Layout& layout = group_.layout();
  const std::size_t size = layout.ring_bytes();
  const bool sending = line.front()->ends.sending;
  Ring& ring =
      sending ? layout.ring(group_.own(), peer) : layout.ring(group_.view(peer), group_.rank());
  std::atomic<std::uint64_t>& counter = sending ? ring.written : ring.taken;  // only we write it
  bool any = false;
  std::uint64_t passed = 0;
  while (!line.empty() && passed < size) {
    Message& message = *line.front();
    const std::uint64_t at = counter.load(std::memory_order_relaxed);
    const std::uint64_t possible =
        sending ? size - (at - ring.taken.load()) : ring.written.load() - at;
    std::uint64_t advance = 0;
    if (!message.announced && possible >= kUnit) {
      announce(message, ring.data() + at % size);
      advance = kUnit;
    } else if (message.announced && possible > 0) {
      advance = std::min({message.left(), possible, piece_of(layout)});
      copy(message, ring, size, at, message.real(advance));
      message.moved += advance;
    }
    if (advance > 0) {
      counter.store(at + advance);
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
