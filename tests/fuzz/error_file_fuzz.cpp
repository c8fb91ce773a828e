// The error file that a rank leaves, which any program may have written and which may be cut
// anywhere: read without an exception, reported, passed on, and announced to the other ranks in one
// line.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <string>

#include "launcher/node_connection.h"
#include "launcher/report.h"
#include "tests/fuzz/driver.h"

namespace {

// The functions take paths; this one needs no disk.
class MemoryFile {
 public:
  MemoryFile() : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {}
  const std::string& holding(const std::uint8_t* data, std::size_t size) {
    const bool written =
        ::ftruncate(fd_, 0) == 0 && ::pwrite(fd_, data, size, 0) == static_cast<ssize_t>(size);
    lockstep::fuzz::require(written, "the memory file cannot be written");
    return path_;
  }

 private:
  int fd_;
  std::string path_ = "/proc/self/fd/" + std::to_string(fd_);
};

}  // namespace

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::launch;
  using lockstep::fuzz::require;
  static MemoryFile memory;
  const ErrorFile file = read_error_file(memory.holding(data, size));
  require(file.present == (size != 0), "present is not what it should be");
  require(std::isfinite(file.time), "a time that is not a time");
  RankFailure failure;
  failure.rank = 0;
  failure.cause = "exited with code 1";
  add_error_file(failure, file);
  failure_report(failure);
  const std::string line = control_line(failure);
  require(line.find('\n') + 1 == line.size(), "an announcement of more than one line");
  const RankFailure again = failure_from_json(failure_to_json(failure));
  require(again.stack.size() == failure.stack.size(), "a stack that changes on its way");
  return 0;
}
