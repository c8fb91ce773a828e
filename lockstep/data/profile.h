// Measures where a loader's time goes, and advises how to reduce it.
//
//   LoaderProfile profile = profile_loader(loader, {.batches = 100, .step = train_on});
//   fmt::print("{}\n", fmt::join(profile.advice, "\n"));
//
// Rule of thumb: a batch that takes more than 10 ms to reach the device slows training down. What
// counts in the end is `wait`, the time in which the step could not run.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/loader.h"

namespace lockstep::data {

constexpr double kSlowTransferMs = 10;

struct ProfileOptions {
  std::int64_t batches = 100;
  std::int64_t epoch = 0;
  std::function<void(Batch&)> step{};  // what training does with a batch; nothing by default
};

struct LoaderProfile {
  std::vector<BatchTiming> batches{};
  double seconds = 0;       // all of it, steps included
  double wait_percent = 0;  // of `seconds`, from the second batch on: the first waits for the start
  double wait_p99_ms = 0;   // the same
  std::vector<std::string> advice{};
};

// Repeats the epoch if it has fewer batches. Throws what the loader throws.
LoaderProfile profile_loader(Loader& loader, const ProfileOptions& options = {});

// Advice from the figures; one sentence that all is well if there is nothing to advise.
struct LoaderFigures {
  double load_ms = 0, collate_ms = 0, copy_ms = 0, transfer_ms = 0, wait_ms = 0;  // means
  std::optional<double> step_ms{};  // unset: no step was profiled
  double wait_percent = 0;
  int num_workers = 0;
  bool pin_memory = false;
  bool accelerator = false;
};
std::vector<std::string> loader_advice(const LoaderFigures& figures);

}  // namespace lockstep::data
