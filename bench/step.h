// What the two sides of `lockstep bench step` agree on: the parent starts the job and prints, the
// ranks verify and measure.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

namespace lockstep::bench {

// The contenders: what happens between backward and the next forward.
struct Tail {
  const char* key;   // in options and files
  const char* name;  // in tables
};
inline constexpr Tail kFused{"fused", "ShardedOptimizer on shm"};
inline constexpr Tail kReplicated{"replicated", "shm zero-copy all-reduce + AdamW"};
inline constexpr Tail kGloo{"gloo", "gloo all-reduce + ATen's fused AdamW"};
inline constexpr Tail kAlone{"alone", "ATen's fused AdamW alone, no communication"};
inline constexpr Tail kTails[] = {kFused, kReplicated, kGloo, kAlone};

// What the machine allows for a fused step without clipping (limits.h); the slower one is the
// limit.
inline constexpr Tail kMemory{"memory", "limit: a rank's share of the bytes, plain loop"};
inline constexpr Tail kArithmetic{"arithmetic", "limit: a rank's share of AdamW, in cache"};

struct StepSettings {
  int ranks = 2;
  std::int64_t params = 32'000'000;
  bool clip = false;
  int rounds = 20;
  double seconds = 60;  // no further round begins after this
  std::string corrupt;  // the key of a contender that is to get a wrong gradient
};

inline std::vector<Tail> tails_of(const StepSettings& settings) {
  std::vector<Tail> tails(std::begin(kTails), std::end(kTails));
  if (!settings.clip) tails.insert(tails.end(), {kMemory, kArithmetic});
  return tails;
}

// Never fewer, however slow the machine is.
inline constexpr int kFewestRounds = 3;

}  // namespace lockstep::bench
