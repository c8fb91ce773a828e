// The first half of parsing: arguments and PET_ variables become texts under the names of the table
// (flag_table.h). What they mean is decided in flags.cpp.
//
// Written by hand, not with CLI11, because torchrun's grammar is argparse's: flags by any unique
// prefix, in either spelling, and everything after the program belongs to the program.
//
//   GivenArguments given = read_arguments({"--nproc=2", "-mr3", "train"});
//   given.values.number("nproc-per-node", 1, 1, 4096);   // 2
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/host.h"

namespace lockstep::launch {

// The flags of `lockstep run`: what each is called, takes and means.
//
//   for (const FlagSpec& flag : flag_table()) print(flag.name, flag.help);

enum class Treatment { kHonoured, kIgnored, kRefused };

struct FlagSpec {
  std::string_view name;        // "nproc-per-node"; underscores are accepted for the dashes
  std::string_view value_name;  // "N|auto|cpu|gpu"; empty: a switch
  std::string_view help;        // for an ignored or refused flag: why
  bool torchrun = true;         // false: only ours
  char letter = '\0';           // 'r' for -r
  Treatment treatment = Treatment::kHonoured;
  std::string_view optional_value = "";  // "[=PORT]": a switch that may have one, after '='

  bool is_switch() const { return value_name.empty(); }
  std::string variable() const;  // "PET_NPROC_PER_NODE"
};

std::span<const FlagSpec> flag_table();

// What a command line asks for.
enum class Request { kRun, kHelp, kListFlags };

std::string run_help();   // for `lockstep run --help`
std::string flag_list();  // one line a flag, "--name treatment value|switch": for tests and shells

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

std::optional<int> to_int(std::string_view text);  // the whole text or nothing

}  // namespace lockstep::launch
