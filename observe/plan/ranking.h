// Every way to train with the same global batch, the fastest first.
//
//   for (const Way& way : rank_ways(training, machine, 4))
//     print(way.choice.batch, way.step->total_s(), way.settings);
//
// A way has a number of GPUs (some may stay idle), a strategy, a micro-batch with its accumulation,
// and may checkpoint activations or compute in a half type where the file does neither. Of its
// micro-batches it has the file's where that is within a hundredth of the fastest, or the smallest
// that is: memory is left free for a longer batch.
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

struct Way : Timed {
  bool checkpointing = false;
  bool half = false;
  bool fp8 = false;
  std::vector<Setting> settings{};  // what the file does not say; empty: it is as written
  bool measured = false;            // step and memory are those of a run
  std::string disturbance{};        // of that run

  std::uint64_t memory_bytes() const { return measured ? run_bytes : choice.memory.total(); }
  std::uint64_t run_bytes = 0;
  StepTime estimate{};
};

// Ways that fit, on up to `gpus` GPUs. Nothing where the speed is not known.
std::vector<Way> rank_ways(const Training& training, const Machine& machine, int gpus);

// What a few steps of a way have shown.
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

  bool is_of(const Way& way) const;
  bool is_like(const Measurement& other) const;  // of the same way
  bool operator==(const Measurement&) const = default;
};
Measurement measurement_of(const Way& way, double step_s, std::uint64_t memory_bytes);

// Puts what was measured in place of the estimates, scales the times of the others by what those
// took over their estimates, and ranks them again. Where samples were shorter than planned, so are
// the others'.
void use_measurements(std::vector<Way>& ways, const Training& training,
                      const std::vector<Measurement>& measurements);

// What elastic_gpu sets: the fastest micro-batch for so many data-parallel ranks, larger than the
// file's too. choose() where nothing fits, and on CPUs.
Choice fastest_batch(const Training& training, const Card& card, int ranks);

}  // namespace lockstep::plan
