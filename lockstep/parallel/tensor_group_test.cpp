// Operations over slices of a TensorGroup: each is the one of a process that has everything.
#include "lockstep/nn/tensor_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <utility>

#include "lockstep/parallel/counting_allocator_for_test.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::tensor_group {
namespace {

using ::testing::HasSubstr;
using testing::run_threads;

class WorldGroup final : public nn::TensorGroup {
 public:
  explicit WorldGroup(World world) : world_(std::move(world)) {}
  int rank() const override { return world_.rank(); }
  int size() const override { return world_.size(); }
  void sum(const at::Tensor& tensor) override { world_.all_reduce(tensor).wait(); }
  void max(const at::Tensor& tensor) override { world_.all_reduce(tensor, ReduceOp::kMax).wait(); }
  void all_gather(const at::Tensor& all, const at::Tensor& mine) override {
    ++gathers;
    world_.all_gather(all, mine).wait();
  }
  void reduce_scatter(const at::Tensor& mine, const at::Tensor& all) override {
    world_.reduce_scatter(mine, all).wait();
  }
  int gathers = 0;

 private:
  World world_;
};

at::Tensor drawn(at::IntArrayRef sizes, std::uint64_t seed) {
  auto random = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, random, at::kDouble);
}

at::Tensor slice(const at::Tensor& whole, std::int64_t dimension, const nn::TensorGroup& group) {
  const nn::Range mine = group.range(whole.size(dimension));
  return whole.narrow(dimension, mine.begin, mine.length).clone();
}

void on_group(int ranks, const std::function<void(const nn::TensorGroupPtr&)>& body) {
  run_threads(ranks, [&](World& world) { body(c10::make_intrusive<WorldGroup>(world)); });
}

TEST(TensorGroup, SlicesCoverEverythingOnce) {
  for (const int ranks : {1, 2, 3, 4, 7})
    for (const std::int64_t whole : {1, 6, 7, 50257}) {
      std::int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const nn::Range range = nn::slice_range(whole, rank, ranks);
        EXPECT_EQ(range.begin, next);
        EXPECT_LE(std::abs(range.length - whole / ranks), 1);
        next += range.length;
      }
      EXPECT_EQ(next, whole);
    }
}

// In double: what differs is the order of a few sums, 1e-15 each.
constexpr double kDoubleSums = 1e-13;

TEST(TensorGroup, APairOfMatricesIsOne) {
  for (const int ranks : {2, 3, 4})
    on_group(ranks, [](const nn::TensorGroupPtr& group) {
      const auto leaf = [](const at::Tensor& x) { return x.clone().set_requires_grad(true); };
      const at::Tensor x = leaf(drawn({5, 6}, 1)), first = leaf(drawn({8, 6}, 2)),
                       second = leaf(drawn({3, 8}, 3)), bias = leaf(drawn({3}, 4));
      const at::Tensor one = at::linear(at::linear(x, first).relu(), second, bias).square().mean();
      one.backward();
      const at::Tensor x2 = leaf(x.detach()), bias2 = leaf(bias.detach()),
                       first2 = leaf(slice(first.detach(), 0, *group)),
                       second2 = leaf(slice(second.detach(), 1, *group));
      const at::Tensor h = at::linear(nn::enter(x2, group), first2).relu();
      const at::Tensor y = nn::leave(at::linear(h, second2), group) + bias2;
      const at::Tensor loss = y.square().mean();
      loss.backward();
      EXPECT_NEAR(loss.item<double>(), one.item<double>(), kDoubleSums);
      EXPECT_TENSOR_NEAR(x2.grad(), x.grad(), kDoubleSums);
      EXPECT_TENSOR_NEAR(bias2.grad(), bias.grad(), kDoubleSums);
      EXPECT_TENSOR_NEAR(first2.grad(), slice(first.grad(), 0, *group), kDoubleSums);
      EXPECT_TENSOR_NEAR(second2.grad(), slice(second.grad(), 1, *group), kDoubleSums);
    });
}

// Times that ranks divide unequally. A second backward of the graph gathers once more.
TEST(TensorGroup, APairOfMatricesBetweenPartsOfASequenceIsOne) {
  for (const int ranks : {2, 3, 4})
    on_group(ranks, [](const nn::TensorGroupPtr& group) {
      const std::int64_t time = 7;
      const auto leaf = [](const at::Tensor& x) { return x.clone().set_requires_grad(true); };
      const at::Tensor x = leaf(drawn({2, time, 6}, 1)), scale = leaf(drawn({6}, 2)),
                       first = leaf(drawn({8, 6}, 3)), second = leaf(drawn({6, 8}, 4));
      const auto loss_of = [](const at::Tensor& y) { return (y * y).sum(); };
      loss_of(x + at::linear(at::linear(x * scale, first).relu(), second)).backward();
      const at::Tensor x2 = leaf(slice(x.detach(), 1, *group)), scale2 = leaf(scale.detach()),
                       first2 = leaf(slice(first.detach(), 0, *group)),
                       second2 = leaf(slice(second.detach(), 1, *group));
      const nn::EnteredSequence in(x2 * nn::enter_weight(scale2, group), time, group);
      EXPECT_TENSOR_NEAR(in.whole().detach(), (x * scale).detach(), kDoubleSums);
      const at::Tensor h = in.release({at::linear(in.whole(), first2)})[0].relu();
      EXPECT_EQ(in.whole().storage().nbytes(), 0);
      const at::Tensor y = x2 + nn::leave_sequence(at::linear(h, second2), group);
      for (const int times : {1, 2}) {
        loss_of(y).backward({}, /*retain_graph=*/true);
        EXPECT_EQ(in.whole().storage().nbytes(), 0);
        EXPECT_TENSOR_NEAR(x2.grad(), slice(x.grad(), 1, *group) * times, 8 * kDoubleSums);
        const at::Tensor all = scale2.grad() / group->size();
        group->sum(all);
        EXPECT_TENSOR_NEAR(all, scale.grad() * times, 64 * kDoubleSums);
        EXPECT_EQ(group->take_partial().count(scale2.unsafeGetTensorImpl()), 1u);
        EXPECT_TENSOR_NEAR(first2.grad(), slice(first.grad(), 0, *group) * times, 64 * kDoubleSums);
        EXPECT_TENSOR_NEAR(second2.grad(), slice(second.grad(), 1, *group) * times,
                           64 * kDoubleSums);
      }
      EXPECT_THAT(testing::message_of<UsageError>([&] {
                    loss_of(y).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
                  }),
                  HasSubstr("Train without sequence_parallel"));
    });
}

// The graph lives on, and the sequence is as large as all the rest together. Where no layer has
// saved it, because its weight is not trained, nobody gathers it again.
TEST(TensorGroup, ASequenceWithoutAGradientIsFreedInBackward) {
  testing::CountingAllocator allocator;
  for (const bool trained : {true, false})
    run_threads(2, [&](World& world) {
      const auto group = c10::make_intrusive<WorldGroup>(world);
      const auto count = testing::this_rank = std::make_shared<testing::Count>();
      constexpr std::int64_t kTime = 64, kWidth = 32;
      constexpr std::int64_t kBytes = 2 * kTime * kWidth * sizeof(double);
      const at::Tensor x = slice(drawn({2, kTime, kWidth}, 1), 1, *group),
                       weight = drawn({1, kWidth}, 2).set_requires_grad(trained),
                       bias = drawn({1}, 3).set_requires_grad(true);
      at::Tensor y;
      {
        const nn::EnteredSequence in(x, kTime, group);
        y = in.release({at::linear(in.whole(), weight, bias)})[0].sum();
      }
      const std::int64_t before = count->live;
      EXPECT_EQ(group->gathers, 1);
      y.backward();
      EXPECT_EQ(group->gathers, trained ? 2 : 1);
      EXPECT_LT(count->live - before, kBytes / 2);
      EXPECT_TENSOR_EQ(bias.grad(), at::full({1}, 2.0 * kTime, at::kDouble));
      if (trained) {
        EXPECT_TENSOR_NEAR(weight.grad(), drawn({2, kTime, kWidth}, 1).flatten(0, 1).sum(0, true),
                           64 * kDoubleSums);
      }
      testing::this_rank.reset();
    });
}

// 37 columns: ranks have different numbers of them.
TEST(TensorGroup, TheLossOverSlicesOfTheVocabularyIsTorchs) {
  const at::Tensor whole = drawn({2, 4, 37}, 1) * 3;
  const at::Tensor targets = at::tensor({0, 36, -100, 18, 19, 5, 17, -100}, at::kLong).view({2, 4});
  const at::Tensor logits = whole.clone().set_requires_grad(true);
  const at::Tensor expected = at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
  (expected * 0.25).backward();
  for (const int ranks : {2, 3, 4})
    on_group(ranks, [&](const nn::TensorGroupPtr& group) {
      const at::Tensor mine = slice(whole, 2, *group).set_requires_grad(true);
      const at::Tensor loss = nn::sliced_cross_entropy(mine, targets, 37, group);
      (loss * 0.25).backward();
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), kDoubleSums);
      EXPECT_TENSOR_NEAR(mine.grad(), slice(logits.grad(), 2, *group), kDoubleSums);
      const at::Tensor none = at::full_like(targets, -100);
      EXPECT_TRUE(std::isnan(nn::sliced_cross_entropy(mine, none, 37, group).item<double>()));
      EXPECT_TENSOR_EQ(nn::join(mine.detach(), 2, 37, group), whole);
    });
}

TEST(TensorGroup, AnEmbeddingOverSlicesOfTheVocabularyIsTorchs) {
  const at::Tensor whole = drawn({37, 3}, 1);
  const at::Tensor ids = at::tensor({0, 36, 18, 18, 9, 0}, at::kLong).view({2, 3});
  for (const int ranks : {2, 3, 4})
    for (const std::int64_t padding : {-1, 0, 18})
      on_group(ranks, [&](const nn::TensorGroupPtr& group) {
        const at::Tensor weight = whole.clone().set_requires_grad(true);
        const at::Tensor expected = at::embedding(weight, ids, padding);
        expected.square().sum().backward();
        const at::Tensor mine = slice(whole, 0, *group).set_requires_grad(true);
        const at::Tensor rows = nn::leave(nn::own_embedding(ids, mine, 37, padding, group), group);
        rows.square().sum().backward();
        EXPECT_TENSOR_EQ(rows, expected);
        EXPECT_TENSOR_EQ(mine.grad(), slice(weight.grad(), 0, *group));
      });
}

TEST(TensorGroup, AnIdOutsideOfTheVocabularyIsRefusedByOneRank) {
  for (const std::int64_t id : {-1, 37}) {
    const auto said = testing::run_threads_collecting(2, [&](World& world) {
      const nn::TensorGroupPtr group = c10::make_intrusive<WorldGroup>(world);
      nn::leave(nn::own_embedding(at::full({1, 1}, id, at::kLong),
                                  slice(drawn({37, 3}, 1), 0, *group), 37, -1, group),
                group);
    });
    EXPECT_THAT(said[id < 0 ? 0 : 1], HasSubstr("index out of range"));
  }
}

}  // namespace
}  // namespace lockstep::tensor_group
