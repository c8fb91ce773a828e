// Starts short-lived ranks on this host, under `lockstep run` and with a deadline, for `lockstep
// doctor` and `lockstep plan --probe`.
//
//   const ScratchFolder folder("doctor");
//   const RanksOutcome end = run_ranks({.ranks = 2, .arguments = {"doctor-probe"}}, folder.path());
//   if (!end.ok()) for (const std::string& line : tail(end.output)) print(line);
//
// One thread.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "launcher/process.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

namespace lockstep::cli {

// A folder in TMPDIR for the files of one command, removed at its end.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& name) {
    const std::string base = env::get("TMPDIR").value_or("");
    path_ = (base.empty() ? "/tmp" : base) + "/lockstep_" + name + "_XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr)
      throw SystemError(name, "cannot make a folder " + path_, errno);
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// libexec/lockstep-train beside this program; empty: this build has no LibTorch.
std::string train_program();

struct RanksRequest {
  int ranks = 1;
  int timeout_s = 30;
  std::vector<std::string> arguments{};    // of lockstep-train
  std::vector<std::string> environment{};  // beside the caller's, NAME=value
};

struct RanksOutcome {
  bool in_time = false;
  launch::Ending ending{};
  std::string output{};  // its last 64 KiB

  bool ok() const { return in_time && ending.ok(); }
};

// Logs go to `folder`. At the deadline the launcher stops its ranks.
RanksOutcome run_ranks(const RanksRequest& request, const std::string& folder);

// The last lines of an output, without stack frames, which would hide the cause.
std::vector<std::string> tail(const std::string& text);

}  // namespace lockstep::cli
