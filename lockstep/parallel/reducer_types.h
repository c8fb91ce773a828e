// The types in the interface of DistributedDataParallel and Reducer: options, named tensors,
// buckets for communication hooks, times.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"

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

// Options of DistributedDataParallel, with PyTorch's names and meanings.
struct DistributedDataParallelOptions {
  // MiB per bucket. Unset: 25 with a first bucket of 1, so that communication starts early (without
  // overlap no bucket is under 4); a value given here holds for every bucket, as in PyTorch.
  std::optional<double> bucket_cap_mb{};
  // Allows parts of the model to stay unused in a step. Costs a walk of the graph per backward.
  bool find_unused_parameters = false;
  // Promises that every step uses the same parameters the same number of times.
  bool static_graph = false;
  // .grad lies in the bucket: no copy back after the reduction.
  bool gradient_as_bucket_view = true;
  // Copy rank 0's buffers (BatchNorm statistics) to all ranks at the end of a synchronised
  // backward.
  bool broadcast_buffers = true;
  // Copy rank 0's parameters and buffers to all ranks at construction.
  bool init_sync = true;
  // Parameters and buffers that are left alone, by qualified name ("head.weight").
  std::vector<std::string> ignored_parameters{};
  // Parameters whose gradients are sparse. Embeddings made with sparse(true) are found without it.
  std::vector<std::string> sparse_parameters{};
  // Reduce buckets while backward still runs. Unset: unless the ranks of one host share memory and
  // fill its cores, where they would only take turns. Then one large reduction follows backward.
  std::optional<bool> overlap{};
  // Keep the reducer working in a world of one; for measuring what it costs.
  bool force_reducer = false;
};
using DdpOptions = DistributedDataParallelOptions;

struct JoinOptions {
  bool divide_by_initial_world_size = true;  // otherwise by the number of ranks still training
  bool throw_on_early_termination = false;   // every rank throws when the first one runs out
};

}  // namespace lockstep
