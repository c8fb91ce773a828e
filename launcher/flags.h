// Parses torchrun's command line into a LaunchPlan.
//
// One table (arguments.h) lists every flag, its value and meaning, and whether it is honoured,
// ignored with a note, or refused. Parsing, --help and the test against torchrun's help text all
// use that table. A flag takes precedence over its PET_<NAME> variable, which takes precedence over
// the file of --config-file. Arguments after the program are not parsed.
//
//   ParsedFlags parsed = parse_flags({"--nproc-per-node=2", "./train", "--lr=0.1"});
//   for (const auto& note : parsed.notes) log::warning("run", "{}", note);
//   return supervise(parsed.plan);
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "launcher/arguments.h"  // IWYU pragma: export
#include "launcher/host.h"
#include "launcher/plan.h"

namespace lockstep::launch {

// The machine and environment that parsing depends on; the defaults are the real ones.
struct LaunchContext {
  Variables variable = process_variables();
  std::function<int()> cores = allowed_cores;
  std::function<Gpus()> gpus = [] { return find_gpus(); };
  // The keys of the training file, so that an error says where one in --config-file belongs.
  std::vector<std::string> training_keys{};
};

struct ParsedFlags {
  Request request = Request::kRun;  // anything but kRun leaves the plan empty
  LaunchPlan plan;
  std::vector<std::string> notes;  // a line for each flag that is ignored or deserves a remark
};

// Throws UsageError naming the flag or variable and its value, and for a typo the nearest flag.
ParsedFlags parse_flags(const std::vector<std::string>& args, const LaunchContext& context = {});

}  // namespace lockstep::launch
