// The optimizers by themselves. tests/parity checks that their bits are Python's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <sstream>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/optim/local_gradients.h"
#include "lockstep/optim/rule_state.h"
#include "lockstep/optim/schedule.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::optim {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::UnorderedElementsAre;

at::Tensor leaf(at::Tensor values) {
  return values.clone().set_requires_grad(true);
}

void set_grad(at::Tensor& param, const at::Tensor& grad) {
  param.mutable_grad() = grad.clone();
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.dtype() == b.dtype() &&
         std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.nbytes()) == 0;
}

// The textbook rule, in double.
struct ReferenceAdamW {
  double w, m = 0, v = 0;
  int t = 0;
  void step(double g, const auto& o) {
    ++t;
    w -= o.lr * o.weight_decay * w;
    m = o.betas.first * m + (1 - o.betas.first) * g;
    v = o.betas.second * v + (1 - o.betas.second) * g * g;
    const double m_hat = m / (1 - std::pow(o.betas.first, t));
    const double v_hat = v / (1 - std::pow(o.betas.second, t));
    w -= o.lr * m_hat / (std::sqrt(v_hat) + o.eps);
  }
};

// One optimizer's parameters and state under ATen's own kernels.
struct Aten {
  std::vector<at::Tensor> params, first, second;
  int steps = 0;

  explicit Aten(const std::vector<at::Tensor>& start) {
    for (const auto& p : start) {
      params.push_back(p.detach().clone());
      first.push_back(at::zeros_like(params.back()));
      second.push_back(at::zeros_like(params.back()));
    }
  }
  void step(const std::vector<at::Tensor>& grads, const AdamWOptions& o) {
    adam(grads, o, [](auto&&... all) { at::_fused_adamw_(all...); });
  }
  void step(const std::vector<at::Tensor>& grads, const AdamOptions& o) {
    adam(grads, o, [](auto&&... all) { at::_fused_adam_(all...); });
  }
  void step(const std::vector<at::Tensor>& grads, const SGDOptions& o) {
    const auto momentum = o.momentum == 0 ? std::vector<at::Tensor>{} : first;
    at::_fused_sgd_(params, grads, momentum, o.weight_decay, o.momentum, o.lr, o.dampening,
                    o.nesterov, /*maximize=*/false, ++steps == 1);
  }
  void adam(const std::vector<at::Tensor>& grads, const auto& o, const auto& fused) {
    const std::vector<at::Tensor> counts(params.size(), at::full({}, ++steps, at::kFloat));
    fused(params, grads, first, second, std::vector<at::Tensor>{}, counts, o.lr, o.betas.first,
          o.betas.second, o.weight_decay, o.eps, false, false, std::optional<at::Tensor>{},
          std::optional<at::Tensor>{});
  }
};

// Small tensors, none at all, and ones that several threads share.
template <typename Optimizer, typename Options>
void follow_aten(const Options& options, c10::ScalarType dtype) {
  torch::manual_seed(11);
  std::vector<at::Tensor> params;
  for (const int size : {100'003, 0, 7, 40'000, 1025, 1, 0, 98'309, 2048})
    params.push_back(leaf(torch::randn({size}, dtype)));
  Aten theirs(params);
  Optimizer ours{params, options};
  for (int step = 0; step < 3; ++step) {
    std::vector<at::Tensor> grads;
    for (auto& p : params) {
      grads.push_back(torch::randn_like(p.detach()));
      set_grad(p, grads.back());
    }
    ours.step();
    theirs.step(grads, options);
    for (std::size_t i = 0; i < params.size(); ++i)
      ASSERT_TRUE(same_bits(params[i].detach(), theirs.params[i]))
          << Options::kName << ", " << dtype << ", tensor " << i << ", step " << step;
  }
}

TEST(Optimizers, GiveAtensBitsOnAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 3, 8}) {
    SCOPED_TRACE(threads);
    at::set_num_threads(threads);
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      follow_aten<AdamW>(AdamWOptions{.lr = 0.01, .weight_decay = 0.1}, dtype);
      follow_aten<Adam>(AdamOptions{.lr = 0.01, .weight_decay = 0.1}, dtype);
      if (dtype == at::kBFloat16) continue;  // ATen's kernel of SGD leaves elements out
      follow_aten<SGD>(SGDOptions{.lr = 0.1, .weight_decay = 0.01}, dtype);
      follow_aten<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.3}, dtype);
      follow_aten<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}, dtype);
    }
  }
  at::set_num_threads(before);
}

// SGD in double, for one element.
struct ReferenceSGD {
  double w, momentum = 0;
  int t = 0;
  void step(double g, const SGDOptions& o) {
    g += o.weight_decay * w;
    momentum = ++t == 1 ? g : o.momentum * momentum + (1 - o.dampening) * g;
    if (o.momentum != 0) g = o.nesterov ? g + o.momentum * momentum : momentum;
    w -= o.lr * g;
  }
};

// Whatever kernel takes the step: each element of tensors around the widths of vectors has moved
// as a plain loop moves it.
template <typename Optimizer, typename Reference, typename Options>
void follow_loop(const Options& options, c10::ScalarType dtype) {
  const double tolerance = dtype == at::kBFloat16 ? 0.15 : dtype == at::kHalf ? 0.02 : 1e-4;
  for (const int size : {1, 15, 16, 17, 32, 33, 64, 100, 1000}) {
    torch::manual_seed(size);
    auto param = leaf(torch::randn({size}).to(dtype));
    const auto begin = param.detach().to(at::kDouble);
    std::vector<Reference> expected;
    for (int i = 0; i < size; ++i) expected.push_back({begin[i].item<double>()});
    Optimizer optimizer{{param}, options};
    for (int step = 0; step < 3; ++step) {
      // Between 0.5 and 1.5 in size, so that an element which stays behind is seen.
      const auto sign = torch::randn({size}).sign();
      set_grad(param, (sign * (0.5 + torch::rand({size}))).to(dtype));
      optimizer.step();
      for (int i = 0; i < size; ++i)
        expected[i].step(param.grad()[i].template item<double>(), options);
    }
    const auto now = param.detach().to(at::kDouble);
    for (int i = 0; i < size; ++i)
      ASSERT_NEAR(now[i].item<double>(), expected[i].w, tolerance)
          << Options::kName << ", " << dtype << ", element " << i << " of " << size;
  }
}

TEST(Optimizers, MoveEveryElementAsAPlainLoopDoes) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    follow_loop<AdamW, ReferenceAdamW>(AdamWOptions{.lr = 0.5, .weight_decay = 0.1}, dtype);
    follow_loop<Adam, ReferenceAdamW>(AdamOptions{.lr = 0.5, .weight_decay = 0}, dtype);
    follow_loop<SGD, ReferenceSGD>(SGDOptions{.lr = 0.5, .weight_decay = 0.1}, dtype);
    follow_loop<SGD, ReferenceSGD>(SGDOptions{.lr = 0.5, .momentum = 0.9, .dampening = 0.3}, dtype);
    follow_loop<SGD, ReferenceSGD>(SGDOptions{.lr = 0.5, .momentum = 0.9, .nesterov = true}, dtype);
  }
}

TEST(Optimizers, AGraphRetainedAcrossAStepIsRefused) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    auto p = leaf(torch::ones({3}, dtype));
    auto loss = (p * p).sum();
    set_grad(p, torch::ones({3}, dtype));
    AdamW({p}).step();
    EXPECT_THROW(loss.backward(), c10::Error);
    loss = (p * p).sum();
    SGD({p}).step();
    EXPECT_THROW(loss.backward(), c10::Error);
  }
}

// Gradients that are not materialised in memory: all zeros, or with a pending negation.
TEST(Optimizers, GradientsNeedNotBeWrittenOut) {
  auto p = leaf(torch::ones({4})), q = leaf(torch::ones({4}));
  p.mutable_grad() = at::_efficientzerotensor({4}, at::kFloat);
  q.mutable_grad() = at::imag(at::complex(torch::zeros({4}), torch::ones({4})).conj());
  ASSERT_TRUE(q.grad().is_neg());
  SGD({p, q}, {.lr = 0.5}).step();
  EXPECT_TRUE(same_bits(p.detach(), torch::ones({4})));
  EXPECT_TRUE(same_bits(q.detach(), torch::full({4}, 1.5)));
}

TEST(Optimizers, SkipParametersWithoutGradient) {
  auto used = leaf(torch::ones({3})), unused = leaf(torch::ones({2}));
  AdamW adamw{{used, unused}, {.weight_decay = 0.5}};
  SGD sgd{{used, unused}, {.lr = 1, .momentum = 0.9, .weight_decay = 0.5}};
  set_grad(used, torch::ones({3}));
  adamw.step();
  sgd.step();
  // Not even weight decay is applied, and no state is made.
  EXPECT_TRUE(same_bits(unused, torch::ones({2})));
  EXPECT_EQ(adamw.state().count(unused.unsafeGetTensorImpl()), 0u);
  EXPECT_EQ(sgd.state().count(unused.unsafeGetTensorImpl()), 0u);
  EXPECT_FALSE(same_bits(used, torch::ones({3})));
}

TEST(Optimizers, ArchivesOfEveryRuleContinueAndOthersAreRefused) {
  const auto params = [] {
    return std::vector{leaf(torch::ones({3, 2})), leaf(torch::ones({4, 3}))};
  };
  const auto round = [&](auto make) {
    auto first = params(), second = params();
    auto one = make(first), two = make(second);
    const auto step = [](auto& tensors, auto& optimizer) {
      for (std::size_t i = 0; i < tensors.size(); ++i)
        set_grad(tensors[i], torch::full_like(tensors[i], 0.5 + static_cast<double>(i)));
      optimizer.step();
    };
    step(first, one);
    one.options().lr = 0.25;
    std::stringstream archive;
    torch::save(one, archive);
    for (std::size_t i = 0; i < first.size(); ++i) second[i].set_data(first[i].detach().clone());
    auto& options = two.options();
    torch::load(two, archive);
    EXPECT_EQ(options.lr, 0.25) << "a reference from before";
    step(first, one);
    step(second, two);
    for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(same_bits(first[i], second[i])) << i;
  };
  round([](const auto& p) { return AdamW{p}; });
  round([](const auto& p) { return SGD{p, {.momentum = 0.9}}; });
  round([](const auto& p) { return Lion{p}; });
  round([](const auto& p) { return Muon{p, {.ns_steps = 3}}; });
  round([](const auto& p) { return Adafactor{p, {.beta1 = 0.9}}; });
  // Groups of different rules, and a tied weight.
  round([](const auto& p) {
    return OptimizerOf<MuonOptions>{
        {Muon::group({p[0]}, {.ns_steps = 3}), Lion::group({p[1], p[1]}, {.lr = 0.1})}};
  });
  // SGD's has neither a count nor second moments.
  auto p = params();
  SGD sgd{p, {.momentum = 0.9}};
  for (auto& each : p) set_grad(each, torch::ones_like(each));
  sgd.step();
  std::stringstream archive;
  torch::save(sgd, archive);
  AdamW adamw{p}, grouped{{AdamW::group({p[0]}, {}), AdamW::group({p[1]}, {})}};
  EXPECT_THAT(message_of<UsageError>([&] { torch::load(adamw, archive); }),
              HasSubstr("[AdamW] the archive has no option 'beta1'"));
  archive.seekg(0);
  EXPECT_THAT(message_of<UsageError>([&] { torch::load(grouped, archive); }),
              HasSubstr("the archive has 1 param_groups, and the optimizer has 2"));
}

// What programs and files of earlier versions rely on.
TEST(Optimizers, ArchivesHaveTorchsLayout) {
  auto p = leaf(torch::ones({2}));
  AdamW optimizer{{p}, {.lr = 0.5}};
  set_grad(p, torch::ones({2}));
  optimizer.step();
  std::stringstream file;
  torch::save(optimizer, file);
  torch::serialize::InputArchive archive, state, one, groups, group, options;
  archive.load_from(file);
  EXPECT_THAT(archive.keys(), UnorderedElementsAre("pytorch_version", "state", "param_groups"));
  archive.read("state", state);
  ASSERT_EQ(state.keys().size(), 1u);
  state.read(state.keys()[0], one);
  EXPECT_THAT(one.keys(), UnorderedElementsAre("step", "exp_avg", "exp_avg_sq"));
  archive.read("param_groups", groups);
  groups.read("param_groups/0", group);
  group.read("options", options);
  EXPECT_THAT(options.keys(),
              UnorderedElementsAre("lr", "beta1", "beta2", "eps", "weight_decay", "bf16_state"));
  c10::IValue lr;
  options.read("lr", lr);
  EXPECT_EQ(lr.toDouble(), 0.5);
}

TEST(Optimizers, CountStepsPerParameter) {
  auto a = leaf(torch::ones({3})), late = leaf(torch::ones({3}));
  AdamW optimizer{{a, late}};
  set_grad(a, torch::ones({3}));
  optimizer.step();
  optimizer.step();
  set_grad(late, torch::ones({3}));
  optimizer.step();
  const auto step_of = [&](const at::Tensor& p) { return find_state(optimizer, p)->step; };
  EXPECT_EQ(step_of(a).item<float>(), 3);
  EXPECT_EQ(step_of(late).item<float>(), 1);
  EXPECT_EQ(step_of(late).scalar_type(), torch::kFloat);
}

TEST(SGD, MomentumMayStartLater) {
  auto a = leaf(torch::ones({4})), late = leaf(torch::ones({4})), alone = leaf(torch::ones({4}));
  const SGDOptions options{.lr = 0.1, .momentum = 0.9, .dampening = 0.5};
  SGD together{{a, late}, options}, single{{alone}, options};
  const auto grad = torch::full({4}, 0.25);
  set_grad(a, grad);
  together.step();
  for (int t = 0; t < 3; ++t) {
    set_grad(late, grad);
    set_grad(alone, grad);
    together.step();
    single.step();
  }
  EXPECT_TRUE(same_bits(late, alone));
}

TEST(Optimizers, StepTiedWeightsOnce) {
  auto p = leaf(torch::ones({4})), q = leaf(torch::ones({4}));
  SGD once{{p}, {.lr = 0.5}}, twice{{q, q}, {.lr = 0.5}};
  set_grad(p, torch::ones({4}));
  set_grad(q, torch::ones({4}));
  once.step();
  twice.step();
  EXPECT_TRUE(same_bits(p, q));
}

// LibTorch's kernels walk memory without looking at strides: a gradient with another layout must
// not be applied to the wrong elements.
TEST(Optimizers, GradientMayHaveOtherStrides) {
  auto p = leaf(torch::zeros({2, 3}));
  const auto grad = torch::arange(6, torch::kFloat).view({3, 2}).t();
  p.mutable_grad() = grad;
  SGD optimizer{{p}, {.lr = 1}};
  optimizer.step();
  EXPECT_TRUE(torch::equal(p.detach(), -grad));
  auto channels_last =
      leaf(torch::ones({2, 3, 4, 5})).detach().contiguous(torch::MemoryFormat::ChannelsLast);
  channels_last.set_requires_grad(true);
  const auto wanted = torch::randn({2, 3, 4, 5});
  channels_last.mutable_grad() = wanted;
  AdamW adamw{{channels_last}, {.lr = 0.1, .weight_decay = 0}};
  adamw.step();
  EXPECT_TRUE(torch::allclose(channels_last.detach(), 1 - 0.1 * wanted.sign(), 1e-4, 1e-4));
}

TEST(Optimizers, MixDtypes) {
  auto a = leaf(torch::ones({4})), b = leaf(torch::ones({4}, torch::kDouble));
  auto c = leaf(torch::ones({4}, torch::kBFloat16));
  AdamW optimizer{{a, b, c}, {.lr = 0.25, .weight_decay = 0}};
  for (auto* p : {&a, &b, &c}) set_grad(*p, torch::ones_like(*p));
  optimizer.step();
  for (const auto& p : {a, b, c}) EXPECT_NEAR(p[3].item<double>(), 0.75, 1e-6);
}

TEST(Optimizers, GroupsHaveTheirOwnOptions) {
  auto a = leaf(torch::ones({2})), b = leaf(torch::ones({2})), c = leaf(torch::ones({2}));
  SGD optimizer{{SGD::group({a}, {.lr = 0.5}), torch::optim::OptimizerParamGroup({b})},
                {.lr = 0.25}};
  optimizer.add_param_group(SGD::group({c}, {.lr = 0.125}));
  for (auto* p : {&a, &b, &c}) set_grad(*p, torch::ones({2}));
  optimizer.step();
  EXPECT_EQ(a[0].item<float>(), 0.5f);
  EXPECT_EQ(b[0].item<float>(), 0.75f);
  EXPECT_EQ(c[0].item<float>(), 0.875f);
  optimizer.zero_grad();
  EXPECT_FALSE(a.grad().defined());
}

// LibTorch's StepLR counts differently from Python's, so the test expects what it does to a stock
// optimizer.
TEST(Optimizers, WorkWithStockSchedulers) {
  auto p = leaf(torch::ones({2})), q = leaf(torch::ones({2}));
  AdamW ours{{p}, {.lr = 1.0}};
  torch::optim::AdamW stock{{q}, torch::optim::AdamWOptions(1.0)};
  torch::optim::StepLR our_schedule{ours, /*step_size=*/2, /*gamma=*/0.1};
  torch::optim::StepLR stock_schedule{stock, /*step_size=*/2, /*gamma=*/0.1};
  for (int t = 0; t < 6; ++t) {
    EXPECT_EQ(ours.options().lr, stock.param_groups()[0].options().get_lr());
    our_schedule.step();
    stock_schedule.step();
  }
  EXPECT_LT(ours.options().lr, 0.02);
}

TEST(Optimizers, ClosureIsRunWithGradients) {
  auto p = leaf(torch::ones({2}));
  SGD optimizer{{p}, {.lr = 1}};
  const torch::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    auto value = (p * p).sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<float>(), 2);
  EXPECT_EQ(p[0].item<float>(), -1);
}

TEST(Optimizers, SaveAndLoadBeforeTheFirstStep) {
  auto p = leaf(torch::ones({2}));
  AdamW first{{p}, {.lr = 0.5}}, second{{p}};
  std::stringstream file;
  torch::save(first, file);
  torch::load(second, file);
  EXPECT_EQ(second.options().lr, 0.5);
}

TEST(Optimizers, RefuseStateOfAnotherShape) {
  auto p = leaf(torch::ones({2})), q = leaf(torch::ones({3}));
  const auto load_into_q = [&](auto&& first, auto&& second) {
    set_grad(p, torch::ones({2}));
    first.step();
    std::stringstream file;
    torch::save(first, file);
    return message_of<UsageError>([&] { torch::load(second, file); });
  };
  EXPECT_THAT(load_into_q(AdamW{{p}}, AdamW{{q}}),
              HasSubstr("state of shape [2] for a parameter of shape [3]"));
  EXPECT_THAT(load_into_q(SGD{{p}, {.momentum = 0.9}}, SGD{{q}}),
              HasSubstr("[SGD] the archive holds"));
}

TEST(Optimizers, RefuseWhatTheyCannotStep) {
  auto p = leaf(torch::ones({4, 2}));
  p.mutable_grad() = torch::ones({4, 2}).to_sparse();
  AdamW sparse{{p}};
  EXPECT_THAT(message_of<UsageError>([&] { sparse.step(); }),
              HasSubstr("[AdamW] the parameter of shape [4, 2] has a sparse gradient"));

  auto slice = torch::ones({4, 4}).slice(1, 0, 2).set_requires_grad(true);
  set_grad(slice, torch::ones({4, 2}));
  SGD sliced{{slice}};
  EXPECT_THAT(message_of<UsageError>([&] { sliced.step(); }),
              HasSubstr("[SGD] the parameter of shape [4, 2] is not dense in memory"));

  auto q = leaf(torch::ones({3}));
  AdamW twice{{AdamW::group({q}, {}), AdamW::group({q}, {})}};
  EXPECT_THAT(message_of<UsageError>([&] { twice.step(); }),
              HasSubstr("the parameter of shape [3] is in two parameter groups"));
}

TEST(Optimizers, RefuseWrongOptions) {
  auto p = leaf(torch::ones({2}));
  EXPECT_THAT(message_of<UsageError>([&] { AdamW a({p}, {.lr = -1}); }),
              HasSubstr("[AdamW] option lr cannot be -1"));
  EXPECT_THAT(message_of<UsageError>([&] { AdamW a({p}, {.lr = std::nan("")}); }),
              HasSubstr("nan"));
  EXPECT_THAT(message_of<UsageError>([&] { AdamW::group({p}, {.betas = {0.9, 1.0}}); }),
              HasSubstr("option beta2 cannot be 1"));
  EXPECT_THAT(message_of<UsageError>([&] { SGD a({p}, {.momentum = -0.1}); }),
              HasSubstr("[SGD] option momentum cannot be -0.1"));
  EXPECT_THAT(message_of<UsageError>([&] { SGD a({p}, {.nesterov = true}); }),
              HasSubstr("nesterov with momentum 0 and dampening 0"));

  AdamW optimizer{{p}};
  auto q = leaf(torch::ones({2}));
  optimizer.add_param_group(
      {{q}, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.1))});
  set_grad(q, torch::ones({2}));
  EXPECT_THAT(message_of<UsageError>([&] { optimizer.step(); }),
              HasSubstr("a parameter group has options of another optimizer"));
}

TEST(LocalGradients, AreRefusedUntilTheyAreAveraged) {
  auto mine = leaf(at::ones({2, 3})), other = leaf(at::ones({4}));
  bool local = true;
  // As a Reducer does for every parameter.
  const auto accumulator = torch::autograd::impl::grad_accumulator(mine);
  accumulator->add_post_hook(std::make_unique<GradientHook>(
      [](const auto& outputs, const auto&) { return outputs; }, [&] { return local; }));
  refuse_local_gradients({other, at::Tensor(), mine.detach()}, "clip_grad_norm_");
  const auto refusal = [&](const std::vector<at::Tensor>& params) {
    return message_of<UsageError>([&] { refuse_local_gradients(params, "clip_grad_norm_"); });
  };
  EXPECT_THAT(refusal({other, mine}),
              AllOf(HasSubstr("[clip_grad_norm_] the parameter of shape [2, 3]"),
                    HasSubstr("Make the optimizer by model.make_optimizer()"),
                    HasSubstr("step({.max_grad_norm")));
  // New memory under the same tensor.
  mine.set_data(at::zeros({2, 3}));
  EXPECT_THAT(refusal({mine}), HasSubstr("belongs to FullyShard"));
  set_grad(mine, at::ones({2, 3}));
  EXPECT_THAT(message_of<UsageError>([&] { SGD({mine}).step(); }), HasSubstr("[SGD] "));
  local = false;
  refuse_local_gradients({mine, other}, "clip_grad_norm_");
}

// Stops after some steps and continues in a fresh optimizer over copies, with the state by name.
template <typename Optimizer, typename Options>
void check_state_dict(const Options& options) {
  torch::manual_seed(5);
  auto p = leaf(torch::randn({4, 5})), q = leaf(torch::randn({3})), unused = leaf(torch::ones({2}));
  Optimizer first{{p, q, p, unused}, options};
  for (int t = 0; t < 3; ++t) {
    set_grad(p, torch::randn({4, 5}));
    if (t > 0) set_grad(q, torch::randn({3}));
    first.step();
  }
  const NamedParameters names{{"p", p}, {"q", q}, {"tied", p}, {"unused", unused}};
  first.name_parameters(names);
  const TensorDict state = first.state_dict();
  EXPECT_EQ(state.count("tied.step"), 0u);
  EXPECT_EQ(state.at("unused.step").item<double>(), 0);
  auto p2 = leaf(p.detach()), q2 = leaf(q.detach()), unused2 = leaf(unused.detach());
  Optimizer second{{p2, q2, unused2}, options};
  const NamedParameters names2{{"p", p2}, {"q", q2}, {"unused", unused2}};
  second.name_parameters(names2);
  second.load_state_dict(state);
  for (const auto& [name, tensor] : second.state_dict())
    EXPECT_TRUE(same_bits(tensor, state.at(name))) << name;
  for (int t = 0; t < 2; ++t) {
    for (auto [a, b] : {std::pair(&p, &p2), std::pair(&q, &q2), std::pair(&unused, &unused2)}) {
      const auto grad = torch::randn(a->sizes());
      set_grad(*a, grad);
      set_grad(*b, grad);
    }
    first.step();
    second.step();
  }
  EXPECT_TRUE(same_bits(p, p2));
  EXPECT_TRUE(same_bits(q, q2));
  EXPECT_TRUE(same_bits(unused, unused2));
}

TEST(Optimizers, StateByNameSurvives) {
  check_state_dict<AdamW>(AdamWOptions{.lr = 0.1});
  check_state_dict<Adam>(AdamOptions{.lr = 0.1, .weight_decay = 0.1});
  check_state_dict<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.5});
  check_state_dict<SGD>(SGDOptions{.lr = 0.1});
}

TEST(Optimizers, RefuseStateOfAnotherModel) {
  auto p = leaf(torch::ones({2}));
  AdamW optimizer{{p}};
  set_grad(p, torch::ones({2}));
  optimizer.step();
  EXPECT_THAT(message_of<UsageError>([&] { optimizer.state_dict(); }),
              HasSubstr("a parameter of shape [2] has no name"));
  optimizer.name_parameters({{"p", p}});
  const auto good = optimizer.state_dict();
  const auto refusal = [&](auto change) {
    auto state = good;
    change(state);
    return message_of<UsageError>([&] { optimizer.load_state_dict(state); });
  };
  EXPECT_THAT(refusal([](auto& s) { s.erase("p.exp_avg"); }),
              HasSubstr("[AdamW] the state has no 'p.exp_avg'"));
  EXPECT_THAT(refusal([](auto& s) { s["p.exp_avg"] = torch::ones({3}); }),
              HasSubstr("'p.exp_avg' has shape [3] in the state, but [2] is wanted"));
  EXPECT_THAT(refusal([](auto& s) { s["q.step"] = torch::ones({}); }),
              HasSubstr("the state holds 'q.step', which this optimizer has no place for"));
  EXPECT_TRUE(same_bits(optimizer.state_dict().at("p.exp_avg"), good.at("p.exp_avg")));
}

// ---------------------------------------------------------------- schedules

// The schedules by themselves. tests/optim checks that their values are those of Hugging Face and
// PyTorch.

Schedule make(const std::string& name, std::int64_t warmup, std::int64_t total,
              const std::string& kwargs = "{}") {
  return make_schedule({.name = name,
                        .warmup_steps = warmup,
                        .total_steps = total,
                        .lr = 0.5,
                        .kwargs = schedule_kwargs(parse_json(kwargs, "kwargs"))});
}

std::string refusal(const std::string& name, std::int64_t warmup, std::int64_t total,
                    const std::string& kwargs = "{}") {
  try {
    make(name, warmup, total, kwargs);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "(nothing thrown)";
}

TEST(Schedule, EveryNameStartsAtZeroWithWarmupAndReachesOne) {
  for (const std::string& name : schedule_names()) {
    const std::string kwargs = name == "cosine_with_min_lr"    ? R"({"min_lr_rate": 0.1})"
                               : name == "warmup_stable_decay" ? R"({"num_decay_steps": 5})"
                               : name == "step"                ? R"({"step_size": 7})"
                               : name == "multi_step"          ? R"({"milestones": [5, 9]})"
                               : name == "exponential"         ? R"({"gamma": 0.9})"
                                                               : "{}";
    const Schedule schedule = make(name, 10, 40, kwargs);
    if (name != "constant") {
      EXPECT_EQ(schedule.factor(0), 0.0) << name;
      EXPECT_EQ(schedule.factor(5), 0.5) << name;
    }
    EXPECT_DOUBLE_EQ(schedule.factor(10), 1.0) << name;
    for (int step = 0; step < 60; ++step) {
      EXPECT_GE(schedule.factor(step), 0.0) << name << " " << step;
      EXPECT_LE(schedule.factor(step), 1.0) << name << " " << step;
    }
  }
  EXPECT_EQ(schedule_names().size(), 12u);
}

TEST(Schedule, AWarmupToTheEndAndAnUnknownEnd) {
  EXPECT_DOUBLE_EQ(make("polynomial", 10, 10, R"({"lr_end": 0.1})").factor(10), 0.2);
  EXPECT_EQ(make("inverse_sqrt", 0, 0, R"({"timescale": 4})").factor(12), 0.5);
  EXPECT_EQ(make("warmup_stable_decay", 2, 0,
                 R"({"num_stable_steps": 3, "num_decay_steps": 4, "min_lr_ratio": 0.25,
                     "decay_type": "linear"})")
                .factor(7),
            0.625);
}

// As None is.
TEST(Schedule, AKeyWithoutAValueIsItsDefault) {
  EXPECT_EQ(make("cosine", 0, 10, R"({"num_cycles": null})").factor(10), 0.0);
}

TEST(Schedule, TakesMilestonesInAnyOrderTwiceAndOfAProgram) {
  const Schedule several = make("multi_step", 0, 0, R"({"milestones": [8, 3, 8], "gamma": 0.5})");
  EXPECT_EQ(several.factor(3), 0.5);
  EXPECT_EQ(several.factor(8), 0.125);
  const Schedule from_cpp = make_schedule(
      {.name = "multi_step", .kwargs = {{"milestones", std::vector<double>{2}}, {"gamma", 0.5}}});
  EXPECT_EQ(from_cpp.factor(2), 0.5);
}

TEST(Schedule, KnowsWhichHaveAnEnd) {
  EXPECT_TRUE(schedule_has_end("linear"));
  for (const char* name : {"constant", "inverse_sqrt", "step", "multi_step", "exponential", "?"})
    EXPECT_FALSE(schedule_has_end(name)) << name;
}

TEST(Schedule, RefusesWhatItCannotCompute) {
  EXPECT_THAT(refusal("step", 0, 0), HasSubstr("step needs step_size, at least 1"));
  EXPECT_THAT(refusal("step", 0, 0, R"({"step_size": 2, "gamma": -1})"),
              HasSubstr("gamma = -1 of step cannot be used. It must be a number, at least 0."));
  EXPECT_THAT(refusal("exponential", 0, 0), HasSubstr("exponential needs gamma"));
  EXPECT_THAT(refusal("multi_step", 0, 0), HasSubstr("milestones = (not given) of multi_step"));
  EXPECT_THAT(refusal("multi_step", 0, 0, R"({"milestones": []})"),
              HasSubstr("milestones = [] of multi_step cannot be used. It must be a list of whole "
                        "numbers of steps, at least one."));
  EXPECT_THAT(refusal("multi_step", 0, 0, R"({"milestones": [1, 2.5]})"),
              HasSubstr("milestones = 2.5 of multi_step"));
  EXPECT_THAT(refusal("exponential", 0, 0, R"({"gamma": [1]})"),
              HasSubstr("gamma = [1] of exponential cannot be used. It must be a number."));
  EXPECT_THAT(refusal("cosin", 0, 10),
              AllOf(HasSubstr("[schedule] there is no schedule 'cosin'. Did you mean cosine?"),
                    HasSubstr("warmup_stable_decay")));
  EXPECT_THAT(refusal("cosine", 0, 10, R"({"num_cycle": 1})"),
              HasSubstr("cosine has no option 'num_cycle'. Did you mean num_cycles? It has "
                        "num_cycles."));
  EXPECT_THAT(refusal("linear", 0, 10, R"({"power": 1})"), HasSubstr("It has none."));
  EXPECT_THAT(refusal("linear", 0, 0), HasSubstr("linear needs total_steps, and it is 0"));
  EXPECT_THAT(refusal("linear", -1, 10), HasSubstr("warmup_steps = -1 is negative"));
  EXPECT_THAT(refusal("polynomial", 0, 10, R"({"lr_end": 0.5})"),
              HasSubstr("lr_end = 0.5 of polynomial is not below the learning rate 0.5"));
  EXPECT_THAT(refusal("cosine_with_min_lr", 0, 10), HasSubstr("and neither is given"));
  EXPECT_THAT(refusal("cosine_with_min_lr", 0, 10, R"({"min_lr": 0, "min_lr_rate": 0})"),
              HasSubstr("and both are given"));
  EXPECT_THAT(refusal("warmup_stable_decay", 0, 10), HasSubstr("needs num_decay_steps"));
  EXPECT_THAT(refusal("warmup_stable_decay", 6, 10, R"({"num_decay_steps": 5})"),
              HasSubstr("6 warm-up and 5 decay steps are more than the 10"));
  EXPECT_THAT(
      refusal("warmup_stable_decay", 0, 10, R"({"num_decay_steps": 5, "decay_type": "steep"})"),
      HasSubstr("decay_type = steep of warmup_stable_decay cannot be used. It must be "
                "linear, cosine, 1-sqrt."));
  EXPECT_THAT(refusal("warmup_stable_decay", 0, 10, R"({"num_decay_steps": -5})"),
              HasSubstr("num_decay_steps = -5"));
  EXPECT_THAT(refusal("inverse_sqrt", 0, 0, R"({"timescale": 0})"), HasSubstr("timescale = 0"));
  EXPECT_THAT(refusal("cosine", 0, 10, R"({"num_cycles": "two"})"),
              HasSubstr("num_cycles = two of cosine cannot be used. It must be a number."));
  EXPECT_THAT(refusal("inverse_sqrt", 0, 0, R"({"timescale": 1.5})"), HasSubstr("timescale = 1.5"));
  EXPECT_THAT(refusal("warmup_stable_decay", 0, 10, R"({"num_decay_steps": 5, "decay_type": 1})"),
              HasSubstr("decay_type = 1 of"));
  EXPECT_THAT(refusal("cosine", 0, 10, "[1]"), HasSubstr("lr_scheduler_kwargs"));
  try {
    make_schedule({.total_steps = 5, .lr = 0, .kwargs = {{"power", 2.0}, {"decay_type", "x"}}});
    FAIL();
  } catch (const UsageError& e) {
    EXPECT_THAT(e.what(), HasSubstr("the learning rate 0 is not a positive number"));
  }
}

}  // namespace
}  // namespace lockstep::optim
