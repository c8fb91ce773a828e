// The store's clients on other hosts: each is a stream on the link between two launchers.
//
// Node 0's launcher serves the store (store_server.h). The others pass on the bytes of their ranks
// and the bytes of its replies, and read neither. A stream has a number, so a client that waits,
// or does not read its replies, holds up no other.
//
// Flow control has two windows, as in HTTP/2. A sender may have
//   - kStreamWindow bytes on a stream that the other side has not consumed, which bounds memory;
//   - kLinkWindow bytes on the link that have not arrived. It bounds what the launchers' own
//     messages wait behind. It is also less than the kernel buffers for a process that is stopped:
//     a receive window of zero would end the connection (TCP_USER_TIMEOUT).
//
//   StoreStreams streams({.send = ..., .received = ..., .writable = ..., .closed = ...});
//   streams.open(client, rank);
//   sent = streams.write(client, bytes);      // writable(client) follows where this is not all
//
// Knows no sockets. Owned and called by one thread. Handlers may call every function but on_frame.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace lockstep {

// What goes over the link: 17 bytes (kind, attempt, stream and value, little-endian) and the
// payload of kData, whose length is the value.
struct StoreFrame {
  enum class Kind : std::uint8_t {
    kOpen = 1,  // to node 0; value: the client's rank, or kNoRank
    kData,
    kClose,   // no frames of the stream follow
    kCredit,  // value: bytes that were consumed; on stream 0: that have arrived on the link
  };
  Kind kind = Kind::kData;
  std::uint32_t attempt = 0;  // frames of an earlier one are ignored
  std::uint64_t stream = 0;
  std::uint32_t value = 0;
  std::string_view payload = {};

  static constexpr std::uint32_t kNoRank = 0xffffffff;
  static constexpr std::size_t kHeaderBytes = 17;
  static constexpr std::size_t kMaxPayload = 16'000;  // with its header within a TLS record
};
// Messages of JSON on the same link begin with another byte.
bool begins_store_frame(char first);
std::string encode(const StoreFrame& frame);
// Reads the frame at the front of `bytes`, into which it points, and returns its size; 0 when it is
// not complete. Throws UsageError for what is not a frame.
std::size_t decode(std::string_view bytes, StoreFrame& frame);

class StoreStreams {
 public:
  using Id = std::uint64_t;  // 0 is never one
  static constexpr std::size_t kLinkWindow = 128u << 10;
  static constexpr std::size_t kStreamWindow = 64u << 10;
  static constexpr std::size_t kFrameCost = 256;  // each kData costs this beside its payload
  // Part of the link's window, for writes of at most kSmallWrite: large ones do not hold them up.
  static constexpr std::size_t kReserved = 16u << 10;
  static constexpr std::size_t kSmallWrite = 1u << 10;
  static constexpr std::size_t kMaxStreams = 16u << 10;

  struct Handlers {
    std::function<void(StoreFrame)> send;      // sets the attempt
    std::function<void(Id, int rank)> opened;  // on node 0 only; rank -1: a TCP client
    std::function<void(Id, std::string_view)> received;
    std::function<void(Id)> writable;
    std::function<void(Id)> closed;  // by the peer
  };
  explicit StoreStreams(Handlers handlers) : handlers_(std::move(handlers)) {}

  // The peer learns about it with the first bytes.
  void open(Id id, int rank);
  // Returns how many of the bytes were taken; if not all, writable() is called later.
  std::size_t write(Id id, std::string_view bytes);
  // This many of the received bytes no longer need memory here.
  void consumed(Id id, std::size_t bytes);
  void close(Id id);
  // Throws UsageError where the peer breaks the protocol.
  void on_frame(const StoreFrame& frame);

 private:
  struct Stream {
    std::uint32_t rank = StoreFrame::kNoRank;
    bool announced = false;  // the peer knows it
    bool waiting = false;    // in waiting_
    std::size_t credit = kStreamWindow;
    std::size_t unconsumed = 0;
    std::size_t consumed = 0;  // part of `unconsumed`; not reported yet
  };

  std::size_t room(const Stream& stream, std::size_t wanted) const;
  void on_data(const StoreFrame& frame);
  void on_credit(const StoreFrame& frame);
  void wake();

  Handlers handlers_;
  std::unordered_map<Id, Stream> streams_;
  std::deque<Id> waiting_;  // wrote less than they had, in this order
  std::size_t link_credit_ = kLinkWindow;
  std::size_t arrived_ = 0;  // not reported yet
};

}  // namespace lockstep
