// The keys and values of a store, and what the commands of its protocol do with them
// (rendezvous/store_channel.h lists the commands).
//
//   StoreTable table([&](auto client, auto bytes) { send(client, bytes); });
//   input.erase(0, table.feed(client, input));   // carries out the first command
//
// Bytes in, bytes out: it knows no sockets. The keys, values, queues and awaited keys that clients
// make it hold are counted and bounded; input that is not complete and replies that are not sent
// belong to the caller. One command costs at most what its own bytes and its reply allow
// (StoreLimits::command_bytes).
// Owned and called by one thread.
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
  // Called from within feed(), also for clients that wait for what another one sets.
  using Reply = std::function<void(Client, std::string_view)>;

  explicit StoreTable(Reply reply, StoreLimits limits = {})
      : reply_(std::move(reply)), limits_(limits) {}

  // Carries out the first command of the input, and returns its size; 0 when it is not complete.
  // Throws CommError where a client breaks the protocol or a limit: drop it then.
  std::size_t feed(Client client, std::string_view input);
  // Forgets the client and what it waits for. Its keys stay.
  void drop(Client client);

 private:
  class Input;
  struct Arguments;
  struct State {
    bool validated = false;
    std::vector<std::string> awaited;  // keys that were missing when the wait began
    std::size_t missing = 0;           // how many of them have not come since
    std::size_t awaited_bytes = 0;     // counted in bytes_
  };

  bool carry_out(Client client, Input& in);
  void obey(Client client, store::Command command, Arguments& got);
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

}  // namespace lockstep
