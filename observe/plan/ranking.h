// Ranks strategies to train with the same global batch, fastest first.
//
//   for (const Strategy& strategy : rank_strategies(training, machine, 4))
//     print(strategy.choice.batch, strategy.step->total_s(), strategy.settings);
//
// A Strategy has a number of GPUs (some may stay idle), what they share of the model, a micro-batch
// with its accumulation, and whether activations are checkpointed and products computed in a half
// type or in fp8. Among micro-batches within a hundredth of the least time, the file's is taken, or
// else the smallest, which leaves memory for a longer batch.
//
// Values and functions without state; call from any thread.
#pragma once

#include <string>
#include <vector>

#include "observe/plan/strategy.h"

namespace lockstep::plan {

// A key of the training file and its value: {"per_device_train_batch_size", "32"}.
struct Setting {
  std::string key;
  std::string value;
  bool operator==(const Setting&) const = default;
};

struct Strategy : Timed {
  bool checkpointing = false;
  bool half = false;
  bool fp8 = false;
  std::vector<Setting> settings{};  // that differ from the file's; empty: it is as written
  bool measured = false;            // step and run_bytes are those of a run
  std::string disturbance{};        // what other programs did during that run
  std::uint64_t run_bytes = 0;
  StepTime estimate{};

  std::uint64_t memory_bytes() const { return measured ? run_bytes : choice.memory.total(); }
};

// Strategies that fit, on up to `gpus` GPUs. Nothing where the speed is not known.
std::vector<Strategy> rank_strategies(const Training& training, const Machine& machine, int gpus);

// The results of a few measured steps of a strategy.
struct Measurement {
  Parts parts{};
  std::int64_t batch = 1;
  std::int64_t accumulation = 1;
  bool checkpointing = false;
  bool half = false;
  bool fp8 = false;
  double step_s = 0;
  std::uint64_t memory_bytes = 0;  // of a device, at the peak
  double tokens = 0;               // of a sample, as computed; 0: as many as planned
  std::string disturbance{};       // "other programs used 1.0 of the 2 cores"; empty: none

  bool is_of(const Strategy& strategy) const;
  bool is_like(const Measurement& other) const;  // of the same strategy
  bool operator==(const Measurement&) const = default;
};
Measurement measurement_of(const Strategy& strategy, double step_s, std::uint64_t memory_bytes);

// Replaces estimates by measurements, scales the other estimates by the median ratio of a measured
// time to its estimate, and ranks the strategies again. If measured samples were shorter than
// planned, the lengths of all strategies are reduced.
void use_measurements(std::vector<Strategy>& strategies, const Training& training,
                      const std::vector<Measurement>& measurements);

// The choice of elastic_gpu: choose() with the fastest micro-batch for this many data-parallel
// ranks, which may exceed the file's. On CPUs, and if nothing fits, choose() unchanged.
Choice fastest_batch(const Training& training, const Card& card, int ranks);

}  // namespace lockstep::plan
