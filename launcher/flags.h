// torchrun's command line, turned into a LaunchPlan.
//
// One table says for every flag what it takes, what it means, and whether it is honoured, ignored
// with a line, or refused; parsing, --help and the test against torchrun's own help text all read
// that table. A flag beats its PET_<NAME> variable, which beats the file of --config-file, which
// beats the default. Args after the program belong to the program and are not looked at.
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

// What parsing needs to know about the machine and the program; the defaults ask the real machine.
struct LaunchContext {
  Variables variable = process_variables();
  std::function<int()> cores = allowed_cores;
  std::function<Gpus()> gpus = [] { return find_gpus(); };
  // Keys of the training file, to say where a misplaced one in --config-file belongs.
  std::vector<std::string> training_keys{};
};

struct ParsedFlags {
  Request request = Request::kRun;  // anything but kRun leaves the plan empty
  LaunchPlan plan;
  std::vector<std::string> notes;  // one line for each flag that was ignored or needs an argument
};

// Throws UsageError naming flag or variable and the value, and the nearest flag after a typo.
ParsedFlags parse_flags(const std::vector<std::string>& args, const LaunchContext& context = {});

}  // namespace lockstep::launch
