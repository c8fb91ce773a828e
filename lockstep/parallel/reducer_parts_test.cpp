// The parts of the reducer, each alone: no test here runs a backward.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <random>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/parallel/bucket_set.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/pass_state.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::parallel {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_threads;
using Order = std::vector<std::size_t>;

constexpr BucketLimits kOneEach{.first_cap_bytes = 1, .cap_bytes = 1};

at::Tensor trained(at::IntArrayRef sizes) {
  return at::randn(sizes).set_requires_grad(true);
}

ModelTensors model_of(std::vector<at::Tensor> tensors, const DdpOptions& options = {}) {
  std::vector<NamedTensor> named;
  for (auto& tensor : tensors) named.push_back({fmt::format("p{}", named.size()), tensor});
  return {std::move(named), {}, options};
}

std::vector<ParameterForm> forms_of(const ModelTensors& model) {
  std::vector<ParameterForm> forms;
  for (const auto& p : model.parameters()) forms.push_back(p.form());
  return forms;
}

void set_gradient(BucketSet& buckets, const ModelTensors& model, std::size_t i, at::Tensor value) {
  model[i].tensor.mutable_grad() = std::move(value);
  buckets.store(i, at::Tensor(), /*sync=*/true);
}

// ---------------------------------------------------------------- BucketSet

TEST(BucketSet, SlotsLieInTheirBucketsInTheParametersOwnOrderOfElements) {
  World alone;
  const auto image = at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto model = model_of(
      {trained({3, 5}), at::Tensor(image).set_requires_grad(true), trained({7}), at::zeros({4})});
  BucketSet buckets(alone, model, /*views=*/true);
  buckets.lay_out(forms_of(model), {2, 1, 0}, {.first_cap_bytes = 1, .cap_bytes = 1 << 20});
  ASSERT_EQ(buckets.size(), 2u);
  EXPECT_EQ(buckets.bucket_of(2), 0u);
  EXPECT_EQ(buckets.bucket_of(1), 1u);
  EXPECT_EQ(buckets.bucket_of(0), 1u);
  EXPECT_EQ(buckets.bucket_of(3), kNoBucket);
  EXPECT_FALSE(buckets.slot(3).defined());
  EXPECT_EQ(buckets[0].wire.numel(), buckets[0].flat.numel() + 1) << "the change flag";
  EXPECT_EQ(buckets[1].wire.numel(), buckets[1].flat.numel());
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(buckets.slot(i).sizes(), model[i].tensor.sizes());
    EXPECT_EQ(buckets.slot(i).strides(), model[i].tensor.strides());
    buckets.slot(i).fill_(static_cast<float>(i + 1));
  }
  // Every element of every slot is in its bucket, and in no other slot.
  for (const std::size_t b : {0u, 1u})
    for (const auto& [parameter, offset] : buckets[b].slots)
      EXPECT_TRUE(buckets[b]
                      .flat.narrow(0, offset, model[parameter].tensor.numel())
                      .eq(static_cast<float>(parameter + 1))
                      .all()
                      .item<bool>());
}

TEST(BucketSet, AnotherLayoutTakesGradientsAlong) {
  for (const int ranks : {1, 2}) {  // in memory of their own, and shared
    run_threads(ranks, [](World& world) {
      const auto model = model_of({trained({300}), trained({20, 3}), trained({64}), trained({1})});
      BucketSet buckets(world, model, /*views=*/true);
      buckets.lay_out(forms_of(model), {3, 2, 1, 0}, kOneEach);
      std::vector<at::Tensor> held, values;
      for (std::size_t i = 0; i < 3; ++i) {
        values.push_back(at::randn(model[i].tensor.sizes()));
        set_gradient(buckets, model, i, values[i].clone());
        held.push_back(model[i].tensor.grad());
        EXPECT_TRUE(held[i].is_same(buckets.slot(i)));
      }
      const void* const before = held[0].const_data_ptr();
      for (const Order& order : {Order{0, 2, 1, 3}, Order{1, 3, 0, 2}, Order{3, 2, 1, 0}}) {
        buckets.lay_out(forms_of(model), order, {});
        ASSERT_EQ(buckets.size(), 1u);
        for (std::size_t i = 0; i < 3; ++i) {
          EXPECT_TRUE(model[i].tensor.grad().is_same(held[i])) << "for everyone who holds it";
          EXPECT_TRUE(held[i].is_same(buckets.slot(i)));
          EXPECT_TRUE(held[i].is_alias_of(buckets[0].flat));
          EXPECT_TRUE(at::equal(held[i], values[i]));
        }
        EXPECT_FALSE(model[3].tensor.grad().defined());
      }
      EXPECT_NE(held[0].const_data_ptr(), before);
    });
  }
}

TEST(BucketSet, AGradientWithoutASlotLeavesTheOldMemory) {
  World alone;
  const auto model = model_of({trained({30}), trained({40}), trained({50})});
  BucketSet buckets(alone, model, /*views=*/true);
  buckets.lay_out(forms_of(model), {2, 1, 0}, {});
  std::vector<at::Tensor> values;
  for (std::size_t i = 0; i < 3; ++i) {
    values.push_back(at::randn(model[i].tensor.sizes()));
    set_gradient(buckets, model, i, values[i].clone());
  }
  const at::Tensor old = buckets[0].flat;
  auto forms = forms_of(model);
  forms[1].dtype = at::kDouble;        // moved since; .grad is of the old type
  buckets.lay_out(forms, {2, 1}, {});  // and the first was frozen
  EXPECT_FALSE(buckets.slot(0).defined());
  EXPECT_EQ(buckets.slot(1).scalar_type(), at::kDouble);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(model[i].tensor.grad(), values[i]));
    EXPECT_FALSE(model[i].tensor.grad().is_alias_of(old));
    EXPECT_EQ(model[i].tensor.grad().is_same(buckets.slot(i)), i == 2);
  }
}

TEST(BucketSet, StoresAsByCopying) {
  World alone;
  const std::int64_t streamed = (9 << 20) / 4 + 3;  // past the cache, and cut by threads
  for (const std::int64_t numel : {std::int64_t{1}, std::int64_t{1'000}, streamed}) {
    const auto model = model_of({trained({numel}), trained({3, 3}), trained({0})});
    BucketSet buckets(alone, model, /*views=*/false);
    buckets.lay_out(forms_of(model), {2, 1, 0}, {});
    const int threads = at::get_num_threads();
    for (const int n : {1, 3}) {
      at::set_num_threads(n);
      const auto value = at::randn({numel + 5}).narrow(0, 5, numel);  // not aligned
      const auto version = buckets.slot(0)._version();
      set_gradient(buckets, model, 0, value);
      EXPECT_TRUE(at::equal(buckets.slot(0), value)) << numel;
      EXPECT_GT(buckets.slot(0)._version(), version);
      EXPECT_TRUE(model[0].tensor.grad().is_same(value)) << ".grad is its own";
    }
    at::set_num_threads(threads);
    const auto other_layout = at::randn({3, 3}).t();
    set_gradient(buckets, model, 1, other_layout);
    EXPECT_TRUE(at::equal(buckets.slot(1), other_layout));
    set_gradient(buckets, model, 2, at::empty({0}));
    set_gradient(buckets, model, 1, at::Tensor());
    EXPECT_TRUE(at::equal(buckets.slot(1), at::zeros({3, 3}))) << "an undefined gradient is zero";
  }
}

TEST(BucketSet, WhatNoRankUsedStaysBitByBit) {
  World alone;
  for (const bool views : {true, false}) {
    const auto model = model_of({trained({5}), trained({6}), trained({7})});
    BucketSet buckets(alone, model, views);
    buckets.lay_out(forms_of(model), {2, 1, 0}, {});
    const auto earlier = at::randn({5});
    set_gradient(buckets, model, 0, earlier.clone());
    buckets.store_unused(0, /*save=*/true);
    buckets.slot(1).fill_(3);
    buckets.store_unused(1, /*save=*/true);
    EXPECT_TRUE(at::equal(buckets.slot(1), at::zeros({6})));
    set_gradient(buckets, model, 2, at::ones({7}));
    for (std::size_t i = 0; i < 3; ++i) buckets.slot(i).add_(1);  // the reduction
    buckets.publish({false, false, true});
    EXPECT_TRUE(at::equal(model[0].tensor.grad(), earlier));
    EXPECT_FALSE(model[1].tensor.grad().defined());
    EXPECT_TRUE(at::equal(model[2].tensor.grad(), at::full({7}, 2.f)));
    EXPECT_EQ(model[2].tensor.grad().is_same(buckets.slot(2)), views);
    buckets.drop_saved();
    buckets.publish({});  // all of them
    EXPECT_TRUE(at::equal(model[1].tensor.grad(), buckets.slot(1)));
  }
}

TEST(BucketSet, RefusesGradientsOfTheOtherKind) {
  World alone;
  const auto model = model_of({trained({4, 2}), trained({4, 2})}, {.sparse_parameters = {"p1"}});
  BucketSet buckets(alone, model, /*views=*/true);
  buckets.lay_out(forms_of(model), {0}, {});
  const auto sparse = at::randn({4, 2}).to_sparse(1);
  EXPECT_THAT(message_of<UsageError>([&] { set_gradient(buckets, model, 0, sparse); }),
              HasSubstr("parameter 'p0' got a sparse gradient"));
  EXPECT_THAT(message_of<UsageError>([&] { set_gradient(buckets, model, 1, at::ones({4, 2})); }),
              HasSubstr("got a dense gradient"));
  set_gradient(buckets, model, 1, sparse);
  EXPECT_TRUE(model[1].tensor.grad().is_same(sparse));
}

TEST(BucketSet, AHookSeesTheSlots) {
  World alone;
  const auto model = model_of({trained({5}), trained({6, 2})});
  BucketSet buckets(alone, model, /*views=*/true);
  buckets.lay_out(forms_of(model), {1, 0}, {});
  buckets.slot(0).fill_(1);
  buckets.slot(1).fill_(2);
  const auto elsewhere = buckets[0].flat.clone().neg_();
  const Bucket view = buckets.for_hook(0, elsewhere);
  EXPECT_TRUE(view.is_last);
  EXPECT_TRUE(view.parameters[0].is_same(model[1].tensor));
  EXPECT_TRUE(at::equal(view.gradients[0], at::full({6, 2}, -2.f)));
  EXPECT_TRUE(at::equal(view.gradients[1], at::full({5}, -1.f)));
}

// ---------------------------------------------------------------- ChangeDetector

TEST(ChangeDetector, SeesEveryKindOfChangeUntilItIsAccepted) {
  World alone;
  const auto tensor = trained({4, 2});
  const auto model = model_of({trained({3}), tensor});
  const DdpOptions options;
  ChangeDetector changes(alone, model, options);
  const std::vector<std::pair<const char*, std::function<void()>>> cases{
      {"frozen", [&] { at::Tensor(tensor).set_requires_grad(false); }},
      {"unfrozen", [&] { at::Tensor(tensor).set_requires_grad(true); }},
      {"moved to Double", [&] { at::Tensor(tensor).set_data(tensor.detach().to(at::kDouble)); }},
      {"given the shape [2, 4]",
       [&] { at::Tensor(tensor).set_data(at::ones({2, 4}, at::kDouble)); }}};
  for (const auto& [what, make] : cases) {
    changes.accept();
    EXPECT_FALSE(changes.changed()) << what;
    make();
    EXPECT_TRUE(changes.changed()) << what;
    EXPECT_FALSE(changes.stale()) << "before it has looked";
    EXPECT_TRUE(changes.look());
    EXPECT_TRUE(changes.stale());
    EXPECT_THAT(message_of<UsageError>([&] { changes.refuse(); }),
                HasSubstr(fmt::format("parameter 'p1' was {}", what)));
  }
  changes.accept();
  EXPECT_FALSE(changes.stale());
}

TEST(ChangeDetector, APassWalksOverTheModuleOnce) {
  World alone;
  torch::nn::Sequential net(torch::nn::Linear(2, 2));
  const DdpOptions options;
  const ModelTensors model(parameters_of(*net), {}, options);
  ChangeDetector changes(alone, model, options);
  changes.accept();
  changes.follow(*net);
  EXPECT_FALSE(changes.look_for_new());
  const torch::nn::Linear added(2, 2);
  net->push_back(added);
  EXPECT_FALSE(changes.look()) << "the forward of this pass has walked";
  EXPECT_TRUE(changes.look()) << "of a pass without such a forward";
  EXPECT_TRUE(changes.look_for_new());
  for (const at::Tensor& parameter : added->parameters()) parameter.set_requires_grad(false);
  EXPECT_FALSE(changes.look()) << "a forward that found some does not stand for this";
  EXPECT_FALSE(changes.look_for_new());
  for (const at::Tensor& parameter : added->parameters()) parameter.set_requires_grad(true);
  changes.look_at_known();
  EXPECT_FALSE(changes.stale());
  EXPECT_TRUE(changes.look()) << "a pass that does not synchronise uses its forward up";
}

TEST(ChangeDetector, TheFlagReachesEveryRankAloneOrWithABucket) {
  run_threads(3, [](World& world) {
    const auto model = model_of({trained({3})});
    const DdpOptions options;
    ChangeDetector changes(world, model, options);
    changes.accept();
    for (const bool change : {false, true}) {
      if (change && world.rank() == 1) at::Tensor(model[0].tensor).set_requires_grad(false);
      changes.look();
      changes.send_flag({});
      EXPECT_EQ(changes.flag().item<int>(), change ? 1 : 0);
      const auto bucket = at::full({5}, 7.f);
      changes.send_flag(bucket.narrow(0, 4, 1));
      world.all_reduce(bucket).wait();
      EXPECT_EQ(changes.flag().item<float>(), change ? 1 : 0);
      EXPECT_EQ(bucket[0].item<float>(), 21);
    }
  });
}

TEST(ChangeDetector, ModelsThatDifferAreRefusedByAllRanks) {
  run_threads(2, [](World& world) {
    const auto model = model_of({trained({3}), trained({4})});
    const DdpOptions options;
    ChangeDetector changes(world, model, options);
    changes.accept();
    changes.check_same_model();
    if (world.rank() == 1) at::Tensor(model[1].tensor).set_requires_grad(false);
    EXPECT_THAT(message_of<UsageError>([&] { changes.check_same_model(); }),
                HasSubstr("rank 1 has 'p1: shape [4], Float on cpu, requires_grad=false'"));
    EXPECT_THAT(message_of<UsageError>([&] { changes.refuse(); }),
                HasSubstr("on rank 1 parameter 'p1' was frozen."));
    if (world.rank() == 0) at::Tensor(model[1].tensor).set_requires_grad(false);
    changes.check_same_model();  // on all: as before it is accepted
    const auto refusal =
        refusal_of([&] { world.rank() == 0 ? throw UsageError("test", "not this one") : void(); });
    EXPECT_THAT(message_of<UsageError>([&] { changes.check_same_model(refusal); }),
                HasSubstr("not this one"));
  });
}

// ---------------------------------------------------------------- PassState

TEST(PassState, BucketsAreLaunchedInPlanOrderOnly) {
  World alone;
  const DdpOptions options;
  const auto model = model_of({trained({3}), trained({4}), trained({5}), at::ones({6})});
  BucketSet buckets(alone, model, /*views=*/true);
  PassState pass(model, buckets, options);
  pass.expect(forms_of(model));
  buckets.lay_out(forms_of(model), {2, 1, 0}, kOneEach);
  for (int round = 0; round < 2; ++round) {
    pass.reset();
    EXPECT_THAT(pass.missing(), ElementsAre(0, 1, 2));
    EXPECT_TRUE(pass.arrived(0));
    EXPECT_FALSE(pass.next_ready().has_value()) << "the first bucket is not ready";
    EXPECT_TRUE(pass.arrived(2));
    EXPECT_EQ(pass.next_ready(), 0u);
    EXPECT_FALSE(pass.next_ready().has_value());
    EXPECT_THAT(message_of<UsageError>([&] { pass.refuse_missing(6, pass.missing()); }),
                HasSubstr("rank 6: 1 of 3 parameters got no gradient in step 0: p1."));
    EXPECT_TRUE(pass.arrived(1));
    EXPECT_EQ(pass.next_ready(), 1u);
    EXPECT_EQ(pass.next_ready(), 2u);
    EXPECT_FALSE(pass.next_ready().has_value());
    EXPECT_TRUE(pass.complete());
    EXPECT_THAT(pass.observed({2, 1, 0}), ElementsAre(0, 2, 1));
    EXPECT_THAT(message_of<UsageError>([&] { pass.arrived(1); }),
                HasSubstr("parameter 'p1' got 2 gradients in one backward, the last after its"));
  }
}

TEST(PassState, AnInterruptionRemembersWhatWasSent) {
  World alone;
  const DdpOptions options;
  const auto model = model_of({trained({3}), trained({4})});
  BucketSet buckets(alone, model, /*views=*/true);
  PassState pass(model, buckets, options);
  pass.expect(forms_of(model));
  buckets.lay_out(forms_of(model), {1, 0}, kOneEach);
  pass.reset();
  pass.interrupt();
  EXPECT_FALSE(pass.interrupted()) << "it had not begun";
  pass.begin(/*synchronised=*/true);
  pass.run();
  pass.arrived(1);
  pass.next_ready();
  pass.interrupt();
  EXPECT_TRUE(pass.interrupted());
  EXPECT_EQ(pass.launched, 1u);
  pass.reset();
  EXPECT_FALSE(pass.interrupted());
  EXPECT_EQ(pass.launched, 0u);
}

// ---------------------------------------------------------------- JoinSession

TEST(JoinSession, TheHighestRankThatTrainsIsTheRoot) {
  run_threads(3, [](World& world) {
    for (const bool initial : {true, false}) {
      JoinSession join(world);
      EXPECT_EQ(join.divisor(), 3);
      join.begin({.divide_by_initial_world_size = initial});
      EXPECT_THAT(message_of<UsageError>([&] { join.begin({}); }), HasSubstr("inside join"));
      EXPECT_TRUE(join.exchange(true));
      EXPECT_EQ(join.root(), 2);
      EXPECT_TRUE(join.exchange(world.rank() < 2));
      EXPECT_EQ(join.root(), 1);
      EXPECT_EQ(join.divisor(), initial ? 3 : 2);
      EXPECT_FALSE(join.exchange(false));
      EXPECT_EQ(join.root(), 1) << "of the last pass, for the final model";
      join.end();
      EXPECT_EQ(join.root(), 0);
    }
    JoinSession strict(world);
    strict.begin({.throw_on_early_termination = true});
    EXPECT_THAT(message_of<UsageError>([&] { strict.exchange(world.rank() == 0); }),
                AllOf(HasSubstr("1 of 3 ranks still have inputs"), HasSubstr("early_termination")));
    EXPECT_FALSE(strict.active());
  });
}

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
