// The types in the interface of DistributedDataParallel and Reducer: named tensors, buckets for
// communication hooks, times.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/parallel/options.h"

namespace lockstep {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// The argument of a communication hook: one bucket's gradients, local to this rank.
struct Bucket {
  std::size_t index = 0;
  bool is_last = false;
  at::Tensor data;                    // flat; must hold the average when the reduction has finished
  std::vector<at::Tensor> gradients;  // the slots as tensors of the parameters' shapes
  std::vector<at::Tensor> parameters;
};

// A hook's answer: the operation to wait for, and what to do with its result before .grad is used.
struct Reduction {
  Work work{};
  std::function<void()> finish{};
};
using CommHook = std::function<Reduction(World&, const Bucket&)>;

// Host clock, in milliseconds since the step's first gradient.
struct BucketTiming {
  double ready_ms = 0;      // this rank's last gradient of the bucket was written
  double launched_ms = 0;   // the reduction was started
  double completed_ms = 0;  // it had finished (CPU), or was waited for (CUDA)
  std::int64_t bytes = 0;
};
struct StepTiming {
  std::uint64_t step = 0;
  double last_gradient_ms = 0;
  double finalized_ms = 0;
  std::vector<BucketTiming> buckets;
};

struct JoinOptions {
  bool divide_by_initial_world_size = true;  // otherwise by the number of ranks still training
  bool throw_on_early_termination = false;   // every rank throws when the first one runs out
};

}  // namespace lockstep
