// What the sides of `lockstep bench train` agree on. The parent writes the start (weights and
// tokens), starts the contenders' ranks and gives them orders in turn; see crew.h.
//
// Orders to a rank, and its answer:
//   new                          a model with the start's weights and a fresh optimizer: "ok"
//   run BATCH STEPS own|same     train on the rank's own tokens, or all ranks on rank 0's:
//                                "SECONDS IDLE_CPU_S IDLE_S LOSS LOSS ...", a loss per step, idle
//                                being the time since the last answer
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/small_gpt.h"

namespace lockstep::bench {

// The contenders.
inline constexpr const char* kOurs = "ours";      // DDP and ShardedOptimizer on shm
inline constexpr const char* kSilent = "alone";   // ranks that do not communicate
inline constexpr const char* kCached = "cached";  // as alone, with the memory cache of run()
inline constexpr const char* kMet = "met";        // as cached, with a barrier after every step
inline constexpr const char* kPython = "python";  // PyTorch's DDP over gloo
inline constexpr double kLearningRate = 3e-4;

struct TrainSettings {
  int ranks = 2;
  GptShape shape;
  std::vector<int> batches{1, 2, 4, 8};
  int steps = 10;        // per block
  int rounds = 12;       // blocks of each contender and batch size, at most
  double seconds = 240;  // for all batch sizes together
  bool python = true;
  bool cached = false, met = false;
  std::string corrupt;  // a contender that is to train with another learning rate
};

}  // namespace lockstep::bench
