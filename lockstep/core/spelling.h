// "Did you mean": the known name nearest to a mistyped one.
//
//   throw UsageError("config", "there is no key '{}'.{}", key, did_you_mean(key, known));
//
// Free functions without state; call them from any thread.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

// Insertions, deletions, changes and swaps of neighbours, which are the commonest slip.
std::size_t edit_distance(std::string_view a, std::string_view b);

// The candidate with the smallest distance, when it is near enough to be what was meant: at most a
// third of its letters, and two for short ones.
std::optional<std::string> nearest(std::string_view word, std::span<const std::string> candidates);

// " Did you mean warmup_steps?", or nothing. `prefix` stands before the candidate.
std::string did_you_mean(std::string_view word, std::span<const std::string> candidates,
                         std::string_view prefix = "");

}  // namespace lockstep
