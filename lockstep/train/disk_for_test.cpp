#include "lockstep/train/disk_for_test.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>

namespace lockstep::train {
namespace {

bool is_for(int fd, const std::atomic<const char*>& part) {
  const char* name = part.load();
  if (name == nullptr) return false;
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), error);
  return path.string().find(name) != std::string::npos;
}

}  // namespace

DiskForTest& disk() {
  static DiskForTest disk;
  return disk;
}

}  // namespace lockstep::train

// Takes the place of the C library's in this program.
extern "C" int fsync(int fd) {
  auto& disk = lockstep::train::disk();
  if (lockstep::train::is_for(fd, disk.slow_for)) {
    disk.slow_for = nullptr;
    ++disk.slow_now;
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(disk.slow_ms))
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    --disk.slow_now;
  }
  if (!lockstep::train::is_for(fd, disk.fails_for)) return 0;
  errno = disk.error;
  return -1;
}
