// Which parameter's gradient lies in which bucket, as a pure function.
//
// Buckets are filled in the order gradients become ready, so that a bucket is complete early and
// its reduction overlaps the rest of backward. A bucket holds one dtype on one device, and a sparse
// parameter gets no slot. The plan depends only on what is passed in, so ranks that agree on the
// parameters and the order agree on the plan.
//
//   auto buckets = plan_buckets(parameters, reverse_order(n), {.first_cap_bytes = 1 << 20});
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::parallel {

struct ParameterInfo {
  std::int64_t numel = 0;
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::kCPU;
};

struct BucketLimits {
  std::int64_t first_cap_bytes = 1 << 20;  // small, so that communication starts early
  std::int64_t cap_bytes = 25 << 20;
  std::int64_t min_bytes = 0;         // a last bucket below this is joined to the one before it
  std::int64_t alignment_bytes = 64;  // of each slot within its bucket
};

struct Slot {
  std::size_t parameter = 0;  // index into the parameter list
  std::int64_t offset = 0;    // in elements
};

struct BucketPlan {
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::kCPU;
  std::int64_t numel = 0;  // padding included
  std::vector<Slot> slots;
};

// Buckets in launch order: by the position, in `order`, of the parameter that completes them.
// `order` lists parameter indices in the expected order of readiness; indices skipped get no slot.
std::vector<BucketPlan> plan_buckets(const std::vector<ParameterInfo>& parameters,
                                     const std::vector<std::size_t>& order,
                                     const BucketLimits& limits = {});

// n-1, ..., 0: the order of readiness before anything was observed.
std::vector<std::size_t> reverse_order(std::size_t n);

}  // namespace lockstep::parallel
