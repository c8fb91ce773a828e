// rendezvous(): rank 0 tells the other ranks of its host its port through an abstract socket, whose
// name derives from the launcher's job id. Ranks that are missing, or come twice, are named by the
// start-up check, which follows.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <optional>
#include <thread>
#include <utility>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/core/thread_signals.h"
#include "lockstep/rendezvous/key_value_store.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/rendezvous/unix_socket.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPause{20};

Fd unix_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) throw SystemError("rank", "cannot create a local socket", errno);
  return fd;
}

// A listening socket on a free port of the loopback interface.
Fd listen_on_free_port(int& port) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (!fd || ::bind(fd.get(), generic, length) != 0 || ::listen(fd.get(), SOMAXCONN) != 0 ||
      ::getsockname(fd.get(), generic, &length) != 0) {
    throw SystemError("rank", "cannot listen on a free port of 127.0.0.1", errno);
  }
  port = ntohs(address.sin_port);
  return fd;
}

// ---------------------------------------------------------------- rank 0

// The name is free unless an earlier program of the same job is still exiting.
Fd listen_at(const std::string& name, const Deadline& deadline) {
  Fd listener = unix_socket();
  while (bind_abstract(listener.get(), name) != 0) {
    const int error = errno;
    if (error == EADDRINUSE && !deadline.expired()) {
      std::this_thread::sleep_for(kPause);
      continue;
    }
    throw SystemError(
        "rank",
        fmt::format("cannot take the rendezvous name '{}' (another rank 0 of this job "
                    "may be alive; MASTER_ADDR and MASTER_PORT avoid the name)",
                    name),
        error);
  }
  if (::listen(listener.get(), SOMAXCONN) != 0)
    throw SystemError("rank", "cannot listen on the rendezvous name", errno);
  return listener;
}

// Tells `others` ranks the port, on a thread of its own. The name is given up then: the next
// program of the job takes it again.
void serve(Fd listener, int port, int others, const Deadline& deadline) {
  const SignalsBlocked blocked;
  std::thread([listener = std::move(listener), text = std::to_string(port), others,
               deadline]() mutable {
    while (others > 0 && !deadline.expired()) {
      pollfd waits{listener.get(), POLLIN, 0};
      if (::poll(&waits, 1, deadline.remaining_ms()) <= 0) continue;
      const Fd client(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!client) std::this_thread::sleep_for(kPause);  // no descriptor is left
      if (!client || peer_uid(client.get()) != ::geteuid()) continue;
      if (::send(client.get(), text.data(), text.size(), MSG_NOSIGNAL) > 0) --others;
    }
  }).detach();
}

// ---------------------------------------------------------------- the others

// One attempt: the port, or nothing if rank 0 does not listen (yet, or any more).
std::optional<int> ask(const RankEnv& env, const std::string& name, const Deadline& deadline) {
  const Fd fd = unix_socket();
  const milliseconds left = std::max(milliseconds(1), deadline.remaining());
  const timeval limit{left.count() / 1000, (left.count() % 1000) * 1000};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // of connect(), too
  if (connect_abstract(fd.get(), name) != 0) return std::nullopt;
  const auto uid = peer_uid(fd.get());
  if (uid != ::geteuid()) {
    throw CommError(
        "rank",
        fmt::format("the rendezvous name '{}' is held by user {}, not by rank 0 of this "
                    "job. Set MASTER_ADDR and MASTER_PORT.",
                    name, uid ? fmt::to_string(*uid) : "(unknown)"),
        {.rank = env.rank, .peer = 0, .operation = "rendezvous"});
  }
  char text[16];
  ssize_t n = -1;
  do n = ::recv(fd.get(), text, sizeof text, 0);
  while (n < 0 && errno == EINTR);  // rank 0 answers each rank once
  const auto port = leading_number({text, static_cast<std::size_t>(std::max<ssize_t>(n, 0))});
  return port ? std::optional(static_cast<int>(*port)) : std::nullopt;
}

int find_port(const RankEnv& env, const std::string& name, const Deadline& deadline) {
  std::optional<int> port;
  const auto found = [&] { return (port = ask(env, name, deadline)).has_value(); };
  if (poll_until(found, deadline, milliseconds(50))) return *port;
  throw TimeoutError(
      "rank",
      fmt::format(
          "rank {} did not find rank 0 on this host within {:.1f} s. Rank 0 may have failed "
          "to start, or runs in another container: then set MASTER_ADDR and MASTER_PORT.",
          env.rank, static_cast<double>(deadline.total().count()) / 1000),
      {.rank = env.rank, .peer = 0, .operation = "rendezvous", .elapsed = deadline.elapsed()});
}

}  // namespace

void rendezvous(RankEnv& env, int timeout_ms) {
  if (env.rendezvous_name.empty() || env.alone() || env.master_port != 0) return;
  // A process may call this more than once; a fast rank's second call must not disturb the first.
  static std::atomic<int> rendezvous_count{0};
  const std::string name = fmt::format("{}/{}", env.rendezvous_name, rendezvous_count++);
  const Deadline deadline = Deadline::after(milliseconds(timeout_ms));
  if (env.rank != 0) {
    env.master_port = find_port(env, name, deadline);
    return;
  }
  Fd listener = listen_at(name, deadline);
  env.store_fd = listen_on_free_port(env.master_port).release();
  serve(std::move(listener), env.master_port, env.world_size - 1, deadline);
}

}  // namespace lockstep
