// The flags of `lockstep run`: what each is called, takes and means.
//
//   for (const FlagSpec& flag : flag_table()) print(flag.name, flag.help);
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace lockstep::launch {

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

}  // namespace lockstep::launch
