#include "lockstep/io/folder_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/io/file.h"

namespace lockstep::io {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kTick{50};

std::string this_process() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  char when[32] = "";
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  std::strftime(when, sizeof when, "%F %T", &parts);
  return fmt::format("pid {} on {} since {}", ::getpid(), host, when);
}

// The file is somebody else's: whatever it holds must fit into a message.
std::string read_note(int fd) {
  char bytes[1024];
  const ssize_t size = ::pread(fd, bytes, sizeof bytes, 0);
  return std::string(bytes, size > 0 ? static_cast<std::size_t>(size) : 0);
}

std::string first_line(const std::string& note) {
  std::string line = note.substr(0, std::min<std::size_t>(note.find('\n'), 200));
  for (char& c : line)
    if (static_cast<unsigned char>(c) < ' ' || c == 127) c = '?';
  return line.empty() ? "a process that has left no name" : line;
}

}  // namespace

void refuse_link(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::read_symlink(path, error);
  if (error) return;
  throw UsageError("io",
                   "{} is a symbolic link to {}, and a run does not write through links in its "
                   "folder. Delete the link. The folder itself may be one, and so may checkpoints.",
                   path, target.string());
}

FolderLock::FolderLock(const std::string& folder, const std::string& token,
                       std::chrono::milliseconds timeout) {
  try {
    make_directories(folder);
  } catch (const SystemError&) {
    // Opening the file reports what is wrong with it.
  }
  const std::string path = folder + "/" + kFolderLockName;
  Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!fd) {
    problem_ = fmt::format("{} cannot be opened: {}", path, std::strerror(errno));
    return;
  }
  for (const auto start = Clock::now();; std::this_thread::sleep_for(kTick)) {
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) break;
    const int error = errno;
    if (error == EINTR) continue;
    if (error != EWOULDBLOCK) {
      problem_ = fmt::format("{} cannot be locked: {}", path, std::strerror(error));
      return;
    }
    const std::string note = read_note(fd.get());
    if (note.find("\n" + token + "\n") != note.npos) return;
    if (Clock::now() - start < timeout) continue;
    holder_ = first_line(note);
    return;
  }
  fd_ = std::move(fd);
  sign(token);
}

// A full disk leaves it without a name, and locked all the same.
void FolderLock::sign(const std::string& token) {
  const std::string note = this_process() + "\n" + token + "\n";
  if (::ftruncate(fd_.get(), 0) != 0 || ::pwrite(fd_.get(), note.data(), note.size(), 0) < 0)
    return;
  ::fsync(fd_.get());  // on a network file system others would not see it before
}

}  // namespace lockstep::io
