#include "lockstep/io/directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <random>
#include <regex>
#include <system_error>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/text.h"

namespace lockstep::io {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporaryMark = ".tmp-";
constexpr int kAttempts = 100;
// linux/fs.h has them, but conflicts with the C library's headers.
constexpr unsigned kNoReplace = 1;
constexpr unsigned kExchange = 2;

int rename_with(const std::string& from, const std::string& to, unsigned flags) {
  return static_cast<int>(
      ::syscall(SYS_renameat2, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags));
}

bool unsupported(int error_number) {
  return error_number == EINVAL || error_number == ENOSYS || error_number == EOPNOTSUPP;
}

std::string parent_of(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

bool present(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

std::string temporary_name(const std::string& path) {
  std::random_device device;
  const std::uint64_t random = std::uint64_t{device()} << 32 | device();
  return fmt::format("{}{}{}-{:016x}", path, kTemporaryMark, ::getpid(), random);
}

enum class Lock { kTaken, kHeld, kGone, kUnknown };

// Locks the directory itself, so that the lock needs no file of its own and outlives a rename.
// `error` is for kUnknown: a file system that does not do this.
Lock lock_directory(const std::string& path, Fd& fd, int& error) {
  fd.reset(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd) {
    error = errno;
    return error == ENOENT ? Lock::kGone : Lock::kUnknown;
  }
  while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    error = errno;
    if (error != EINTR) return error == EWOULDBLOCK ? Lock::kHeld : Lock::kUnknown;
  }
  // Somebody may have removed or renamed it between open and flock.
  struct stat mine {
  }, named{};
  if (::fstat(fd.get(), &mine) != 0 || ::lstat(path.c_str(), &named) != 0 ||
      mine.st_ino != named.st_ino || mine.st_dev != named.st_dev)
    return Lock::kGone;
  return Lock::kTaken;
}

// A new directory beside `path`, which sweep() leaves alone while `lock` is open.
std::string make_temporary(const std::string& path, Fd& lock) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::string name = temporary_name(path);
    if (::mkdir(name.c_str(), 0755) != 0) {
      if (errno == EEXIST) continue;
      throw file_error("make the directory", name, errno);
    }
    int error = 0;
    const Lock outcome = lock_directory(name, lock, error);
    if (outcome == Lock::kTaken) return name;
    // Without locks a sweep deletes nothing, so it is safe to continue.
    if (outcome == Lock::kUnknown) return name;
    // A sweep saw it before it was locked and is removing it: take another name.
  }
  throw SystemError("io",
                    fmt::format("cannot make a temporary directory for {} in {} attempts. Is "
                                "another process sweeping in a loop?",
                                path, kAttempts),
                    EBUSY);
}

// For cleanup while another error is propagating: a failure is only logged.
void remove_tree_quietly(const std::string& path) noexcept {
  std::error_code error;
  fs::remove_all(path, error);
  if (!error) return;
  try {
    log::warning("io", "cannot remove {}: {}. Remove it by hand.", path, error.message());
  } catch (...) {
    // A failure to log is ignored, too.
  }
}

// The entries of a directory; none where it is not there.
std::vector<fs::directory_entry> entries_of(const std::string& directory) {
  std::vector<fs::directory_entry> all;
  std::error_code error;
  for (auto it = fs::directory_iterator(directory, error); !error && it != fs::directory_iterator();
       it.increment(error))
    all.push_back(*it);
  if (error && error != std::errc::no_such_file_or_directory)
    throw file_error("read the directory", directory, error.value());
  return all;
}

std::string strip_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

}  // namespace

bool is_temporary_name(const std::string& path) {
  static const std::regex kEnd(R"([^/]\.tmp-[0-9]+-[0-9a-f]{16}$)");
  return std::regex_search(path, kEnd);
}

AtomicDir::AtomicDir(std::string final_path, AtomicDirOptions options)
    : final_path_(strip_slashes(std::move(final_path))), options_(options) {
  const std::string name = fs::path(final_path_).filename().string();
  if (name.empty() || name == "." || name == ".." || is_temporary_name(name))
    throw UsageError("io", "'{}' cannot be the name of a directory to write.", final_path_);
  if (!options_.replace && present(final_path_))
    throw UsageError("io",
                     "{} is already there. Choose another name, remove it, or ask to replace it.",
                     final_path_);
  const std::string parent = parent_of(final_path_);
  make_directories(parent);
  if (options_.expected_bytes > free_space(parent))
    throw file_error("write", final_path_, ENOSPC, options_.expected_bytes);
  path_ = make_temporary(final_path_, lock_);
  open_ = true;
}

AtomicDir::~AtomicDir() {
  if (open_) discard();
}

void AtomicDir::discard() noexcept {
  open_ = false;
  remove_tree_quietly(path_);
  lock_.reset();
}

void AtomicDir::guarded(const std::function<void()>& step) {
  try {
    step();
  } catch (...) {
    discard();
    throw;
  }
}

void AtomicDir::check_open(std::string_view what) const {
  if (!open_)
    throw UsageError("io",
                     "cannot {} {}: it was committed, or an error has ended it. Use one object per "
                     "directory.",
                     what, final_path_);
}

void AtomicDir::check_name(const std::string& name) const {
  if (name.empty() || name == "." || name == ".." || name == kManifestName ||
      name.find_first_of(std::string_view("/\\\r\n\0", 5)) != std::string::npos ||
      invalid_utf8(name))
    throw UsageError("io", "'{}' cannot be the name of a file in {}.", name, final_path_);
  if (manifest_.contains(name))
    throw UsageError("io", "{} was already written to {}. Each file is written once.", name,
                     final_path_);
}

void AtomicDir::write(const std::string& name, const std::function<void(FileWriter&)>& fill) {
  check_open("write to");
  guarded([&] {
    check_name(name);
    FileWriter file(path_ + "/" + name, options_.progress);
    fill(file);
    manifest_[name] = file.finish();
    bytes_ += manifest_[name].bytes;
  });
}

void AtomicDir::write(const std::string& name, std::string_view contents) {
  write(name, [&](FileWriter& file) { file.append(contents); });
}

void AtomicDir::adopt(const std::string& name) {
  check_open("write to");
  guarded([&] {
    check_name(name);
    const std::string file = path_ + "/" + name;
    const Fd fd(::open(file.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
    if (!fd) throw file_error("open", file, errno);
    while (::fsync(fd.get()) != 0)
      if (errno != EINTR) throw file_error("fsync", file, errno);
    manifest_[name] = digest_file(file, options_.progress);
    bytes_ += manifest_[name].bytes;
  });
}

void AtomicDir::refuse_other_files() const {
  for (const fs::directory_entry& entry : entries_of(path_))
    if (const std::string name = entry.path().filename(); !manifest_.contains(name))
      throw UsageError("io", "{} was put into {} by somebody else. Hand it over with adopt().",
                       name, path_);
}

// True when the directory that had the name is still there, under our temporary name.
bool AtomicDir::take_name() {
  if (options_.replace && present(final_path_)) {
    if (rename_with(path_, final_path_, kExchange) == 0) return true;
    if (!unsupported(errno)) throw file_error("put a directory in place of", final_path_, errno);
    remove_durably(final_path_);
  }
  if (rename_with(path_, final_path_, kNoReplace) == 0) return false;
  if (unsupported(errno) && ::rename(path_.c_str(), final_path_.c_str()) == 0) return false;
  throw file_error("rename a finished directory to", final_path_, errno);
}

void AtomicDir::commit() {
  check_open("commit");
  bool replaced = false;
  guarded([&] {
    refuse_other_files();
    FileWriter file(path_ + "/" + std::string(kManifestName), options_.progress);
    file.append(manifest_text(manifest_));
    file.finish();
    sync_directory(path_);
    replaced = take_name();
  });
  // From here on it has its final name: an error below is reported but removes nothing.
  open_ = false;
  const std::string temporary = std::exchange(path_, final_path_);
  sync_directory(parent_of(final_path_));
  if (replaced) remove_tree_quietly(temporary);
  lock_.reset();
}

void remove_durably(const std::string& directory) {
  const std::string path = strip_slashes(directory);
  // Held while its files are deleted, so that a sweep elsewhere does not touch the directory.
  Fd lock;
  int error = 0;
  if (lock_directory(path, lock, error) == Lock::kGone) throw file_error("remove", path, ENOENT);
  const std::string doomed = temporary_name(path);
  if (::rename(path.c_str(), doomed.c_str()) != 0) throw file_error("remove", path, errno);
  sync_directory(parent_of(path));
  std::error_code failure;
  fs::remove_all(doomed, failure);
  if (failure) throw file_error("remove", doomed, failure.value());
}

SweepResult sweep(const std::string& parent) {
  SweepResult result;
  for (const fs::directory_entry& entry : entries_of(parent)) {
    const std::string path = entry.path();
    if (!is_temporary_name(entry.path().filename()) ||
        entry.symlink_status().type() != fs::file_type::directory)
      continue;
    Fd lock;
    int reason = 0;
    const Lock outcome = lock_directory(path, lock, reason);
    if (outcome == Lock::kGone) continue;
    std::error_code error;
    if (outcome == Lock::kTaken) fs::remove_all(path, error);
    if (outcome == Lock::kTaken && !error) {
      result.removed.push_back(path);
      continue;
    }
    result.remaining.emplace_back(
        path, outcome == Lock::kHeld ? "its writer is alive"
              : outcome == Lock::kUnknown
                  ? fmt::format("whether its writer is alive cannot be determined ({})",
                                std::strerror(reason))
                  : fmt::format("it cannot be removed ({})", error.message()));
  }
  return result;
}

// ---------------------------------------------------------------- numbered directories

namespace {

// The number after the prefix, or -1 for a name of another kind.
std::int64_t step_of(const std::string& name, const std::string& prefix) {
  if (!name.starts_with(prefix)) return -1;
  const char* begin = name.data() + prefix.size();
  const char* end = name.data() + name.size();
  if (begin == end || *begin < '0' || *begin > '9') return -1;
  std::int64_t step = -1;
  const auto [stop, error] = std::from_chars(begin, end, step);
  return error == std::errc() && stop == end ? step : -1;
}

bool same_place(const std::string& a, const std::string& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) && !error;
}

// Whether a damaged folder may be deleted. One without our manifest belongs to another program, and
// a file that cannot be read now may be readable tomorrow.
bool is_waste(const std::vector<Fault>& damage) {
  return std::ranges::all_of(damage, [](const Fault& fault) {
    return fault.kind != FaultKind::kManifestMissing && fault.kind != FaultKind::kManifestTorn &&
           fault.kind != FaultKind::kUnreadable;
  });
}

}  // namespace

std::vector<NumberedDir> list_numbered(const std::string& parent, const std::string& prefix) {
  std::vector<NumberedDir> found;
  for (const fs::directory_entry& entry : entries_of(parent)) {
    const std::int64_t step = step_of(entry.path().filename(), prefix);
    std::error_code ignored;
    if (step >= 0 && entry.is_directory(ignored)) found.push_back({step, entry.path()});
  }
  // 7 and 007 are the same number; names break the tie, so that all ranks choose the same.
  std::ranges::sort(found, [](const NumberedDir& a, const NumberedDir& b) {
    return a.step != b.step ? a.step > b.step : a.path > b.path;
  });
  return found;
}

Newest newest_valid(const std::string& parent, const std::string& prefix, std::int64_t max_step) {
  Newest newest;
  for (const NumberedDir& dir : list_numbered(parent, prefix)) {
    if (dir.step > max_step) continue;
    const std::vector<Fault> faults = verify(dir.path);
    const bool whole = std::ranges::all_of(
        faults, [](const Fault& fault) { return fault.kind == FaultKind::kExtra; });
    if (whole) {
      newest.step = dir.step;
      newest.path = dir.path;
      if (!faults.empty()) newest.remark = describe(faults);
      return newest;
    }
    newest.passed_over.push_back({dir.path, describe(faults)});
  }
  return newest;
}

std::vector<std::string> retain(const std::string& parent, const std::string& prefix,
                                const RetainOptions& options) {
  if (options.limit < 1)
    throw UsageError("io", "at least 1 checkpoint must be retained (limit {}).", options.limit);
  if (const auto faults = damage_of(options.durable, Depth::kSizes); !faults.empty())
    throw UsageError("io",
                     "nothing is deleted, because {} is not whole: {}. Commit the new checkpoint "
                     "before old ones are deleted.",
                     options.durable, describe(faults));
  int retained = 0;
  std::vector<std::string> broken, old;  // both newest first
  for (const NumberedDir& dir : list_numbered(parent, prefix)) {
    const bool must_stay = same_place(dir.path, options.durable) ||
                           std::ranges::any_of(options.keep, [&](const std::string& path) {
                             return same_place(dir.path, path);
                           });
    if (must_stay)
      ++retained;
    else if (const auto damage = damage_of(dir.path, Depth::kSizes); damage.empty())
      old.push_back(dir.path);
    else if (is_waste(damage))
      broken.push_back(dir.path);
  }
  const auto room = static_cast<std::size_t>(std::max(0, options.limit - retained));
  std::vector<std::string> doomed(broken.rbegin(), broken.rend());
  if (old.size() > room)
    doomed.insert(doomed.end(), old.rbegin(), old.rend() - static_cast<std::ptrdiff_t>(room));
  for (const std::string& path : doomed) remove_durably(path);
  return doomed;
}

// ---------------------------------------------------------------- one process at a time

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

// Another program may have written the file: the result must still fit into a message.
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

// On a full disk the folder is locked, but its file names no holder.
void FolderLock::sign(const std::string& token) {
  const std::string note = this_process() + "\n" + token + "\n";
  if (::ftruncate(fd_.get(), 0) != 0 || ::pwrite(fd_.get(), note.data(), note.size(), 0) < 0)
    return;
  ::fsync(fd_.get());  // on a network file system others would not see it before
}

}  // namespace lockstep::io
