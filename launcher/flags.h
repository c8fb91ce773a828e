// Parses torchrun's command line into a LaunchPlan.
//
// One table lists every flag, its value and meaning, and whether it is honoured, ignored with a
// note, or refused. Parsing, --help and the test against torchrun's help text all use that table. A
// flag takes precedence over its PET_<NAME> variable, which takes precedence over the file of
// --config-file. Arguments after the program are not parsed.
//
// Not parsed by CLI11, because torchrun's grammar is argparse's: a unique prefix of a flag is
// enough, dashes may be underscores, and everything after the program belongs to the program.
// arguments.cpp turns arguments into texts under the names of the table; flags.cpp interprets them.
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

#include "launcher/host.h"
#include "launcher/plan.h"
#include "lockstep/core/document.h"
#include "lockstep/core/problems.h"

namespace lockstep::launch {

enum class Treatment { kHonoured, kIgnored, kRefused };

struct FlagSpec {
  std::string_view name;        // "nproc-per-node"; underscores are accepted for the dashes
  std::string_view value_name;  // "N|auto|cpu|gpu"; empty: a switch
  std::string_view help;        // for an ignored or refused flag, the reason
  bool torchrun = true;         // false: torchrun does not have it
  char letter = '\0';           // 'r' for -r
  Treatment treatment = Treatment::kHonoured;
  std::string_view optional_value = "";  // "[=PORT]": a switch that may have a value after '='

  bool is_switch() const { return value_name.empty(); }
  std::string variable() const;  // "PET_NPROC_PER_NODE"
};

std::span<const FlagSpec> flag_table();

// The flags that `name`, with dashes, may mean: one for a flag's name and for a prefix that is
// unique here or in torchrun.
std::vector<const FlagSpec*> flags_named(std::string_view name);

// What to write instead of another launcher's flag, such as "num_processes"; empty if it is none.
std::string_view hint_for_flag(const std::string& name);

std::string run_help();  // for `lockstep run --help`

// A value and where it came from, for messages: "--nnodes", "-r" or "PET_NNODES".
struct Given {
  std::string text;
  std::string origin;
};

// The given values, by the flags' names in the table.
class Values {
 public:
  void set(const FlagSpec& flag, std::string text, std::string origin);
  const Given* find(const std::string& name) const;
  bool has(const std::string& name) const { return find(name) != nullptr; }
  std::string text(const std::string& name, std::string fallback) const;
  bool is_on(const std::string& name) const { return text(name, "0") == "1"; }

  // Throw UsageError naming the origin, the text and the accepted range.
  int number(const std::string& name, int fallback, int min, int max) const;
  std::chrono::milliseconds seconds(const std::string& name, std::chrono::milliseconds fallback,
                                    double min_s) const;

 private:
  std::map<std::string, Given> values_;
};

struct GivenArguments {
  bool help = false;  // nothing else counts then
  Values values;
  std::vector<std::string> program;  // the first argument that is not a flag, and all after it
};

// Reads the command line. Values of long flags follow after '=' or as the next argument; letters
// may be joined (-mr3) and their value may follow directly.
//
//   GivenArguments given = read_arguments({"--nproc=2", "-mr3", "train"});
//   given.values.number("nproc-per-node", 1, 1, 4096);   // 2
GivenArguments read_arguments(const std::vector<std::string>& args);

// Adds PET_ variables for flags that were not given. An empty variable counts as unset.
void fill_from_variables(Values& values, const Variables& variable);

std::optional<int> to_int(std::string_view text);  // none unless the whole text is a number

// The machine and environment that parsing depends on; the defaults are the real ones.
struct LaunchContext {
  Variables variable = process_variables();
  std::function<int()> cores = allowed_cores;
  std::function<Gpus()> gpus = [] { return find_gpus(); };
  // The keys of the training file, so that an error says where one in --config-file belongs.
  std::vector<std::string> training_keys{};
};

struct ParsedFlags {
  bool help = false;  // the plan is empty then
  LaunchPlan plan;
  std::vector<std::string> notes;  // a line for each flag that is ignored or deserves a remark
};

// Throws UsageError naming the flag or variable and its value, and for a typo the nearest flag.
ParsedFlags parse_flags(const std::vector<std::string>& args, const LaunchContext& context = {});

// ---------------------------------------------------------------- Accelerate's file
//
// Accelerate's YAML file (default_config.yaml) becomes the flags that a user could have typed, and
// the variables that `accelerate launch` would have set. So only parse_flags() interprets them, and
// flags on the command line take precedence. In accelerate_config.cpp.
//
//   AccelerateLaunch launch = load_accelerate_config("ddp_config.yaml");
//   // launch.flags: {"--nproc-per-node=2"}; launch.environment: ACCELERATE_MIXED_PRECISION=bf16

struct AccelerateLaunch {
  std::vector<std::string> flags;                  // those of the command line take precedence
  std::map<std::string, std::string> environment;  // of the ranks, unless already set
  std::vector<std::string> notes;                  // about keys that have no effect here
  std::string gpu_key;  // "acc.yaml:3:19: distributed_type is MULTI_GPU": ranks need GPUs
};

// Throws UsageError with every mistake on a line of its own: unknown keys with the nearest name,
// keys that belong in the training file, wrong types and ranges, and what this launcher does not
// support (DeepSpeed, TPUs, SageMaker, fp8).
// `training_keys`: the keys of the training file, which this layer cannot include; without them
// such a key is unknown. `problems`: those of load_document().
AccelerateLaunch read_accelerate_config(const Node& document,
                                        const std::vector<std::string>& training_keys = {},
                                        Problems problems = {});
// The file at `path`, read and translated.
AccelerateLaunch load_accelerate_config(const std::string& path,
                                        const std::vector<std::string>& training_keys = {});

// All keys of the file.
std::vector<std::string> launcher_keys();

}  // namespace lockstep::launch
