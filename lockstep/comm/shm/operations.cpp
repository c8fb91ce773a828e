#include "lockstep/comm/shm/operations.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "lockstep/comm/shm/group.h"

namespace lockstep::shm {
namespace {

// The caller's own number, if it has one.
std::uint64_t number(const Descriptor& what) {
  return what.number != 0 ? what.number : what.sequence;
}

}  // namespace

// ---------------------------------------------------------------- rounds

Rounds::Step Rounds::step(Collective& collective) {
  bool moved = false;
  if (!posted_) {
    collective.fill(group_, static_cast<int>((round_ + 1) & 1));
    post(collective);
    moved = true;
  }
  if (!all_posted()) return moved ? Step::kMoved : Step::kBlocked;
  if (first_) check_agreement(collective);
  first_ = false;
  switch (collective.take(group_, static_cast<int>(round_ & 1))) {
    case Collective::Next::kAgain:
      return Step::kMoved;
    case Collective::Next::kRound:
      posted_ = false;
      return Step::kMoved;
    case Collective::Next::kDone:
      break;
  }
  drop();
  return Step::kDone;
}

void Rounds::drop() {
  posted_ = false;
  first_ = true;
}

void Rounds::post(const Collective& collective) {
  ++round_;
  Post& own = group_.own().header->posts[round_ & 1];
  if (first_) own.what = collective.what;
  own.cpu.store(::sched_getcpu(), std::memory_order_relaxed);
  own.round.store(round_);
  posted_ = true;
  arrived_ = 0;
  for (int rank = 0; rank < group_.size(); ++rank)
    if (rank != group_.rank()) group_.wake_peer(rank);
}

bool Rounds::all_posted() {
  for (; arrived_ < group_.size(); ++arrived_) {
    if (arrived_ == group_.rank()) continue;
    if (group_.view(arrived_).header->posts[round_ & 1].round.load() < round_) return false;
  }
  return true;
}

std::vector<int> Rounds::behind() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank == group_.rank()) continue;
    if (group_.view(rank).header->posts[round_ & 1].round.load() < round_) ranks.push_back(rank);
  }
  return ranks;
}

void Rounds::check_agreement(Collective& collective) const {
  const int parity = static_cast<int>(round_ & 1);
  const Descriptor& what = collective.what;
  int other = 0;
  while (other < group_.size() && (other == group_.rank() || what.agrees(called_by(other, what))))
    ++other;
  const bool differ = other < group_.size();
  std::string text = differ ? difference(what) : collective.disagreement(group_, parity);
  if (text.empty()) return;
  if (!differ)
    text += ". Every rank must call the same operations with the same sizes in the same order.";
  throw EngineFailure{.disagreement = true,
                      .text = std::move(text),
                      .culprit = differ ? other : -1,
                      .context = {.operation = what.text(),
                                  .sequence = number(what),
                                  .elapsed = collective.deadline().elapsed()}};
}

const Descriptor& Rounds::called_by(int rank, const Descriptor& own) const {
  return rank == group_.rank() ? own : group_.view(rank).header->posts[round_ & 1].what;
}

// Names rank 0 and the first that differs from it: all ranks say the same, whichever notices first.
std::string Rounds::difference(const Descriptor& own) const {
  const Descriptor& first = called_by(0, own);
  int rank = 1;
  while (rank + 1 < group_.size() && first.agrees(called_by(rank, own))) ++rank;
  const Descriptor& second = called_by(rank, own);
  const std::string subject = first.difference(second);
  std::string text = fmt::format("ranks disagree on collective #{}{}: rank 0 {}, rank {} {}",
                                 number(first), subject.empty() ? "" : ", on its " + subject,
                                 first.action(), rank, second.action());
  if (number(second) != number(first)) text += fmt::format(" as its #{}", number(second));
  text += ". Every rank must call the same operations with the same sizes in the same order. ";
  if (!subject.empty())
    text +=
        fmt::format("Give this one the same {} on every rank. If these are two calls: ", subject);
  return text + (first.saving != second.saving ? kUnevenSaves
                 : any_has_finished(own)       ? kUnevenInputs
                                               : kUnevenCalls);
}

bool Rounds::any_has_finished(const Descriptor& own) const {
  for (int rank = 0; rank < group_.size(); ++rank)
    if (called_by(rank, own).kind == Kind::kFinish) return true;
  return false;
}

// ---------------------------------------------------------------- messages

namespace {

// Lengths are stored at multiples of this, so that one never wraps around the ring's end; a message
// is padded to the next multiple.
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
