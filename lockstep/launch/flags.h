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

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/launch/flag_table.h"  // IWYU pragma: export
#include "lockstep/launch/host.h"
#include "lockstep/launch/plan.h"

namespace lockstep::launch {

// What parsing needs to know about the machine and the program; the defaults ask the real machine.
struct Surroundings {
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
ParsedFlags parse_flags(const std::vector<std::string>& args, const Surroundings& around = {});

// ---------------------------------------------------------------- the first half of parsing
// Arguments and PET_ variables become named texts. Private to this layer.

// A value and where it came from, for messages: "--nnodes", "-r" or "PET_NNODES".
struct Given {
  std::string text;
  std::string origin;
};

// What was given, flag by flag; the keys are names of the table. A plain value, no locks.
class Values {
 public:
  void set(const FlagSpec& flag, std::string text, std::string origin);
  const Given* find(const std::string& name) const;
  bool has(const std::string& name) const { return find(name) != nullptr; }
  std::string text(const std::string& name, std::string fallback) const;
  bool is_on(const std::string& name) const { return text(name, "0") == "1"; }

  // Throw UsageError naming origin, text and what is accepted.
  int number(const std::string& name, int fallback, int min, int max) const;
  std::chrono::milliseconds seconds(const std::string& name, std::chrono::milliseconds fallback,
                                    double min_s) const;

 private:
  std::map<std::string, Given> values_;
};

struct GivenArguments {
  Request request = Request::kRun;
  Values values;
  std::vector<std::string> program;  // the first arg that is not a flag, and all after it
};

// Long flags in either spelling, by unique prefix, with "=value" or the next arg; letters alone,
// joined (-mr3) or with the value attached.
GivenArguments read_arguments(const std::vector<std::string>& args);

// PET_ variables fill what the command line left open. Empty counts as unset.
void fill_from_variables(Values& values, const Variables& variable);

std::string trim(std::string_view text);

}  // namespace lockstep::launch
