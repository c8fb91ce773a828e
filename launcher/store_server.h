// The key-value store of a run, served by the launcher in its own event loop.
//
// Ranks that use Lockstep reach it over the channel they inherit (rendezvous/store_channel.h).
// Python ranks connect to MASTER_PORT as they do under torchrun, so the server also listens there,
// on the loopback interface only. It cannot know which of the two a program will do:
//   - It begins to listen `listen_after` after the start, unless a rank has a connection over its
//     channel then, and again when the last such connection has closed.
//   - It stops listening when a rank opens one before any TCP client has completed a command (the
//     handshake is one). Once one has, it listens until it is destroyed.
// TCP clients are not authenticated: every user of the host can read and set keys while it listens.
//
// With several hosts node 0's launcher has the keys. The launchers of the others serve their ranks
// in the same way, and forward the bytes over the link between the launchers (store_streams.h).
//
// What it may take is bounded. A turn of the loop carries out at most 256 commands, of about 1 MiB
// of input and replies and one larger command; a client with more than 1 MiB of unread replies is
// neither read nor served. So a connection of a rank holds at most one command and one reply (128
// MiB each) and 1 MiB; all TCP connections together hold StoreServerOptions::tcp_bytes, checked
// after each turn (within a turn, one reply more). Clients of other nodes count like those of this
// one. A launcher that forwards holds at most 128 KiB of commands and one window of replies per
// client.
//
//   StoreServer store(loop, port, say);       // a fresh one for each attempt
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
#include "launcher/ports.h"
#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/store_streams.h"
#include "lockstep/rendezvous/store_table.h"

namespace lockstep::launch {

// How the launchers of several hosts share the store.
struct StoreLink {
  bool forwards = false;  // forwards to node 0; otherwise this is node 0
  int attempt = 0;
  std::function<void(int node, const StoreFrame&)> send;
};

struct StoreServerOptions {
  StoreLimits limits = {};
  std::size_t connections_per_rank = 64;
  std::size_t tcp_connections = 1024;
  // Limit on what all TCP connections together have sent but not completed, and on replies that
  // they have not read: the largest command and reply. Above it the largest of them is closed.
  std::size_t tcp_bytes = 256u << 20;
  std::chrono::milliseconds tcp_handshake{10'000};  // a TCP connection without one is closed then
  // Less than importing torch takes, more than our own ranks usually need to come here.
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
  // From another launcher. Throws UsageError where it breaks the protocol.
  void on_frame(int node, const StoreFrame& frame);
  // The launcher of that node is lost: its clients are dropped. Without node 0 no client is served.
  void on_lost(int node);

 private:
  static constexpr int kOverTcp = -1;
  struct Connection {
    Connection(EventLoop& loop, StoreTable::Client number)
        : client(number), handshake_timer(loop) {}

    StoreTable::Client client;
    Fd fd;  // none: a client of another node
    int node = 0;
    StoreStreams::Id stream = 0;
    int rank = kOverTcp;
    std::string in;
    std::string out;
    std::size_t sent = 0;        // bytes of `out`
    std::size_t counted = 0;     // bytes counted in tcp_bytes_
    std::size_t unconsumed = 0;  // received from its stream
    std::uint32_t events = 0;    // watched
    bool queued = false;         // in turns_
    bool forwarded = false;      // node 0 knows it
    bool ended = false;          // its client is gone; what it had sent is still carried out
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
  bool may_listen_ = false;  // ranks have had time to use their channels
  bool used_by_tcp_ = false;
  int complaints_ = 0;
  std::map<int, Fd> channels_;  // by their own number
  std::map<StoreTable::Client, Connection> connections_;
  std::unique_ptr<StoreStreams> node_zero_;  // set where this launcher forwards
  std::map<int, StoreStreams> nodes_;        // the others, where it does not forward
  std::map<std::pair<int, StoreStreams::Id>, StoreTable::Client> client_of_stream_;
  bool lost_ = false;  // node 0, where this launcher forwards
  std::size_t tcp_bytes_ = 0;
  std::deque<StoreTable::Client> turns_;  // clients whose input is to be carried out
  Timer turn_timer_;
  std::size_t turn_work_ = 0;  // bytes of input and replies in this turn
  StoreTable::Client last_client_ = 0;
};

}  // namespace lockstep::launch
