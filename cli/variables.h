// The environment variables that matter to a rank, each with one line of meaning: what `lockstep
// env` prints and what docs/environment.md must list.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::cli {

struct KnownVariable {
  std::string_view name;
  std::string_view meaning;
  // Listed even when unset; the others are listed only when they are set.
  bool important = false;
};

std::span<const KnownVariable> known_variables();

// Whether `name` belongs to a family that is shown whole (NCCL_*, LOCKSTEP_*, ...).
bool is_shown(std::string_view name);

// Every variable of this process that is known or shown, with its value.
std::map<std::string, std::string> set_variables();

// A line for each LOCKSTEP_ variable of this process that nothing of ours reads, with the name that
// was probably meant.
std::vector<std::string> unread_variables();

}  // namespace lockstep::cli
