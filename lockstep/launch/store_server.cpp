#include "lockstep/launch/store_server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

// What one descriptor may do before the others have their turn.
constexpr std::size_t kReadBytes = 64u << 10;
constexpr int kRounds = 16;
// What all of them may do in one turn of the event loop.
constexpr std::size_t kTurnBytes = 1u << 20;
constexpr std::size_t kCommandBytes = 4u << 10;  // as which every command counts, beside its own
constexpr std::size_t kMaxUnsent = 1u << 20;
constexpr int kMaxComplaints = 10;
constexpr std::chrono::milliseconds kAcceptPause{200};

// The descriptors that came with a message; all of them are ours to close.
std::vector<Fd> receive_descriptors(int channel, ssize_t& received) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  received = ::recvmsg(channel, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  std::vector<Fd> fds;
  if (received < 0) return fds;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      fds.emplace_back(fd);
    }
  }
  return fds;
}

// Also gives back the memory that a large command or reply took.
void remove_front(std::string& text, std::size_t bytes) {
  text.erase(0, bytes);
  if (text.capacity() > 4 * (text.size() + kReadBytes)) text.shrink_to_fit();
}

bool is_unix_stream(int fd) {
  int domain = 0, type = 0;
  socklen_t length = sizeof domain;
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0) return false;
  length = sizeof type;
  return ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && domain == AF_UNIX &&
         type == SOCK_STREAM;
}

}  // namespace

StoreServer::StoreServer(EventLoop& loop, const HeldPort& port, Say say, StoreServerOptions options)
    : loop_(loop),
      port_(port),
      say_(std::move(say)),
      options_(options),
      table_([this](StoreTable::Client client, std::string_view bytes) { send(client, bytes); },
             options.limits) {
  listen_timer_ = loop_.after(options_.listen_after, [this] {
    listen_timer_ = 0;
    may_listen_ = true;
    update_listener();
  });
}

StoreServer::~StoreServer() {
  loop_.cancel(listen_timer_);
  loop_.cancel(turn_timer_);
  if (listener_) loop_.forget(listener_.get());
  for (const auto& [fd, owner] : channels_) loop_.forget(fd);
  for (auto& [client, connection] : connections_) {
    loop_.cancel(connection.handshake_timer);
    loop_.forget(connection.fd.get());
  }
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
    ssize_t received = 0;
    std::vector<Fd> connections = receive_descriptors(fd, received);
    if (received < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (received <= 0) {  // every process that had the other end has ended
      loop_.forget(fd);
      channels_.erase(fd);
      return;
    }
    for (Fd& connection : connections) {
      if (!is_unix_stream(connection.get())) continue;
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
  const auto over_tcp = count(kOverTcp);
  const bool used_by_channel = connections_.size() > over_tcp;
  const bool wanted = may_listen_ && (!used_by_channel || used_by_tcp_);
  if (wanted && !listener_) return listen();
  if (wanted || !listener_) return;
  loop_.forget(listener_.get());
  listener_.reset();
}

void StoreServer::listen() {
  try {
    listener_ = port_.listener();
  } catch (const Error&) {
    may_listen_ = false;
    say_(
        fmt::format("[store] MASTER_PORT {} is already served, probably by rank 0 itself; the "
                    "launcher does not serve its store there. A program that hosts its own store "
                    "ignores TORCHELASTIC_USE_AGENT_STORE=True.",
                    port_.number()));
    return;
  }
  loop_.watch(listener_.get(), EPOLLIN, [this](std::uint32_t) { on_accept(); });
}

// Out of descriptors: those who want to connect wait in the kernel's queue.
void StoreServer::listen_again_later() {
  loop_.forget(listener_.get());
  loop_.cancel(listen_timer_);  // of a listener that was closed and opened again since
  listen_timer_ = loop_.after(kAcceptPause, [this] {
    listen_timer_ = 0;
    if (listener_ && !loop_.watching(listener_.get()))
      loop_.watch(listener_.get(), EPOLLIN, [this](std::uint32_t) { on_accept(); });
  });
}

void StoreServer::on_accept() {
  for (int round = 0; round < kRounds; ++round) {
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
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
  return static_cast<std::size_t>(
      std::count_if(connections_.begin(), connections_.end(),
                    [rank](const auto& each) { return each.second.rank == rank; }));
}

void StoreServer::serve(Fd fd, int rank) {
  set_nonblocking(fd.get());
  const StoreTable::Client client = ++last_client_;
  loop_.watch(fd.get(), EPOLLIN,
              [this, client](std::uint32_t events) { on_connection(client, events); });
  Connection& connection = connections_[client];
  connection.fd = std::move(fd);
  connection.rank = rank;
  if (rank == kOverTcp)
    connection.handshake_timer =
        loop_.after(options_.tcp_handshake, [this, client] { close(client); });
  update_listener();
}

void StoreServer::close(StoreTable::Client client) {
  const auto found = connections_.find(client);
  loop_.cancel(found->second.handshake_timer);
  loop_.forget(found->second.fd.get());
  tcp_bytes_ -= found->second.counted;
  connections_.erase(found);
  table_.drop(client);
  update_listener();
}

void StoreServer::on_connection(StoreTable::Client client, std::uint32_t events) {
  Connection& connection = connections_.at(client);
  constexpr auto kOut = static_cast<std::uint32_t>(EPOLLOUT);
  const bool broken = (events & (EPOLLHUP | EPOLLERR)) != 0;
  if (connection.unsent() > 0 && (broken || (events & kOut) != 0)) {
    flush(connection);
    // What waited for the client to read; nothing more is read from it before.
    if (connection.unsent() <= kMaxUnsent && !connection.in.empty()) queue_turn(client);
  }
  if (connection.queued || (events & ~kOut) == 0) return;
  if (connection.unsent() > kMaxUnsent) {
    if (broken) close(client);
    return;
  }
  char buffer[kReadBytes];
  const ssize_t n = ::recv(connection.fd.get(), buffer, sizeof buffer, 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) return close(client);
  connection.in.append(buffer, static_cast<std::size_t>(n));
  recount(connection);
  queue_turn(client);
  enforce_tcp_bytes();
}

// ---------------------------------------------------------------- turns

// Commands are carried out by a timer: between two turns all descriptors are looked at.
void StoreServer::queue_turn(StoreTable::Client client) {
  Connection& connection = connections_.at(client);
  if (!connection.queued) turns_.push_back(client);
  connection.queued = true;
  schedule_turn();
}

void StoreServer::schedule_turn() {
  if (turn_timer_ != 0) return;
  turn_timer_ = loop_.after(std::chrono::milliseconds(0), [this] {
    turn_timer_ = 0;
    take_turns();
  });
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
      if (carry_out(client)) unfinished.push_back(client);
    } catch (const CommError& error) {
      const int rank = found->second.rank;
      complain(fmt::format("{}: the connection of {} is closed.", error.what(),
                           rank == kOverTcp ? "a TCP client" : fmt::format("rank {}", rank)));
      close(client);
    }
  }
  enforce_tcp_bytes();
  for (const StoreTable::Client client : unfinished)
    if (connections_.count(client) != 0) queue_turn(client);
  if (!turns_.empty()) schedule_turn();
}

// True when it stopped before the end of what has come, and the client may have another turn.
bool StoreServer::carry_out(StoreTable::Client client) {
  Connection& connection = connections_.at(client);
  std::size_t used = 0;
  bool complete = true;
  while (complete && used < connection.in.size() && turn_work_ < kTurnBytes &&
         connection.unsent() <= kMaxUnsent) {
    const auto input = std::string_view(connection.in).substr(used);
    const std::size_t command = table_.feed_one(client, input);
    complete = command > 0;
    turn_work_ += kCommandBytes + (complete ? command : input.size());
    used += command;
  }
  remove_front(connection.in, used);
  recount(connection);
  if (used > 0) {
    loop_.cancel(connection.handshake_timer);
    if (connection.rank == kOverTcp) used_by_tcp_ = true;
  }
  return complete && !connection.in.empty() && connection.unsent() <= kMaxUnsent;
}

// ---------------------------------------------------------------- replies

// Never closes the connection itself: it may be called while others are being served. One that is
// broken is reported by the next event.
void StoreServer::send(StoreTable::Client client, std::string_view bytes) {
  Connection& connection = connections_.at(client);
  connection.out.append(bytes);
  turn_work_ += bytes.size();
  flush(connection);
}

void StoreServer::flush(Connection& connection) {
  while (connection.unsent() > 0) {
    const ssize_t n = ::send(connection.fd.get(), connection.out.data() + connection.sent,
                             connection.unsent(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN) connection.sent = connection.out.size();
    if (n < 0) break;
    connection.sent += static_cast<std::size_t>(n);
  }
  if (2 * connection.sent >= connection.out.size()) {  // seldom enough to be cheap
    remove_front(connection.out, connection.sent);
    connection.sent = 0;
  }
  recount(connection);
  std::uint32_t events = connection.unsent() > 0 ? static_cast<std::uint32_t>(EPOLLOUT) : 0u;
  if (connection.unsent() <= kMaxUnsent) events |= static_cast<std::uint32_t>(EPOLLIN);
  loop_.change(connection.fd.get(), events);
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
    const auto largest = std::max_element(
        connections_.begin(), connections_.end(),
        [](const auto& a, const auto& b) { return a.second.counted < b.second.counted; });
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
