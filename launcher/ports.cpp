#include "launcher/ports.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/text.h"

namespace lockstep::launch {
namespace {

namespace fs = std::filesystem;

void allow_reuse(int fd, bool allowed = true) {
  const int value = allowed ? 1 : 0;
  if (::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &value, sizeof value) != 0)
    throw SystemError("launch", "cannot set SO_REUSEADDR", errno);
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

struct PortRequest {
  int port;
  Reach reach;
  bool reuse;
};

// None, with errno, if it cannot be bound.
Fd bind_socket(int family, const PortRequest& request) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return fd;
  if (request.reuse) allow_reuse(fd.get());
  const bool network = request.reach == Reach::kNetwork;
  const auto port = htons(static_cast<std::uint16_t>(request.port));
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = port;
  if (!network) four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  six.sin6_port = port;
  if (!network) six.sin6_addr = in6addr_loopback;
  const int off = 0;  // also accept IPv4, as c10d does
  const bool bound =
      family == AF_INET
          ? ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&four), sizeof four) == 0
          : ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0 &&
                ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&six), sizeof six) == 0;
  if (bound) return fd;
  const int error = errno;
  fd.reset();
  errno = error;
  return fd;
}

// IPv6 may be missing or disabled.
bool is_missing_family(int error) {
  return error == EAFNOSUPPORT || error == EADDRNOTAVAIL;
}

// Binds every address of the reach at one port; none of them, with errno, if one is taken.
std::vector<Fd> bind_sockets(PortRequest request) {
  std::vector<Fd> sockets;
  const bool network = request.reach == Reach::kNetwork;
  Fd first = bind_socket(network ? AF_INET6 : AF_INET, request);
  if (!first && network && is_missing_family(errno)) first = bind_socket(AF_INET, request);
  if (!first) return sockets;
  request.port = bound_port(first.get());
  sockets.push_back(std::move(first));
  if (request.reach != Reach::kLoopback) return sockets;
  Fd second = bind_socket(AF_INET6, request);
  if (second) {
    sockets.push_back(std::move(second));
  } else if (const int error = errno; !is_missing_family(error)) {
    sockets.clear();
    errno = error;
  }
  return sockets;
}

// Sets SO_REUSEADDR if connections that were accepted earlier need it. If another process binds the
// port in that moment, only one of the two can listen; this fails if it is the other.
bool begin_to_listen(const std::vector<Fd>& sockets) {
  constexpr int kQueue = 128;
  for (const Fd& socket : sockets) {
    if (::listen(socket.get(), kQueue) != 0) {
      if (errno != EADDRINUSE) return false;
      allow_reuse(socket.get());
      if (::listen(socket.get(), kQueue) != 0) return false;
    }
    // Otherwise the connections that are accepted would keep the next run from binding the port.
    allow_reuse(socket.get());
  }
  return true;
}

// The sockets stay bound, and Linux lets them listen again.
void end_listening(const std::vector<Fd>& sockets) {
  for (const Fd& socket : sockets) {
    int listening = 0;
    socklen_t size = sizeof listening;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ACCEPTCONN, &listening, &size);
    if (listening == 0) continue;
    allow_reuse(socket.get(), false);  // before the next line, so that the port is never shared
    ::shutdown(socket.get(), SHUT_RDWR);
  }
}

// The kernel releases a port that was chosen by binding to 0 when its socket stops listening, so
// only the number is used.
int free_port(Reach reach) {
  const std::vector<Fd> sockets = bind_sockets({.port = 0, .reach = reach, .reuse = false});
  return sockets.empty() ? 0 : bound_port(sockets.front().get());
}

// ---------------------------------------------------------------- who has a port

struct Listener {
  std::string inode;
  std::string user;
};

std::optional<Listener> find_listener(int port) {
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    std::string line;
    for (std::getline(file, line); std::getline(file, line);) {
      std::istringstream fields(line);
      std::string slot, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> user >>
          timeout >> inode;
      constexpr const char* kListening = "0A";
      if (state == kListening && local.ends_with(fmt::format(":{:04X}", port)))
        return Listener{inode, user};
    }
  }
  return std::nullopt;
}

// The first process that `matches`, of those that this user may inspect.
std::string find_process(const std::function<bool(const fs::path&)>& matches) {
  std::error_code problem;
  for (fs::directory_iterator at("/proc", problem), end; !problem && at != end;
       at.increment(problem)) {
    const std::string name = at->path().filename().string();
    if (name.find_first_not_of("0123456789") == std::string::npos && matches(at->path()))
      return name;
  }
  return {};
}

bool has_socket(const fs::path& process, const std::string& inode) {
  std::error_code problem;
  for (fs::directory_iterator at(process / "fd", problem), end; !problem && at != end;
       at.increment(problem)) {
    std::error_code ignored;
    if (fs::read_symlink(at->path(), ignored) == fmt::format("socket:[{}]", inode)) return true;
  }
  return false;
}

std::string process_text(const std::string& pid) {
  constexpr std::size_t kMost = 120;
  std::string command = text_or_empty(fs::path("/proc") / pid / "cmdline");
  while (command.ends_with('\0')) command.pop_back();
  for (char& c : command)
    if (c == '\0') c = ' ';
  if (command.size() > kMost) command = command.substr(0, kMost) + "...";
  return fmt::format("pid {} ({})", pid, printable(command));
}

// No table that every user may read lists sockets that do not listen, but a job's ranks have the
// port in their environment.
std::string holder_of(int port) {
  if (const auto listener = find_listener(port)) {
    const std::string pid =
        find_process([&](const fs::path& process) { return has_socket(process, listener->inode); });
    return pid.empty()
               ? fmt::format("a process of the user with id {} listens there", listener->user)
               : process_text(pid) + " listens there";
  }
  const std::string variable = fmt::format("{}MASTER_PORT={}{}", '\0', port, '\0');
  const std::string own = std::to_string(::getpid()), front = std::to_string(::getppid());
  const std::string pid = find_process([&](const fs::path& process) {
    const auto name = process.filename();
    return name != own && name != front &&
           text_or_empty(process / "environ").find(variable) != std::string::npos;
  });
  if (pid.empty()) return "another process has bound it";
  return fmt::format("another job has it: {} was started with MASTER_PORT={}", process_text(pid),
                     port);
}

[[noreturn]] void refuse(int port, int error) {
  if (error == EADDRINUSE)
    throw UsageError("launch",
                     "--master-port={} cannot be used: {}. Choose another port (on every host), "
                     "or leave the flag out on one host to get a free one.",
                     port, holder_of(port));
  if (error == EACCES)
    throw UsageError("launch",
                     "--master-port={} cannot be used: {}. Ports below 1024 are usually root's. "
                     "Choose a higher one.",
                     port, std::strerror(error));
  throw SystemError("launch", fmt::format("cannot bind port {}", port), error);
}

}  // namespace

HeldPort HeldPort::any(Reach reach) {
  constexpr int kTries = 100;  // another process may get the same number meanwhile
  for (int i = 0; i < kTries; ++i) {
    const int port = free_port(reach);
    if (port == 0 && errno != EADDRINUSE) break;
    if (port == 0) continue;
    std::vector<Fd> sockets = bind_sockets({.port = port, .reach = reach, .reuse = false});
    if (!sockets.empty()) return HeldPort(std::move(sockets), port);
  }
  throw SystemError("launch", "cannot find a free TCP port", errno);
}

namespace {

// None, with errno, if another process has the port.
std::vector<Fd> bind_asked(int port, Reach reach) {
  std::vector<Fd> sockets = bind_sockets({.port = port, .reach = reach, .reuse = false});
  if (!sockets.empty() || errno != EADDRINUSE) return sockets;
  sockets = bind_sockets({.port = port, .reach = reach, .reuse = true});
  if (!sockets.empty() && !begin_to_listen(sockets)) {
    const int error = errno;
    sockets.clear();
    errno = error;
  }
  end_listening(sockets);  // which shows that no other process listens, or can from now on
  return sockets;
}

}  // namespace

HeldPort HeldPort::exactly(int port, Reach reach) {
  std::vector<Fd> sockets = bind_asked(port, reach);
  if (sockets.empty()) refuse(port, errno);
  return HeldPort(std::move(sockets), port);
}

std::optional<HeldPort> HeldPort::unless_in_use(int port, Reach reach) {
  std::vector<Fd> sockets = bind_asked(port, reach);
  if (sockets.empty() && errno == EADDRINUSE) return std::nullopt;
  if (sockets.empty()) refuse(port, errno);
  return HeldPort(std::move(sockets), port);
}

void HeldPort::listen() const {
  if (!begin_to_listen(sockets_)) refuse(number_, errno);
}

void HeldPort::stop_listening() const {
  end_listening(sockets_);
}

}  // namespace lockstep::launch
