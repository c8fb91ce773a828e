// torchrun's command line, turned into a LaunchPlan.
//
// One table says of every flag what it takes, what it means, and whether it is honoured, ignored
// with a line, or refused; parsing, --help and the test against torchrun's own help text all read
// that table. A flag beats its PET_<NAME> variable, which beats the file of --config-file, which
// beats the default. Args after the program belong to the program and are not looked at.
//
//   ParsedFlags parsed = parse_flags({"--nproc-per-node=2", "./train", "--lr=0.1"});
//   for (const auto& note : parsed.notes) log::warning("run", "{}", note);
//   return supervise(parsed.plan);
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/launch/host.h"
#include "lockstep/launch/plan.h"

namespace lockstep::launch {

enum class Treatment { kHonoured, kIgnored, kRefused };

struct FlagSpec {
  std::string_view name;        // "nproc-per-node"; underscores are accepted for the dashes
  char letter;                  // 'r' for -r; '\0' without one
  std::string_view value_name;  // "N|auto|cpu|gpu"; empty: a switch
  Treatment treatment;
  std::string_view help;  // for an ignored or refused flag: why
  bool torchrun = true;   // false: ours alone

  bool is_switch() const { return value_name.empty(); }
  std::string variable() const;  // "PET_NPROC_PER_NODE"
};

std::span<const FlagSpec> flag_table();

// What parsing asks of the machine; the defaults ask the real one.
struct Surroundings {
  Variables variable = process_variables();
  std::function<int()> cores = allowed_cores;
  std::function<Gpus()> gpus = [] { return find_gpus(); };
};

enum class Request { kRun, kHelp, kListFlags };

struct ParsedFlags {
  Request request = Request::kRun;  // anything but kRun leaves the plan empty
  LaunchPlan plan;
  std::vector<std::string> notes;  // one line for each flag that was ignored or needs an argument
};

// Throws UsageError naming flag or variable and the value, and the nearest flag after a typo.
ParsedFlags parse_flags(const std::vector<std::string>& args, const Surroundings& around = {});

std::string run_help();   // for `lockstep run --help`
std::string flag_list();  // one line a flag, "--name treatment value|switch": for tests and shells

// The candidate with the smallest edit distance, when it is near enough to be what was meant.
std::optional<std::string> nearest(std::string_view arg, std::span<const std::string> candidates);

}  // namespace lockstep::launch
