#include "lockstep/launch/ports.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

// IPv6 with IPv4 mapped into it where the kernel has it, as c10d binds; plain IPv4 elsewhere.
Fd make_socket(int& family) {
  Fd fd;
  if (family != AF_INET) {
    fd.reset(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int off = 0;
    if (fd && ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0) {
      family = AF_INET6;
      return fd;
    }
  }
  family = AF_INET;
  fd.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) throw SystemError("launch", "cannot create a TCP socket", errno);
  return fd;
}

void allow_reuse(int fd) {
  const int on = 1;
  if (::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0)
    throw SystemError("launch", "cannot set SO_REUSEADDR", errno);
}

bool bind_address(int fd, int family, int port, Reach reach) {
  if (family == AF_INET6) {
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<std::uint16_t>(port));
    return ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  if (reach == Reach::kLoopback) address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

int bound_port(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0)
    throw SystemError("launch", "cannot read the port of a socket", errno);
  return address.ss_family == AF_INET6
             ? ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port)
             : ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

// IPv6 may be compiled in and switched off: then its bind fails and IPv4 is tried.
Fd bind_new_socket(int port, int& family, Reach reach, bool reuse_before) {
  Fd fd = make_socket(family);
  if (reuse_before) allow_reuse(fd.get());
  if (bind_address(fd.get(), family, port, reach)) return fd;
  if (errno == EADDRNOTAVAIL && family == AF_INET6) {
    family = AF_INET;
    fd = make_socket(family);
    if (reuse_before) allow_reuse(fd.get());
    if (bind_address(fd.get(), family, port, reach)) return fd;
  }
  return Fd();
}

// No socket is bound to both loopback addresses; clients of "localhost" try 127.0.0.1 as well.
int family_for(Reach reach) {
  return reach == Reach::kLoopback ? AF_INET : AF_UNSPEC;
}

}  // namespace

HeldPort HeldPort::any(Reach reach) {
  int family = family_for(reach);
  // Without SO_REUSEADDR while the kernel chooses: it never chooses a port that anybody has bound.
  Fd fd = bind_new_socket(0, family, reach, false);
  if (!fd) throw SystemError("launch", "cannot find a free TCP port", errno);
  allow_reuse(fd.get());
  const int number = bound_port(fd.get());
  return HeldPort(std::move(fd), number, family, reach);
}

HeldPort HeldPort::exactly(int port, Reach reach) {
  int family = family_for(reach);
  Fd fd = bind_new_socket(port, family, reach, true);
  if (!fd) {
    const int error = errno;
    if (error == EADDRINUSE || error == EACCES)
      throw UsageError("launch",
                       "--master-port={} cannot be used: {}. Another job probably listens there. "
                       "Choose another port, or leave the flag out on one host to get a free one.",
                       port, std::strerror(error));
    throw SystemError("launch", fmt::format("cannot bind port {}", port), error);
  }
  return HeldPort(std::move(fd), port, family, reach);
}

Fd HeldPort::store_socket() const {
  int family = family_;
  Fd fd = bind_new_socket(number_, family, reach_, true);
  if (!fd) throw SystemError("launch", fmt::format("cannot bind port {} again", number_), errno);
  return fd;
}

Fd HeldPort::listener() const {
  Fd fd = store_socket();
  if (::listen(fd.get(), 128) != 0) {
    throw UsageError("launch",
                     "--master-port={} cannot be used: {}. Another job probably listens there. "
                     "Choose another port on every host.",
                     number_, std::strerror(errno));
  }
  set_nonblocking(fd.get());
  return fd;
}

}  // namespace lockstep::launch
