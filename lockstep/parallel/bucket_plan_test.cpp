#include "lockstep/parallel/bucket_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace lockstep::parallel {
namespace {

constexpr std::int64_t kKi = 1 << 10;

std::vector<ParameterInfo> floats(std::initializer_list<std::int64_t> numels) {
  std::vector<ParameterInfo> infos;
  for (const auto n : numels) infos.push_back({.numel = n});
  return infos;
}

TEST(BucketPlan, FirstBucketIsSmall) {
  const auto infos = floats({1024, 1024, 1024, 1024});  // 4 KiB each
  const auto plan =
      plan_buckets(infos, reverse_order(4), {.first_cap_bytes = 4 * kKi, .cap_bytes = 8 * kKi});
  ASSERT_EQ(plan.size(), 3u);
  EXPECT_EQ(plan[0].slots.size(), 1u);
  EXPECT_EQ(plan[0].slots[0].parameter, 3u);
  EXPECT_EQ(plan[1].slots.size(), 2u);
  EXPECT_EQ(plan[2].slots[0].parameter, 0u);
}

TEST(BucketPlan, DefaultsAreThoseOfPyTorch) {
  EXPECT_EQ(BucketLimits{}.cap_bytes, 25 * kKi * kKi);
  EXPECT_EQ(BucketLimits{}.first_cap_bytes, kKi * kKi);
}

TEST(BucketPlan, OneDtypeAndDevicePerBucketInOrderOfCompletion) {
  auto infos = floats({8, 8, 8, 8});
  infos[1].dtype = c10::kDouble;
  infos[3].dtype = c10::kDouble;
  const auto plan = plan_buckets(infos, reverse_order(4));
  ASSERT_EQ(plan.size(), 2u);
  EXPECT_EQ(plan[0].dtype, c10::kDouble);  // completed by parameter 1, before parameter 0
  EXPECT_EQ(plan[1].dtype, c10::kFloat);
  infos[2].device = c10::Device(c10::kCUDA, 0);
  EXPECT_EQ(plan_buckets(infos, reverse_order(4)).size(), 3u);
}

TEST(BucketPlan, SlotsAreAligned) {
  const auto plan = plan_buckets(floats({3, 5, 17}), {0, 1, 2});
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].slots[1].offset, 16);
  EXPECT_EQ(plan[0].slots[2].offset, 32);
  EXPECT_EQ(plan[0].numel, 64);
}

TEST(BucketPlan, EmptyAndZeroSized) {
  EXPECT_TRUE(plan_buckets({}, {}).empty());
  const auto plan = plan_buckets(floats({0, 4}), {0, 1});
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].slots.size(), 2u);
}

// Whatever the sizes and the order: every parameter exactly once, no overlap, caps respected.
TEST(BucketPlan, PropertiesHoldForRandomModels) {
  std::mt19937 random(7);
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 300; ++round) {
    std::vector<ParameterInfo> infos(static_cast<std::size_t>(1 + pick(40)));
    for (auto& info : infos) {
      info.numel = pick(3000);
      info.dtype = pick(3) == 0 ? c10::kBFloat16 : c10::kFloat;
    }
    auto order = reverse_order(infos.size());
    std::shuffle(order.begin(), order.end(), random);
    const BucketLimits limits{.first_cap_bytes = 1 + pick(4000), .cap_bytes = 1 + pick(20000)};
    std::set<std::size_t> seen;
    const auto plan = plan_buckets(infos, order, limits);
    for (const auto& bucket : plan) {
      std::int64_t end = 0;
      std::int64_t bytes_before_last = 0;
      for (const auto& slot : bucket.slots) {
        const auto& info = infos[slot.parameter];
        EXPECT_TRUE(seen.insert(slot.parameter).second);
        EXPECT_EQ(info.dtype, bucket.dtype);
        EXPECT_GE(slot.offset, end);
        const auto element = static_cast<std::int64_t>(c10::elementSize(info.dtype));
        EXPECT_EQ(slot.offset * element % limits.alignment_bytes, 0);
        end = slot.offset + info.numel;
        if (&slot != &bucket.slots.back()) bytes_before_last += info.numel * element;
      }
      EXPECT_LE(end, bucket.numel);
      if (bucket.slots.size() > 1) {
        EXPECT_LT(bytes_before_last, std::max(limits.first_cap_bytes, limits.cap_bytes));
      }
    }
    EXPECT_EQ(seen.size(), infos.size());
  }
}

TEST(BucketPlan, ASmallRestIsJoinedToTheLastBucketOfItsKind) {
  auto infos = floats({100, 1024, 1024, 1024});  // 4 KiB each but the last to come
  const BucketLimits limits{.first_cap_bytes = 8 * kKi, .cap_bytes = 8 * kKi, .min_bytes = 5 * kKi};
  const auto plan = plan_buckets(infos, reverse_order(4), limits);
  ASSERT_EQ(plan.size(), 1u);
  ASSERT_EQ(plan[0].slots.size(), 4u);
  EXPECT_EQ(plan[0].slots[2].offset, 2048);
  EXPECT_EQ(plan[0].slots[3].offset, 3072);
  EXPECT_EQ(plan[0].numel, 3072 + 112);
  // Another dtype has no bucket to go to.
  infos[0].dtype = c10::kDouble;
  EXPECT_EQ(plan_buckets(infos, reverse_order(4), limits).size(), 2u);
}

}  // namespace
}  // namespace lockstep::parallel
