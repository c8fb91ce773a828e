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

}  // namespace lockstep
