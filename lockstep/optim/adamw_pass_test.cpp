// AdamWPass against the rule in double precision, on the CPU and, with LOCKSTEP_DEVICE=cuda, with
// the kernels.
#include "lockstep/optim/adamw_pass.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>

#include "lockstep/core/error.h"
#include "lockstep/kernels/step.h"
#include "lockstep/nn/device_for_test.h"
#include "lockstep/optim/algorithms.h"

namespace lockstep::optim {
namespace {

at::TensorOptions on_device() {
  return at::TensorOptions(nn::test_device()).dtype(at::kFloat);
}

// Sizes around the kernels' vectors and chunks; the fourth begins at an address that is not a
// multiple of 16 bytes.
std::vector<AdamWItem> some_items() {
  torch::manual_seed(3);
  std::vector<AdamWItem> items;
  for (const std::int64_t size : {1, 7, 64, 1003, 16384, 50001}) {
    const auto make = [&](double scale) {
      const at::Tensor whole = torch::randn({size + 1}).mul(scale).to(nn::test_device());
      return whole.narrow(0, size == 1003 ? 1 : 0, size);
    };
    AdamWItem item{make(1), make(0.1), torch::zeros({size}, on_device()),
                   torch::zeros({size}, on_device()), torch::zeros({}, on_device())};
    item.group = items.size() % 2;
    items.push_back(item);
  }
  return items;
}

struct Reference {
  at::Tensor param, m, v;
};

// As torch.optim does with a parameter that has no gradient.
TEST(AdamWPass, AParameterThatIsFrozenLaterStaysAsItIs) {
  auto items = some_items();
  for (auto& item : items) {
    item.param = item.param.clone().set_requires_grad(true);
    item.param.mutable_grad() = item.grad;
    item.grad = at::Tensor();
  }
  AdamWPass pass{items, {{.lr = 1e-2}, {.lr = 1e-2}}};
  pass.step();
  items[4].param.set_requires_grad(false);
  items[4].param.mutable_grad() = at::Tensor();
  std::vector<at::Tensor> before;
  double squares = 0;
  for (const auto& item : items) {
    before.push_back(item.param.detach().clone());
    if (item.param.requires_grad()) squares += item.param.grad().square().sum().item<double>();
  }
  pass.step();
  EXPECT_NEAR(pass.norm().item<double>(), std::sqrt(squares), 1e-5 * std::sqrt(squares));
  for (std::size_t i = 0; i < items.size(); ++i) {
    EXPECT_EQ(items[i].param.equal(before[i]), i == 4) << i;
    EXPECT_EQ(items[i].step.item<float>(), i == 4 ? 1 : 2) << i;
  }
}

TEST(AdamWPass, FollowsTheRuleWithClipping) {
  const std::vector<AdamWOptions> groups{
      {.lr = 1e-2, .betas = {0.9, 0.95}, .weight_decay = 0.1},
      {.lr = 3e-3, .betas = {0.8, 0.99}, .eps = 1e-6, .weight_decay = 0}};
  for (const double max_norm : {0.0, 1.0, 1e6}) {
    const auto items = some_items();
    std::vector<Reference> reference;
    double squares = 0;
    for (const auto& item : items) {
      reference.push_back({item.param.to(at::kDouble), torch::zeros_like(item.param, at::kDouble),
                           torch::zeros_like(item.param, at::kDouble)});
      squares += item.grad.to(at::kDouble).square().sum().item<double>();
    }
    const double norm = std::sqrt(squares);
    AdamWPass pass{items, groups};
    pass.set_max_norm(max_norm);
    double lr = groups[1].lr;
    for (int step = 1; step <= 3; ++step) {
      if (step == 3) {
        auto changed = groups[1];
        changed.lr = lr = 1e-3;
        pass.set_options(1, changed);
      }
      pass.step();
      EXPECT_NEAR(pass.norm().item<double>(), norm, 1e-6 * norm);
      const double clip = max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
      for (std::size_t i = 0; i < items.size(); ++i) {
        const auto& o = groups[items[i].group];
        const double rate = items[i].group == 0 ? o.lr : lr;
        auto& r = reference[i];
        const auto g = items[i].grad.to(at::kDouble) * clip;
        r.m = r.m + (1 - o.betas.first) * (g - r.m);
        r.v = o.betas.second * r.v + (1 - o.betas.second) * g * g;
        const auto denominator = (r.v / (1 - std::pow(o.betas.second, step))).sqrt() + o.eps;
        r.param = r.param * (1 - rate * o.weight_decay) -
                  rate * (r.m / (1 - std::pow(o.betas.first, step))) / denominator;
        // Two roundings of the parameter per step, and an update of at most lr that is accurate
        // to 1e-5 where eps does not decide it.
        const auto bound = 2 * step * 0x1p-24 * r.param.abs() + step * 1e-4 * rate;
        const auto error = (items[i].param.to(at::kDouble) - r.param).abs();
        EXPECT_TRUE((error <= bound).all().item<bool>()) << "size " << items[i].param.numel();
        EXPECT_EQ(items[i].step.item<double>(), step);
      }
    }
  }
}

TEST(AdamWPass, AStepThatIsNotFiniteChangesNothing) {
  const auto items = some_items();
  AdamWPass pass{items, {{}, {}}};
  pass.step();
  std::vector<at::Tensor> before;
  for (const auto& item : items) before.push_back(item.param.clone());
  items[2].grad[3].fill_(INFINITY);
  pass.step();
  EXPECT_EQ(pass.found_inf().item<double>(), 1);
  for (std::size_t i = 0; i < items.size(); ++i) {
    EXPECT_TRUE(items[i].param.equal(before[i]));
    EXPECT_EQ(items[i].step.item<double>(), 1);
  }
  items[2].grad[3].fill_(0);
  pass.step();
  EXPECT_EQ(pass.found_inf().item<double>(), 0);
  EXPECT_EQ(items[0].step.item<double>(), 2);
}

// As with PyTorch's clip_grad_norm_, the factor is then not a number, and nothing hides that.
TEST(AdamWPass, ANormThatIsNotANumberReachesEveryParameterOfAStepThatIsTaken) {
  const auto items = some_items();
  AdamWPass pass{items, {{}, {}}};
  pass.set_max_norm(1);
  items[2].grad[3].fill_(NAN);
  pass.measure();
  pass.update();
  for (const auto& item : items) EXPECT_TRUE(item.param.isnan().all().item<bool>());
}

// torch::load and vector_to_parameters give a parameter other memory.
TEST(AdamWPass, UpdatesTheMemoryThatAParameterHasNow) {
  const auto items = some_items();
  AdamWPass pass{items, {{.lr = 0.1}, {.lr = 0.1}}};
  pass.step();
  std::vector<at::Tensor> old;
  for (const auto& item : items) {
    old.push_back(item.param.detach());  // an alias of the memory that it had
    at::Tensor(item.param).set_data(torch::full_like(item.param, 2));
  }
  std::vector<at::Tensor> before;
  for (const auto& memory : old) before.push_back(memory.clone());
  pass.step();
  for (std::size_t i = 0; i < items.size(); ++i) {
    EXPECT_TRUE(old[i].equal(before[i]));
    EXPECT_TRUE(items[i].param.ne(2).all().item<bool>());
  }
  at::Tensor(items[0].param).set_data(torch::zeros({3}, on_device()));
  EXPECT_THROW(pass.step(), UsageError);
}

TEST(AdamWPass, RefusesWhatDoesNotFit) {
  auto items = some_items();
  items[1].exp_avg = torch::zeros({3}, on_device());
  EXPECT_THROW((AdamWPass{items, {{}, {}}}), UsageError);
  EXPECT_THROW((AdamWPass{some_items(), {{}}}), UsageError);
  items = some_items();
  items[0].grad = at::Tensor();
  items[0].param.set_requires_grad(true);
  AdamWPass pass{items, {{}, {}}};
  EXPECT_THROW(pass.step(), UsageError);
  EXPECT_THROW(pass.set_max_norm(-1), UsageError);
}

// ---------------------------------------------------------------- bfloat16

// The same with state, of these types, and at places in larger parameters.
std::vector<AdamWItem> typed_items(at::ScalarType param, at::ScalarType state, c10::Device device) {
  std::vector<AdamWItem> items = some_items();
  for (std::size_t i = 0; i < items.size(); ++i) {
    AdamWItem& item = items[i];
    // In memory of its own whose address is as little a multiple of 16 bytes as before.
    const auto as = [&](const at::Tensor& values, at::ScalarType type) {
      const std::int64_t size = values.numel(), shift = size == 1003 ? 1 : 0;
      const at::Tensor whole = at::empty({size + 1}, at::device(device).dtype(type));
      return whole.narrow(0, shift, size).copy_(values);
    };
    const at::Tensor average = torch::randn({item.param.numel()}) * 0.01;
    item.grad = as(item.grad, param);
    item.param = as(item.param, param);
    item.exp_avg = as(average, state);
    item.exp_avg_sq = as(average.square() * 3, state);
    item.step = torch::full({}, 4, at::device(device).dtype(at::kFloat));
    item.origin = {static_cast<std::uint32_t>(100 + i), static_cast<std::int64_t>(i * 70001)};
  }
  return items;
}

// x rounded to a neighbour in bfloat16: away from zero where a 16-bit number that is drawn and the
// part that is cut off make a whole.
float rounded_plainly(float x, std::uint64_t drawn) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const std::uint64_t cut = bits % 65536;
  bits -= static_cast<std::uint32_t>(cut);
  if (cut + drawn % 65536 >= 65536) bits += 65536;
  std::memcpy(&x, &bits, 4);
  return x;
}

std::uint64_t drawn_for(std::uint64_t key, std::uint64_t element) {
  std::uint64_t x = key + element * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Every product is stored before it is added, so that no compiler makes one operation of both.
void step_plainly(const AdamWItem& item, const AdamWOptions& o) {
  const auto floats = [](const at::Tensor& t) { return t.to(at::kFloat).contiguous(); };
  const at::Tensor p = floats(item.param), g = floats(item.grad), m = floats(item.exp_avg),
                   v = floats(item.exp_avg_sq);
  const kernels::cuda::AdamGroup c{static_cast<float>(o.lr), static_cast<float>(o.betas.first),
                                   static_cast<float>(o.betas.second), static_cast<float>(o.eps),
                                   static_cast<float>(o.weight_decay)};
  const auto f = kernels::adamw_factors(c, 5, item.origin.parameter);
  const bool rounds = item.exp_avg.scalar_type() == at::kBFloat16;
  const bool rounds_param = item.param.scalar_type() == at::kBFloat16;
  for (std::int64_t i = 0; i < p.numel(); ++i) {
    auto* const px = p.mutable_data_ptr<float>() + i;
    auto* const mx = m.mutable_data_ptr<float>() + i;
    auto* const vx = v.mutable_data_ptr<float>() + i;
    const float grad = g.const_data_ptr<float>()[i];
    volatile float fresh = (1 - c.beta2) * grad, square = fresh * grad;
    volatile float average = std::fma(1 - c.beta1, grad - *mx, *mx);
    volatile float squares = std::fma(c.beta2, *vx, square);
    volatile float root = std::sqrt(squares) * f.root_correction2, denominator = root + c.eps;
    volatile float change = f.step_size * average, kept = *px * f.decay;
    volatile float moved = change / denominator;
    const std::uint64_t drawn = drawn_for(f.key, static_cast<std::uint64_t>(item.origin.begin + i));
    *px = rounds_param ? rounded_plainly(kept - moved, drawn) : kept - moved;
    *mx = rounds ? rounded_plainly(average, drawn >> 16) : average;
    *vx = rounds ? rounded_plainly(squares, drawn >> 32) : squares;
  }
  item.param.copy_(p);
  item.exp_avg.copy_(m);
  item.exp_avg_sq.copy_(v);
}

// With LOCKSTEP_DEVICE=cuda this compares the CUDA kernel with the CPU's loop.
TEST(AdamWPass, HasTheBitsOfAPlainLoopInEveryType) {
  const std::vector<AdamWOptions> groups{
      {.lr = 1e-2, .betas = {0.9, 0.95}, .weight_decay = 0.1},
      {.lr = 3e-3, .betas = {0.8, 0.99}, .eps = 1e-6, .weight_decay = 0}};
  for (const auto param : {at::kFloat, at::kBFloat16})
    for (const auto state : {at::kFloat, at::kBFloat16}) {
      const auto items = typed_items(param, state, nn::test_device());
      const auto plain = typed_items(param, state, at::kCPU);
      AdamWPass pass{items, groups};
      pass.update();
      for (std::size_t i = 0; i < items.size(); ++i) {
        step_plainly(plain[i], groups[plain[i].group]);
        EXPECT_TRUE(items[i].param.cpu().equal(plain[i].param)) << param << state << i;
        EXPECT_TRUE(items[i].exp_avg.cpu().equal(plain[i].exp_avg)) << param << state << i;
        EXPECT_TRUE(items[i].exp_avg_sq.cpu().equal(plain[i].exp_avg_sq)) << param << state << i;
        EXPECT_EQ(items[i].step.item<float>(), 5);
      }
    }
}

// ---------------------------------------------------------------- state in bfloat16

constexpr AdamWOptions kRounded{.lr = 1e-2, .weight_decay = 0.1, .bf16_state = true};

at::Tensor trained_copy(const at::Tensor& values) {
  return values.to(nn::test_device()).clone().set_requires_grad(true);
}

// A few matrices with names, and gradients of a step.
struct Named {
  explicit Named(at::ScalarType type = at::kFloat) {
    torch::manual_seed(5);
    for (const char* name : {"a", "b", "c"})
      params.emplace_back(name, trained_copy(torch::randn({40, 33}).to(type)));
  }
  void give_gradients(int step) {
    torch::manual_seed(100 + step);
    for (auto& [name, param] : params)
      param.mutable_grad() = torch::randn(param.sizes()).to(param.device(), param.scalar_type());
  }
  void expect_same(const Named& other) const {
    for (std::size_t i = 0; i < params.size(); ++i)
      EXPECT_TRUE(params[i].second.equal(other.params[i].second)) << params[i].first;
  }
  NamedParameters params;
};

TEST(RoundedState, IsBfloat16AndContinuesWithTheSameBits) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    Named whole(type), first(type);
    Optimizer through(whole.params, kRounded), before(first.params, kRounded);
    const auto steps = [](Named& net, Optimizer& optimizer, int from, int to) {
      for (int step = from; step < to; ++step) {
        net.give_gradients(step);
        optimizer.step({.max_grad_norm = 1});
      }
    };
    steps(whole, through, 0, 6);
    steps(first, before, 0, 3);
    const TensorDict state = before.state_dict();
    EXPECT_EQ(state.at("b.exp_avg").scalar_type(), at::kBFloat16);
    EXPECT_EQ(state.at("b.exp_avg_sq").scalar_type(), at::kBFloat16);
    EXPECT_EQ(before.state_bytes(), 3 * 40 * 33 * 4);
    Optimizer after(first.params, kRounded);
    after.load_state_dict(state);
    steps(first, after, 3, 6);
    first.expect_same(whole);
  }
}

// The parts of a parameter on several ranks have the bits of the whole.
TEST(RoundedState, IsTheSameHoweverAParameterIsDivided) {
  for (const std::int64_t parts : {2, 3}) {
    Named whole;
    Optimizer all(whole.params, kRounded);
    NamedParameters divided;
    std::vector<std::unique_ptr<Optimizer>> ranks;
    const std::int64_t size = 40 * 33;
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t begin = size * part / parts, end = size * (part + 1) / parts;
      NamedParameters mine;
      for (const auto& [name, param] : whole.params)
        mine.emplace_back(name, trained_copy(param.detach().flatten().slice(0, begin, end)));
      ranks.push_back(std::make_unique<Optimizer>(mine, kRounded));
      for (auto& [name, rows] : mine) {
        ranks.back()->set_begin(rows, begin);
        divided.emplace_back(name, rows);
      }
    }
    for (int step = 0; step < 4; ++step) {
      whole.give_gradients(step);
      for (std::size_t i = 0; i < divided.size(); ++i) {
        const auto part = static_cast<std::int64_t>(i / 3);
        divided[i].second.mutable_grad() =
            whole.params[i % 3]
                .second.grad()
                .flatten()
                .slice(0, size * part / parts, size * (part + 1) / parts)
                .clone();
      }
      all.step();
      for (auto& rank : ranks) rank->step();
    }
    for (std::size_t k = 0; k < 3; ++k) {
      std::vector<at::Tensor> rows;
      for (std::size_t i = k; i < divided.size(); i += 3)
        rows.push_back(divided[i].second.detach());
      EXPECT_TRUE(at::cat(rows).equal(whole.params[k].second.detach().flatten()));
    }
  }
}

// An update of 1e-4 is 1/78 of the distance between bfloat16 numbers above 1: rounded to the
// nearest it is lost, and the mean of stochastic ones is not. That of 4096 elements after 100 steps
// has a deviation of at most 2^-7 sqrt(100 / 78 / 4096) = 1.4e-4.
TEST(RoundedState, MovesBfloat16ParametersByLessThanTheirLastDigit) {
  for (const bool rounded : {false, true}) {
    at::Tensor param = trained_copy(torch::full({4096}, 1.25, at::kBFloat16));
    AdamW optimizer({param}, {.lr = 1e-4, .weight_decay = 0, .bf16_state = rounded});
    for (int step = 0; step < 100; ++step) {
      param.mutable_grad() = torch::ones_like(param).detach();
      optimizer.step();
    }
    const double moved = 1.25 - param.to(at::kDouble).mean().item<double>();
    EXPECT_NEAR(moved, rounded ? 100 * 1e-4 : 0, rounded ? 5 * 1.4e-4 : 0);
  }
}

// The curve of float state: a tenth of what is left after as many steps as it takes.
TEST(RoundedState, LearnsAsWithFloatState) {
  const auto losses = [](bool rounded) {
    torch::manual_seed(11);
    torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(),
                              torch::nn::Linear(64, 4));
    torch::nn::Linear teacher(16, 4);
    net->to(nn::test_device());
    teacher->to(nn::test_device());
    AdamW optimizer(net->parameters(), {.lr = 3e-3, .bf16_state = rounded});
    std::vector<double> all;
    for (int step = 0; step < 250; ++step) {
      const at::Tensor x = torch::randn({64, 16}).to(nn::test_device());
      const at::Tensor loss = (net->forward(x) - teacher->forward(x).detach()).square().mean();
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      all.push_back(loss.item<double>());
    }
    return all;
  };
  const auto plain = losses(false), rounded = losses(true);
  for (std::size_t step = 0; step < plain.size(); ++step)
    EXPECT_NEAR(rounded[step], plain[step], 0.1 * plain[step] + 1e-3 * plain[0]) << step;
  EXPECT_LT(plain.back(), 0.05 * plain[0]);
}

}  // namespace
}  // namespace lockstep::optim
