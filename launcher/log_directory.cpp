#include "launcher/log_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <ftw.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <random>
#include <string_view>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "lockstep_";
constexpr std::string_view kRandom = "XXXXXX";  // mkdtemp's
constexpr std::time_t kKept_s = 24 * 3600;

// Not std::filesystem::remove_all: a CUDA library that comes with LibTorch exports a broken one of
// its own, which a program that links it, and calls spawn(), would get.
void remove_tree(const std::string& path) {
  ::nftw(
      path.c_str(),
      [](const char* each, const struct stat*, int, struct FTW*) {
        ::remove(each);
        return 0;
      },
      16, FTW_DEPTH | FTW_PHYS);
}

Fd open_directory(const std::string& path) {
  return Fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

// The kernel releases it when the last process that has the descriptor is gone.
bool lock(const Fd& directory) {
  return directory && ::flock(directory.get(), LOCK_EX | LOCK_NB) == 0;
}

bool is_old_and_ours(const Fd& directory) {
  struct stat info {};
  return directory && ::fstat(directory.get(), &info) == 0 && info.st_uid == ::geteuid() &&
         std::time(nullptr) - info.st_mtime > kKept_s;
}

void sweep(const std::string& folder) {
  std::error_code problem;  // a folder that cannot be read: nothing is found in it
  for (fs::directory_iterator at(folder, problem), end; !problem && at != end;
       at.increment(problem)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with(kPrefix) || name.size() != kPrefix.size() + kRandom.size()) continue;
    const Fd directory = open_directory(at->path().string());
    if (is_old_and_ours(directory) && lock(directory)) remove_tree(at->path().string());
  }
}

}  // namespace

LogDirectory::LogDirectory(const LaunchPlan& plan) : temporary_(plan.log_dir.empty()) {
  if (temporary_)
    make_temporary(plan.redirects.any());
  else
    base_ = fs::absolute(plan.log_dir).string();
  std::string run = plan.run_id;
  std::ranges::replace(run, '/', '_');
  if (run.empty() || run == "." || run == "..") run = "none";
  run.resize(std::min<std::size_t>(run.size(), 200));  // a file name has at most 255 bytes
  // As torchrun: a later run with the same id does not write over this one's files.
  std::error_code problem;
  do {
    root_ = fmt::format("{}/{}_{:08x}", base_, run, std::random_device{}());
  } while (!fs::create_directories(root_, problem) && !problem);
  if (plan.nnodes > 1) root_ += fmt::format("/node_{}", plan.node_rank);
  if (!problem) fs::create_directories(root_, problem);
  if (problem)
    throw UsageError("launch", "--log-dir={} cannot be used: {}. Name a directory you may write.",
                     plan.log_dir, problem.message());
  // Only under the lock: no sweep takes it before.
  constexpr timespec kEpoch[] = {{0, 0}, {0, 0}};
  if (lock(lock_)) ::futimens(lock_.get(), kEpoch);
}

void LogDirectory::make_temporary(bool for_output) {
  const std::string folder = env::get("TMPDIR").value_or("/tmp");
  sweep(folder);
  base_ = fmt::format("{}/{}{}{}", folder, kPrefix, for_output ? "output_" : "", kRandom);
  if (::mkdtemp(base_.data()) == nullptr)
    throw UsageError("launch",
                     "the temporary directory {} cannot be created: {}. Set TMPDIR to a "
                     "directory you may write, or name one with --log-dir=DIR.",
                     base_, std::strerror(errno));
  lock_ = open_directory(base_);
}

LogDirectory::~LogDirectory() {
  if (temporary_ && !preserved_) remove_tree(base_);
}

std::string LogDirectory::attempt(int number) const {
  return fmt::format("{}/attempt_{}", root_, number);
}

std::string LogDirectory::preserve(bool failed) {
  std::error_code problem;  // for a folder that cannot be read: nothing is found in it
  for (fs::recursive_directory_iterator at(root_, problem), end; !problem && at != end;
       at.increment(problem)) {
    std::error_code ignored;
    if (!at->is_regular_file(ignored) || at->file_size(ignored) == 0) continue;
    const bool is_error = at->path().filename() == "error.json";
    if (temporary_ && at->path().extension() != ".log" && !(failed && is_error)) continue;
    preserved_ = true;
    if (temporary_) ::futimens(lock_.get(), nullptr);
    return root_;
  }
  return {};
}

}  // namespace lockstep::launch
