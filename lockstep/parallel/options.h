// How a way of training is set: the options of DistributedDataParallel and of FullyShard, and the
// schedules of a Pipeline. They are apart from the classes, so that who chooses among these
// (parallelize.h) need not include them.
//
//   const DdpOptions data{.bucket_cap_mb = 25};
//   const FullyShardOptions shard{.reshard_after_forward = false};
//   const PipelineSchedule schedule = parallel::schedule_named("1F1B");
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

namespace lockstep {

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

// What ranks along "shard" divide. The others' parts of what is not divided are copies.
enum class Shard {
  kState,      // the optimizer's state alone (ZeRO stage 1)
  kGradients,  // and gradients (stage 2)
  kAll,        // and parameters (stage 3)
};

struct FullyShardOptions {
  // With kGradients and kState parameters are whole between uses, too: a step ends with the
  // exchange of the rows that ranks have stepped. kGradients averages gradients as
  // reduce_every_backward says; with kState they are this rank's own and whole until the step,
  // which averages them, so that accumulation communicates once; a rank without a pass adds zeros.
  // There a rank steps blocks of 4096 elements rather than rows, so that the results are those of
  // replicas at any number of ranks; a smaller parameter is the first rank's.
  // Both need `param_dtype` unset, no offload, and one rank along "tensor" and "pipeline".
  Shard shard = Shard::kAll;
  // False: a block stays gathered from forward to backward. Less communication, more memory. With
  // `shard` other than kAll nothing is freed, so that this has no effect.
  bool reshard_after_forward = true;
  // Averages gradients in every backward, so that no rank ever holds all of them. False: until the
  // last one they accumulate whole on each rank, as PyTorch's set_requires_gradient_sync(false) and
  // as with Shard::kState in any case.
  bool reduce_every_backward = true;
  // Copies buffers (BatchNorm statistics) to all ranks: rank 0's at the end of the last backward,
  // and with kState, in the step, those of the first rank that has had a pass.
  bool broadcast_buffers = true;
  // The types in which parameters are gathered and gradients averaged, as those of FSDP2's
  // MixedPrecisionPolicy. Parameters, gradients and state keep their own type and the ranks their
  // exact values; in forward and backward parameters have values that are rounded to
  // `param_dtype`. The type of computation is autocasting's (optim::Autocast). gathered() gives
  // the exact values. Unset: their own type, but nn::Block::products() in the type that they are
  // computed in, by which nothing is lost; `reduce_dtype`: that of `param_dtype`.
  std::optional<c10::ScalarType> param_dtype{};
  std::optional<c10::ScalarType> reduce_dtype{};
  // Keeps rows, their gradients and the optimizer's state in the host's memory, where the optimizer
  // steps, as FSDP2's CPUOffloadPolicy. The device computes. No effect on the CPU. A single rank
  // along "shard" gathers and frees its blocks too.
  bool cpu_offload = false;
};

enum class PipelineSchedule { kGPipe, k1F1B, kInterleaved1F1B };

namespace parallel {

// "GPipe", "1F1B", "Interleaved1F1B", as torchtitan writes them.
const char* name(PipelineSchedule schedule);
PipelineSchedule schedule_named(const std::string& name);  // UsageError for another one

}  // namespace parallel
}  // namespace lockstep
