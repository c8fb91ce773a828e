#include "lockstep/rendezvous/store_streams.h"

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/rendezvous/rank_env.h"

namespace lockstep {
namespace {

using Kind = StoreFrame::Kind;

// Credit is reported seldom enough to be cheap, and soon enough that a sender does not stop.
constexpr std::size_t kReportAfter = StoreStreams::kStreamWindow / 4;

[[noreturn]] void reject(const char* what) {
  throw UsageError("launch", "another launcher's store frame {}", what);
}

void append_number(std::string& to, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) to += static_cast<char>((value >> (8 * i)) & 0xff);
}

std::uint64_t number_at(std::string_view bytes, std::size_t at, int size) {
  std::uint64_t value = 0;
  for (int i = 0; i < size; ++i)
    value |= static_cast<std::uint64_t>(
                 static_cast<unsigned char>(bytes[at + static_cast<std::size_t>(i)]))
             << (8 * i);
  return value;
}

void check(const StoreFrame& frame) {
  if (frame.stream == 0 && frame.kind != Kind::kCredit) reject("has no stream");
  switch (frame.kind) {
    case Kind::kOpen:
      if (frame.value != StoreFrame::kNoRank && frame.value >= kMaxWorldSize)
        reject("opens a stream for a rank that cannot exist");
      return;
    case Kind::kData:
      if (frame.value == 0 || frame.value > StoreFrame::kMaxPayload) reject("has a bad length");
      return;
    case Kind::kClose:
      if (frame.value != 0) reject("closes with a value");
      return;
    case Kind::kCredit:
      if (frame.value == 0 || frame.value > StoreStreams::kLinkWindow)
        reject("reports more than a window");
      return;
  }
}

}  // namespace

bool begins_store_frame(char first) {
  return first >= static_cast<char>(Kind::kOpen) && first <= static_cast<char>(Kind::kCredit);
}

std::string encode(const StoreFrame& frame) {
  std::string bytes;
  bytes.reserve(StoreFrame::kHeaderBytes + frame.payload.size());
  bytes += static_cast<char>(frame.kind);
  append_number(bytes, frame.attempt, 4);
  append_number(bytes, frame.stream, 8);
  append_number(bytes, frame.value, 4);
  bytes += frame.payload;
  return bytes;
}

std::size_t decode(std::string_view bytes, StoreFrame& frame) {
  if (bytes.empty()) return 0;
  if (!begins_store_frame(bytes.front())) reject("has an unknown kind");
  if (bytes.size() < StoreFrame::kHeaderBytes) return 0;
  frame.kind = static_cast<Kind>(bytes.front());
  frame.attempt = static_cast<std::uint32_t>(number_at(bytes, 1, 4));
  frame.stream = number_at(bytes, 5, 8);
  frame.value = static_cast<std::uint32_t>(number_at(bytes, 13, 4));
  check(frame);
  const std::size_t payload = frame.kind == Kind::kData ? frame.value : 0;
  if (bytes.size() - StoreFrame::kHeaderBytes < payload) return 0;
  frame.payload = bytes.substr(StoreFrame::kHeaderBytes, payload);
  return StoreFrame::kHeaderBytes + payload;
}

// ---------------------------------------------------------------- sending

void StoreStreams::open(Id id, int rank) {
  streams_[id].rank = static_cast<std::uint32_t>(rank);  // -1 is kNoRank
}

std::size_t StoreStreams::room(const Stream& stream, std::size_t wanted) const {
  const std::size_t not_for_it = kFrameCost + (wanted > kSmallWrite ? kReserved : 0);
  const std::size_t on_link = link_credit_ > not_for_it ? link_credit_ - not_for_it : 0;
  return std::min({stream.credit, on_link, StoreFrame::kMaxPayload, wanted});
}

std::size_t StoreStreams::write(Id id, std::string_view bytes) {
  Stream& stream = streams_.at(id);
  std::size_t taken = 0;
  while (taken < bytes.size()) {
    const std::string_view payload = bytes.substr(taken, room(stream, bytes.size() - taken));
    if (payload.empty()) {
      if (!std::exchange(stream.waiting, true)) waiting_.push_back(id);
      break;
    }
    if (!std::exchange(stream.announced, true))
      handlers_.send({.kind = Kind::kOpen, .stream = id, .value = stream.rank});
    handlers_.send({.kind = Kind::kData,
                    .stream = id,
                    .value = static_cast<std::uint32_t>(payload.size()),
                    .payload = payload});
    stream.credit -= payload.size();
    link_credit_ -= payload.size() + kFrameCost;
    taken += payload.size();
  }
  return taken;
}

void StoreStreams::close(Id id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  const bool announced = found->second.announced;
  if (found->second.waiting) std::erase(waiting_, id);
  streams_.erase(found);
  if (announced) handlers_.send({.kind = Kind::kClose, .stream = id});
}

// ---------------------------------------------------------------- receiving

void StoreStreams::on_frame(const StoreFrame& frame) {
  switch (frame.kind) {
    case Kind::kOpen: {
      if (!handlers_.opened) reject("opens a stream to a node that has no store");
      if (streams_.size() >= kMaxStreams) reject("opens too many streams");
      if (streams_.count(frame.stream) != 0) reject("opens a stream again");
      Stream& stream = streams_[frame.stream];
      stream.rank = frame.value;
      stream.announced = true;
      return handlers_.opened(frame.stream, static_cast<int>(frame.value));
    }
    case Kind::kData:
      return on_data(frame);
    case Kind::kClose: {
      const auto found = streams_.find(frame.stream);
      if (found == streams_.end()) return;  // both sides closed it
      found->second.announced = false;
      close(frame.stream);
      return handlers_.closed(frame.stream);
    }
    case Kind::kCredit:
      return on_credit(frame);
  }
}

void StoreStreams::on_data(const StoreFrame& frame) {
  arrived_ += frame.payload.size() + kFrameCost;
  if (arrived_ >= kReportAfter)
    handlers_.send({.kind = Kind::kCredit,
                    .stream = 0,
                    .value = static_cast<std::uint32_t>(std::exchange(arrived_, 0))});
  const auto found = streams_.find(frame.stream);
  if (found == streams_.end()) return;  // closed here; the peer does not know yet
  found->second.unconsumed += frame.payload.size();
  if (found->second.unconsumed > kStreamWindow) reject("exceeds the window of its stream");
  handlers_.received(frame.stream, frame.payload);
}

void StoreStreams::consumed(Id id, std::size_t bytes) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  Stream& stream = found->second;
  stream.consumed += bytes;
  if (stream.consumed < kReportAfter) return;
  stream.unconsumed -= stream.consumed;
  handlers_.send({.kind = Kind::kCredit,
                  .stream = id,
                  .value = static_cast<std::uint32_t>(std::exchange(stream.consumed, 0))});
}

void StoreStreams::on_credit(const StoreFrame& frame) {
  if (frame.stream == 0) {
    link_credit_ += frame.value;
    if (link_credit_ > kLinkWindow) reject("reports bytes that were not sent");
  } else if (const auto found = streams_.find(frame.stream); found != streams_.end()) {
    found->second.credit += frame.value;
    if (found->second.credit > kStreamWindow) reject("reports bytes that were not sent");
  }
  wake();
}

// Calls writable() once for each stream that can write. A stream that still cannot write everything
// moves to the end.
void StoreStreams::wake() {
  for (std::size_t left = waiting_.size(); left > 0 && link_credit_ > kFrameCost; --left) {
    if (waiting_.empty()) return;
    const Id id = waiting_.front();
    waiting_.pop_front();
    Stream& stream = streams_.at(id);
    if (stream.credit == 0) {
      waiting_.push_back(id);
      continue;
    }
    stream.waiting = false;
    handlers_.writable(id);
  }
}

}  // namespace lockstep
