// Loss scaling, autocasting, clipping, averages, seeds and the replicated optimizer. tests/optim
// checks that the numbers are PyTorch's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>

#include "lockstep/core/error.h"
#include "lockstep/kernels/step.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/amp.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/optim/ema.h"
#include "lockstep/optim/local_gradients.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::optim {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_threads;

constexpr double kInf = std::numeric_limits<double>::infinity();

at::Tensor trained(at::Tensor values) {
  return values.clone().set_requires_grad(true);
}

void set_grad(at::Tensor& param, double value) {
  param.mutable_grad() = at::full_like(param, value).detach();
}

// ---------------------------------------------------------------- GradScaler

TEST(GradScaler, LeavesAStepOutOnEveryRankWhenOneHasAnInfiniteGradient) {
  run_threads(3, [](World& world) {
    auto p = trained(at::ones({3}));
    SGD optimizer{{p}, {.lr = 1}};
    GradScaler scaler{world, {.init_scale = 4}};
    for (int step = 0; step < 2; ++step) {
      const bool bad = step == 0 && world.rank() == 1;
      scaler.scale((p * 0.25).sum() * (bad ? kInf : 1)).backward();
      scaler.step(optimizer);
      EXPECT_EQ(scaler.found_inf(&optimizer).item<float>(), step == 0 ? 1 : 0);
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 2) << "rank " << world.rank();
      EXPECT_TENSOR_EQ(p.detach(), at::full({3}, step == 0 ? 1.0 : 0.75));
      optimizer.zero_grad();
    }
  });
}

TEST(GradScaler, StepsStockOptimizersToo) {
  auto p = trained(at::ones({3}));
  torch::optim::SGD optimizer({p}, torch::optim::SGDOptions(1.0));
  GradScaler scaler;
  for (const double by : {kInf, 1.0}) {
    scaler.scale((p * 0.25).sum() * by).backward();
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
  EXPECT_TENSOR_EQ(p.detach(), at::full({3}, 0.75));
}

TEST(GradScaler, StateSurvives) {
  auto p = trained(at::ones({1}));
  SGD optimizer{{p}, {.lr = 0}};
  GradScaler scaler{{}, {.growth_interval = 4}};
  const auto step = [&](GradScaler& with) {
    optimizer.zero_grad();
    with.scale(p.sum()).backward();
    with.step(optimizer);
    with.update();
  };
  for (int i = 0; i < 3; ++i) step(scaler);
  const GradScalerState state = scaler.state_dict();
  EXPECT_EQ(state.scale, 65536);
  EXPECT_EQ(state.growth_tracker, 3);
  GradScaler fresh, used;
  step(used);
  fresh.load_state_dict(state);
  used.load_state_dict(state);
  for (GradScaler* other : {&scaler, &fresh, &used}) {
    step(*other);
    EXPECT_EQ(other->get_scale(), 131072);
    EXPECT_EQ(other->state_dict().growth_tracker, 0);
    EXPECT_EQ(other->state_dict().growth_interval, 4);
  }
  scaler.scale(p.sum());
  scaler.update(8.0);
  EXPECT_EQ(scaler.get_scale(), 8);
}

TEST(GradScaler, SwitchedOffDoesNothing) {
  auto p = trained(at::ones({1}));
  SGD optimizer{{p}, {.lr = 1}};
  GradScaler scaler{{}, {.enabled = false}};
  const at::Tensor loss = p.sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  scaler.unscale_(optimizer);
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_EQ(p.item<float>(), 0);
}

TEST(GradScaler, RefusesCallsOutOfOrder) {
  auto p = trained(at::ones({1}));
  SGD optimizer{{p}};
  GradScaler scaler;
  EXPECT_THAT(message_of<UsageError>([&] { scaler.step(optimizer); }),
              HasSubstr("[GradScaler] step() was called, but no loss was scaled yet"));
  EXPECT_THAT(message_of<UsageError>([&] { scaler.update(); }), HasSubstr("update() was called"));
  scaler.scale(p.sum()).backward();
  EXPECT_THAT(message_of<UsageError>([&] { scaler.update(); }),
              HasSubstr("no gradient was checked since the last one"));
  scaler.unscale_(optimizer);
  EXPECT_THAT(message_of<UsageError>([&] { scaler.unscale_(optimizer); }),
              HasSubstr("unscale_() was already called on this optimizer"));
  scaler.step(optimizer);
  EXPECT_THAT(message_of<UsageError>([&] { scaler.unscale_(optimizer); }),
              HasSubstr("unscale_() was called after step()"));
  EXPECT_THAT(message_of<UsageError>([&] { scaler.step(optimizer); }),
              HasSubstr("step() was already called on this optimizer"));
  EXPECT_THAT(message_of<UsageError>([&] { scaler.record_step(&optimizer, false); }),
              HasSubstr("already recorded"));
  EXPECT_THAT(message_of<UsageError>([&] { scaler.update(-1.0); }), HasSubstr("a new scale of -1"));
  scaler.update();
  auto half = trained(at::ones({1}, at::kHalf));
  SGD of_half{{half}};
  scaler.scale(half.sum()).backward();
  EXPECT_THAT(message_of<UsageError>([&] { scaler.unscale_(of_half); }),
              HasSubstr("has fp16 gradients"));
  EXPECT_THAT(message_of<UsageError>([&] { SGD(std::vector{p}).step_unless(at::ones({2})); }),
              HasSubstr("[SGD] step_unless() takes one float"));
  for (const auto& [options, text] : std::vector<std::pair<GradScalerOptions, std::string>>{
           {{.init_scale = 0}, "init_scale = 0"},
           {{.growth_factor = 1}, "growth_factor = 1 does not grow"},
           {{.backoff_factor = 1}, "backoff_factor = 1 does not shrink"},
           {{.growth_interval = 0}, "growth_interval = 0"}})
    EXPECT_THAT(message_of<UsageError>([&] { GradScaler({}, options); }), HasSubstr(text));
}

// ---------------------------------------------------------------- clipping

TEST(Clip, BoundsTheNormOverAllGradients) {
  auto a = trained(at::zeros({2})), b = trained(at::zeros({2})), unused = trained(at::zeros({9}));
  set_grad(a, 3);
  set_grad(b, 4);
  const auto norm = clip_grad_norm_({a, b, unused, a}, 1.0);  // tied weights count once
  EXPECT_NEAR(norm.item<double>(), std::sqrt(50.0), 1e-6);
  EXPECT_NEAR(grad_norm({a, b}).item<double>(), 1.0, 1e-6);
  EXPECT_EQ(clip_grad_norm_({unused}, 1.0).item<float>(), 0);
  const auto before = a.grad().clone();
  clip_grad_norm_({a, b}, 100.0);
  EXPECT_TENSOR_EQ(a.grad(), before);
  set_grad(b, -7);
  clip_grad_value_({a, b, unused}, 0.125);
  EXPECT_TENSOR_EQ(b.grad(), at::full({2}, -0.125));
  auto wide = trained(at::zeros({2}, at::kDouble));
  set_grad(wide, 3);
  set_grad(a, 4);
  EXPECT_NEAR(clip_grad_norm_({a, wide}, 1.0).item<double>(), std::sqrt(50.0), 1e-6);
}

// The definition: sums of squares over blocks of 4096 elements, in double, added in order.
TEST(Clip, ByBlocksIsTheNormOfADividedState) {
  torch::manual_seed(4);
  auto a = trained(at::zeros({3, 5000})), b = trained(at::zeros({7}, at::kDouble));
  a.mutable_grad() = at::randn({3, 5000});
  b.mutable_grad() = at::randn({7}, at::kDouble);
  std::vector<double> sums(5);
  kernels::block_norms(a.grad().const_data_ptr<float>(), a.numel(), sums.data());
  kernels::block_norms(b.grad().const_data_ptr<double>(), b.numel(), sums.data() + 4);
  const double want = std::sqrt(kernels::add_blocks(sums.data(), 5));
  const at::Tensor ga = a.grad().clone(), gb = b.grad().clone();
  EXPECT_EQ(grad_norm({a, b}, {.by_blocks = true}).item<double>(), want);
  EXPECT_EQ(clip_grad_norm_({a, b, a}, want + 1, {.by_blocks = true}).item<double>(), want);
  EXPECT_TENSOR_EQ(a.grad(), ga);
  clip_grad_norm_({a, b}, 1.0, {.by_blocks = true});
  EXPECT_TENSOR_EQ(a.grad(), ga * (1.0 / (want + 1e-6)));
  EXPECT_TENSOR_EQ(b.grad(), gb * (1.0 / (want + 1e-6)));
  EXPECT_EQ(clip_grad_norm_({trained(at::zeros({9}))}, 1.0, {.by_blocks = true}).item<double>(), 0);

  EXPECT_THAT(message_of<UsageError>([&] { grad_norm({a}, {.norm_type = 1, .by_blocks = true}); }),
              HasSubstr("by_blocks computes norms of order 2 alone, and norm_type is 1"));
  auto half = trained(at::zeros({2}, at::kHalf));
  set_grad(half, 1);
  EXPECT_THAT(message_of<UsageError>([&] { clip_grad_norm_({half}, 1, {.by_blocks = true}); }),
              HasSubstr("by_blocks takes float and double gradients on the CPU, and one is Half"));
  set_grad(a, std::nan(""));
  EXPECT_THAT(message_of<UsageError>([&] {
                clip_grad_norm_({a}, 1, {.error_if_nonfinite = true, .by_blocks = true});
              }),
              HasSubstr("over all gradients is nan"));
}

TEST(Clip, RefusesWhatItCannotClip) {
  auto p = trained(at::zeros({2, 2}));
  set_grad(p, std::nan(""));
  EXPECT_THAT(
      message_of<UsageError>([&] { clip_grad_norm_({p}, 1.0, {.error_if_nonfinite = true}); }),
      HasSubstr("[clip_grad_norm_] the norm of order 2 over all gradients is nan"));
  EXPECT_THAT(message_of<UsageError>([&] { clip_grad_norm_({p}, -1); }),
              HasSubstr("max_norm = -1 is not a bound"));
  EXPECT_THAT(message_of<UsageError>([&] { clip_grad_norm_({p}, 1, {.norm_type = 0}); }),
              HasSubstr("norm_type = 0 is not a norm"));
  EXPECT_THAT(message_of<UsageError>([&] { clip_grad_value_({p}, -1); }),
              HasSubstr("clip_value = -1 is not a bound"));
  p.mutable_grad() = at::ones({2, 2}).to_sparse();
  EXPECT_THAT(message_of<UsageError>([&] { clip_grad_norm_({p}, 1); }), HasSubstr("is sparse"));
}

TEST(Clip, RefusesGradientsThatAreNotAveragedYet) {
  auto p = trained(at::ones({2}));
  SGD optimizer{{p}};
  GradScaler scaler;
  scaler.scale(p.sum()).backward();
  bool local = true;
  const auto accumulator = torch::autograd::impl::grad_accumulator(p);
  accumulator->add_post_hook(std::make_unique<GradientHook>(
      [](const auto& outputs, const auto&) { return outputs; }, [&] { return local; }));
  for (const auto& text : {message_of<UsageError>([&] { clip_grad_norm_({p}, 1); }),
                           message_of<UsageError>([&] { clip_grad_value_({p}, 1); }),
                           message_of<UsageError>([&] { grad_norm({p}); }),
                           message_of<UsageError>([&] { scaler.unscale_(optimizer); })})
    EXPECT_THAT(text, HasSubstr("belongs to FullyShard"));
  local = false;
  clip_grad_norm_({p}, 1);
}

// ---------------------------------------------------------------- autocast

at::ScalarType product_type() {
  return at::mm(at::ones({4, 4}), at::ones({4, 4})).scalar_type();
}

TEST(Autocast, LowersPrecisionWhileItLives) {
  const c10::Device cpu(c10::kCPU);
  EXPECT_EQ(product_type(), at::kFloat);
  {
    const Autocast outer{cpu, at::kBFloat16};
    EXPECT_EQ(product_type(), at::kBFloat16);
    {
      const Autocast off{cpu, at::kFloat};
      EXPECT_EQ(product_type(), at::kFloat);
      const Autocast half{cpu, at::kHalf};
      EXPECT_EQ(product_type(), at::kHalf);
    }
    EXPECT_EQ(product_type(), at::kBFloat16);
    try {
      const Autocast half{cpu, at::kHalf};
      throw std::runtime_error("out");
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(product_type(), at::kBFloat16);
  }
  EXPECT_EQ(product_type(), at::kFloat);
  EXPECT_THAT(message_of<UsageError>([&] { Autocast wrong(cpu, at::kDouble); }),
              HasSubstr("[Autocast] Double is not a type to compute in"));
  EXPECT_THAT(message_of<UsageError>([&] { Autocast wrong(c10::Device("meta"), at::kHalf); }),
              HasSubstr("no autocasting for meta"));
}

// A weight that was changed between two guards must not be taken from the cache of the first.
TEST(Autocast, ForgetsConvertedWeightsAtTheEnd) {
  auto weight = trained(at::ones({2, 2}));
  const auto product = [&] {
    const Autocast autocast{c10::Device(c10::kCPU), at::kBFloat16};
    at::mm(at::ones({2, 2}), weight);
    { const Autocast inner{c10::Device(c10::kCPU), at::kBFloat16}; }
    return at::mm(at::ones({2, 2}), weight)[0][0].item<float>();
  };
  EXPECT_EQ(product(), 2);
  weight.data().fill_(3);
  EXPECT_EQ(product(), 6);
}

// ---------------------------------------------------------------- Ema

struct Net : torch::nn::Module {
  Net() {
    weight = register_parameter("weight", at::zeros({2}));
    half = register_parameter("half", at::zeros({2}, at::kBFloat16));
    mean = register_buffer("mean", at::zeros({2}));
    steps = register_buffer("steps", at::zeros({}, at::kLong));
  }
  void set(double value) {
    const torch::NoGradGuard no_grad;
    for (auto& p : parameters()) p.fill_(value);
    mean.fill_(value);
    steps.fill_(static_cast<std::int64_t>(value));
  }
  at::Tensor weight, half, mean, steps;
};

TEST(Ema, FollowsTheWeights) {
  Net net;
  Ema plain{net, {.decay = 0.75, .warmup = false}};
  Ema warm{net, {.decay = 0.75}};
  net.set(8);
  plain.update();
  warm.update();  // decay is 1/10 at first
  EXPECT_TENSOR_EQ(plain.state_dict().at("weight"), at::full({2}, 2.0));
  EXPECT_TENSOR_EQ(plain.state_dict().at("mean"), at::full({2}, 8.0));
  EXPECT_EQ(plain.state_dict().at("steps").item<std::int64_t>(), 8);
  EXPECT_EQ(plain.state_dict().at("half").scalar_type(), at::kFloat);
  EXPECT_TENSOR_NEAR(warm.state_dict().at("weight"), at::full({2}, 7.2), 1e-6);
  EXPECT_EQ(warm.updates(), 1);
}

TEST(Ema, SwapIsExactUndoneAndNoWrite) {
  Net net;
  Ema ema{net, {.decay = 0.5, .warmup = false}};
  net.set(4);
  ema.update();
  net.set(9);
  const auto version = net.weight._version();
  const void* memory = net.weight.data_ptr();
  try {
    const auto averaged = ema.swap();
    EXPECT_TENSOR_EQ(net.weight.detach(), at::full({2}, 2.0));
    EXPECT_TENSOR_EQ(net.half.detach(), at::full({2}, 2.0, at::kBFloat16));
    EXPECT_TENSOR_EQ(net.mean, at::full({2}, 4.0));
    EXPECT_THAT(message_of<UsageError>([&] { (void)ema.swap(); }), HasSubstr("already swapped in"));
    EXPECT_THAT(message_of<UsageError>([&] { ema.update(); }), HasSubstr("while the averages"));
    EXPECT_THAT(message_of<UsageError>([&] { ema.load_state_dict({}); }),
                HasSubstr("End the swap"));
    throw std::runtime_error("out");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TENSOR_EQ(net.weight.detach(), at::full({2}, 9.0));
  EXPECT_TENSOR_EQ(net.mean, at::full({2}, 9.0));
  EXPECT_EQ(net.weight._version(), version);
  EXPECT_EQ(net.weight.data_ptr(), memory);
}

TEST(Ema, StateSurvivesAndIsChecked) {
  Net net, other;
  Ema ema{net}, fresh{other};
  for (int i = 1; i < 4; ++i) {
    net.set(i);
    ema.update();
  }
  auto state = ema.state_dict();
  fresh.load_state_dict(state);
  EXPECT_EQ(fresh.updates(), 3);
  net.set(7);
  other.set(7);
  ema.update();
  fresh.update();
  for (const auto& [name, tensor] : ema.state_dict())
    EXPECT_TENSOR_EQ(tensor, fresh.state_dict().at(name));
  state["extra"] = at::ones({1});
  EXPECT_THAT(message_of<UsageError>([&] { fresh.load_state_dict(state); }),
              HasSubstr("the state holds 'extra'"));
  state["mean"] = at::ones({3});
  EXPECT_THAT(message_of<UsageError>([&] { fresh.load_state_dict(state); }),
              HasSubstr("'mean' has shape [3] in the state, but the model has [2]"));
  state.erase("weight");
  EXPECT_THAT(message_of<UsageError>([&] { fresh.load_state_dict(state); }),
              HasSubstr("the state has no 'weight'"));
  EXPECT_THAT(message_of<UsageError>([&] { Ema(net, {.decay = 1}); }), HasSubstr("decay = 1"));
}

// ---------------------------------------------------------------- seeds and switches

TEST(Seeds, WeightsAreEqualAndDropoutDiffers) {
  const auto rank = [](int r) {
    seed_everything(42, r);
    at::rand({r + 1});  // what a rank drew before does not matter for the weights
    const auto weights = with_seed(42, [] { return at::randn({4}); });
    return std::pair(weights, at::rand({4}));
  };
  const auto [weights0, noise0] = rank(0);
  const auto [weights1, noise1] = rank(1);
  EXPECT_TENSOR_EQ(weights0, weights1);
  EXPECT_FALSE(noise0.equal(noise1));
  torch::manual_seed(43);
  at::rand({2});
  EXPECT_TENSOR_EQ(noise1, at::rand({4}));  // seed + rank, not moved by with_seed
}

TEST(Seeds, RandomStateSurvives) {
  seed_everything(7);
  at::randn({3});
  const RngState state = rng_state();
  const auto next = at::randn({5});
  set_rng_state(state);
  EXPECT_TENSOR_EQ(at::randn({5}), next);
  RngState larger = state;
  larger["cuda:63"] = at::zeros({16}, at::kByte);
  set_rng_state(larger);
  EXPECT_TENSOR_EQ(at::randn({5}), next);
  EXPECT_THAT(message_of<UsageError>([&] { set_rng_state({}); }), HasSubstr("has no 'cpu'"));
  EXPECT_THAT(message_of<UsageError>([&] { set_rng_state({{"cpu", at::zeros({3}, at::kByte)}}); }),
              HasSubstr("[determinism] the random state of cpu cannot be used"));
}

TEST(Determinism, SwitchesAreSet) {
  set_tf32(true);
  EXPECT_TRUE(tf32());
  full_determinism(3, 1);
  EXPECT_FALSE(tf32());
  EXPECT_TRUE(deterministic());
  EXPECT_TRUE(at::globalContext().deterministicCuDNN());
  EXPECT_FALSE(at::globalContext().benchmarkCuDNN());
  EXPECT_STRNE(std::getenv("CUBLAS_WORKSPACE_CONFIG"), nullptr);
  const auto noise = at::rand({2});
  set_deterministic(false);
  EXPECT_FALSE(deterministic());
  torch::manual_seed(4);
  EXPECT_TENSOR_EQ(noise, at::rand({2}));
}

// ---------------------------------------------------------------- ReplicatedOptimizer

torch::nn::Linear make_linear() {
  return with_seed(1, [] { return torch::nn::Linear(3, 2); });
}

// Clipping, scaling and skipping by options of the step, beside the same by hand.
void expect_steps_as_by_hand(Optimizer& ours, torch::nn::Linear& stepped) {
  auto by_hand = make_linear();
  AdamW optimizer{by_hand->parameters(), {.lr = 0.1}};
  GradScaler first, second;
  for (const double by : {1.0, kInf, 2.0}) {
    const auto x = at::full({4, 3}, 3.0);
    first.scale(by_hand(x).pow(2).sum() * by).backward();
    first.unscale_(optimizer);
    const auto norm = clip_grad_norm_(by_hand->parameters(), 1.0, {.by_blocks = true});
    first.step(optimizer);
    first.update();
    optimizer.zero_grad();
    second.scale(stepped(x).pow(2).sum() * by).backward();
    const StepResult result = ours.step({.max_grad_norm = 1.0, .scaler = &second});
    ours.zero_grad();
    EXPECT_FALSE(stepped->weight.grad().defined());
    if (by != kInf) {
      EXPECT_TENSOR_EQ(result.grad_norm, norm);
    }
    EXPECT_EQ(result.was_skipped(), by == kInf);
    EXPECT_EQ(first.get_scale(), second.get_scale());
    EXPECT_TENSOR_EQ(by_hand->weight.detach(), stepped->weight.detach());
  }
}

TEST(ReplicatedOptimizer, ClipsScalesAndSkipsAsByHand) {
  auto stepped = make_linear();
  ReplicatedOptimizer ours{stepped->named_parameters().pairs(), AdamWOptions{.lr = 0.1}};
  expect_steps_as_by_hand(ours, stepped);
}

// The same in an optimizer that was made from a list of parameters, as in PyTorch.
TEST(Optimizer, MadeFromAListOfParametersHasTheOptionsOfAStep) {
  auto stepped = make_linear();
  AdamW ours{stepped->parameters(), {.lr = 0.1}};
  expect_steps_as_by_hand(ours, stepped);
  auto p = trained(at::ones({2}));
  Lion lion{{p}, {.lr = 0.5}};
  set_grad(p, kInf);
  EXPECT_TRUE(lion.step({.skip_non_finite = true}).was_skipped());
  EXPECT_TENSOR_EQ(p.detach(), at::ones({2}));
  EXPECT_EQ(lion.state_bytes(), 0);
  set_grad(p, 3);
  EXPECT_NEAR(lion.step({.want_grad_norm = true}).norm(), std::sqrt(18.0), 1e-12);
  EXPECT_TENSOR_EQ(p.detach(), at::full({2}, 0.5));
  EXPECT_EQ(lion.state_bytes(), 2 * 4);
  EXPECT_THAT(lion.unavailable_for_capture({}), HasSubstr("not on a GPU"));
}

// A group that is added later takes part in the norm, and is refused where it is in another one.
TEST(Optimizer, GroupsMayBeAdded) {
  auto a = trained(at::ones({2})), b = trained(at::ones({2})), c = trained(at::ones({2}));
  Optimizer optimizer{NamedParameters{{"b", b}, {"a", a}}, SGDOptions{.lr = 1}};
  set_grad(a, 1);
  set_grad(b, 1);
  set_grad(c, 1);
  EXPECT_NEAR(optimizer.step({.want_grad_norm = true}).norm(), 2, 1e-12);
  optimizer.add_param_group(Lion::group({c}, {.lr = 0.25}));
  EXPECT_NEAR(optimizer.step({.want_grad_norm = true}).norm(), std::sqrt(6.0), 1e-12);
  EXPECT_TENSOR_EQ(c.detach(), at::full({2}, 0.75));
  EXPECT_THAT(message_of<UsageError>([&] { optimizer.state_dict(); }),
              HasSubstr("[optimizer] a parameter of shape [2] has no name"));
  optimizer.name_parameters({{"c", c}, {"other", a}});
  EXPECT_TRUE(optimizer.state_dict().contains("c.exp_avg"));
  EXPECT_TRUE(optimizer.state_dict().contains("a.step")) << "as it was made with";
  optimizer.param_groups()[1].params()[0] = b;
  EXPECT_THAT(message_of<UsageError>([&] { optimizer.step(); }),
              HasSubstr("in two parameter groups"));
}

TEST(ReplicatedOptimizer, SkipsANonFiniteStepOnEveryRank) {
  run_threads(2, [](World& world) {
    auto p = trained(at::ones({2}));
    ReplicatedOptimizer optimizer{NamedParameters{{"p", p}}, SGDOptions{.lr = 1}, world};
    set_grad(p, world.rank() == 1 ? std::nan("") : 0.25);
    EXPECT_TRUE(optimizer.step({.skip_non_finite = true}).was_skipped());
    EXPECT_TENSOR_EQ(p.detach(), at::ones({2}));
    set_grad(p, 0.25);
    const auto result = optimizer.step({.want_grad_norm = true, .skip_non_finite = true});
    EXPECT_FALSE(result.was_skipped());
    EXPECT_NEAR(result.norm(), std::sqrt(0.125), 1e-7);
    EXPECT_TENSOR_EQ(p.detach(), at::full({2}, 0.75));
    EXPECT_FALSE(optimizer.step().skipped.defined());
    EXPECT_THAT(message_of<UsageError>([&] { optimizer.step({.max_grad_norm = std::nan("")}); }),
                HasSubstr("max_grad_norm = nan must be positive"));
  });
}

TEST(ReplicatedOptimizer, KnowsGroupsAndNames) {
  auto a = trained(at::ones({2})), b = trained(at::ones({2}));
  const NamedParameters names{{"a", a}, {"b", b}};
  const std::vector<ParamGroup> groups{{{a}, SGDOptions{.lr = 0.5}}, {{b}, SGDOptions{.lr = 0.25}}};
  ReplicatedOptimizer optimizer{names, groups};
  EXPECT_EQ(optimizer.groups(), 2u);
  EXPECT_EQ(optimizer.lr(1), 0.25);
  optimizer.set_lr(1, 0.125);
  set_grad(a, 1);
  set_grad(b, 1);
  optimizer.step();
  EXPECT_EQ(a[0].item<float>(), 0.5f);
  EXPECT_EQ(b[0].item<float>(), 0.875f);
  optimizer.options(1).as<SGDOptions>().weight_decay = 8;
  optimizer.step();
  EXPECT_EQ(b[0].item<float>(), 0.875f - 0.125f * (1 + 8 * 0.875f));
  const auto refusal = [&](const auto& body) { return message_of<UsageError>(body); };
  EXPECT_THAT(refusal([&] { optimizer.lr(2); }), HasSubstr("there is no group 2"));
  EXPECT_THAT(refusal([&] { optimizer.set_lr(2, 1); }), HasSubstr("there is no group 2"));
  optimizer.set_lr(-1);
  EXPECT_THAT(refusal([&] { optimizer.step(); }), HasSubstr("option lr cannot be -1"));
  optimizer.options(0) = AdamOptions{};
  EXPECT_THAT(refusal([&] { optimizer.step(); }), HasSubstr("has options of another optimizer"));
  EXPECT_THAT(refusal([&] { ReplicatedOptimizer(NamedParameters{{"a", a}}, groups); }),
              HasSubstr("1 of 2 parameters in the groups have none of the 1 names"));
}

// Groups of different kinds: one norm and one decision to skip, state by name, all or nothing.
TEST(ReplicatedOptimizer, MixesKindsOfOptions) {
  auto a = trained(at::ones({2})), b = trained(at::ones({3}));
  const std::vector<ParamGroup> groups{{{a}, SGDOptions{.lr = 1, .momentum = 0.5}},
                                       {{b}, AdamWOptions{.lr = 0.5}}};
  ReplicatedOptimizer optimizer{NamedParameters{{"a", a}, {"b", b}}, groups};
  set_grad(a, 3);
  set_grad(b, 4);
  EXPECT_NEAR(optimizer.step({.max_grad_norm = 1}).norm(), std::sqrt(2 * 9 + 3 * 16), 1e-9);
  set_grad(a, 3);
  set_grad(b, kInf);
  const at::Tensor before = a.detach().clone();
  EXPECT_TRUE(optimizer.step({.skip_non_finite = true}).was_skipped());
  EXPECT_TENSOR_EQ(a.detach(), before);
  TensorDict state = optimizer.state_dict();
  EXPECT_EQ(state.size(), 5u);
  EXPECT_EQ(state.at("b.step").item<double>(), 1);
  EXPECT_TRUE(optimizer.state_dict({.wanted = false}).empty());
  state["a.momentum_buffer"].fill_(7);
  optimizer.load_state_dict(state);
  EXPECT_TENSOR_EQ(optimizer.state_dict().at("a.momentum_buffer"), at::full({2}, 7.0));
  TensorDict torn = state;
  torn["a.momentum_buffer"] = at::zeros({2});
  torn.erase("b.exp_avg");
  EXPECT_THAT(message_of<UsageError>([&] { optimizer.load_state_dict(torn); }),
              HasSubstr("the state has no 'b.exp_avg'"));
  EXPECT_TENSOR_EQ(optimizer.state_dict().at("a.momentum_buffer"), at::full({2}, 7.0));
  state["c.step"] = at::zeros({});
  EXPECT_THAT(message_of<UsageError>([&] { optimizer.load_state_dict(state); }),
              HasSubstr("the state holds 'c.step'"));
}

// Without a copy the tensors are the optimizer's own, which a save copies during the next backward.
TEST(ReplicatedOptimizer, StateIsACopyUnlessAskedOtherwise) {
  auto p = trained(at::ones({2}));
  ReplicatedOptimizer optimizer{NamedParameters{{"p", p}}, AdamWOptions{.lr = 0.5}};
  set_grad(p, 1);
  optimizer.step();
  const at::Tensor copy = optimizer.state_dict().at("p.exp_avg");
  const at::Tensor own = optimizer.state_dict({.copy = false}).at("p.exp_avg");
  EXPECT_TENSOR_EQ(copy, own);
  optimizer.step();
  EXPECT_FALSE(at::equal(copy, own));
  EXPECT_TENSOR_EQ(optimizer.state_dict().at("p.exp_avg"), own);
}

TEST(ReplicatedOptimizer, DecayGroupsAreHuggingFaces) {
  struct Block : torch::nn::Module {
    Block() {
      fc = register_module("fc", torch::nn::Linear(2, 2));
      ln = register_module("ln_1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({2})));
      q_norm = register_parameter("q_norm", at::ones({2}));
      normal = register_parameter("normal", at::ones({2}));
      frozen = register_parameter("frozen", at::ones({2}), /*requires_grad=*/false);
    }
    torch::nn::Linear fc{nullptr};
    torch::nn::LayerNorm ln{nullptr};
    at::Tensor q_norm, normal, frozen;
  } block;
  const auto groups = decay_groups(block, AdamWOptions{.lr = 0.5, .weight_decay = 0.25});
  ASSERT_EQ(groups.size(), 2u);
  ASSERT_EQ(groups[0].params.size(), 2u);
  EXPECT_TRUE(groups[0].params[0].is_same(block.normal));
  EXPECT_TRUE(groups[0].params[1].is_same(block.fc->weight));
  EXPECT_EQ(groups[0].options.as<AdamWOptions>().weight_decay, 0.25);
  EXPECT_EQ(groups[1].params.size(), 4u);
  EXPECT_EQ(groups[1].options.as<AdamWOptions>().weight_decay, 0);
  EXPECT_EQ(groups[1].options.as<AdamWOptions>().lr, 0.5);
  torch::nn::LayerNorm alone(torch::nn::LayerNormOptions({2}));
  EXPECT_EQ(decay_groups(*alone, SGDOptions{}).size(), 1u);
}

}  // namespace
}  // namespace lockstep::optim
