#include "lockstep/train/folder_owner.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <mutex>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::train {
namespace {

namespace fs = std::filesystem;

// For a run that was killed a moment ago and still exists.
constexpr std::chrono::seconds kLockTimeout{3};

// The files of a run besides checkpoints; they replace files of the same names.
constexpr const char* kWritten[] = {
    io::kFolderLockName,     ".run_id", "metrics.jsonl", "metrics.superseded.jsonl",
    "effective_config.json", "monitor", "runs"};

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
  for (const char* name : kWritten) io::refuse_link(folder + "/" + name);
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

// Finds the checkpoint that the run starts from among those of the folder; the newest, if links
// name it twice.
const io::NumberedDir* begun_from(const std::vector<io::NumberedDir>& all, const RunStart& start) {
  std::error_code error;
  for (const io::NumberedDir& dir : all)
    if (!start.checkpoint.empty() && fs::equivalent(dir.path, start.checkpoint, error)) return &dir;
  return nullptr;
}

}  // namespace

bool continues_in(const std::string& output_dir, const RunStart& start) {
  return begun_from(io::list_numbered(output_dir, kCheckpointPrefix), start) != nullptr;
}

std::vector<io::NumberedDir> other_checkpoints(const std::string& output_dir,
                                               const RunStart& start) {
  std::vector<io::NumberedDir> all = io::list_numbered(output_dir, kCheckpointPrefix);
  if (const io::NumberedDir* from = begun_from(all, start); from != nullptr) {
    const std::int64_t step = start.newest ? std::numeric_limits<std::int64_t>::max() : from->step;
    std::erase_if(all, [&](const io::NumberedDir& dir) { return dir.step <= step; });
  }
  return all;
}

void refuse_others(const std::string& output_dir, const std::vector<io::NumberedDir>& others) {
  if (others.empty()) return;
  throw UsageError(
      "checkpoint",
      "output_dir {} has {} of another run or of later steps than this one continues "
      "from ({}). The next run would resume from them, or this one replace them. To "
      "continue from the newest that is whole: resume_from_checkpoint: auto "
      "(lockstep train --resume auto; in a loop of your own, resume()). To delete "
      "them: overwrite_output_dir: true. Or choose another output_dir.",
      output_dir,
      others.size() == 1 ? "a checkpoint" : fmt::format("{} checkpoints", others.size()),
      others.size() == 1 ? fs::path(others[0].path).filename().string()
                         : fmt::format("{} to {}", fs::path(others.back().path).filename().string(),
                                       fs::path(others[0].path).filename().string()));
}

void remove_others(const std::vector<io::NumberedDir>& others) {
  for (const io::NumberedDir& dir : others) {
    io::remove_durably(dir.path);
    log::warning("checkpoint", "removed {}, as overwrite_output_dir says.", dir.path);
  }
}

void remove_record(const std::string& output_dir) {
  const fs::path folder = fs::path(output_dir) / "monitor";
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (at->path().filename() == "run.json") continue;
    fs::remove_all(folder, error);
    return;
  }
}

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

void LoopDirectory::resumed(const RunStart& start) {
  first_step_ = continues_in(directory_, start) ? start.step : 0;
  if (start.newest) written_.clear();  // what it has written later is damaged
  continued_.clear();
  for (const io::NumberedDir& dir : io::list_numbered(directory_, kCheckpointPrefix))
    continued_.insert(dir.path);
  for (const io::NumberedDir& dir : other_checkpoints(directory_, start))
    continued_.erase(dir.path);
}

void LoopDirectory::make_way(std::int64_t step, bool overwrite) const {
  std::vector<io::NumberedDir> in_the_way = io::list_numbered(directory_, kCheckpointPrefix);
  std::erase_if(in_the_way, [&](const io::NumberedDir& dir) {
    if (written_.contains(dir.step)) return dir.step <= step;
    return continued_.contains(dir.path);
  });
  if (overwrite)
    remove_others(in_the_way);
  else
    refuse_others(directory_, in_the_way);
}

}  // namespace lockstep::train
