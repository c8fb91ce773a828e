// The contents of a store, and the commands of its protocol (store_client.h lists them).
//
//   StoreTable table([&](auto client, auto bytes) { send(client, bytes); });
//   input.erase(0, table.feed(client, input));   // executes the first command
//
// Turns a client's bytes into replies; it has no sockets. The memory for keys, values, queues and
// awaited keys is counted and bounded; incomplete input and unsent replies belong to the caller.
// The work of one command is bounded by its size and that of its reply
// (StoreLimits::command_bytes). Owned and called by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/rendezvous/store_client.h"

namespace lockstep {

struct StoreLimits {
  std::size_t keys = 1u << 20;
  std::size_t bytes = 512u << 20;          // keys, values, queues and awaited keys together
  std::size_t command_bytes = 128u << 20;  // one command or one reply
};

class StoreTable {
 public:
  using Client = std::uint64_t;
  // Called by feed(), also for other clients, whose wait ends.
  using Reply = std::function<void(Client, std::string_view)>;

  explicit StoreTable(Reply reply, StoreLimits limits = {})
      : reply_(std::move(reply)), limits_(limits) {}

  // Executes the first command of the input and returns its size; 0 if it is incomplete. Throws
  // CommError if the client breaks the protocol or a limit: drop it then.
  std::size_t feed(Client client, std::string_view input);
  // Removes the client and its wait. Its keys stay.
  void drop(Client client);

 private:
  class Input;
  struct Arguments;
  struct State {
    bool validated = false;
    std::vector<std::string> awaited;  // keys that were missing when the wait began
    std::size_t missing = 0;           // how many of them are still missing
    std::size_t awaited_bytes = 0;     // counted in bytes_
  };

  bool run_command(Client client, Input& in);
  void execute(Client client, store::Command command, Arguments& got);
  void reserve(std::size_t added, std::size_t removed);
  void check_reply(std::size_t bytes) const;
  void put(const std::string& key, std::string value);
  void append(const std::string& key, std::string_view value);
  std::size_t erase(const std::string& key);
  std::string value_reply(const std::vector<std::string>& keys) const;
  void add(Client client, const std::string& key, std::int64_t amount);
  void compare_set(Client client, const std::string& key, std::string_view expected,
                   std::string_view desired);
  void list(Client client);
  void push(const std::string& key, std::string_view value);
  void pop(Client client, const std::string& key);
  bool present(const std::string& key) const;
  void wait(Client client, std::vector<std::string> keys);
  void wake(const std::string& key, bool one_only = false);
  void stop_waiting(Client client);

  Reply reply_;
  StoreLimits limits_;
  std::size_t bytes_ = 0;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;
  std::unordered_map<Client, State> clients_;
  std::unordered_map<std::string, std::deque<Client>> waiters_;
};

// ---------------------------------------------------------------- clients of another host
//
// StoreStreams multiplexes the store's clients of another host over the link between two launchers:
// one stream per client.
//
// Node 0's launcher serves the store (launcher/store_server.h). The others forward their ranks'
// bytes and its replies without parsing them. Because every client has a stream of its own, one
// that waits, or does not read its replies, does not block the others.
//
// Flow control has two windows, as in HTTP/2. A sender may have
//   - kStreamWindow bytes on a stream that the receiver has not consumed, which bounds memory;
//   - kLinkWindow bytes on the link that have not arrived. This bounds the delay of the launchers'
//     own messages. It is less than the kernel buffers for a stopped process, because a receive
//     window of zero would end the connection (TCP_USER_TIMEOUT).
//
//   StoreStreams streams({.send = ..., .received = ..., .writable = ..., .closed = ...});
//   streams.open(client, rank);
//   sent = streams.write(client, bytes);      // if not all, writable(client) is called later
//
// Has no sockets. Owned and called by one thread. Handlers may call any function except on_frame().
//
// A frame on the link: 17 bytes (kind, attempt, stream and value, little-endian), and for kData a
// payload whose length is the value.
struct StoreFrame {
  enum class Kind : std::uint8_t {
    kOpen = 1,  // to node 0; value: the client's rank, or kNoRank
    kData,
    kClose,   // the last frame of the stream
    kCredit,  // value: bytes that were consumed; on stream 0: bytes that arrived on the link
  };
  Kind kind = Kind::kData;
  std::uint32_t attempt = 0;  // frames of earlier attempts are ignored
  std::uint64_t stream = 0;
  std::uint32_t value = 0;
  std::string_view payload = {};

  static constexpr std::uint32_t kNoRank = 0xffffffff;
  static constexpr std::size_t kHeaderBytes = 17;
  static constexpr std::size_t kMaxPayload = 16'000;  // fits a TLS record with its header
};
// JSON messages on the same link begin with another byte.
bool begins_store_frame(char first);
std::string encode(const StoreFrame& frame);
// Reads the frame at the front of `bytes` and returns its size; 0 if it is incomplete. The payload
// points into `bytes`. Throws UsageError for anything but a frame.
std::size_t decode(std::string_view bytes, StoreFrame& frame);

class StoreStreams {
 public:
  using Id = std::uint64_t;  // never 0
  static constexpr std::size_t kLinkWindow = 128u << 10;
  static constexpr std::size_t kStreamWindow = 64u << 10;
  static constexpr std::size_t kFrameCost = 256;  // of a kData frame, besides its payload
  // The part of the link's window for writes of at most kSmallWrite, which do not wait for others.
  static constexpr std::size_t kReserved = 16u << 10;
  static constexpr std::size_t kSmallWrite = 1u << 10;
  static constexpr std::size_t kMaxStreams = 16u << 10;

  struct Handlers {
    std::function<void(StoreFrame)> send;      // also sets the frame's attempt
    std::function<void(Id, int rank)> opened;  // on node 0 only; rank -1: a TCP client
    std::function<void(Id, std::string_view)> received;
    std::function<void(Id)> writable;
    std::function<void(Id)> closed;  // the peer closed the stream
  };
  explicit StoreStreams(Handlers handlers) : handlers_(std::move(handlers)) {}

  // Announced to the peer with the first bytes.
  void open(Id id, int rank);
  // Returns the number of bytes taken; if not all, writable() is called later.
  std::size_t write(Id id, std::string_view bytes);
  // The receiver no longer holds this many of the received bytes in memory.
  void consumed(Id id, std::size_t bytes);
  void close(Id id);
  // Throws UsageError if the peer breaks the protocol.
  void on_frame(const StoreFrame& frame);

 private:
  struct Stream {
    std::uint32_t rank = StoreFrame::kNoRank;
    bool announced = false;  // to the peer
    bool waiting = false;    // in waiting_
    std::size_t credit = kStreamWindow;
    std::size_t unconsumed = 0;
    std::size_t consumed = 0;  // part of `unconsumed`, not yet reported to the peer
  };

  std::size_t room(const Stream& stream, std::size_t wanted) const;
  void on_data(const StoreFrame& frame);
  void on_credit(const StoreFrame& frame);
  void wake();

  Handlers handlers_;
  std::unordered_map<Id, Stream> streams_;
  std::deque<Id> waiting_;  // streams that could not write all their bytes, in this order
  std::size_t link_credit_ = kLinkWindow;
  std::size_t arrived_ = 0;  // bytes not yet reported to the peer
};

}  // namespace lockstep
