#include "lockstep/parallel/bucket_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::parallel {
namespace {

struct OpenBucket {
  BucketPlan plan;
  std::int64_t bytes = 0;
  std::size_t last_position = 0;
};

// What is left over at the end, joined to the last full bucket of its kind where it is too small.
void join_small(OpenBucket rest, std::vector<OpenBucket>& closed, std::int64_t min_bytes) {
  const auto same_kind = [&](const OpenBucket& bucket) {
    return bucket.plan.dtype == rest.plan.dtype && bucket.plan.device == rest.plan.device;
  };
  const auto last = std::find_if(closed.rbegin(), closed.rend(), same_kind);
  if (rest.bytes >= min_bytes || last == closed.rend()) {
    closed.push_back(std::move(rest));
    return;
  }
  for (const Slot& slot : rest.plan.slots)
    last->plan.slots.push_back({slot.parameter, last->plan.numel + slot.offset});
  last->plan.numel += rest.plan.numel;
  last->bytes += rest.bytes;
  last->last_position = rest.last_position;
}

std::int64_t round_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace

std::vector<std::size_t> reverse_order(std::size_t n) {
  std::vector<std::size_t> order(n);
  for (std::size_t i = 0; i < n; ++i) order[i] = n - 1 - i;
  return order;
}

std::vector<BucketPlan> plan_buckets(const std::vector<ParameterInfo>& parameters,
                                     const std::vector<std::size_t>& order,
                                     const BucketLimits& limits) {
  using Kind = std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  std::map<Kind, OpenBucket> open;
  std::vector<OpenBucket> closed;
  for (std::size_t position = 0; position < order.size(); ++position) {
    LOCKSTEP_ASSERT(order[position] < parameters.size());
    const ParameterInfo& info = parameters[order[position]];
    const auto element = static_cast<std::int64_t>(c10::elementSize(info.dtype));
    const Kind kind{info.dtype, info.device.type(), info.device.index()};
    OpenBucket& bucket = open[kind];
    bucket.plan.dtype = info.dtype;
    bucket.plan.device = info.device;
    bucket.plan.slots.push_back({order[position], bucket.plan.numel});
    bucket.plan.numel += round_up(info.numel * element, limits.alignment_bytes) / element;
    bucket.bytes += info.numel * element;
    bucket.last_position = position;
    const std::int64_t cap = closed.empty() ? limits.first_cap_bytes : limits.cap_bytes;
    if (bucket.bytes >= cap) {
      closed.push_back(std::move(bucket));
      open.erase(kind);
    }
  }
  for (auto& [kind, bucket] : open) join_small(std::move(bucket), closed, limits.min_bytes);
  std::stable_sort(closed.begin(), closed.end(), [](const OpenBucket& a, const OpenBucket& b) {
    return a.last_position < b.last_position;
  });
  std::vector<BucketPlan> plans;
  plans.reserve(closed.size());
  for (auto& bucket : closed) plans.push_back(std::move(bucket.plan));
  return plans;
}

}  // namespace lockstep::parallel
