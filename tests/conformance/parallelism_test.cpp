// What every Parallelism promises (lockstep/parallel/parallelism.h), on each implementation: the
// conformance suite of that interface. A new one is a row of `implementations`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/data/window.h"
#include "lockstep/nn/block.h"
#include "lockstep/nn/tensor_group.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/pipeline.h"
#include "lockstep/parallel/tensor_parallel.h"
#include "lockstep/testing/naive_shard.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

struct Implementation {
  std::string name;
  std::vector<MeshAxis> axes;
  std::function<std::shared_ptr<Parallelism>(torch::nn::Module&, const Mesh&)> make;
};

template <typename Class>
std::shared_ptr<Parallelism> make_one(torch::nn::Module& module, const Mesh& mesh) {
  return std::make_shared<Class>(module, mesh);
}

template <Shard shard>
std::shared_ptr<Parallelism> make_mode(torch::nn::Module& module, const Mesh& mesh) {
  return std::make_shared<FullyShard>(module, mesh, FullyShardOptions{.shard = shard});
}

const std::vector<Implementation>& implementations() {
  using testing::NaiveShard;
  static const std::vector<Implementation> all{
      {"data_parallel", {{"data", -1}}, make_one<DataParallel>},
      {"naive_shard", {{"shard", -1}}, make_one<NaiveShard>},
      {"fully_shard", {{"shard", -1}}, make_one<FullyShard>},
      {"fully_shard_gradients", {{"shard", -1}}, make_mode<Shard::kGradients>},
      {"fully_shard_state", {{"shard", -1}}, make_mode<Shard::kState>},
      {"pipeline", {{"pipeline", -1}}, make_one<Pipeline>},
      {"tensor_parallel", {{"tensor", -1}}, make_one<TensorParallel>},
      {"fully_shard_of_slices", {{"shard", 1}, {"tensor", -1}}, make_one<FullyShard>},
      {"pipeline_of_slices", {{"pipeline", 1}, {"tensor", -1}}, make_one<Pipeline>},
      {"naive_shard_of_tensor", {{"tensor", -1}}, make_one<NaiveShard>}};
  return all;
}

// A weight that is used twice, a frozen one, a buffer. Seven blocks, each an operation. `last` is
// cut where the net is in slices, of which the seventh rank has none.
struct Net : torch::nn::Module, nn::Staged, nn::Sliced {
  explicit Net(int seed) {
    const auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
    const auto made = [&](at::IntArrayRef sizes) { return at::randn(sizes, random) * 0.5; };
    first = register_parameter("first", made({6, 6}));
    bias = register_parameter("bias", made({6}));
    frozen = register_parameter("frozen", made({6}), /*requires_grad=*/false);
    last = register_parameter("last", made({6, 3}));
    scale = register_parameter("scale", made({3}));
    seen = register_buffer("seen", at::full({1}, seed, at::kFloat));
  }
  at::Tensor forward(const at::Tensor& samples) {
    at::Tensor x = stage().first ? samples : stage().input;
    for (std::size_t i = stage().begin; i < stage().end_of(7); ++i) x = block(i, x);
    return x;
  }
  at::Tensor block(std::size_t index, const at::Tensor& x) {
    if (index == 0 || index == 3) return x.matmul(first);
    if (index == 1) return x + bias;
    if (index == 2) return x.tanh();
    if (index == 4) return x * frozen;
    return index == 5 ? times_last(x) : x * scale;
  }
  at::Tensor times_last(const at::Tensor& x) {
    if (!tensor_group()) return x.matmul(last);
    const nn::Range mine = tensor_group()->range(6);
    const at::Tensor columns = nn::enter(x, tensor_group()).narrow(1, mine.begin, mine.length);
    return nn::leave(columns.matmul(last), tensor_group());
  }
  std::vector<Cut> cuts(int) const override { return {{last, 0, {6}}}; }
  Parts parts() const override {
    return {.blocks = {{first}, {bias}, {}, {first}, {frozen}, {last}, {scale}}};
  }
  at::Tensor first, bias, frozen, last, scale, seen;
};

at::Tensor batch(int number) {
  const auto random = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t(100 + number));
  return at::randn({4, 6}, random);
}

at::Tensor loss_of(Net& net, const at::Tensor& x) {
  const at::Tensor y = net.forward(x);
  return net.stage().last ? y.square().mean() : y;
}

at::Tensor flat(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& each : module.parameters()) all.push_back(each.detach().flatten());
  return at::cat(all);
}

optim::NamedParameters names_of(const torch::nn::Module& module) {
  return module.named_parameters().pairs();
}

std::vector<optim::ParamGroup> groups_of(const Net& net, const optim::Rule& rule) {
  return {{{net.first, net.bias}, rule}, {{net.last, net.scale}, rule}};
}

const optim::AdamWOptions kAdamW{.lr = 0.05};

// The same training in one process: batch `step * ranks + r` of every rank r, averaged.
class Reference {
 public:
  Reference(int ranks, const optim::Rule& rule)
      : ranks_(ranks), optimizer(names_of(net), groups_of(net, rule)) {}
  optim::StepResult step(int number, const optim::StepOptions& options = {}) {
    for (int rank = 0; rank < ranks_; ++rank)
      (loss_of(net, batch(number * ranks_ + rank)) / ranks_).backward();
    const optim::StepResult result = optimizer.step(options);
    optimizer.zero_grad();
    return result;
  }

 private:
  int ranks_;

 public:
  Net net{0};
  optim::ReplicatedOptimizer optimizer;
};

// One of several ranks, whose weights were other than rank 0's before.
class Rank {
 public:
  Rank(const Implementation& kind, const Mesh& mesh, const optim::Rule& rule)
      : net(mesh.world().rank()),
        parallelism(kind.make(net, mesh)),
        optimizer(parallelism->make_optimizer(groups_of(net, rule))) {}

  at::Tensor mine(int number) const {
    World& ranks = parallelism->mesh().batch();
    return batch(number * ranks.size() + ranks.rank());
  }
  void backward(const at::Tensor& x, double factor, bool last) {
    if (parallelism->takes_windows()) {
      passes.push_back({.forward = [this, x] { return loss_of(net, x); },
                        .weigh = [factor](const at::Tensor& loss) { return loss * factor; }});
      if (last) parallelism->run_window(std::exchange(passes, {}));
      return;
    }
    parallelism->before_forward();
    parallelism->backward(parallelism->watch(loss_of(net, x) * factor), last);
  }
  optim::StepResult step(int number, const optim::StepOptions& options = {}) {
    backward(mine(number), 1, /*last=*/true);
    const optim::StepResult result = optimizer->step(options);
    optimizer->zero_grad();
    return result;
  }
  at::Tensor weights() {
    const std::shared_ptr<void> whole = parallelism->gathered();
    return flat(net).clone();
  }

  Net net;  // in no shared pointer
  std::shared_ptr<Parallelism> parallelism;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::vector<Parallelism::Pass> passes;  // of a window that is not complete
};

void expect_close(const at::Tensor& got, const at::Tensor& expected) {
  // AdamW moves a weight by lr times a ratio of gradients, which has their relative error: where
  // terms cancel, rounding in another order gives up to 1e-4 of a gradient, times an lr of 0.05.
  EXPECT_TRUE(at::allclose(got, expected, 1e-4, 1e-5)) << (got - expected).abs().max();
}

using Parameters = std::tuple<std::size_t, int, const char*>;

class ParallelismConformance : public ::testing::TestWithParam<Parameters> {
 protected:
  static const Implementation& kind() { return implementations()[std::get<0>(GetParam())]; }
  static void on_ranks(const std::function<void(const Mesh&)>& body) {
    testing::ThreadOptions options;
    options.world.backend = std::get<2>(GetParam());
    testing::run_threads(
        std::get<1>(GetParam()), [&](World& world) { body(Mesh(world, kind().axes)); }, options);
  }
};

TEST_P(ParallelismConformance, BeginsWithTheTensorsOfRankZero) {
  on_ranks([](const Mesh& mesh) {
    Rank rank(kind(), mesh, kAdamW);
    EXPECT_TENSOR_EQ(rank.weights(), flat(Net(0)));
    EXPECT_EQ(rank.net.seen.item<float>(), 0);
    EXPECT_EQ(rank.parallelism->mesh().text(), mesh.text());
    EXPECT_FALSE(rank.parallelism->text().empty());
  });
}

TEST_P(ParallelismConformance, TrainsAsOneProcessOnAllSamples) {
  for (const optim::Rule& rule :
       {optim::Rule(kAdamW), optim::Rule(optim::SGDOptions{.lr = 0.1, .momentum = 0.9})})
    on_ranks([&](const Mesh& mesh) {
      Reference one(mesh.batch().size(), rule);
      Rank rank(kind(), mesh, rule);
      for (int step = 0; step < 5; ++step) {
        one.step(step);
        rank.step(step);
      }
      expect_close(rank.weights(), flat(one.net));
      rank.parallelism->verify_parameters();
      rank.parallelism->verify_buffers();
    });
}

TEST_P(ParallelismConformance, PassesBeforeTheLastAddUp) {
  on_ranks([](const Mesh& mesh) {
    Reference one(mesh.batch().size(), kAdamW);
    Rank rank(kind(), mesh, kAdamW);
    for (int step = 0; step < 3; ++step) {
      one.step(step);
      // The batch in halves.
      const auto halves = rank.mine(step).chunk(2);
      rank.backward(halves[0], 0.5, /*last=*/false);
      rank.backward(halves[1], 0.5, /*last=*/true);
      rank.optimizer->step();
      rank.optimizer->zero_grad();
    }
    expect_close(rank.weights(), flat(one.net));
  });
}

TEST_P(ParallelismConformance, AWindowIsItsPassesInTurn) {
  on_ranks([](const Mesh& mesh) {
    Reference one(mesh.batch().size(), kAdamW);
    Rank rank(kind(), mesh, kAdamW);
    one.step(0);
    std::vector<Parallelism::Pass> passes;
    for (const at::Tensor& half : rank.mine(0).chunk(2))
      passes.push_back({.forward = [&rank, half] { return loss_of(rank.net, half); },
                        .weigh = [](const at::Tensor& loss) { return loss * 0.5; }});
    const std::vector<at::Tensor> losses = rank.parallelism->run_window(passes);
    ASSERT_EQ(losses.size(), 2u);
    for (std::size_t i = 0; i < 2; ++i)
      EXPECT_NEAR(losses[i].item<double>(),
                  loss_of(*std::make_unique<Net>(0), rank.mine(0).chunk(2)[i]).item<double>(),
                  1e-6);
    rank.optimizer->step();
    expect_close(rank.weights(), flat(one.net));
  });
}

TEST_P(ParallelismConformance, ClipsByTheNormOfTheWholeGradient) {
  on_ranks([](const Mesh& mesh) {
    Reference one(mesh.batch().size(), kAdamW);
    Rank rank(kind(), mesh, kAdamW);
    for (int step = 0; step < 3; ++step) {
      const optim::StepOptions options{.max_grad_norm = 0.001};
      const double expected = one.step(step, options).norm();
      EXPECT_GT(expected, 0.001);
      EXPECT_NEAR(rank.step(step, options).norm(), expected, 1e-5 * expected);
    }
    expect_close(rank.weights(), flat(one.net));
  });
}

// It takes the norm of what a rank has in .grad. Where that is a part, or not averaged, the step
// refuses what it has clipped. What reads gradients alone, or scales them all, is nobody's concern.
TEST_P(ParallelismConformance, ClippingByLibTorchIsRightOrRefused) {
  if (kind().name.starts_with("naive")) GTEST_SKIP() << "does not look";
  on_ranks([](const Mesh& mesh) {
    Reference one(mesh.batch().size(), kAdamW);
    Rank rank(kind(), mesh, kAdamW);
    const double expected = one.step(0, {.max_grad_norm = 0.001}).norm();
    rank.backward(rank.mine(0), 1, /*last=*/true);
    const std::vector<at::Tensor> parameters = rank.net.parameters();
    const bool holds_any = std::ranges::any_of(
        parameters, [](const at::Tensor& parameter) { return parameter.grad().defined(); });
    const double norm = torch::nn::utils::clip_grad_norm_(parameters, 0.001);
    const std::string said = message_of<UsageError>([&] { rank.optimizer->step(); });
    if (mesh.world().size() > 1 && kind().name != "data_parallel") {
      if (holds_any) {  // a stage may have nothing to train
        EXPECT_THAT(said, AllOf(HasSubstr("torch::nn::utils::clip_grad_norm_"),
                                HasSubstr("step({.max_grad_norm = 1})")));
      }
    } else {
      EXPECT_EQ(said, "(nothing thrown)");
      EXPECT_NEAR(norm, expected, 1e-5 * expected);
      expect_close(rank.weights(), flat(one.net));
    }
    rank.optimizer->zero_grad();
    for (int step = 1; step < 3; ++step) {
      rank.backward(rank.mine(step), 1, /*last=*/true);
      for (const at::Tensor& parameter : rank.net.parameters()) {
        const at::Tensor grad = parameter.grad();
        if (!grad.defined()) continue;
        EXPECT_TRUE(std::isfinite(grad.norm().item<double>() + grad.abs().sum().item<double>()));
        at::Tensor(grad).mul_(0.5);
      }
      EXPECT_EQ(message_of<UsageError>([&] { rank.optimizer->step(); }), "(nothing thrown)");
      rank.optimizer->zero_grad();
    }
    rank.parallelism->verify_parameters();
  });
}

TEST_P(ParallelismConformance, SkipsAStepOnAllRanksOrNone) {
  on_ranks([](const Mesh& mesh) {
    Rank rank(kind(), mesh, kAdamW);
    rank.step(0, {.skip_non_finite = true});
    const at::Tensor before = rank.weights();
    const bool last = mesh.batch().rank() == mesh.batch().size() - 1;
    const double factor = last ? std::numeric_limits<double>::infinity() : 1;
    rank.backward(rank.mine(1), factor, /*last=*/true);
    EXPECT_TRUE(rank.optimizer->step({.skip_non_finite = true}).was_skipped());
    rank.optimizer->zero_grad();
    EXPECT_TENSOR_EQ(rank.weights(), before);
    EXPECT_FALSE(rank.step(2, {.skip_non_finite = true}).was_skipped());
    EXPECT_FALSE(rank.weights().equal(before));
  });
}

// Rank r has r + 1 samples of its window's batches; the mean is that over all samples.
TEST_P(ParallelismConformance, AWindowWeighsBySamples) {
  on_ranks([](const Mesh& mesh) {
    const optim::SGDOptions sgd{.lr = 0.1};
    World& ranks = mesh.batch();
    Reference one(1, sgd);
    std::vector<at::Tensor> all;
    const auto samples_of = [](int rank, int micro) {
      return batch(10 * micro + rank).slice(0, 0, std::min(4, rank + 1));
    };
    for (int r = 0; r < ranks.size(); ++r)
      for (int micro = 0; micro < 2; ++micro) all.push_back(samples_of(r, micro));
    const at::Tensor expected = loss_of(one.net, at::cat(all));
    expected.backward();
    one.optimizer.step();

    Rank rank(kind(), mesh, sgd);
    std::vector<data::Batch> batches;
    for (int micro = 0; micro < 2; ++micro) {
      const at::Tensor x = samples_of(ranks.rank(), micro);
      batches.push_back({.data = x, .tokens = x.size(0)});
    }
    const data::Window window(batches, ranks);
    const auto losses = rank.parallelism->run_window(
        passes_of(window, [&](const data::Batch& each) { return loss_of(rank.net, each.data); }));
    rank.optimizer->step();
    expect_close(rank.weights(), flat(one.net));
    double mean = 0;
    for (std::size_t i = 0; i < losses.size(); ++i)
      mean += losses[i].item<double>() * window[i].weight.item<double>();
    EXPECT_NEAR(all_reduce(ranks, mean, ReduceOp::kAvg), expected.item<double>(), 1e-6);
  });
}

// The state is whole, named after parameters, and continues anywhere.
TEST_P(ParallelismConformance, ItsStateIsThatOfOneProcess) {
  on_ranks([](const Mesh& mesh) {
    Reference one(mesh.batch().size(), kAdamW);
    Rank rank(kind(), mesh, kAdamW);
    for (int step = 0; step < 3; ++step) {
      one.step(step);
      rank.step(step);
    }
    const optim::TensorDict state = rank.optimizer->state_dict();
    const optim::TensorDict expected = one.optimizer.state_dict();
    ASSERT_EQ(state.size(), expected.size());
    for (const auto& [name, tensor] : expected) {
      ASSERT_TRUE(state.contains(name)) << name;
      EXPECT_TRUE(at::allclose(state.at(name), tensor, 1e-4, 1e-6)) << name;
    }
    EXPECT_TRUE(rank.optimizer->state_dict({.wanted = false}).empty());

    // Into one that begins elsewhere.
    Rank other(kind(), mesh, kAdamW);
    {
      const std::shared_ptr<void> whole = other.parallelism->gathered();
      const torch::NoGradGuard no_grad;
      const auto from = one.net.parameters();
      const auto to = other.net.parameters();
      for (std::size_t i = 0; i < to.size(); ++i) at::Tensor(to[i]).copy_(from[i]);
      other.optimizer->sync_from_model();
    }
    other.optimizer->load_state_dict(expected);
    one.step(3);
    other.step(3);
    expect_close(other.weights(), flat(one.net));
  });
}

TEST_P(ParallelismConformance, OptionsOfAGroupMayChangeBetweenSteps) {
  on_ranks([](const Mesh& mesh) {
    Reference one(mesh.batch().size(), kAdamW);
    Rank rank(kind(), mesh, kAdamW);
    one.step(0);
    rank.step(0);
    one.optimizer.set_lr(1, 0);
    rank.optimizer->set_lr(1, 0);
    one.step(1);
    rank.step(1);
    expect_close(rank.weights(), flat(one.net));
    EXPECT_EQ(rank.optimizer->lr(0), 0.05);
    EXPECT_EQ(rank.optimizer->lr(1), 0);
  });
}

TEST_P(ParallelismConformance, ParametersAreWholeWhileItIsAskedFor) {
  on_ranks([](const Mesh& mesh) {
    Reference one(mesh.batch().size(), kAdamW);
    Rank rank(kind(), mesh, kAdamW);
    one.step(0);
    rank.step(0);
    const torch::NoGradGuard no_grad;
    const std::shared_ptr<void> whole = rank.parallelism->gathered();
    for (int number = 0; number < 1 + mesh.world().rank(); ++number)  // no collective
      expect_close(loss_of(rank.net, batch(number)), loss_of(one.net, batch(number)));
  });
}

// What it cannot do is a UsageError, and leaves it as it was.
TEST_P(ParallelismConformance, RefusesWhatItCannotDo) {
  on_ranks([](const Mesh& mesh) {
    Reference one(mesh.batch().size(), kAdamW);
    Rank rank(kind(), mesh, kAdamW);
    one.step(0);
    rank.step(0);
    expect_close(rank.weights(), flat(one.net));
  });
}

std::string show(const ::testing::TestParamInfo<Parameters>& info) {
  const auto& [kind, ranks, backend] = info.param;
  return implementations()[kind].name + "_" + backend + std::to_string(ranks);
}

INSTANTIATE_TEST_SUITE_P(
    Shm, ParallelismConformance,
    ::testing::Combine(::testing::Range(std::size_t{0}, implementations().size()),
                       ::testing::Values(1, 2, 3, 4, 7), ::testing::Values("shm")),
    show);
INSTANTIATE_TEST_SUITE_P(Gloo, ParallelismConformance,
                         ::testing::Combine(::testing::Range(std::size_t{0},
                                                             implementations().size()),
                                            ::testing::Values(2, 3), ::testing::Values("gloo")),
                         show);

}  // namespace
}  // namespace lockstep
