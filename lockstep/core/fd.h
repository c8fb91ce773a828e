// Owned file descriptors, reading and writing of whole files, paths with `~`, and terminals.
//
//   const std::string text = read_file(expand_home(path, "config"));
//   write_file_atomically(path, text);
//   const bool bar = terminal::columns(STDOUT_FILENO) > 0;
//
// Functions without state; call them from any thread.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

class Deadline;

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

struct Pipe {
  Fd read;
  Fd write;
};
Pipe make_pipe();  // close-on-exec on both ends; throws SystemError

void set_nonblocking(int fd, bool on = true);
void set_cloexec(int fd, bool on = true);

// Writes everything or throws SystemError; retries after signals and, on a non-blocking
// descriptor, waits for room.
void write_all(int fd, std::string_view data);
// The whole file, or SystemError. UsageError over `limit` bytes, and for a fifo or a device.
std::string read_file(const std::string& path, std::size_t limit = 64u << 20);
// Reads until the other end is closed; nothing when time runs out, since a partial answer may be
// wrong.
std::optional<std::string> read_until_closed(int fd, const Deadline& deadline);
// Kills and reaps a child. Gives up on one that the kernel does not release within a second.
void end_child(pid_t child);
// Writes a temporary file in the same directory and renames it: readers see all or nothing.
void write_file_atomically(const std::string& path, std::string_view data);

// Replaces `~` and `~ada` at the start of a path by a home directory. A shell does so too, but not
// in `--key=~/runs` and not in files. Other paths come back unchanged. UsageError, which begins
// with `what`, when the user or the home directory is unknown.
std::string expand_home(const std::string& path, std::string_view what);

// For a path that does not exist because it, or a folder above it, is a symbolic link to nothing:
// a sentence that names both ends, after a space. Otherwise empty.
std::string link_advice(const std::string& path);
// That, or for a path that looks like a model's name on Hugging Face's hub ("Qwen/Qwen2-0.5B"): the
// folder that has it in the hub's cache, or else the command that downloads it.
std::string hub_advice(const std::string& path);

// The width of the terminal that shows a stream, even through the launcher's pipe.
//
// A rank's stdout is a pipe to `lockstep run`, so isatty() says no even where a person watches. The
// launcher therefore names the terminal's width in LOCKSTEP_TERMINAL, together with the pipe it
// means (<device>:<inode>:<columns>): a child of the rank whose stdout is redirected inherits the
// variable, and must not draw into a file.
namespace terminal {

inline constexpr const char* kVariable = "LOCKSTEP_TERMINAL";

// 0: it is neither a terminal nor a pipe that leads to one.
int columns(int fd);

// The value of kVariable for a process that writes to the pipe `fd`; "" when there is none.
std::string describe_pipe(int fd, int columns);

}  // namespace terminal

// ---------------------------------------------------------------- Unix-domain sockets
//
// Between processes of one host: abstract names, which leave no file behind,
// the peer's user, and messages that carry descriptors (SCM_RIGHTS).
//
//   if (connect_abstract(socket, name) == 0 && peer_uid(socket) == ::geteuid())
//     send_with_fd(socket, "here", memory.get());
//
// Any user of the host may take an abstract name, so both ends check the peer's user.

// Like ::bind() and ::connect(): 0, or -1 with errno.
int bind_abstract(int socket, const std::string& name);
int connect_abstract(int socket, const std::string& name);

std::optional<uid_t> peer_uid(int socket);
// `type`: SOCK_STREAM, SOCK_SEQPACKET.
bool is_unix_socket(int fd, int type);

// Sends one message, with `fd` unless that is -1. Like ::sendmsg(), but never blocks (EAGAIN).
ssize_t send_with_fd(int socket, std::string_view bytes, int fd);
// Like ::recvmsg(), but never blocks. `fds` receives the message's descriptors, close-on-exec.
ssize_t receive_with_fds(int socket, std::span<char> buffer, std::vector<Fd>& fds);

}  // namespace lockstep
