// Ranks of this host that a command starts for a moment, under `lockstep run` and with a deadline:
// those of `lockstep doctor` and of `lockstep plan --probe`.
//
//   const ScratchFolder folder("doctor");
//   const RanksOutcome end = run_ranks({.ranks = 2, .arguments = {"doctor-probe"}}, folder.path());
//   if (!end.ok()) for (const std::string& line : tail(end.output)) print(line);
//
// One thread.
#pragma once

#include <string>
#include <vector>

#include "cli/scratch_folder.h"  // IWYU pragma: export
#include "launcher/process.h"

namespace lockstep::cli {

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

// The last lines of an output, without frames of stacks, which hide the cause.
std::vector<std::string> tail(const std::string& text);

}  // namespace lockstep::cli
