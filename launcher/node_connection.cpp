#include "launcher/node_connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"
#include "lockstep/rendezvous/this_host.h"

namespace lockstep::launch {
namespace {

constexpr std::size_t kMaxLine = 1u << 20;
constexpr std::size_t kMaxFirstLine = 4u << 10;  // before a peer has joined
constexpr std::size_t kMaxUnsent = 16u << 20;

void tune(int fd) {
  const auto set = [fd](int level, int option, int value) {
    ::setsockopt(fd, level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(kLostAfter.count()));
}

// One end of a socket, which `ask` (::getsockname, ::getpeername) knows.
std::string address_of(int fd, int (*ask)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  return ask(fd, address, &size) == 0 ? address_text(address) : "?";
}

}  // namespace

Connection::Connection(EventLoop& loop, Fd socket, std::unique_ptr<SecureChannel> channel,
                       Handlers handlers)
    : loop_(loop),
      socket_(std::move(socket)),
      channel_(std::move(channel)),
      handlers_(std::move(handlers)) {
  set_nonblocking(socket_.get());
  tune(socket_.get());
  loop_.watch(socket_.get(), EPOLLIN, [this](std::uint32_t events) { on_event(events); });
  if (!channel_) return;
  channel_->start(outgoing_);
  write_some();
}

Connection::~Connection() {
  if (socket_) loop_.forget(socket_.get());
}

std::string Connection::local_address() const {
  return address_of(socket_.get(), ::getsockname);
}

std::string Connection::peer_address() const {
  return address_of(socket_.get(), ::getpeername);
}

void Connection::on_event(std::uint32_t events) {
  const std::weak_ptr<int> alive = alive_;
  if ((events & EPOLLOUT) != 0) write_some();
  if (!alive.expired() && socket_ && (events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0)
    read_some();
}

void Connection::read_some() {
  std::array<char, 64u << 10> buffer;
  const ssize_t n = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
  if (n < 0) {
    if (errno == EAGAIN || errno == EINTR) return;
    return close({errno == ETIMEDOUT ? "nothing was heard from it" : std::strerror(errno)});
  }
  if (n == 0) return close({"the connection was closed"});
  if (take({buffer.data(), static_cast<std::size_t>(n)})) read_messages();
}

// A launcher without a secret sends JSON, one with a secret TLS. Each recognises the other by its
// first byte, and answers with something that the other recognises.
bool Connection::is_other_protocol(char first) {
  constexpr char kTlsAlert = 0x15;
  constexpr char kTlsHandshake = 0x16;
  if (channel_ && first == '{') {
    outgoing_ += std::string_view("\x15\x03\x03\x00\x02\x02\x28", 7);  // handshake_failure
    write_some();
    close({"it does not use TLS", Closing::Secret::kPeerHasNone});
    return true;
  }
  if (channel_ || (first != kTlsAlert && first != kTlsHandshake)) return false;
  outgoing_ += encode({.kind = Message::Kind::kRefused, .code = 2});
  write_some();
  close({"it uses TLS", Closing::Secret::kPeerHasOne});
  return true;
}

bool Connection::take(std::string_view bytes) {
  if (std::exchange(silent_, false) && is_other_protocol(bytes.front())) return false;
  if (!channel_) {
    incoming_ += bytes;
    return true;
  }
  const bool good = channel_->receive(bytes, incoming_, outgoing_);
  write_some();  // an alert, if the handshake failed
  if (!good)
    close({channel_->problem(),
           channel_->wrong_key() ? Closing::Secret::kDiffers : Closing::Secret::kFine});
  return good;
}

void Connection::read_messages() {
  const std::weak_ptr<int> alive = alive_;
  std::size_t used = 0;
  for (std::size_t size = 1; size > 0 && used < incoming_.size(); used += size) {
    std::optional<Message> message;
    try {
      size = read_one(std::string_view(incoming_).substr(used), message);
    } catch (const UsageError& error) {
      return close({printable(error.what())});
    }
    if (message) handlers_.message(*message);
    if (alive.expired() || !socket_) return;
  }
  incoming_.erase(0, used);
}

// Hands on a frame, or reads a line. Returns its size, 0 when it is not complete.
std::size_t Connection::read_one(std::string_view bytes, std::optional<Message>& message) {
  if (trusted_ && begins_store_frame(bytes.front())) {
    StoreFrame frame;
    const std::size_t size = decode(bytes, frame);
    if (size > 0) handlers_.frame(frame);
    return size;
  }
  const std::size_t max_line = trusted_ ? kMaxLine : kMaxFirstLine;
  const std::size_t end = std::min(bytes.find('\n'), bytes.size());
  if (end > max_line) throw UsageError("launch", "it sent a line of more than {} bytes", max_line);
  if (end == bytes.size()) return 0;
  message = decode(std::string(bytes.substr(0, end)));
  return end + 1;
}

void Connection::send_bytes(std::string_view bytes) {
  if (!socket_) return;
  if (channel_) {
    channel_->send(bytes, outgoing_);
  } else {
    outgoing_ += bytes;
  }
  write_some();
}

void Connection::write_some() {
  while (!outgoing_.empty()) {
    const ssize_t n = ::send(socket_.get(), outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      // An error is reported by the reading side, which has an event for it; so is the end of a
      // peer that does not read.
      if (errno != EAGAIN) outgoing_.clear();
      if (outgoing_.size() > kMaxUnsent) ::shutdown(socket_.get(), SHUT_RDWR);
      break;
    }
    outgoing_.erase(0, static_cast<std::size_t>(n));
  }
  const std::uint32_t events = outgoing_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
  loop_.change(socket_.get(), events);
}

void Connection::close(Closing closing) {
  if (!socket_) return;
  loop_.forget(socket_.get());
  // Unread data would reset the connection, and the peer might lose the last answer.
  std::array<char, 4096> rest;
  for (int i = 0; i < 16 && ::recv(socket_.get(), rest.data(), rest.size(), 0) > 0; ++i) {
  }
  socket_.reset();
  const auto closed = handlers_.closed;  // the handler may destroy this object
  closed(closing);
}

}  // namespace lockstep::launch
