// Every operation against the same one composed of ATen's operations in double precision: outputs
// and gradients, in float, bfloat16 and float16, on odd shapes, empty batches and with any subset
// of inputs that require a gradient. With LOCKSTEP_DEVICE=cuda on CUDA tensors, our kernels against
// ATen's in double precision (tests/gpu).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>

#include "lockstep/core/error.h"
#include "lockstep/nn/device_for_test.h"
#include "lockstep/nn/functional.h"
#include "lockstep/nn/on_cuda.h"

namespace nn = lockstep::nn;

namespace {

using lockstep::nn::test_device;
using Tensors = std::vector<at::Tensor>;
using Op = std::function<Tensors(const Tensors&)>;

// Units of rounding: operations round their results once or twice, and sums of a few hundred terms
// add little to that because they are in float. The kernels' exponential has 22 bits.
double tolerance(at::ScalarType type) {
  switch (type) {
    case at::kBFloat16:
      return 3 * 0x1p-8;
    case at::kHalf:
      return 3 * 0x1p-11;
    case at::kDouble:
      return 1e-12;
    default:
      return test_device().is_cuda() ? 1e-5 : 2e-6;
  }
}

void expect_close(const at::Tensor& got, const at::Tensor& want, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(got.defined(), want.defined()) << what;
  if (!got.defined() || want.numel() == 0) return;
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  const at::Tensor difference = (got.to(at::kDouble) - want.to(at::kDouble)).abs();
  const double scale = want.to(at::kDouble).abs().max().item<double>();
  EXPECT_LE(difference.max().item<double>(), tolerance * (scale + 1e-30)) << what;
}

struct Outcome {
  Tensors outputs, grads;
};

// Differentiates the sum of the outputs, each weighted by random numbers.
Outcome run(const Op& op, const Tensors& inputs, const std::vector<bool>& wanted) {
  Outcome result;
  Tensors leaves;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    leaves.push_back(inputs[i].defined() ? inputs[i].detach().clone() : at::Tensor());
    if (wanted[i] && inputs[i].defined()) leaves[i].set_requires_grad(true);
  }
  result.outputs = op(leaves);
  torch::manual_seed(11);
  const auto wide = at::TensorOptions(test_device()).dtype(at::kDouble);
  at::Tensor sum = torch::zeros({}, wide);
  for (const auto& output : result.outputs) {
    const auto weights = torch::rand(output.sizes(), wide) + 0.5;
    sum = sum + (output.to(at::kDouble) * weights).sum();
  }
  if (sum.requires_grad()) sum.backward();
  for (const auto& leaf : leaves) result.grads.push_back(leaf.defined() ? leaf.grad() : leaf);
  return result;
}

// Compares with `plain` in double on the same values.
void expect_same(const Op& ours, const Op& plain, const Tensors& inputs,
                 const std::vector<bool>& wanted, double tolerance, const std::string& what) {
  Tensors wide;
  for (const auto& input : inputs)
    wide.push_back(input.defined() && input.is_floating_point() ? input.to(at::kDouble) : input);
  const Outcome got = run(ours, inputs, wanted), want = run(plain, wide, wanted);
  for (std::size_t i = 0; i < got.outputs.size(); ++i)
    expect_close(got.outputs[i], want.outputs[i], tolerance, what + " output");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    expect_close(got.grads[i], want.grads[i], tolerance,
                 what + " gradient of input " + std::to_string(i));
    if (got.grads[i].defined()) {
      EXPECT_EQ(got.grads[i].scalar_type(), inputs[i].scalar_type());
    }
  }
}

// With gradients for all inputs, for none, for each alone, and under no_grad.
void check(const Op& ours, const Op& plain, const Tensors& inputs, double tolerance,
           const std::string& what) {
  std::vector<bool> wanted;
  for (const auto& input : inputs) wanted.push_back(input.defined() && input.is_floating_point());
  expect_same(ours, plain, inputs, wanted, tolerance, what);
  expect_same(ours, plain, inputs, std::vector<bool>(inputs.size()), tolerance, what + ", no grad");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    std::vector<bool> one(inputs.size());
    one[i] = wanted[i];
    if (one[i]) expect_same(ours, plain, inputs, one, tolerance, what + ", one input");
  }
  const torch::NoGradGuard no_grad;
  for (const auto& output : ours(inputs)) EXPECT_FALSE(output.requires_grad()) << what;
}

at::Tensor random(at::IntArrayRef sizes, at::ScalarType type) {
  return torch::randn(sizes).to(test_device(), type);
}

at::Tensor random_targets(std::int64_t classes, at::IntArrayRef sizes) {
  return torch::randint(classes, sizes, at::kLong).to(test_device());
}

at::TensorOptions floats() {
  return at::TensorOptions(test_device()).dtype(at::kFloat);
}

const std::vector<at::ScalarType> kTypes{at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};
const std::vector<std::vector<std::int64_t>> kBatches{{5}, {2, 3}, {0}, {2, 0}, {}};

std::vector<std::int64_t> shape(std::vector<std::int64_t> batch, std::int64_t last) {
  batch.push_back(last);
  return batch;
}

at::Tensor rms(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x * torch::rsqrt(x.square().mean(-1, true) + eps) * weight;
}

TEST(Norm, LayerNormAndRmsNormWithAndWithoutResidual) {
  torch::manual_seed(1);
  for (const auto type : kTypes) {
    for (const auto& batch : kBatches) {
      for (const std::int64_t c : {7, 40, 768, 2000}) {
        const auto sizes = shape(batch, c);
        // Residual and delta on a grid on which their sum is exact, so that both see the same sum.
        const auto grid = [&] {
          return ((torch::rand(sizes, floats()) - 0.5) * 64).round().div(32).to(type);
        };
        const auto w = random({c}, type), b = random({c}, type);
        const auto bias = torch::zeros({c}, floats()).to(type);
        const double t = tolerance(type);
        check([](auto& i) { return Tensors{nn::layer_norm(i[0], i[1], i[2])}; },
              [](auto& i) {
                return Tensors{torch::layer_norm(i[0], {i[1].size(0)}, i[1], i[2], 1e-5)};
              },
              {grid(), w, b}, t, "layer_norm");
        check([](auto& i) { return Tensors{nn::rms_norm(i[0], i[1])}; },
              [](auto& i) { return Tensors{rms(i[0], i[1], 1e-6)}; }, {grid(), w}, t, "rms_norm");
        check(
            [](auto& i) {
              const auto [sum, normed] = nn::add_layer_norm(i[0], i[1], i[2], i[3], i[4]);
              return Tensors{sum, normed};
            },
            [](auto& i) {
              const auto sum = i[0] + i[1] + i[2];
              return Tensors{sum, torch::layer_norm(sum, {sum.size(-1)}, i[3], i[4], 1e-5)};
            },
            {grid(), grid(), bias, w, b}, t, "add_layer_norm");
        check(
            [](auto& i) {
              const auto [sum, normed] = nn::add_rms_norm(i[0], i[1], i[2], i[3]);
              return Tensors{normed, sum};
            },
            [](auto& i) {
              const auto sum = i[0] + i[1] + i[2];
              return Tensors{rms(sum, i[3], 1e-6), sum};
            },
            {grid(), grid(), bias, w}, t, "add_rms_norm");
      }
    }
  }
}

// A float residual beside 16 bits: the sum keeps what 16 bits would round away.
TEST(Norm, FloatResidualBesideSixteenBits) {
  torch::manual_seed(14);
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    for (const std::int64_t c : {7, 40, 768}) {
      const auto x = random({5, c}, at::kFloat), delta = random({5, c}, type);
      const auto w = random({c}, at::kFloat), b = random({c}, at::kFloat);
      const auto bias = random({c}, at::kFloat);
      check(
          [&](auto& i) {
            const auto [sum, normed] = nn::add_layer_norm(i[0], i[1], i[2], i[3], i[4]);
            EXPECT_EQ(sum.scalar_type(), at::kFloat);
            EXPECT_EQ(normed.scalar_type(), type);
            return Tensors{sum, normed};
          },
          [](auto& i) {
            const auto sum = i[0] + i[1] + i[2];
            return Tensors{sum, torch::layer_norm(sum, {sum.size(-1)}, i[3], i[4], 1e-5)};
          },
          {x, delta, bias, w, b}, tolerance(type), "add_layer_norm");
      check([&](auto& i) { return Tensors{nn::rms_norm(i[0], i[1], 1e-6, type)}; },
            [](auto& i) { return Tensors{rms(i[0], i[1], 1e-6)}; }, {x, w}, tolerance(type),
            "rms_norm");
      // Far below a unit of 16 bits.
      const auto tiny = torch::full({5, c}, 1e-4, floats()).to(type);
      const auto sum = nn::add_rms_norm(torch::ones({5, c}, floats()), tiny, {}, w).sum;
      EXPECT_GT(sum.min().item<double>(), 1.00005);
    }
  }
  EXPECT_THROW(
      nn::rms_norm(random({2, 8}, at::kBFloat16), random({8}, at::kFloat), 1e-6, at::kFloat),
      lockstep::UsageError);
}

TEST(Norm, FloatWeightsOptionalTensorsOneOutputAndOneTensorTwice) {
  torch::manual_seed(2);
  const auto x = random({6, 24}, at::kBFloat16), w = random({24}, at::kFloat);
  check([](auto& i) { return Tensors{nn::layer_norm(i[0], i[1], {})}; },
        [](auto& i) { return Tensors{torch::layer_norm(i[0], {24}, i[1], {}, 1e-5)}; }, {x, w},
        tolerance(at::kBFloat16), "float weight, no bias");
  const auto y = random({6, 24}, at::kFloat);
  check([](auto& i) { return Tensors{nn::add_rms_norm(i[0], i[0], {}, i[1]).normed}; },
        [](auto& i) { return Tensors{rms(2 * i[0], i[1], 1e-6)}; }, {y, w}, tolerance(at::kFloat),
        "one tensor twice, the sum unused");
  check([](auto& i) { return Tensors{nn::add_layer_norm(i[0], i[1], i[2], i[3], {}).sum}; },
        [](auto& i) { return Tensors{i[0] + i[1] + i[2]}; }, {y, random({6, 24}, at::kFloat), w, w},
        tolerance(at::kFloat), "norm unused");
  // Not contiguous.
  check([](auto& i) { return Tensors{nn::rms_norm(i[0].t(), i[1])}; },
        [](auto& i) { return Tensors{rms(i[0].t(), i[1], 1e-6)}; }, {y, random({6}, at::kFloat)},
        tolerance(at::kFloat), "transposed");
}

at::Tensor plain_loss(const at::Tensor& logits, const at::Tensor& targets, std::int64_t columns,
                      std::int64_t ignore = -100) {
  const auto real = columns == 0 ? logits : logits.narrow(-1, 0, columns);
  return torch::nn::functional::cross_entropy(
      real.reshape({-1, real.size(-1)}), targets.reshape(-1),
      torch::nn::functional::CrossEntropyFuncOptions().ignore_index(ignore));
}

// Logits are consumed, so they are computed rather than a leaf.
TEST(CrossEntropy, EqualsAtenInEveryTypeWithPaddingAndIgnoredTargets) {
  torch::manual_seed(3);
  for (const auto type : kTypes) {
    for (const std::int64_t columns : {0, 11, 13}) {
      const auto x = random({2, 3, 13}, type);
      auto targets = random_targets(11, {2, 3});
      targets[0][1] = -100;
      const auto ours = [&](auto& i) {
        return Tensors{nn::cross_entropy(i[0] * 2, targets, {.columns = columns})};
      };
      const auto plain = [&](auto& i) { return Tensors{plain_loss(i[0] * 2, targets, columns)}; };
      check(ours, plain, {x}, tolerance(type), "cross_entropy");
      const auto head = [&](std::int64_t chunk) {
        return [&, chunk](auto& i) {
          return Tensors{nn::linear_cross_entropy(i[0], i[1], targets,
                                                  {.columns = columns, .chunk_rows = chunk})};
        };
      };
      const auto plain_head = [&](auto& i) {
        return Tensors{plain_loss(at::matmul(i[0], i[1].t()), targets, columns)};
      };
      // The logits are rounded to the type: an error of rounding times their size in each p.
      const double t = tolerance(type) * (type == at::kFloat || type == at::kDouble ? 1 : 8);
      for (const std::int64_t chunk : {0, 1, 4, 6, 100})
        check(head(chunk), plain_head, {random({2, 3, 5}, type) * 0.5, random({13, 5}, type) * 0.5},
              t, "linear_cross_entropy, chunk " + std::to_string(chunk));
    }
  }
}

TEST(CrossEntropy, NoTargetCountsAndNoRows) {
  for (const std::int64_t rows : {3, 0}) {
    const auto x = random({rows, 8}, at::kFloat).set_requires_grad(true);
    const auto w = random({8, 8}, at::kFloat).set_requires_grad(true);
    const auto targets = random_targets(8, {rows}).fill_(-7);
    const auto loss = nn::cross_entropy(x * 1, targets, {.ignore_index = -7});
    EXPECT_TRUE(std::isnan(loss.item<double>()));
    loss.backward();
    EXPECT_TRUE(x.grad().equal(torch::zeros_like(x)));
    const auto head = nn::linear_cross_entropy(x, w, targets, {.ignore_index = -7});
    EXPECT_TRUE(std::isnan(head.item<double>()));
    head.backward();
    EXPECT_TRUE(w.grad().equal(torch::zeros_like(w)));
  }
}

TEST(CrossEntropy, LossScaleReachesFloat16GradientsThatWouldUnderflow) {
  torch::manual_seed(4);
  const std::int64_t rows = 40'000;
  const auto x = random({rows, 8}, at::kHalf).set_requires_grad(true);
  const auto targets = random_targets(8, {rows});
  (nn::cross_entropy(x * 1, targets) * 65536).backward();
  const auto wide = x.detach().to(at::kDouble).set_requires_grad(true);
  (plain_loss(wide, targets, 0) * 65536).backward();
  expect_close(x.grad(), wide.grad(), tolerance(at::kHalf), "scaled");
}

TEST(CrossEntropy, ConsumesLogitsOnlyForAGradient) {
  const auto x = random({4, 8}, at::kFloat);
  const auto targets = random_targets(8, {4});
  const auto before = x.clone();
  nn::cross_entropy(x, targets);
  EXPECT_TRUE(x.equal(before));
  const auto leaf = x.clone().set_requires_grad(true);
  const auto logits = leaf * 1;
  const auto squares = logits.square();  // saves the logits
  const auto loss = nn::cross_entropy(logits, targets);
  EXPECT_FALSE(logits.equal(before));
  EXPECT_THROW((loss + squares.sum()).backward(), c10::Error);
  const auto again = nn::cross_entropy(leaf * 1, targets);
  again.backward({}, /*retain_graph=*/true);
  EXPECT_THROW(again.backward(), lockstep::UsageError);
}

TEST(Linear, EqualsAtenAlsoWithWeightsStoredTransposed) {
  torch::manual_seed(5);
  for (const auto type : kTypes) {
    for (const auto& batch : kBatches) {
      const double t = tolerance(type);
      const auto x = random(shape(batch, 6), type);
      const auto w = random({4, 6}, type), wt = random({6, 4}, type), b = random({4}, type);
      check([](auto& i) { return Tensors{nn::linear(i[0], i[1], i[2])}; },
            [](auto& i) { return Tensors{torch::linear(i[0], i[1], i[2])}; }, {x, w, b}, t,
            "linear");
      check([](auto& i) { return Tensors{nn::linear(i[0], i[1].t(), {})}; },
            [](auto& i) { return Tensors{torch::linear(i[0], i[1].t())}; }, {x, wt}, t,
            "linear, stored transposed");
      // The hidden values are rounded, and their error passes through the second product.
      check([](auto& i) { return Tensors{nn::gelu_mlp(i[0], i[1], i[2], i[3], i[4])}; },
            [](auto& i) {
              const auto hidden = torch::gelu(torch::linear(i[0], i[1], i[2]), "tanh");
              return Tensors{torch::linear(hidden, i[3], i[4])};
            },
            {x, w, b, random({5, 4}, type), random({5}, type)}, 4 * t, "gelu_mlp");
    }
  }
}

TEST(Linear, FloatWeightsWithBfloat16InputsAndGradientsAddedToABuffer) {
  torch::manual_seed(6);
  const auto x = random({7, 6}, at::kBFloat16);
  const auto w = random({4, 6}, at::kBFloat16).to(at::kFloat).set_requires_grad(true);
  const auto y = nn::linear(x, w, {});
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  const auto dy = random({7, 4}, at::kBFloat16);
  y.backward(dy);
  const auto want = at::mm(dy.t().to(at::kDouble), x.to(at::kDouble));
  expect_close(w.grad(), want, 1e-6, "float gradient of bfloat16 tensors");
}

// Whole numbers, whose products have the same sums in any order.
TEST(Linear, SeveralWeightsAreOneProduct) {
  torch::manual_seed(7);
  const auto whole = [](at::IntArrayRef shape, at::ScalarType type) {
    return torch::randint(-3, 4, shape).to(type);
  };
  const auto x = whole({2, 5, 8}, at::kBFloat16), dy = whole({2, 5, 24}, at::kBFloat16);
  std::vector<at::Tensor> weights;
  for (const int width : {8, 12, 4}) weights.push_back(whole({width, 8}, at::kFloat));
  const auto bias = whole({24}, at::kFloat);
  std::vector<at::Tensor> leaves{x, bias};
  leaves.insert(leaves.end(), weights.begin(), weights.end());
  for (at::Tensor& leaf : leaves) leaf.set_requires_grad(true);
  const auto apart = [&] {
    std::vector<at::Tensor> parts;
    std::int64_t first = 0;
    for (const at::Tensor& w : weights) {
      parts.push_back(nn::linear(x, w, bias.narrow(0, first, w.size(0))));
      first += w.size(0);
    }
    return at::cat(parts, -1);
  };
  const auto joined = nn::linear(x, weights, bias);
  EXPECT_TRUE(torch::equal(joined, apart()));
  const auto want = torch::autograd::grad({apart()}, leaves, {dy});
  const auto have = torch::autograd::grad({joined}, leaves, {dy});
  for (std::size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(torch::equal(have[i], want[i])) << i;
  for (int pass = 1; pass <= 3; ++pass) {
    nn::linear(x, weights, bias).backward(dy);
    EXPECT_TRUE(torch::equal(weights[1].grad(), want[3] * pass));
  }
}

// The second backward adds to the .grad that is there, on a GPU inside the product; hooks and
// autograd::grad() get what autograd would give them.
TEST(Linear, LaterGradientsAreAddedInPlace) {
  torch::manual_seed(5);
  const auto x = random({16, 8}, at::kBFloat16), dy = random({16, 24}, at::kBFloat16);
  const auto want = at::mm(dy.t().to(at::kDouble), x.to(at::kDouble));
  for (const bool transposed : {false, true}) {
    auto leaf = random({24, 8}, at::kBFloat16).to(at::kFloat);
    if (transposed) leaf = leaf.t().contiguous();
    leaf.set_requires_grad(true);
    const auto weight = [&] { return transposed ? leaf.t() : leaf; };
    const auto times = [&](int n) { return transposed ? (want * n).t() : want * n; };
    nn::linear(x, weight(), {}).backward(dy);
    const void* const place = leaf.grad().const_data_ptr();
    for (const int n : {2, 3}) {
      nn::linear(x, weight(), {}).backward(dy);
      expect_close(leaf.grad(), times(n), 1e-6, "added to .grad");
      EXPECT_EQ(leaf.grad().const_data_ptr(), place);
    }
    const auto apart = torch::autograd::grad({nn::linear(x, weight(), {})}, {leaf}, {dy})[0];
    expect_close(apart, times(1), 1e-6, "a gradient that was asked for");
    expect_close(leaf.grad(), times(3), 1e-6, "leaves .grad alone");
    int seen = 0;
    const auto hook = leaf.register_hook([&](const at::Tensor& gradient) {
      ++seen;
      return gradient * 2;
    });
    nn::linear(x, weight(), {}).backward(dy);
    EXPECT_EQ(seen, 1);
    expect_close(leaf.grad(), times(5), 1e-6, "by way of a hook");
    leaf.remove_hook(hook);
  }
  auto fc = random({24, 8}, at::kBFloat16).to(at::kFloat).set_requires_grad(true);
  auto out = random({16, 24}, at::kBFloat16).to(at::kFloat).set_requires_grad(true);
  const auto mlp = [&] { return nn::gelu_mlp(x, fc, torch::zeros({24}, floats()), out, {}).sum(); };
  mlp().backward();
  const auto first_fc = fc.grad().clone(), first_out = out.grad().clone();
  mlp().backward();
  expect_close(fc.grad(), first_fc * 2, 1e-6, "fc");
  expect_close(out.grad(), first_out * 2, 1e-6, "out");
}

TEST(Swiglu, EqualsSiluOfOneHalfTimesTheOther) {
  torch::manual_seed(7);
  for (const auto type : kTypes) {
    for (const auto& batch : kBatches) {
      check([](auto& i) { return Tensors{nn::swiglu(i[0])}; },
            [](auto& i) {
              const auto halves = i[0].chunk(2, -1);
              return Tensors{torch::silu(halves[0]) * halves[1]};
            },
            {random(shape(batch, 10), type)}, tolerance(type), "swiglu");
      check([](auto& i) { return Tensors{nn::swiglu(i[0], i[1])}; },
            [](auto& i) { return Tensors{torch::silu(i[0]) * i[1]}; },
            {random(shape(batch, 5), type), random(shape(batch, 5), type)}, tolerance(type),
            "swiglu of two tensors");
    }
  }
}

// As transformers writes it, with cos and sin of full width.
at::Tensor rotate_half(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const std::int64_t w = cos.size(-1);
  const auto rotated = x.narrow(-1, 0, 2 * w), rest = x.narrow(-1, 2 * w, x.size(-1) - 2 * w);
  const auto halves = rotated.chunk(2, -1);
  const auto full = [](const at::Tensor& t) {
    const auto wide = torch::cat({t, t}, -1).to(at::kDouble);
    return wide.dim() == 2 ? wide : wide.unsqueeze(1);
  };
  const auto y = rotated * full(cos) + torch::cat({-halves[1], halves[0]}, -1) * full(sin);
  return torch::cat({y, rest}, -1);
}

TEST(Rope, RotatesQueryAndKeyAndLeavesTheRest) {
  torch::manual_seed(8);
  for (const auto type : kTypes) {
    for (const std::int64_t batch : {2, 0}) {
      for (const bool per_batch : {false, true}) {
        for (const std::int64_t width : {6, 9}) {
          const auto angles =
              per_batch ? random({batch, 4, 3}, at::kFloat) : random({4, 3}, at::kFloat);
          const auto cos = angles.cos(), sin = angles.sin();
          check(
              [&](auto& i) {
                const auto [q, k] = nn::rope(i[0].transpose(1, 2), i[1], cos, sin);
                return Tensors{q, k};
              },
              [&](auto& i) {
                return Tensors{rotate_half(i[0].transpose(1, 2), cos, sin),
                               rotate_half(i[1], cos, sin)};
              },
              {random({batch, 4, 3, width}, type), random({batch, 2, 4, width}, type)},
              type == at::kDouble ? 1e-7 : tolerance(type), "rope");
        }
      }
    }
  }
}

TEST(Attention, GroupedHeadsEqualRepeatedOnes) {
  torch::manual_seed(9);
  for (const bool causal : {true, false}) {
    for (const std::int64_t heads : {4, 2, 1}) {
      check([&](auto& i) { return Tensors{nn::attention(i[0], i[1], i[2], {.causal = causal})}; },
            [&](auto& i) {
              const auto k = i[1].repeat_interleave(4 / heads, 1);
              const auto v = i[2].repeat_interleave(4 / heads, 1);
              auto scores = at::matmul(i[0], k.transpose(2, 3)) / std::sqrt(8.0);
              if (causal)
                scores = scores.masked_fill(torch::ones({5, 5}, floats()).triu(1).to(at::kBool),
                                            -INFINITY);
              return Tensors{at::matmul(scores.softmax(-1), v)};
            },
            {random({2, 4, 5, 8}, at::kFloat), random({2, heads, 5, 8}, at::kFloat),
             random({2, heads, 5, 8}, at::kFloat)},
            5e-6, "attention");
    }
  }
}

TEST(Lora, AddsTheAdapterToTheBase) {
  torch::manual_seed(10);
  for (const auto type : kTypes) {
    for (const auto& batch : kBatches) {
      for (const bool float_adapter : {false, true}) {
        if (float_adapter && (type == at::kFloat || type == at::kDouble)) continue;
        const auto adapter_type = float_adapter ? at::kFloat : type;
        const auto on_grid = [&](at::IntArrayRef sizes) {
          return random(sizes, type).to(adapter_type);
        };
        check(
            [](auto& i) {
              return Tensors{nn::lora_linear(i[0], i[1], i[2], i[3], i[4], {.scaling = 0.5})};
            },
            [](auto& i) {
              const auto low = torch::linear(i[0], i[3]);
              return Tensors{torch::linear(i[0], i[1], i[2]) + 0.5 * torch::linear(low, i[4])};
            },
            {random(shape(batch, 6), type), random({4, 6}, type), random({4}, type),
             on_grid({2, 6}), on_grid({4, 2})},
            4 * tolerance(type), "lora_linear");
      }
    }
  }
}

TEST(Lora, DropoutActsOnTheAdaptersInputAlone) {
  torch::manual_seed(12);
  const auto x = random({50, 6}, at::kFloat).set_requires_grad(true);
  const auto w = torch::zeros({6, 6}, floats());
  const auto a = torch::eye(6, floats()).set_requires_grad(true);
  const auto b = torch::eye(6, floats()).set_requires_grad(true);
  const auto y = nn::lora_linear(x, w, {}, a, b, {.scaling = 1, .dropout = 0.5});
  const auto passed = y.detach().ne(0);
  EXPECT_GT(passed.sum().item<std::int64_t>(), 50);
  EXPECT_LT(passed.sum().item<std::int64_t>(), 250);
  expect_close(y.detach(), x.detach() * 2 * passed, 1e-6, "dropped");
  y.sum().backward();
  expect_close(x.grad(), 2.0 * passed.to(at::kFloat), 1e-6, "gradient of x");
  expect_close(a.grad(), y.detach().sum(0).expand({6, 6}), 1e-5, "gradient of a");
}

// ---------------------------------------------------------------- kernels, on CUDA alone

class Kernels : public testing::Test {
 protected:
  void SetUp() override {
    if (!test_device().is_cuda()) GTEST_SKIP() << "no CUDA device was asked for";
    torch::manual_seed(13);
  }

  // Like check(), and the kernels were used.
  void check_kernels(const Op& ours, const Op& plain, const Tensors& inputs, double tolerance,
                     const std::string& what) {
    const auto before = nn::detail::OnCuda::kernels_started();
    std::vector<bool> wanted;
    for (const auto& input : inputs) wanted.push_back(input.defined() && input.is_floating_point());
    expect_same(ours, plain, inputs, wanted, tolerance, what);
    EXPECT_GE(nn::detail::OnCuda::kernels_started(), before + 2) << what << ": kernels not used";
    const Outcome first = run(ours, inputs, wanted), second = run(ours, inputs, wanted);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (first.grads[i].defined()) {
        EXPECT_TRUE(first.grads[i].equal(second.grads[i])) << what << ": other bits";
      }
    }
  }
};

const std::vector<at::ScalarType> kKernelTypes{at::kBFloat16, at::kHalf, at::kFloat};

// More rows than fit on the GPU at once, so that blocks take several.
TEST_F(Kernels, Norms) {
  for (const auto type : kKernelTypes) {
    for (const std::int64_t c : {8, 768, 1024, 1600, 2048, 3072, 4096, 5120, 8192}) {
      const auto grid = [&] {
        return ((torch::rand({4001, c}, floats()) - 0.5) * 64).round().div(32).to(type);
      };
      const auto w = random({c}, at::kFloat), b = random({c}, at::kFloat);
      const auto bias = torch::zeros({c}, floats());
      const std::string what = std::to_string(c) + " columns of " + c10::toString(type);
      // Sums over 4001 rows in float.
      const double t = std::max(tolerance(type), 16 * 0x1p-24 * 64);
      check_kernels(
          [](auto& i) {
            const auto [sum, normed] = nn::add_layer_norm(i[0], i[1], i[2], i[3], i[4]);
            return Tensors{sum, normed};
          },
          [](auto& i) {
            const auto sum = i[0] + i[1] + i[2];
            return Tensors{sum, torch::layer_norm(sum, {sum.size(-1)}, i[3], i[4], 1e-5)};
          },
          {grid(), grid(), bias, w, b}, t, "add_layer_norm, " + what);
      check_kernels(
          [](auto& i) {
            const auto [sum, normed] = nn::add_rms_norm(i[0], i[1], i[2], i[3]);
            return Tensors{sum, normed};
          },
          [](auto& i) {
            const auto sum = i[0] + i[1] + i[2];
            return Tensors{sum, rms(sum, i[3], 1e-6)};
          },
          {grid().to(at::kFloat), grid(), bias, w}, t, "add_rms_norm, float residual, " + what);
      check_kernels([](auto& i) { return Tensors{nn::rms_norm(i[0], i[1])}; },
                    [](auto& i) { return Tensors{rms(i[0], i[1], 1e-6)}; }, {grid(), w}, t,
                    "rms_norm, " + what);
    }
  }
}

TEST_F(Kernels, CrossEntropy) {
  for (const auto type : kKernelTypes) {
    for (const std::int64_t columns : {8, 1000, 8192, 32064, 50304, 128256}) {
      const auto x = random({517, columns}, type);
      const std::int64_t classes = columns - 3;
      auto targets = random_targets(classes, {517});
      targets.narrow(0, 100, 30).fill_(-100);
      const auto ours = [&](auto& i) {
        return Tensors{nn::cross_entropy(i[0] * 1, targets, {.columns = classes})};
      };
      const auto plain = [&](auto& i) { return Tensors{plain_loss(i[0] * 1, targets, classes)}; };
      check_kernels(ours, plain, {x}, tolerance(type),
                    std::to_string(columns) + " columns of " + c10::toString(type));
    }
  }
}

// Which elements an adapter keeps after a seed, whatever its input is: those with a gradient.
at::Tensor stays(std::int64_t rows, std::int64_t in, std::int64_t rank, at::ScalarType type,
                 double dropout, std::uint64_t seed) {
  const auto options = floats().dtype(type);
  const auto x = torch::ones({rows, in}, options).set_requires_grad(true);
  torch::manual_seed(seed);
  nn::lora_linear(x, torch::zeros({8, in}, options), {}, torch::ones({rank, in}, options),
                  torch::ones({8, rank}, options), {.scaling = 1, .dropout = dropout})
      .sum()
      .backward();
  return x.grad().ne(0);
}

TEST_F(Kernels, AdaptersWithDropout) {
  constexpr double kDropout = 0.25;
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    for (const std::int64_t rank : {8, 16}) {
      for (const std::int64_t in : {64, 1056, 3072}) {
        const auto grid = [&](at::IntArrayRef sizes) { return random(sizes, type) * 0.125; };
        const at::Tensor mask = stays(1001, in, rank, type, kDropout, 99);
        check_kernels(
            [](auto& i) {
              torch::manual_seed(99);
              return Tensors{
                  nn::lora_linear(i[0], i[1], {}, i[2], i[3], {.scaling = 2, .dropout = kDropout})};
            },
            [&](auto& i) {
              const auto dropped = i[0] * mask / (1 - kDropout);
              return Tensors{torch::linear(i[0], i[1]) +
                             2 * torch::linear(torch::linear(dropped, i[2]), i[3])};
            },
            {grid({1001, in}), grid({40, in}), grid({rank, in}), grid({40, rank})},
            8 * tolerance(type),
            std::to_string(in) + " to 40, rank " + std::to_string(rank) + " of " +
                c10::toString(type));
      }
    }
  }
}

// Six standard deviations of a fair draw: over all elements, rows, columns, neighbours that both
// stay, and two seeds.
TEST_F(Kernels, DropoutOfAnAdapterIsRandom) {
  constexpr double kKeep = 0.9;
  const std::int64_t rows = 2048, in = 1024;
  const auto mask = stays(rows, in, 16, at::kBFloat16, 1 - kKeep, 5).to(at::kDouble);
  const auto near = [](const at::Tensor& means, double share, std::int64_t count) {
    const double bound = 6 * std::sqrt(share * (1 - share) / static_cast<double>(count));
    EXPECT_LT((means - share).abs().max().item<double>(), bound);
  };
  near(mask.mean(), kKeep, rows * in);
  near(mask.mean(0), kKeep, rows);
  near(mask.mean(1), kKeep, in);
  const auto both = [&](const at::Tensor& a, const at::Tensor& b) {
    near((a * b).mean(), kKeep * kKeep, a.numel() / 2);
  };
  both(mask.slice(1, 1), mask.slice(1, 0, in - 1));
  both(mask.slice(1, 8), mask.slice(1, 0, in - 8));
  both(mask.slice(0, 1), mask.slice(0, 0, rows - 1));
  both(mask, stays(rows, in, 16, at::kBFloat16, 1 - kKeep, 6).to(at::kDouble));
  EXPECT_TRUE(mask.equal(stays(rows, in, 16, at::kBFloat16, 1 - kKeep, 5).to(at::kDouble)));
}

TEST_F(Kernels, ProductsWithEpilogues) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const auto x = random({1000, 768}, type), fc = random({3072, 768}, type) * 0.03;
    const auto out = random({768, 3072}, type) * 0.03;
    // The tanh of the library has 11 bits, and the hidden values are rounded before the product.
    check_kernels([](auto& i) { return Tensors{nn::gelu_mlp(i[0], i[1], i[2], i[3], i[4])}; },
                  [](auto& i) {
                    const auto hidden = torch::gelu(torch::linear(i[0], i[1], i[2]), "tanh");
                    return Tensors{torch::linear(hidden, i[3], i[4])};
                  },
                  {x, fc, random({3072}, type), out, random({768}, type)}, 4 * 0x1p-8, "gelu_mlp");
    const auto w = (random({3072, 768}, at::kFloat) * 0.03).to(type).to(at::kFloat);
    check_kernels([](auto& i) { return Tensors{nn::linear(i[0], i[1], i[2])}; },
                  [](auto& i) { return Tensors{torch::linear(i[0], i[1], i[2])}; },
                  {x, w, random({3072}, type)}, 2 * tolerance(type), "linear, float weight");
    const auto targets = random_targets(997, {1000});
    check_kernels(
        [&](auto& i) {
          return Tensors{
              nn::linear_cross_entropy(i[0], i[1], targets, {.columns = 997, .chunk_rows = 256})};
        },
        [&](auto& i) { return Tensors{plain_loss(at::matmul(i[0], i[1].t()), targets, 997)}; },
        {x, (random({1000, 768}, type) * 0.03).to(type)}, 8 * tolerance(type),
        "linear_cross_entropy");
  }
}

TEST_F(Kernels, SwigluAndRope) {
  for (const auto type : kKernelTypes) {
    check_kernels([](auto& i) { return Tensors{nn::swiglu(i[0])}; },
                  [](auto& i) {
                    const auto halves = i[0].chunk(2, -1);
                    return Tensors{torch::silu(halves[0]) * halves[1]};
                  },
                  {random({301, 2 * 8192}, type)}, tolerance(type), "swiglu");
    check_kernels([](auto& i) { return Tensors{nn::swiglu(i[0], i[1])}; },
                  [](auto& i) { return Tensors{torch::silu(i[0]) * i[1]}; },
                  {random({301, 8192}, type), random({301, 8192}, type)}, tolerance(type),
                  "swiglu of two tensors");
    for (const bool per_batch : {false, true}) {
      const auto angles =
          per_batch ? random({3, 65, 48}, at::kFloat) : random({65, 48}, at::kFloat);
      const auto cos = angles.cos(), sin = angles.sin();
      // Query and key as slices of one projection, 96 of 128 elements rotated.
      const auto split = [](const at::Tensor& t, std::int64_t first, std::int64_t heads) {
        return t.view({3, 65, 6, 128}).narrow(2, first, heads).transpose(1, 2);
      };
      check_kernels(
          [&](auto& i) {
            const auto [q, k] = nn::rope(split(i[0], 0, 4), split(i[0], 4, 2), cos, sin);
            return Tensors{q * 1, k * 1};
          },
          [&](auto& i) {
            return Tensors{rotate_half(split(i[0], 0, 4), cos, sin),
                           rotate_half(split(i[0], 4, 2), cos, sin)};
          },
          {random({3, 65, 6 * 128}, type)}, tolerance(type), "rope");
    }
  }
}

template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const lockstep::UsageError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Refusals, NameTheOperationAndTheShapes) {
  using testing::HasSubstr;
  const auto x = torch::randn({2, 6});
  EXPECT_THAT(message_of([&] { nn::rms_norm(x, torch::ones({5})); }),
              HasSubstr("[rms_norm] weight must have the size of the last dimension"));
  EXPECT_THAT(message_of([&] { nn::linear(x, torch::ones({4, 5}), {}); }),
              HasSubstr("Float [2, 6] and Float [4, 5]"));
  EXPECT_THAT(message_of([&] { nn::swiglu(torch::ones({3})); }), HasSubstr("[swiglu]"));
  EXPECT_THAT(
      message_of([&] { nn::cross_entropy(x, torch::zeros({2}, at::kLong), {.columns = 7}); }),
      HasSubstr("columns = 7 is not within the 6"));
  EXPECT_THAT(message_of([&] { nn::cross_entropy(x, torch::zeros({3}, at::kLong)); }),
              HasSubstr("one for each row"));
  EXPECT_THAT(message_of([&] {
                const auto q = torch::ones({1, 3, 2, 8});
                nn::attention(q, torch::ones({1, 2, 2, 8}), torch::ones({1, 2, 2, 8}));
              }),
              HasSubstr("a divisor"));
}

}  // namespace
