// The key-value store of a one-host run, served by the launcher in its own event loop.
//
// Ranks that use Lockstep reach it over the channel they inherit (core/store_channel.h); then no
// TCP port is open. Python ranks connect to MASTER_PORT as they do under torchrun, so the server
// also listens there, on the loopback interface alone. It cannot know which of the two a program
// will do: it begins to listen some time after the start, unless a rank has used its channel by
// then, and stops when one does before any TCP client has come.
//
//   StoreServer store(loop, port, say);       // a fresh one for each attempt
//   Fd channel = store.open_channel(rank);    // for the rank to inherit
//
// Owned by the supervisor and called by its one thread. The port must outlive it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "lockstep/core/fd.h"
#include "lockstep/launch/event_loop.h"
#include "lockstep/launch/ports.h"
#include "lockstep/launch/store_table.h"

namespace lockstep::launch {

struct StoreServerOptions {
  StoreLimits limits = {};
  std::size_t connections_per_rank = 64;
  std::size_t tcp_connections = 1024;
  // Less than importing torch takes, more than our own ranks usually need to come here.
  std::chrono::milliseconds listen_after{1000};
};

class StoreServer {
 public:
  using Say = std::function<void(const std::string&)>;

  // `say` prints a line of the launcher.
  StoreServer(EventLoop& loop, const HeldPort& port, Say say, StoreServerOptions options = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  // The rank's end, close-on-exec.
  Fd open_channel(int rank);
  bool listening() const { return static_cast<bool>(listener_); }

 private:
  static constexpr int kOverTcp = -1;
  struct Connection {
    Fd fd;
    int rank = kOverTcp;
    std::string in;
    std::string out;
  };

  void on_channel(int fd, int rank);
  void on_accept();
  void on_connection(StoreTable::Client client, std::uint32_t events);
  void serve(Fd fd, int rank);
  void close(StoreTable::Client client);
  void send(StoreTable::Client client, std::string_view bytes);
  void flush(Connection& connection);
  std::size_t count(int rank) const;
  void update_listener();
  void listen();
  void listen_again_later();

  EventLoop& loop_;
  const HeldPort& port_;
  Say say_;
  StoreServerOptions options_;
  StoreTable table_;
  Fd listener_;
  EventLoop::TimerId listen_timer_ = 0;
  bool may_listen_ = false;  // ranks have had time to use their channels; nobody else serves it
  bool used_by_tcp_ = false;
  int complaints_ = 0;
  std::map<int, Fd> channels_;  // by their own number
  std::map<StoreTable::Client, Connection> connections_;
  StoreTable::Client last_client_ = 0;
};

}  // namespace lockstep::launch
