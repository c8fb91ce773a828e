// rendezvous(): rank 0 tells the other ranks of its host its port through an abstract socket, whose
// name derives from the launcher's job id.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/core/text.h"
#include "lockstep/rendezvous/key_value_store.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/rendezvous/unix_socket.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kMessageBytes = 512;
constexpr milliseconds kProgressInterval{10'000};

Fd unix_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) throw SystemError("rank", "cannot create a local socket", errno);
  return fd;
}

void limit_waits(int fd, milliseconds time) {
  const timeval limit{time.count() / 1000, (time.count() % 1000) * 1000};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

std::optional<std::string> receive(int fd) {
  char buffer[kMessageBytes];
  ssize_t n = -1;
  do {
    n = ::recv(fd, buffer, sizeof buffer, 0);
  } while (n < 0 && errno == EINTR);
  if (n <= 0) return std::nullopt;
  return std::string(buffer, static_cast<std::size_t>(n));
}

void send(int fd, const std::string& text) {
  // If the peer has gone, its answer will be missing.
  (void)!::send(fd, text.data(), text.size(), MSG_NOSIGNAL);
}

std::string rank_list(const std::set<int>& ranks) {
  return first_numbers(std::vector<int>(ranks.begin(), ranks.end()));
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

class PortServer {
 public:
  PortServer(const RankEnv& env, std::string name, Deadline deadline)
      : env_(env), name_(std::move(name)), deadline_(deadline) {
    for (int rank = 1; rank < env.world_size; ++rank) missing_.insert(rank);
  }

  void serve(int port) {
    bind_name();
    Deadline progress = Deadline::after(kProgressInterval);
    while (!missing_.empty()) {
      if (deadline_.expired()) {
        throw TimeoutError(
            "rank",
            fmt::format(
                "ranks {} of {} did not come to the rendezvous within {:.1f} s. They may have "
                "failed to start, or run in another container: then set MASTER_ADDR and "
                "MASTER_PORT.",
                rank_list(missing_), env_.world_size,
                static_cast<double>(deadline_.total().count()) / 1000),
            {.rank = 0,
             .peer = *missing_.begin(),
             .operation = "rendezvous",
             .elapsed = elapsed()});
      }
      if (progress.expired()) {
        log::info("rank", "waiting for ranks {} since {} s", rank_list(missing_),
                  elapsed().count() / 1000);
        progress = Deadline::after(kProgressInterval);
      }
      serve_one(port, std::min(deadline_.remaining_ms(), progress.remaining_ms()));
    }
  }

 private:
  milliseconds elapsed() const { return deadline_.elapsed(); }

  // The name is free unless an earlier program of the same job is still exiting.
  void bind_name() {
    while (bind_abstract(listener_.get(), name_) != 0) {
      const int error = errno;
      if (error == EADDRINUSE && !deadline_.expired()) {
        std::this_thread::sleep_for(milliseconds(20));
        continue;
      }
      throw SystemError(
          "rank",
          fmt::format("cannot take the rendezvous name '{}' (another rank 0 of this job "
                      "may be alive; MASTER_ADDR and MASTER_PORT avoid the name)",
                      name_),
          error);
    }
    if (::listen(listener_.get(), SOMAXCONN) != 0)
      throw SystemError("rank", "cannot listen on the rendezvous name", errno);
  }

  // A rank sends its handshake at once; other clients are not waited for.
  void serve_one(int port, int timeout_ms) {
    pollfd waits{listener_.get(), POLLIN, 0};
    if (::poll(&waits, 1, timeout_ms) <= 0) return;
    const Fd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!client || peer_uid(client.get()) != ::geteuid()) return;
    limit_waits(client.get(), milliseconds(1000));
    if (const auto handshake = receive(client.get())) answer(client.get(), *handshake, port);
  }

  void answer(int fd, const std::string& handshake, int port) {
    std::istringstream fields(handshake);
    std::string greeting;
    int rank = -1, world_size = -1;
    fields >> greeting >> rank >> world_size;
    if (greeting != "lockstep-rendezvous" || world_size != env_.world_size) {
      send(fd, fmt::format("refused rank 0 expects a world of {}", env_.world_size));
    } else if (missing_.erase(rank) == 0) {
      send(fd, fmt::format("refused there is already a rank {}", rank));
    } else {
      send(fd, fmt::format("port {}", port));
    }
  }

  const RankEnv& env_;
  std::string name_;
  Deadline deadline_;
  Fd listener_ = unix_socket();
  std::set<int> missing_;
};

// ---------------------------------------------------------------- the others

// One attempt: the port, or nothing if rank 0 does not listen (yet, or any more).
std::optional<int> ask(const RankEnv& env, const std::string& name, const Deadline& deadline) {
  const Fd fd = unix_socket();
  limit_waits(fd.get(), std::max(milliseconds(1), deadline.remaining()));
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
  send(fd.get(), fmt::format("lockstep-rendezvous {} {}", env.rank, env.world_size));
  const auto reply = receive(fd.get());
  if (!reply) return std::nullopt;
  std::istringstream fields(*reply);
  std::string word;
  int port = 0;
  if (fields >> word && word == "port" && fields >> port) return port;
  throw CommError("rank",
                  fmt::format("rank {} was turned away by rank 0: {}. Two programs of one job may "
                              "be starting at once. Set MASTER_ADDR and a MASTER_PORT for each.",
                              env.rank, reply->substr(reply->find(' ') + 1)),
                  {.rank = env.rank, .peer = 0, .operation = "rendezvous"});
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
  int port = 0;
  Fd listener = listen_on_free_port(port);
  PortServer(env, name, deadline).serve(port);
  env.master_port = port;
  env.store_fd = listener.release();
}

}  // namespace lockstep
