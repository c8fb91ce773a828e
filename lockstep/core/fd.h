// A file descriptor that closes itself, and the few reads and writes that loop as they must.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

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
// What comes until the other end is closed; nothing when time runs out, as half an answer may be
// wrong.
std::optional<std::string> read_until_closed(int fd, const Deadline& deadline);
// Kills and reaps a child. One that the kernel does not release within a second is left.
void end_child(pid_t child);
// Written under a temporary name in the same directory, then renamed: readers never see half.
void write_file_atomically(const std::string& path, std::string_view data);

}  // namespace lockstep
