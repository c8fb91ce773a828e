// What backward passes count for the record of a run (core/step_totals.h). Ranks are threads here,
// so the sums are those of all of them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include "lockstep/comm/device.h"
#include "lockstep/core/ledger.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using ledger::Counter;

constexpr int kRanks = 2;
constexpr int kSteps = 3;

struct Gate : torch::nn::Module {
  Gate() {
    left = register_module("left", torch::nn::Linear(4, 4));
    right = register_module("right", torch::nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x, bool both) { return both ? left(x) + right(x) : left(x); }
  torch::nn::Linear left{nullptr}, right{nullptr};
};

std::uint64_t of(const ledger::Totals& spent, Counter counter) {
  return spent.counts[ledger::index(counter)];
}

ledger::Totals spent_by(const std::function<void(World&)>& body) {
  const ledger::Totals before = ledger::totals();
  testing::run_threads(kRanks, body);
  return ledger::since(before, ledger::totals());
}

// A device without a clock stands for one: what is waited for is not the phase's own time.
TEST(DeviceWait, IsTakenOutOfThePhaseAroundIt) {
  constexpr std::chrono::milliseconds kWaited(30);
  const auto waited_in_logging = [&](at::Device device) {
    const ledger::Totals before = ledger::totals();
    {
      const ledger::PhaseScope logging(ledger::Phase::kLogging);
      const DeviceWait wait(device);
      std::this_thread::sleep_for(kWaited);
    }
    const ledger::Totals spent = ledger::since(before, ledger::totals());
    return std::pair(spent.host_ns[ledger::index(ledger::Phase::kDeviceWait)],
                     spent.host_ns[ledger::index(ledger::Phase::kLogging)]);
  };
  const std::uint64_t least = std::chrono::nanoseconds(kWaited).count();
  const auto [waited, logging] = waited_in_logging(at::kMeta);
  EXPECT_GE(waited, least);
  EXPECT_LT(logging, waited);
  const auto [nothing, all] = waited_in_logging(at::kCPU);
  EXPECT_EQ(nothing, 0u);
  EXPECT_GE(all, least);
}

TEST(PassCounts, PassesBucketsAndBytes) {
  std::atomic<std::uint64_t> buckets{0};
  std::atomic<std::uint64_t> bytes{0};
  const ledger::Totals spent = spent_by([&](World& world) {
    DistributedDataParallel model{std::make_shared<Gate>(), world};
    const auto x = torch::ones({2, 4});
    for (int step = 0; step < kSteps; ++step) {
      {
        const auto local = model.no_sync();
        model(x, true).sum().backward();
      }
      model(x, true).sum().backward();
      for (const auto& bucket : model.last_timing().buckets) {
        ++buckets;
        bytes += static_cast<std::uint64_t>(bucket.bytes);
      }
    }
  });
  EXPECT_EQ(of(spent, Counter::kMicroBatches), kRanks * kSteps * 2u);
  EXPECT_EQ(of(spent, Counter::kSynchronisedPasses), kRanks * kSteps * 1u);
  EXPECT_GT(buckets, 0u);
  EXPECT_EQ(of(spent, Counter::kBuckets), buckets);
  EXPECT_EQ(of(spent, Counter::kReducedBytes), bytes);
  EXPECT_GE(bytes, kRanks * kSteps * 40u * sizeof(float));
  EXPECT_GT(of(spent, Counter::kReduceNs), 0u);
  EXPECT_EQ(of(spent, Counter::kUnusedSearches), 0u);
}

TEST(PassCounts, SearchesForUnusedParametersAndWhatTheyFound) {
  for (const bool both : {true, false}) {
    const ledger::Totals spent = spent_by([&](World& world) {
      DistributedDataParallel model{
          std::make_shared<Gate>(), world, {.find_unused_parameters = true}};
      for (int step = 0; step < kSteps; ++step) model(torch::ones({2, 4}), both).sum().backward();
    });
    EXPECT_EQ(of(spent, Counter::kUnusedSearches), kRanks * kSteps * 1u);
    EXPECT_EQ(of(spent, Counter::kUnusedFound), both ? 0u : kRanks * kSteps * 1u);
  }
}

// The reducer of a rank alone averages nothing and sees no gradients.
TEST(PassCounts, AWindowOfARankAloneIsAStep) {
  const ledger::Totals before = ledger::totals();
  DistributedDataParallel model{std::make_shared<Gate>(), World{}};
  for (int micro = 0; micro < 2 * kSteps; ++micro)
    model.backward(model(torch::ones({2, 4}), true).sum(), /*last=*/micro % 2 == 1);
  const ledger::Totals spent = ledger::since(before, ledger::totals());
  EXPECT_EQ(of(spent, Counter::kMicroBatches), 2u * kSteps);
  EXPECT_EQ(spent.steps, static_cast<std::uint64_t>(kSteps));
}

// Nobody hooks the gradients of a world of one.
TEST(BackwardPhase, OfARankAlone) {
  constexpr std::chrono::milliseconds kTaken(20);
  const std::uint64_t least = std::chrono::nanoseconds(kTaken).count();
  World alone;
  ledger::set_phase(ledger::Phase::kNone);  // whatever the tests before it left
  const auto gate = std::make_shared<Gate>();
  DistributedDataParallel model{gate, alone};
  bool fails = false;
  gate->left->weight.register_hook([&](const at::Tensor&) {
    std::this_thread::sleep_for(kTaken);
    if (fails) throw std::runtime_error("as planned");
  });
  const auto x = torch::ones({2, 4});
  const auto spent_in = [&](const std::function<void()>& body) {
    const ledger::Totals before = ledger::totals();
    body();
    std::this_thread::sleep_for(kTaken);
    const ledger::Totals spent = ledger::since(before, ledger::totals());
    EXPECT_GE(spent.host_ns[ledger::index(ledger::Phase::kNone)], least) << "after it";
    return spent.host_ns[ledger::index(ledger::Phase::kBackward)];
  };
  EXPECT_GE(spent_in([&] { model(x, true).sum().backward(); }), least);
  EXPECT_GE(spent_in([&] { (model(x, true) + model(x, false)).sum().backward(); }), least);
  fails = true;
  EXPECT_GE(spent_in([&] { EXPECT_ANY_THROW(model(x, true).sum().backward()); }), least);
  fails = false;
  EXPECT_GE(spent_in([&] { model(x, true).sum().backward(); }), least);
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(spent_in([&] { model(x, true); }), 0u);
}

TEST(PassCounts, ARankThatHasRunOutCountsNothing) {
  const ledger::Totals spent = spent_by([&](World& world) {
    DistributedDataParallel model{std::make_shared<Gate>(), world, {.overlap = true}};
    model.join([&] {
      for (int step = 0; step < (world.rank() == 0 ? kSteps : 1); ++step)
        model(torch::ones({2, 4}), true).sum().backward();
    });
  });
  EXPECT_EQ(of(spent, Counter::kSynchronisedPasses), kSteps + 1u);
  EXPECT_EQ(of(spent, Counter::kBuckets), kSteps + 1u);
}

}  // namespace
}  // namespace lockstep
