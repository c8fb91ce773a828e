// The key-value store of a run, served by the launcher in its event loop.
//
// Ranks that use Lockstep connect over the channel that they inherit (rendezvous/store_client.h).
// Python ranks connect to MASTER_PORT as under torchrun, so the server can also listen there, on
// the loopback interface only. It does not know in advance which of the two a program will use:
//   - It starts to listen `listen_after` after its start, unless a rank has a connection over its
//     channel then, and also when the last such connection has closed.
//   - It stops when a rank opens such a connection and no TCP client has completed a command (the
//     handshake is one). Once a client has, it listens until it is destroyed.
// TCP clients are not authenticated: every user of the host can read and set keys while it listens.
//
// With several hosts, node 0's launcher has the keys. The other launchers accept connections in the
// same way, and forward the bytes over the link between the launchers (store_table.h).
//
// Work and memory are bounded. One turn of the loop executes at most 256 commands, with about 1 MiB
// of input and replies, and one larger command. A client with more than 1 MiB of unread replies is
// neither read nor served. So a rank's connection holds at most one command and one reply (128 MiB
// each) and 1 MiB. All TCP connections together hold at most StoreServerOptions::tcp_bytes, checked
// after each turn, and one more reply within a turn. Clients of other nodes count like local ones.
// A launcher that forwards holds at most 128 KiB of commands and one window of replies per client.
//
//   StoreServer store(loop, port, say);       // a new one for each attempt
//   Fd channel = store.open_channel(rank);    // for the rank to inherit
//
// Owned by the supervisor and called by its one thread. The port must outlive it.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "launcher/event_loop.h"
#include "launcher/host.h"
#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/store_table.h"

namespace lockstep::launch {

// How the launchers of several hosts share the store.
struct StoreLink {
  bool forwards = false;  // to node 0; false on node 0
  int attempt = 0;
  std::function<void(int node, const StoreFrame&)> send;
};

struct StoreServerOptions {
  StoreLimits limits = {};
  std::size_t connections_per_rank = 64;
  std::size_t tcp_connections = 1024;
  // The limit for incomplete commands and unread replies of all TCP connections: the largest
  // command and reply. Above it, the connection with the most is closed.
  std::size_t tcp_bytes = 256u << 20;
  std::chrono::milliseconds tcp_handshake{10'000};  // then a TCP connection without one is closed
  // Shorter than the import of torch, longer than ranks of Lockstep usually take to connect.
  std::chrono::milliseconds listen_after{1000};
  std::optional<StoreLink> link = {};  // none on one host
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
  bool listening() const { return listening_; }
  // From another launcher. Throws UsageError if that breaks the protocol.
  void on_frame(int node, const StoreFrame& frame);
  // The launcher of a node is lost: drops its clients; if it is node 0, all clients.
  void on_lost(int node);

 private:
  static constexpr int kOverTcp = -1;
  struct Connection {
    Connection(EventLoop& loop, StoreTable::Client number)
        : client(number), handshake_timer(loop) {}

    StoreTable::Client client;
    Fd fd;  // none for a client of another node
    int node = 0;
    StoreStreams::Id stream = 0;
    int rank = kOverTcp;
    std::string in;
    std::string out;
    std::size_t sent = 0;        // bytes of `out`
    std::size_t counted = 0;     // bytes counted in tcp_bytes_
    std::size_t unconsumed = 0;  // bytes of its stream, not yet reported as consumed
    std::uint32_t events = 0;    // that the loop watches
    bool queued = false;         // in turns_
    bool forwarded = false;      // opened at node 0
    bool ended = false;          // the client is gone; its complete commands are still executed
    Timer handshake_timer;

    std::size_t unsent() const { return out.size() - sent; }
  };

  void on_channel(int fd, int rank);
  void on_accept(int listener);
  void on_connection(StoreTable::Client client, std::uint32_t events);
  void serve(Fd fd, int rank);
  Connection& new_connection(int rank);
  void end_input(StoreTable::Client client);
  void close(StoreTable::Client client);
  void send(StoreTable::Client client, std::string_view bytes);
  void flush(Connection& connection);
  void watch(Connection& connection);
  bool may_read(const Connection& connection) const;
  void consume(Connection& connection);
  void queue_turn(StoreTable::Client client);
  void schedule_turn();
  void take_turns();
  bool carry_out(StoreTable::Client client);
  std::size_t feed(Connection& connection, std::string_view input);
  StoreStreams& streams_of(int node);
  void recount(Connection& connection);
  void enforce_tcp_bytes();
  void complain(const std::string& line);
  std::size_t count(int rank) const;
  void update_listener();
  void watch_sockets();
  void stop_listening();
  void listen_again_later();

  EventLoop& loop_;
  const HeldPort& port_;
  Say say_;
  StoreServerOptions options_;
  StoreTable table_;
  bool listening_ = false;
  Timer listen_timer_;
  bool may_listen_ = false;  // listen_after has passed
  bool used_by_tcp_ = false;
  int complaints_ = 0;
  std::map<int, Fd> channels_;  // by descriptor number
  std::map<StoreTable::Client, Connection> connections_;
  std::unique_ptr<StoreStreams> node_zero_;  // only if this launcher forwards
  std::map<int, StoreStreams> nodes_;        // only on node 0
  std::map<std::pair<int, StoreStreams::Id>, StoreTable::Client> client_of_stream_;
  bool lost_ = false;  // node 0 is, if this launcher forwards
  std::size_t tcp_bytes_ = 0;
  std::deque<StoreTable::Client> turns_;  // clients with unprocessed input
  Timer turn_timer_;
  std::size_t turn_work_ = 0;  // bytes of input and replies in this turn
  StoreTable::Client last_client_ = 0;
};

}  // namespace lockstep::launch
