// Every way to train with the same global batch, the fastest first.
//
//   for (const Way& way : rank_ways(training, machine, 4))
//     print(way.choice.batch, way.step->total_s(), way.settings);
//
// A way has a number of GPUs (some may stay idle), a strategy, a micro-batch with its accumulation,
// and may checkpoint activations or compute in a half type where the file does neither. Of its
// micro-batches it has the smallest that is within a hundredth of the fastest: memory is left free
// for a longer batch.
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
  std::vector<Setting> settings{};  // what the file does not say; empty: it is as written
};

// Ways that fit, on up to `gpus` GPUs. Nothing where the speed is not known.
std::vector<Way> rank_ways(const Training& training, const Machine& machine, int gpus);

// What elastic_gpu sets: the fastest micro-batch for so many data-parallel ranks, larger than the
// file's too. choose() where nothing fits, and on CPUs.
Choice fastest_batch(const Training& training, const Card& card, int ranks);

}  // namespace lockstep::plan
