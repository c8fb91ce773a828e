#include "lockstep/core/fd.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <poll.h>
#include <pwd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "lockstep/core/deadline.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// The writer of a shell's <(...) is running; one that is silent for longer has probably failed.
constexpr int kPipeSilence_ms = 10'000;

enum class Kind { kFile, kPipe };

// A device may have no end, and a named pipe no writer: reading either could take forever.
Kind check_kind(int fd, const std::string& path) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) throw SystemError("fd", "cannot look at " + path, errno);
  if (S_ISREG(info.st_mode)) return Kind::kFile;
  if (S_ISDIR(info.st_mode)) throw SystemError("fd", "cannot read " + path, EISDIR);
  struct statfs system {};
  const bool pipe = S_ISFIFO(info.st_mode);
  if (pipe && ::fstatfs(fd, &system) == 0 &&
      static_cast<unsigned long>(system.f_type) == PIPEFS_MAGIC)
    return Kind::kPipe;
  throw UsageError("fd", "{} is a {}, not a regular file. Name a file.", path,
                   pipe ? "named pipe" : "device");
}

void wait_for_data(int fd, const std::string& path) {
  pollfd poll_fd{fd, POLLIN, 0};
  const int ready = ::poll(&poll_fd, 1, kPipeSilence_ms);
  if (ready == 0) {
    throw UsageError("fd", "{} is a pipe into which nothing was written for {} s. Name a file.",
                     path, kPipeSilence_ms / 1000);
  }
}

}  // namespace

void Fd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw SystemError("fd", "cannot create a pipe", errno);
  return {Fd(ends[0]), Fd(ends[1])};
}

void set_nonblocking(int fd, bool on) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK) < 0)
    throw SystemError("fd", fmt::format("cannot change the mode of descriptor {}", fd), errno);
}

void set_cloexec(int fd, bool on) {
  const int flags = ::fcntl(fd, F_GETFD);
  if (flags < 0 || ::fcntl(fd, F_SETFD, on ? flags | FD_CLOEXEC : flags & ~FD_CLOEXEC) < 0)
    throw SystemError("fd", fmt::format("cannot change the flags of descriptor {}", fd), errno);
}

void write_all(int fd, std::string_view data) {
  while (!data.empty()) {
    const ssize_t n = ::write(fd, data.data(), data.size());
    if (n >= 0) {
      data.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN) {
      pollfd poll_fd{fd, POLLOUT, 0};
      ::poll(&poll_fd, 1, 1000);
    } else if (errno != EINTR) {
      throw SystemError("fd", fmt::format("cannot write to descriptor {}", fd), errno);
    }
  }
}

std::string read_file(const std::string& path, std::size_t limit) {
  // Without O_NONBLOCK opening a named pipe waits for a writer.
  Fd fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (!fd) throw SystemError("fd", "cannot open " + path, errno);
  const Kind kind = check_kind(fd.get(), path);
  std::string data;
  char buffer[1 << 16];
  for (;;) {
    if (kind == Kind::kPipe) wait_for_data(fd.get(), path);
    const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
    if (n == 0) return data;
    if (n < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      throw SystemError("fd", "cannot read " + path, errno);
    }
    data.append(buffer, static_cast<std::size_t>(n));
    if (data.size() > limit)
      throw UsageError("fd", "{} is larger than {} bytes. Is it the right file?", path, limit);
  }
}

std::optional<std::string> read_until_closed(int fd, const Deadline& deadline) {
  std::string text;
  char block[4096];
  for (;;) {
    pollfd waits{fd, POLLIN, 0};
    const int ready = ::poll(&waits, 1, deadline.remaining_ms());
    if (ready == 0 || deadline.expired()) return std::nullopt;
    if (ready < 0) continue;  // a signal: a read now might wait forever
    const ssize_t count = ::read(fd, block, sizeof block);
    if (count == 0) return text;
    if (count < 0 && errno != EINTR) return std::nullopt;
    if (count > 0) text.append(block, static_cast<std::size_t>(count));
  }
}

void end_child(pid_t child) {
  constexpr int kTries = 2000;
  ::kill(child, SIGKILL);
  for (int i = 0; i < kTries && ::waitpid(child, nullptr, WNOHANG) == 0; ++i) ::usleep(500);
}

void write_file_atomically(const std::string& path, std::string_view data) {
  const std::string temporary = fmt::format("{}.tmp.{}", path, ::getpid());
  ::unlink(temporary.c_str());  // of a process that died, or a link to somewhere else
  {
    Fd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!fd)
      throw SystemError::described(
          "fd",
          fmt::format(
              "cannot write {} ({}). Choose a folder that exists and that you may write to.", path,
              std::strerror(errno)),
          errno);
    try {
      write_all(fd.get(), data);
    } catch (const SystemError& error) {  // a full disk, say, which the rest of it would not help
      ::unlink(temporary.c_str());
      const int number = error.error_number();
      throw SystemError::described(
          "fd", fmt::format("cannot write {} ({}).", path, std::strerror(number)), number);
    }
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    throw SystemError("fd", "cannot rename " + temporary, error);
  }
}

// ---------------------------------------------------------------- paths

namespace {

// The home directory of this user, or of the current one for an empty name; empty when unknown.
std::string home_of(const std::string& user) {
  std::vector<char> buffer(16u << 10);
  passwd entry{};
  passwd* found = nullptr;
  int error = 0;
  do {
    error = user.empty() ? ::getpwuid_r(::geteuid(), &entry, buffer.data(), buffer.size(), &found)
                         : ::getpwnam_r(user.c_str(), &entry, buffer.data(), buffer.size(), &found);
    if (error == ERANGE) buffer.resize(2 * buffer.size());
  } while (error == EINTR || (error == ERANGE && buffer.size() <= (1u << 20)));
  return found != nullptr && found->pw_dir != nullptr ? found->pw_dir : "";
}

}  // namespace

std::string expand_home(const std::string& path, std::string_view what) {
  if (!path.starts_with('~')) return path;
  const std::size_t end = std::min(path.find('/'), path.size());
  const std::string user = path.substr(1, end - 1);
  std::string home = user.empty() ? env::get("HOME").value_or("") : "";
  if (home.empty()) home = home_of(user);
  if (home.empty()) {
    throw UsageError("config",
                     "{}: '{}' names the home directory of {}, which is not known on this machine. "
                     "Write the whole path, or ./{} for a folder of that name.",
                     what, path, user.empty() ? "this user" : "user " + user, path);
  }
  return home + path.substr(end);
}

std::string link_advice(const std::string& path) {
  std::error_code ignored;
  fs::path place;
  for (const fs::path& part : fs::path(path)) {
    place /= part;
    if (fs::is_symlink(place, ignored) && !fs::exists(place, ignored))
      return fmt::format(" {} is a symbolic link to {}, which is not there.", place.string(),
                         fs::read_symlink(place, ignored).string());
  }
  return "";
}

namespace {

// The newest revision of a model in the cache of Hugging Face's hub; empty: it is not there.
std::string cached_model(const std::string& name) {
  std::string cache = env::get("HF_HUB_CACHE").value_or("");
  if (const auto home = env::get("HF_HOME"); cache.empty() && home) cache = *home + "/hub";
  if (cache.empty()) cache = env::get("HOME").value_or("") + "/.cache/huggingface/hub";
  std::string folder = name;
  if (const std::size_t slash = name.find('/'); slash != name.npos) folder.replace(slash, 1, "--");
  folder = fmt::format("{}/models--{}", cache, folder);
  std::string revision;
  std::ifstream(folder + "/refs/main") >> revision;
  std::error_code ignored;
  const std::string snapshot = fmt::format("{}/snapshots/{}", folder, revision);
  return !revision.empty() && fs::is_directory(snapshot, ignored) ? snapshot : "";
}

}  // namespace

std::string hub_advice(const std::string& path) {
  if (std::string link = link_advice(path); !link.empty()) return link;
  const std::size_t slash = path.find('/');
  const bool two_words = slash != path.npos && slash > 0 && slash + 1 < path.size() &&
                         path.find('/', slash + 1) == path.npos && path.front() != '.' &&
                         path.front() != '~';
  std::error_code ignored;
  // A file in a folder that is there is missing itself.
  if (two_words && fs::exists(path.substr(0, slash), ignored)) return "";
  if (two_words || slash == path.npos)
    if (const std::string cached = cached_model(path); !cached.empty())
      return fmt::format(" Hugging Face's hub has stored that model in {}: write that folder.",
                         cached);
  if (!two_words) return "";
  const std::string folder = path.substr(slash + 1);
  return fmt::format(
      " If that is a model of Hugging Face's hub, download it first (huggingface-cli download {} "
      "--local-dir {}) and write {} instead.",
      path, folder, folder);
}

}  // namespace lockstep

namespace lockstep::terminal {
namespace {

constexpr int kUsualColumns = 80;

// "<device>:<inode>:"
std::string name_of(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return {};
  return fmt::format("{}:{}:", info.st_dev, info.st_ino);
}

}  // namespace

int columns(int fd) {
  if (::isatty(fd) == 1) {
    winsize size{};
    return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kUsualColumns;
  }
  const std::string text = env::get(kVariable).value_or("");
  const std::string name = name_of(fd);
  if (name.empty() || text.rfind(name, 0) != 0) return 0;
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + name.size(), end, value);
  return error == std::errc() && stop == end && value > 0 ? value : 0;
}

std::string describe_pipe(int fd, int columns) {
  const std::string name = name_of(fd);
  return name.empty() || columns <= 0 ? std::string() : name + std::to_string(columns);
}

}  // namespace lockstep::terminal

namespace lockstep {
namespace {

struct AbstractAddress {
  sockaddr_un data{};
  socklen_t length = 0;

  explicit AbstractAddress(const std::string& name) {
    data.sun_family = AF_UNIX;
    LOCKSTEP_ASSERT(name.size() + 1 < sizeof data.sun_path);
    std::memcpy(data.sun_path + 1, name.data(), name.size());  // the leading zero: abstract
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&data); }
};

}  // namespace

int bind_abstract(int socket, const std::string& name) {
  const AbstractAddress address(name);
  return ::bind(socket, address.get(), address.length);
}

int connect_abstract(int socket, const std::string& name) {
  const AbstractAddress address(name);
  return ::connect(socket, address.get(), address.length);
}

std::optional<uid_t> peer_uid(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    return std::nullopt;
  return credentials.uid;
}

bool is_unix_socket(int fd, int type) {
  const auto is = [fd](int option, int wanted) {
    int value = 0;
    socklen_t length = sizeof value;
    return ::getsockopt(fd, SOL_SOCKET, option, &value, &length) == 0 && value == wanted;
  };
  return is(SO_DOMAIN, AF_UNIX) && is(SO_TYPE, type);
}

ssize_t send_with_fd(int socket, std::string_view bytes, int fd) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  return ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t receive_with_fds(int socket, std::span<char> buffer, std::vector<Fd>& fds) {
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t received = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  fds.clear();
  if (received < 0) return received;
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
  return received;
}

}  // namespace lockstep
