// What `lockstep bench ablation` needs from torch: a fused optimizer step beside an unfused one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::bench {

struct OptimizerTimes {
  double fused_ms = 0;
  double unfused_ms = 0;
};

struct OptimizerQuestion {
  std::vector<std::vector<std::int64_t>> shapes{};  // of the parameters
  std::string optim = "adamw";                      // or adam, sgd
  std::string device = "cpu";
  int threads = 1;
};

// Medians of a step of lockstep::optim's and of torch::optim's, measured in turn, on parameters of
// these shapes. Both are compared first: Error when they move the parameters differently.
OptimizerTimes optimizer_times(const OptimizerQuestion& question);

}  // namespace lockstep::bench
