// What the two sides of `lockstep bench step` agree on: the parent starts the job and prints, the
// ranks verify and measure.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::bench {

// The contenders: what happens between backward and the next forward.
struct Tail {
  const char* key;   // in options and files
  const char* name;  // in tables
};
inline constexpr Tail kFused{"fused", "ShardedOptimizer on shm"};
inline constexpr Tail kReplicated{"replicated", "shm zero-copy all-reduce + AdamW"};
inline constexpr Tail kGloo{"gloo", "gloo all-reduce + AdamW"};
inline constexpr Tail kAlone{"alone", "AdamW alone, no communication"};
inline constexpr Tail kTails[] = {kFused, kReplicated, kGloo, kAlone};

struct StepSettings {
  int ranks = 2;
  std::int64_t params = 32'000'000;
  bool clip = false;
  int rounds = 20;
  double seconds = 60;  // no further round begins after this
  std::string corrupt;  // the key of a contender that is to get a wrong gradient
};

// Not fewer, however slow the machine is.
inline constexpr int kFewestRounds = 3;

}  // namespace lockstep::bench
