#include "lockstep/parallel/comm_hooks.h"

#include <ATen/ATen.h>

namespace lockstep::hooks {
namespace {

// Divide before the sum, as PyTorch does: a sum of halves could overflow where their mean does not.
CommHook compress(at::ScalarType wire) {
  return [wire](World& world, const Bucket& bucket) -> Reduction {
    at::Tensor small = bucket.data.to(wire).div_(world.size());
    Work work = world.all_reduce(small);
    return {work, [small, data = bucket.data]() mutable { data.copy_(small); }};
  };
}

}  // namespace

CommHook all_reduce() {
  return [](World& world, const Bucket& bucket) -> Reduction {
    return {world.all_reduce(bucket.data, ReduceOp::kAvg), nullptr};
  };
}

CommHook fp16_compress() {
  return compress(at::kHalf);
}
CommHook bf16_compress() {
  return compress(at::kBFloat16);
}

}  // namespace lockstep::hooks
