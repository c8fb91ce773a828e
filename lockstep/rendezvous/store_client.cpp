#include "lockstep/rendezvous/store_client.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/control.h"

namespace lockstep::detail {
namespace {

using store::Command;

constexpr std::size_t kMaxIdleConnections = 4;
// A broken connection is often noticed just before its cause is announced.
constexpr std::chrono::milliseconds kCauseWait{1000};
constexpr std::chrono::milliseconds kAnswerWait{200};

[[noreturn]] void throw_connection_lost(const StoreCall& call) {
  if (control::failure(kCauseWait)) throw_if_failure_announced(call.what);
  throw CommError("store",
                  fmt::format("{}: the launcher has closed the connection to its store. It was "
                              "killed, or the call broke a limit of the store, which the "
                              "launcher's output says (node 0's, where there are several).",
                              call.what));
}

// False after the deadline; throws if the launcher announces a failure.
bool socket_ready(int fd, short events, const StoreCall& call) {
  for (;;) {
    pollfd ready[] = {{fd, events, 0}, {control::failure_fd(), 0, 0}};
    const int count = ::poll(ready, 2, std::max(1, call.deadline.remaining_ms()));
    if (count < 0 && errno != EINTR) throw SystemError("store", "poll failed", errno);
    if (count > 0 && ready[0].revents != 0) return true;
    throw_if_failure_announced(call.what);
    if (call.deadline.expired()) return false;
  }
}

void await_socket(int fd, short events, const StoreCall& call) {
  if (socket_ready(fd, events, call)) return;
  throw TimeoutError("store",
                     fmt::format("{} timed out after {} ms. The rank that should set it is "
                                 "late, stuck or on another path. Look at its output.",
                                 call.what, call.deadline.total().count()),
                     {-1, -1, "store", 0, call.deadline.elapsed()});
}

}  // namespace

// ---------------------------------------------------------------- requests

StoreRequest& StoreRequest::key(const std::string& key) {
  if (key.size() > store::kMaxKeyBytes) {
    throw UsageError("store", "a key of {} bytes is too long: {} are allowed ('{}...').",
                     key.size(), store::kMaxKeyBytes, key.substr(0, 40));
  }
  number<std::uint64_t>(key.size());
  bytes_ += key;
  return *this;
}

StoreRequest& StoreRequest::value(const StoreBytes& value) {
  if (value.size() > store::kMaxValueBytes) {
    throw UsageError("store",
                     "a value of {} bytes is too long: {} are allowed. Send data of this size "
                     "with World::broadcast.",
                     value.size(), store::kMaxValueBytes);
  }
  number<std::uint64_t>(value.size());
  bytes_.append(reinterpret_cast<const char*>(value.data()), value.size());
  return *this;
}

StoreRequest& StoreRequest::keys(const std::vector<std::string>& keys) {
  number<std::uint64_t>(keys.size());
  for (const std::string& each : keys) key(each);
  return *this;
}

// ---------------------------------------------------------------- connections

void StoreConnection::send(const std::string& bytes, const StoreCall& call) const {
  for (std::size_t sent = 0; sent < bytes.size();) {
    const ssize_t n =
        ::send(fd_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      sent += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN) {
      await_socket(fd_.get(), POLLOUT, call);
    } else if (errno != EINTR) {
      throw_connection_lost(call);
    }
  }
}

void StoreConnection::receive(void* to, std::size_t size, const StoreCall& call) const {
  auto* at = static_cast<char*>(to);
  while (size > 0) {
    const ssize_t n = ::recv(fd_.get(), at, size, MSG_DONTWAIT);
    if (n > 0) {
      at += n;
      size -= static_cast<std::size_t>(n);
    } else if (n < 0 && errno == EAGAIN) {
      await_socket(fd_.get(), POLLIN, call);
    } else if (n == 0 || errno != EINTR) {
      throw_connection_lost(call);
    }
  }
}

StoreBytes StoreConnection::receive_value(const StoreCall& call) const {
  StoreBytes value(static_cast<std::size_t>(receive_number<std::uint64_t>(call)));
  receive(value.data(), value.size(), call);
  return value;
}

void StoreConnection::change(const std::string& request, const StoreCall& call) {
  send(request + StoreRequest(Command::kPing).number<std::uint32_t>(0).bytes(), call);
  ++unanswered_;
  const StoreCall soon{call.what,
                       Deadline::after(std::min(kAnswerWait, call.deadline.remaining()))};
  if (socket_ready(fd_.get(), POLLIN, soon)) read_answers(call);
}

void StoreConnection::read_answers(const StoreCall& call) {
  for (; unanswered_ > 0; --unanswered_) receive_number<std::uint32_t>(call);
}

// ---------------------------------------------------------------- the client

StoreConnection StoreClient::take(const StoreCall& call) {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      StoreConnection connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
  }
  StoreConnection connection(open_store_connection(channel_, call.deadline));
  connection.send(StoreRequest(Command::kValidate).number(store::kMagic).bytes(), call);
  return connection;
}

void StoreClient::give_back(StoreConnection connection) {
  const std::lock_guard lock(mutex_);
  if (idle_.size() < kMaxIdleConnections) idle_.push_back(std::move(connection));
}

void StoreClient::change(const StoreRequest& request, const StoreCall& call) {
  StoreConnection connection = take(call);
  connection.change(request.bytes(), call);
  give_back(std::move(connection));
}

}  // namespace lockstep::detail

namespace lockstep {

std::uint64_t inode_of(int fd) {
  struct stat status {};
  return fd >= 0 && ::fstat(fd, &status) == 0 ? static_cast<std::uint64_t>(status.st_ino) : 0;
}

std::optional<StoreChannel> StoreChannel::from_env() {
  const auto text = env::get("LOCKSTEP_STORE_CHANNEL");
  if (!text) return std::nullopt;
  StoreChannel channel;
  char colon[4] = {};
  std::istringstream in(*text);
  in >> channel.fd >> colon[0] >> channel.inode >> colon[1] >> channel.rank >> colon[2] >>
      channel.world_size >> colon[3] >> channel.master_port;
  const bool complete = in && in.peek() == std::istringstream::traits_type::eof();
  if (!complete || std::memcmp(colon, "::::", sizeof colon) != 0 || channel.fd < 0)
    return std::nullopt;
  return channel;
}

std::string StoreChannel::text() const {
  return fmt::format("{}:{}:{}:{}:{}", fd, inode, rank, world_size, master_port);
}

bool StoreChannel::intact() const {
  return is_unix_socket(fd, SOCK_SEQPACKET) && inode != 0 && inode_of(fd) == inode;
}

Fd open_store_connection(int channel_fd, const Deadline& deadline) {
  set_cloexec(channel_fd);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw SystemError("store", "cannot create a socket pair", errno);
  Fd mine(ends[0]);
  const Fd theirs(ends[1]);

  while (send_with_fd(channel_fd, "c", theirs.get()) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != ETOOMANYREFS) {
      throw CommError("store", fmt::format("the launcher does not take connections to its store "
                                           "({}). It was probably killed. Start the run again.",
                                           std::strerror(errno)));
    }
    if (deadline.expired()) {
      throw TimeoutError("store",
                         fmt::format("the launcher took no connection to its store within {} ms. "
                                     "It is probably stopped. Look at the launcher's process.",
                                     deadline.total().count()));
    }
    pollfd ready{channel_fd, POLLOUT, 0};
    ::poll(&ready, 1, std::min(deadline.remaining_ms(), 50));
  }
  return mine;
}

}  // namespace lockstep
