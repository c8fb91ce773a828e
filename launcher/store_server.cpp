#include "launcher/store_server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::launch {
namespace {

// Limits for one descriptor before the others are served.
constexpr std::size_t kReadBytes = 64u << 10;
constexpr int kRounds = 16;
// Limits for all clients in one turn of the event loop.
constexpr std::size_t kTurnBytes = 1u << 20;
constexpr std::size_t kCommandBytes = 4u << 10;  // added to each command's own size
constexpr std::size_t kMaxUnsent = 1u << 20;
constexpr int kMaxComplaints = 10;
constexpr std::chrono::milliseconds kListenPause{200};

// Also releases the memory of a large command or reply.
void remove_front(std::string& text, std::size_t bytes) {
  text.erase(0, bytes);
  if (text.capacity() > 4 * (text.size() + kReadBytes)) text.shrink_to_fit();
}

// The first message of every client, and the only one that a launcher that forwards parses.
constexpr std::size_t kHandshakeBytes = 1 + sizeof store::kMagic;
bool is_handshake(std::string_view bytes) {
  return bytes[0] == static_cast<char>(store::Command::kValidate) &&
         std::memcmp(bytes.data() + 1, &store::kMagic, sizeof store::kMagic) == 0;
}

}  // namespace

StoreServer::StoreServer(EventLoop& loop, const HeldPort& port, Say say, StoreServerOptions options)
    : loop_(loop),
      port_(port),
      say_(std::move(say)),
      options_(options),
      table_([this](StoreTable::Client client, std::string_view bytes) { send(client, bytes); },
             options.limits),
      listen_timer_(loop),
      turn_timer_(loop) {
  listen_timer_.start(options_.listen_after, [this] {
    may_listen_ = true;
    update_listener();
  });
  if (!options_.link || !options_.link->forwards) return;
  StoreStreams::Handlers handlers;
  handlers.send = [this](StoreFrame frame) {
    frame.attempt = static_cast<std::uint32_t>(options_.link->attempt);
    options_.link->send(0, frame);
  };
  handlers.received = [this](StoreTable::Client client, std::string_view bytes) {
    send(client, bytes);
  };
  handlers.writable = [this](StoreTable::Client client) { queue_turn(client); };
  handlers.closed = [this](StoreTable::Client client) { close(client); };
  node_zero_ = std::make_unique<StoreStreams>(std::move(handlers));
}

StoreServer::~StoreServer() {
  stop_listening();
  for (const auto& [fd, owner] : channels_) loop_.forget(fd);
  for (const auto& [client, connection] : connections_)
    if (connection.fd) loop_.forget(connection.fd.get());
}

// ---------------------------------------------------------------- ranks with a channel

Fd StoreServer::open_channel(int rank) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    throw SystemError("launch", "cannot create a socket pair for the store", errno);
  Fd theirs(ends[1]);
  channels_.emplace(ends[0], Fd(ends[0]));
  loop_.watch(ends[0], EPOLLIN,
              [this, fd = ends[0], rank](std::uint32_t) { on_channel(fd, rank); });
  return theirs;
}

void StoreServer::on_channel(int fd, int rank) {
  for (int round = 0; round < kRounds; ++round) {
    char byte = 0;
    std::vector<Fd> connections;
    const ssize_t received = receive_with_fds(fd, {&byte, 1}, connections);
    if (received < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (received <= 0) {  // every process with the other end has exited
      loop_.forget(fd);
      channels_.erase(fd);
      return;
    }
    for (Fd& connection : connections) {
      if (!is_unix_socket(connection.get(), SOCK_STREAM)) continue;
      if (count(rank) >= options_.connections_per_rank) {
        say_(
            fmt::format("[store] rank {} has {} connections to the store; one more is refused. A "
                        "thread for each of them probably waits for a key.",
                        rank, count(rank)));
        continue;
      }
      serve(std::move(connection), rank);
    }
  }
}

// ---------------------------------------------------------------- TCP

void StoreServer::update_listener() {
  const bool used_by_channel = std::ranges::any_of(connections_, [](const auto& each) {
    return each.second.fd && each.second.rank != kOverTcp;
  });
  const bool wanted = may_listen_ && (!used_by_channel || used_by_tcp_);
  if (wanted == listening_) return;
  if (!wanted) return stop_listening();
  port_.listen();
  listening_ = true;
  watch_sockets();
}

void StoreServer::watch_sockets() {
  for (const Fd& socket : port_.sockets())
    loop_.watch(socket.get(), EPOLLIN, [this, fd = socket.get()](std::uint32_t) { on_accept(fd); });
}

void StoreServer::stop_listening() {
  listening_ = false;
  for (const Fd& socket : port_.sockets()) loop_.forget(socket.get());
  port_.stop_listening();
}

// Without free descriptors, new connections wait in the kernel's queue.
void StoreServer::listen_again_later() {
  for (const Fd& socket : port_.sockets()) loop_.forget(socket.get());
  listen_timer_.start(kListenPause, [this] {
    if (listening_ && !loop_.watching(port_.sockets().front().get())) watch_sockets();
  });
}

void StoreServer::on_accept(int listener) {
  for (int round = 0; round < kRounds; ++round) {
    Fd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
        listen_again_later();
      return;
    }
    if (count(kOverTcp) >= options_.tcp_connections) continue;
    const int on = 1;
    ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    serve(std::move(fd), kOverTcp);
  }
}

// ---------------------------------------------------------------- connections

std::size_t StoreServer::count(int rank) const {
  return static_cast<std::size_t>(std::ranges::count_if(connections_, [rank](const auto& each) {
    return each.second.fd && each.second.rank == rank;
  }));
}

void StoreServer::serve(Fd fd, int rank) {
  if (lost_) return;
  set_nonblocking(fd.get());
  Connection& connection = new_connection(rank);
  const StoreTable::Client client = connection.client;
  loop_.watch(fd.get(), EPOLLIN,
              [this, client](std::uint32_t events) { on_connection(client, events); });
  connection.fd = std::move(fd);
  connection.events = EPOLLIN;
  if (rank == kOverTcp)
    connection.handshake_timer.start(options_.tcp_handshake, [this, client] { close(client); });
  update_listener();
}

StoreServer::Connection& StoreServer::new_connection(int rank) {
  const StoreTable::Client client = ++last_client_;
  Connection& connection = connections_.try_emplace(client, loop_, client).first->second;
  connection.rank = rank;
  return connection;
}

void StoreServer::close(StoreTable::Client client) {
  const auto found = connections_.find(client);
  Connection& connection = found->second;
  tcp_bytes_ -= connection.counted;
  if (node_zero_) node_zero_->close(client);
  const bool local = static_cast<bool>(connection.fd);
  if (local) {
    loop_.forget(connection.fd.get());
  } else if (!connection.ended) {
    // Otherwise the stream was closed by its peer, and its number may be in use again.
    nodes_.at(connection.node).close(connection.stream);
    client_of_stream_.erase({connection.node, connection.stream});
  }
  connections_.erase(found);
  table_.drop(client);
  if (local) update_listener();
}

// The client sends no more; its complete commands are executed, or forwarded, before it is closed.
void StoreServer::end_input(StoreTable::Client client) {
  Connection& connection = connections_.at(client);
  if (!connection.queued && (!node_zero_ || connection.in.empty())) return close(client);
  connection.ended = true;
  if (!connection.fd) {
    client_of_stream_.erase({connection.node, connection.stream});
  } else {
    loop_.forget(connection.fd.get());
  }
}

bool StoreServer::may_read(const Connection& connection) const {
  // The table refuses a command that is too long. Forwarded input is not read beyond a limit.
  return connection.unsent() <= kMaxUnsent && (!node_zero_ || connection.in.size() < kReadBytes);
}

void StoreServer::on_connection(StoreTable::Client client, std::uint32_t events) {
  Connection& connection = connections_.at(client);
  constexpr auto kOut = static_cast<std::uint32_t>(EPOLLOUT);
  const bool broken = (events & (EPOLLHUP | EPOLLERR)) != 0;
  if (connection.unsent() > 0 && (broken || (events & kOut) != 0)) {
    flush(connection);
    // Its input, which waited until the client had read its replies.
    if (connection.unsent() <= kMaxUnsent && !connection.in.empty()) queue_turn(client);
  }
  if (connection.queued || (events & ~kOut) == 0) return;
  if (connection.unsent() > kMaxUnsent) {
    if (broken) close(client);
    return;
  }
  // If the client is gone, read the rest now: epoll would report its socket again and again.
  if (!broken && !may_read(connection)) return;
  char buffer[kReadBytes];
  const ssize_t n = ::recv(connection.fd.get(), buffer, sizeof buffer, 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) return end_input(client);
  connection.in.append(buffer, static_cast<std::size_t>(n));
  recount(connection);
  queue_turn(client);
  enforce_tcp_bytes();
}

// ---------------------------------------------------------------- other nodes

StoreStreams& StoreServer::streams_of(int node) {
  const auto found = nodes_.find(node);
  if (found != nodes_.end()) return found->second;
  const auto client = [this, node](StoreStreams::Id stream) {
    return client_of_stream_.at({node, stream});
  };
  StoreStreams::Handlers handlers;
  handlers.send = [this, node](StoreFrame frame) {
    frame.attempt = static_cast<std::uint32_t>(options_.link->attempt);
    options_.link->send(node, frame);
  };
  handlers.opened = [this, node](StoreStreams::Id stream, int rank) {
    Connection& connection = new_connection(rank);
    connection.node = node;
    connection.stream = stream;
    client_of_stream_[{node, stream}] = connection.client;
  };
  handlers.received = [this, client](StoreStreams::Id stream, std::string_view bytes) {
    Connection& connection = connections_.at(client(stream));
    connection.in.append(bytes);
    connection.unconsumed += bytes.size();
    recount(connection);
    queue_turn(connection.client);
    enforce_tcp_bytes();
  };
  handlers.writable = [this, client](StoreStreams::Id stream) {
    Connection& connection = connections_.at(client(stream));
    flush(connection);
    if (connection.unsent() > kMaxUnsent) return;
    if (!connection.in.empty()) return queue_turn(connection.client);
    consume(connection);
  };
  handlers.closed = [this, client](StoreStreams::Id stream) { end_input(client(stream)); };
  return nodes_.emplace(node, std::move(handlers)).first->second;
}

void StoreServer::on_frame(int node, const StoreFrame& frame) {
  if (!options_.link || lost_ || static_cast<int>(frame.attempt) != options_.link->attempt) return;
  if (node_zero_) return node_zero_->on_frame(frame);
  streams_of(node).on_frame(frame);
}

void StoreServer::on_lost(int node) {
  lost_ = node_zero_ != nullptr;
  std::vector<StoreTable::Client> theirs;
  for (const auto& [client, connection] : connections_)
    if (lost_ || (!connection.fd && connection.node == node)) theirs.push_back(client);
  for (const StoreTable::Client client : theirs) close(client);
  nodes_.erase(node);
}

// Lets the peer send more on the client's stream.
void StoreServer::consume(Connection& connection) {
  if (connection.unconsumed > 0 && !connection.ended)
    nodes_.at(connection.node).consumed(connection.stream, std::exchange(connection.unconsumed, 0));
}

// ---------------------------------------------------------------- turns

// A timer executes commands, so that all descriptors are polled between two turns.
void StoreServer::queue_turn(StoreTable::Client client) {
  Connection& connection = connections_.at(client);
  if (!connection.queued) turns_.push_back(client);
  connection.queued = true;
  schedule_turn();
}

void StoreServer::schedule_turn() {
  if (!turn_timer_.pending())
    turn_timer_.start(std::chrono::milliseconds(0), [this] { take_turns(); });
}

void StoreServer::take_turns() {
  turn_work_ = 0;
  std::vector<StoreTable::Client> unfinished;
  while (!turns_.empty() && turn_work_ < kTurnBytes) {
    const StoreTable::Client client = turns_.front();
    turns_.pop_front();
    const auto found = connections_.find(client);
    if (found == connections_.end()) continue;
    found->second.queued = false;
    try {
      if (carry_out(client)) {
        unfinished.push_back(client);
      } else if (found->second.ended && (!node_zero_ || found->second.in.empty())) {
        close(client);
      }
    } catch (const CommError& error) {
      const int rank = found->second.rank;
      complain(fmt::format("{}: the connection of {}{} is closed.", error.what(),
                           rank == kOverTcp ? "a TCP client" : fmt::format("rank {}", rank),
                           found->second.fd ? "" : fmt::format(" on node {}", found->second.node)));
      close(client);
    }
  }
  enforce_tcp_bytes();
  for (const StoreTable::Client client : unfinished)
    if (connections_.count(client) != 0) queue_turn(client);
  if (!turns_.empty()) schedule_turn();
}

// True if it stopped before the end of the input, so that the client needs another turn.
bool StoreServer::carry_out(StoreTable::Client client) {
  Connection& connection = connections_.at(client);
  std::size_t used = 0;
  bool complete = true;
  while (complete && used < connection.in.size() && turn_work_ < kTurnBytes &&
         connection.unsent() <= kMaxUnsent) {
    const auto input = std::string_view(connection.in).substr(used);
    const std::size_t command = feed(connection, input);
    complete = command > 0;
    turn_work_ += kCommandBytes + (complete ? command : input.size());
    used += command;
  }
  remove_front(connection.in, used);
  recount(connection);
  if (used > 0) {
    connection.handshake_timer.cancel();
    if (connection.fd && connection.rank == kOverTcp) used_by_tcp_ = true;
  }
  if (connection.unsent() > kMaxUnsent) return false;
  if (complete && !connection.in.empty()) return true;
  consume(connection);
  watch(connection);
  return false;
}

// Returns the number of bytes taken from the input: a command, or what could be forwarded.
std::size_t StoreServer::feed(Connection& connection, std::string_view input) {
  if (!node_zero_) return table_.feed(connection.client, input);
  if (!connection.forwarded) {
    if (input.size() < kHandshakeBytes) return 0;
    if (!is_handshake(input))
      throw CommError("store", "the first message is not from a TCPStore client");
    connection.forwarded = true;
    node_zero_->open(connection.client, connection.rank);
  }
  return node_zero_->write(connection.client, input);
}

// ---------------------------------------------------------------- replies

// Never closes the connection, because other clients may be in the middle of a command. The next
// event reports a broken connection.
void StoreServer::send(StoreTable::Client client, std::string_view bytes) {
  Connection& connection = connections_.at(client);
  connection.out.append(bytes);
  turn_work_ += bytes.size();
  flush(connection);
}

void StoreServer::flush(Connection& connection) {
  std::size_t passed = connection.ended ? connection.unsent() : 0;
  if (connection.ended) connection.sent = connection.out.size();
  while (connection.unsent() > 0) {
    const auto rest = std::string_view(connection.out).substr(connection.sent);
    const ssize_t n =
        connection.fd
            ? ::send(connection.fd.get(), rest.data(), rest.size(), MSG_NOSIGNAL)
            : static_cast<ssize_t>(nodes_.at(connection.node).write(connection.stream, rest));
    if (n < 0 && errno == EINTR) continue;
    if (n == 0 || (n < 0 && errno == EAGAIN)) break;
    const std::size_t gone = n < 0 ? rest.size() : static_cast<std::size_t>(n);  // broken, or sent
    connection.sent += gone;
    passed += gone;
  }
  if (node_zero_) node_zero_->consumed(connection.client, passed);
  if (2 * connection.sent >= connection.out.size()) {  // seldom enough to be cheap
    remove_front(connection.out, connection.sent);
    connection.sent = 0;
  }
  recount(connection);
  watch(connection);
}

// For local clients only: consume() asks those of other nodes for more, and their streams report
// when they are writable.
void StoreServer::watch(Connection& connection) {
  if (!connection.fd || connection.ended) return;
  std::uint32_t events = connection.unsent() > 0 ? static_cast<std::uint32_t>(EPOLLOUT) : 0u;
  if (may_read(connection)) events |= static_cast<std::uint32_t>(EPOLLIN);
  if (std::exchange(connection.events, events) != events) loop_.change(connection.fd.get(), events);
}

// ---------------------------------------------------------------- bounds

void StoreServer::recount(Connection& connection) {
  if (connection.rank != kOverTcp) return;
  tcp_bytes_ -= connection.counted;
  connection.counted = connection.in.size() + connection.out.size();
  tcp_bytes_ += connection.counted;
}

void StoreServer::enforce_tcp_bytes() {
  while (tcp_bytes_ > options_.tcp_bytes) {
    const auto largest = std::ranges::max_element(connections_, [](const auto& a, const auto& b) {
      return a.second.counted < b.second.counted;
    });
    complain(
        fmt::format("[store] the TCP connections of the store hold more than {} bytes; the "
                    "largest, with {}, is closed. Its client probably does not read replies.",
                    options_.tcp_bytes, largest->second.counted));
    close(largest->first);
  }
}

void StoreServer::complain(const std::string& line) {
  if (complaints_++ < kMaxComplaints) say_(line);
}

}  // namespace lockstep::launch
