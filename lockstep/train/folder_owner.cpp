#include "lockstep/train/folder_owner.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/io/file.h"
#include "lockstep/io/numbered_dirs.h"
#include "lockstep/train/run_checks.h"

namespace lockstep::train {
namespace {

namespace fs = std::filesystem;

// For a run that was killed a moment ago and is not gone yet.
constexpr std::chrono::seconds kLockTimeout{3};

std::mutex g_mutex;

std::map<std::string, LoopDirectory>& held_directories() {
  static std::map<std::string, LoopDirectory> held;  // by canonical path
  return held;
}

std::string key_of(const std::string& directory) {
  std::error_code error;
  const fs::path path = fs::weakly_canonical(fs::absolute(directory, error), error);
  return error ? directory : path.string();
}

io::FolderLock lock_or_refuse(const std::string& folder, const std::string& token) {
  check_output_dir(folder);
  try {
    io::make_directories(folder);
  } catch (const SystemError& e) {
    std::error_code absent;
    if (!fs::is_directory(folder, absent))
      throw UsageError("trainer", "output_dir {} cannot be made: {}. Choose another output_dir.",
                       folder, std::strerror(e.error_number()));
  }
  io::FolderLock lock(folder, token, std::chrono::milliseconds(0));
  if (!lock.holder().empty()) {
    log::info("trainer", "{} is in use by {}: waiting for {} s in case it is ending", folder,
              lock.holder(), kLockTimeout.count());
    lock = io::FolderLock(folder, token, kLockTimeout);
  }
  if (!lock.holder().empty())
    throw UsageError("trainer",
                     "another run trains in output_dir {}: {} holds {}/{}. Two would take each "
                     "other's checkpoints for their own. Wait for its end or stop it, or choose "
                     "another output_dir. If its host is gone, delete that file.",
                     folder, lock.holder(), folder, io::kFolderLockName);
  if (!lock.problem().empty())
    log::warning("trainer",
                 "{}. Nothing keeps a second run out of {}: take care that each run has an "
                 "output_dir of its own.",
                 lock.problem(), folder);
  return lock;
}

}  // namespace

std::string new_lock_token() {
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  return fmt::format("run {}-{}", ::getpid(), now);
}

io::FolderLock lock_output_dir(const std::string& folder, const std::string& token) {
  const std::lock_guard guard(g_mutex);
  held_directories().erase(key_of(folder));
  return lock_or_refuse(folder, token);
}

LoopDirectory& LoopDirectory::hold(const std::string& directory) {
  const std::lock_guard guard(g_mutex);
  const std::string key = key_of(directory);
  auto& all = held_directories();
  // A directory that was deleted since, and its lock with it, is a new one.
  std::error_code error;
  const auto found = all.find(key);
  if (found != all.end() &&
      (!found->second.lock_.held() || fs::exists(fs::path(key) / io::kFolderLockName, error)))
    return found->second;
  if (found != all.end()) all.erase(found);
  LoopDirectory own;
  own.lock_ = lock_or_refuse(directory, new_lock_token());
  own.directory_ = directory;
  return all.emplace(key, std::move(own)).first->second;
}

std::string LoopDirectory::archive_others(std::int64_t step) {
  // A lower step than the last one: steps are repeated, or the process has begun another run.
  if (!written_.empty() && step < *written_.rbegin())
    written_.erase(written_.lower_bound(step), written_.end());
  return archive_checkpoints(directory_, [&](const io::NumberedDir& dir) {
    const bool behind = dir.step < step || dir.step == start_.step;
    return dir.step > step ||
           !(written_.contains(dir.step) || (behind && is_before(dir, directory_, start_)));
  });
}

}  // namespace lockstep::train
