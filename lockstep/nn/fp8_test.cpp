// fp8 casts against the definition of the two formats, enumerated; products and gradients against
// double precision on the values that were cast; largest magnitudes that are handed over against
// those that are read, in bits. With LOCKSTEP_DEVICE=cuda our kernels against the same (tests/gpu),
// and the cast bit by bit against the CPU's.
#include "lockstep/nn/fp8.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>

#include "lockstep/core/error.h"
#include "lockstep/nn/device_for_test.h"
#include "lockstep/nn/on_cuda.h"

namespace nn = lockstep::nn;

namespace {

using nn::Fp8Recipe;
using nn::test_device;

constexpr auto kE4 = at::kFloat8_e4m3fn, kE5 = at::kFloat8_e5m2;
constexpr Fp8Recipe kRecipes[] = {Fp8Recipe::kTensorwise, Fp8Recipe::kRowwise};

struct Format {
  int mantissa, bias, codes;  // codes: of finite values that are not negative
  double largest;
};
Format format_of(at::ScalarType type) {
  return type == kE4 ? Format{3, 7, 127, 448} : Format{2, 15, 124, 57344};
}

double value_of(int code, const Format& f) {
  const int exponent = code >> f.mantissa, fraction = code & ((1 << f.mantissa) - 1);
  const int steps = exponent == 0 ? fraction : fraction + (1 << f.mantissa);
  return std::ldexp(steps, std::max(exponent, 1) - f.bias - f.mantissa);
}

// The nearest code; between two the even one.
int nearest(double x, const Format& f) {
  int best = 0;
  for (int code = 1; code < f.codes; ++code) {
    const double now = std::abs(value_of(code, f) - std::abs(x));
    const double before = std::abs(value_of(best, f) - std::abs(x));
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return std::signbit(x) ? best + 128 : best;
}

at::Tensor random(at::IntArrayRef sizes, at::ScalarType type, int seed) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  return torch::randn(sizes).to(test_device(), type);
}

at::Tensor bytes(const at::Tensor& values) {
  return values.view(at::kByte).cpu();
}

at::Tensor wide(const at::Tensor& t) {
  return t.detach().to(at::kCPU, at::kDouble);
}

at::Tensor wide(const nn::Fp8Matrix& m) {
  return wide(m.values.to(at::kFloat)) * wide(m.scale);
}

nn::Fp8Matrix cast(const at::Tensor& m, at::ScalarType type, Fp8Recipe recipe) {
  return nn::to_fp8({m}, type, recipe).matrix;
}

// Sums are in float, in any order. A GPU's tensor cores add 32 products and the sum so far at a
// time, each cut to 14 bits of the largest of them. The result is rounded once to its type.
void expect_product(const at::Tensor& got, const at::Tensor& a, const at::Tensor& b,
                    const std::string& what) {
  const auto terms = static_cast<double>(a.size(1));
  const double rounding = got.scalar_type() == at::kFloat ? 0x1p-23 : 0x1p-8;
  const at::Tensor want = a.mm(b), sizes = a.abs().mm(b.abs());
  const at::Tensor largest = std::get<0>(a.abs().max(1, true)) * std::get<0>(b.abs().max(0, true));
  const at::Tensor sums = test_device().is_cuda()
                              ? (sizes + 32 * largest) * (std::ceil(terms / 32) * 0x1p-13)
                              : sizes * ((terms + 4) * 0x1p-24);
  const at::Tensor most = sums + want.abs() * rounding + 1e-30;
  EXPECT_TRUE((wide(got) - want).abs().le(most).all().item<bool>())
      << what << ": " << ((wide(got) - want).abs() / most).max().item<double>()
      << " of what may be";
}

TEST(Fp8Cast, RoundsToTheNearestEvenOfTheFormat) {
  for (const auto type : {kE4, kE5}) {
    const Format f = format_of(type);
    // Every value, the middle between each two, and what is just beside it. The largest makes the
    // scale 1.
    std::vector<float> all;
    for (int code = 0; code + 1 < f.codes; ++code) {
      const auto low = static_cast<float>(value_of(code, f));
      const auto middle = static_cast<float>((value_of(code, f) + value_of(code + 1, f)) / 2);
      for (const float x :
           {low, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)})
        all.insert(all.end(), {x, -x});
    }
    all.push_back(static_cast<float>(f.largest));
    while (all.size() % 16 != 0) all.push_back(0);
    const auto size = static_cast<std::int64_t>(all.size());
    const at::Tensor x = torch::tensor(all).view({size / 16, 16}).to(test_device());
    const nn::Fp8Matrix got = cast(x, type, Fp8Recipe::kTensorwise);
    EXPECT_EQ(got.scale.item<float>(), 1.0f);
    const at::Tensor codes = bytes(got.values).flatten();
    for (std::int64_t i = 0; i < size; ++i)
      ASSERT_EQ(codes[i].item<int>(), nearest(all[static_cast<std::size_t>(i)], f))
          << all[static_cast<std::size_t>(i)];
  }
}

TEST(Fp8Cast, ScalesAreOfTheLargestAndTheErrorIsThatOfTheFormat) {
  for (const auto type : {kE4, kE5}) {
    const Format f = format_of(type);
    for (const auto recipe : kRecipes) {
      for (const auto from : {at::kBFloat16, at::kFloat, at::kHalf}) {
        const at::Tensor x = random({37, 48}, from, 1) * 3e-3;
        const auto pair = nn::to_fp8({x}, type, recipe);
        const at::Tensor amax =
            recipe == Fp8Recipe::kRowwise ? wide(x).abs().amax(1, true) : wide(x).abs().amax();
        const at::Tensor most = wide(x).abs() * std::ldexp(1.0, -f.mantissa - 1) * 1.0001 +
                                amax / f.largest * value_of(1, f) / 2 * 1.0001;
        EXPECT_TRUE((wide(pair.matrix) - wide(x)).abs().le(most).all().item<bool>());
        EXPECT_TRUE(torch::allclose(
            wide(pair.matrix.scale).flatten(),
            (amax / f.largest).flatten().expand_as(pair.matrix.scale.flatten()), 1e-6, 0));
        // The transpose: 37 rows are padded to 48.
        ASSERT_EQ(pair.transposed.values.sizes(), at::IntArrayRef({48, 48}));
        EXPECT_EQ(bytes(pair.transposed.values).narrow(1, 37, 11).count_nonzero().item<int>(), 0);
        const auto turned = nn::to_fp8({x.t().contiguous()}, type, recipe).matrix;
        EXPECT_TRUE(
            torch::equal(bytes(pair.transposed.values).narrow(1, 0, 37), bytes(turned.values)));
        EXPECT_TRUE(torch::equal(pair.transposed.scale.flatten(), turned.scale.flatten()));
      }
    }
  }
}

TEST(Fp8Cast, IsTheSameOnEveryDevice) {
  for (const auto recipe : kRecipes)
    for (const std::int64_t rows : {1, 16, 130, 300})
      for (const auto from : {at::kBFloat16, at::kFloat}) {
        const at::Tensor x = random({rows, 272}, from, 2), y = random({48, 272}, from, 3);
        const auto compare = [&](const std::vector<at::Tensor>& list) {
          std::vector<at::Tensor> host;
          for (const at::Tensor& one : list) host.push_back(one.cpu());
          for (const auto type : {kE4, kE5}) {
            const auto got = nn::to_fp8(list, type, recipe), want = nn::to_fp8(host, type, recipe);
            EXPECT_TRUE(torch::equal(bytes(got.matrix.values), bytes(want.matrix.values)));
            EXPECT_TRUE(torch::equal(bytes(got.transposed.values), bytes(want.transposed.values)));
            EXPECT_TRUE(torch::equal(got.matrix.scale.cpu(), want.matrix.scale));
            EXPECT_TRUE(torch::equal(got.transposed.scale.cpu(), want.transposed.scale));
          }
        };
        compare({x});
        compare({y, x});  // the first ends at a multiple of 16
        compare({x.t().contiguous().t()});
      }
}

TEST(Fp8Cast, ZerosStayAndNonFiniteValuesAreSeen) {
  const at::Tensor zeros = torch::zeros({16, 16}, at::TensorOptions(test_device()));
  for (const auto recipe : kRecipes) {
    EXPECT_EQ(wide(cast(zeros, kE4, recipe)).abs().max().item<double>(), 0);
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      at::Tensor x = random({16, 32}, at::kBFloat16, 4);
      x.index_put_({3, 5}, bad);
      const auto pair = nn::to_fp8({x}, kE5, recipe);
      EXPECT_TRUE(torch::isnan(wide(pair.matrix)[3]).all().item<bool>());
      EXPECT_TRUE(torch::isnan(wide(pair.transposed)[5].narrow(0, 0, 16)).all().item<bool>());
    }
  }
}

struct Layer {
  at::Tensor x, weight, bias, dy;
};

Layer layer_of(std::int64_t rows, at::ScalarType type) {
  return {random({rows, 96}, type, 5), random({64, 96}, at::kFloat, 6) * 0.05,
          random({64}, at::kFloat, 7), random({rows, 64}, type, 8) * 1e-4};
}

// What was cast in parts, with the largest magnitude of all, and made wide again is cast to the
// same once more: whoever gathers parts in fp8 computes what the whole would have.
TEST(Fp8Cast, PartsAreCastToTheSameAgain) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16})
    for (const double size : {1.0, 3e-5, 7e4, 1e-33, 0.0})
      for (int seed = 0; seed < 20; ++seed) {
        const at::Tensor whole = random({48, 16}, type, seed) * size;
        const nn::Fp8Pair expected = nn::to_fp8({whole}, kE4, Fp8Recipe::kTensorwise);
        const at::Tensor amax = whole.abs().max().to(at::kFloat);
        at::Tensor back = at::empty_like(whole);
        for (const std::int64_t first : {0, 16, 32}) {
          const at::Tensor part = nn::part_to_fp8(whole.narrow(0, first, 16), amax);
          EXPECT_TRUE(bytes(part).equal(bytes(expected.matrix.values.narrow(0, first, 16))));
          back.narrow(0, first, 16).copy_(part);
        }
        nn::scale_part_from_fp8(back, amax);
        const nn::Fp8Pair again = nn::to_fp8({back}, kE4, Fp8Recipe::kTensorwise);
        EXPECT_TRUE(bytes(again.matrix.values).equal(bytes(expected.matrix.values)))
            << type << ' ' << size << ' ' << seed;
        EXPECT_TRUE(again.matrix.scale.equal(expected.matrix.scale)) << type << ' ' << size;
      }
}

TEST(Fp8Linear, ProductAndGradientsAreThoseOfTheCastValues) {
  for (const auto recipe : kRecipes)
    for (const auto type : {at::kBFloat16, at::kFloat})
      for (const std::int64_t rows : {3, 32, 200}) {
        // A GPU has a product by row in bfloat16 alone.
        if (recipe == Fp8Recipe::kRowwise && type == at::kFloat && test_device().is_cuda())
          continue;
        const Layer l = layer_of(rows, type);
        const at::Tensor x = l.x.clone().requires_grad_(), w = l.weight.clone().requires_grad_(),
                         b = l.bias.clone().requires_grad_();
        const at::Tensor y = nn::fp8_linear(x.view({1, rows, 96}), {w}, b, recipe);
        EXPECT_EQ(y.sizes(), at::IntArrayRef({1, rows, 64}));
        EXPECT_EQ(y.scalar_type(), type);
        y.backward(l.dy.view({1, rows, 64}));
        const auto in = nn::to_fp8({l.x}, kE4, recipe),
                   weight = nn::to_fp8({l.weight}, kE4, recipe),
                   dy = nn::to_fp8({l.dy}, kE5, recipe);
        const at::Tensor own_bias = wide(l.bias.to(type)).unsqueeze(0);
        expect_product(y[0], torch::cat({wide(in.matrix), torch::ones({rows, 1}, at::kDouble)}, 1),
                       torch::cat({wide(weight.matrix).t(), own_bias}), "y");
        expect_product(x.grad(), wide(dy.matrix), wide(weight.transposed).t(), "dx");
        const at::Tensor dw = recipe == Fp8Recipe::kRowwise && test_device().is_cuda()
                                  ? w.grad().to(at::kBFloat16)
                                  : w.grad();
        EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
        expect_product(dw, wide(dy.transposed), wide(in.transposed).t(), "dw");
        EXPECT_TRUE(torch::allclose(wide(b.grad()), wide(l.dy).sum(0), 1e-5, 1e-9));
      }
}

TEST(Fp8Linear, IsAsNearToDoublePrecisionAsTheFormatsAllow) {
  for (const auto recipe : kRecipes) {
    const Layer l = layer_of(64, at::kBFloat16);
    const at::Tensor y = nn::fp8_linear(l.x, {l.weight}, {}, recipe);
    const auto error = [&](const at::Tensor& t) {
      return wide(t).abs() * 0x1p-4 + wide(t).abs().max() / 448 * 0x1p-10;
    };
    const at::Tensor x = wide(l.x).abs(), w = wide(l.weight).abs();
    const at::Tensor most =
        error(l.x).mm(w.t()) + x.mm(error(l.weight).t()) + error(l.x).mm(error(l.weight).t());
    const at::Tensor want = wide(l.x).mm(wide(l.weight).t());
    EXPECT_TRUE((wide(y) - want).abs().le(most + want.abs() * 0x1p-7).all().item<bool>());
    // Rounding errors are of either sign: their sum is far below the worst.
    EXPECT_LT((wide(y) - want).norm().item<double>() / want.norm().item<double>(), 0.05);
  }
}

TEST(Fp8Linear, SeveralWeightsAreOneProduct) {
  for (const auto recipe : kRecipes) {
    const at::Tensor x = random({40, 96}, at::kBFloat16, 9),
                     dy = random({40, 112}, at::kBFloat16, 1);
    const at::Tensor all = random({112, 96}, at::kFloat, 10);
    const auto run = [&](std::vector<at::Tensor> weights) {
      for (at::Tensor& weight : weights) weight = weight.detach().clone().requires_grad_();
      const at::Tensor in = x.clone().requires_grad_();
      const at::Tensor y = nn::fp8_linear(in, weights, {}, recipe);
      y.backward(dy);
      std::vector<at::Tensor> grads;
      for (const at::Tensor& weight : weights) grads.push_back(weight.grad());
      return std::vector<at::Tensor>{y.detach(), in.grad(), torch::cat(grads)};
    };
    const auto one = run({all}),
               three = run({all.narrow(0, 0, 64), all.narrow(0, 64, 32), all.narrow(0, 96, 16)});
    EXPECT_TRUE(torch::equal(one[0], three[0]));
    EXPECT_TRUE(torch::equal(one[1], three[1]));
    // Products of other shapes may add in another order.
    EXPECT_TRUE(torch::allclose(one[2], three[2], 1e-2, 1e-3));
  }
}

TEST(Fp8Linear, AWeightThatIsStoredTransposedGetsTheSameResults) {
  for (const auto recipe : kRecipes) {
    const Layer l = layer_of(48, at::kBFloat16);
    const at::Tensor w = l.weight.clone().requires_grad_();
    const at::Tensor stored = l.weight.t().contiguous().requires_grad_();
    const at::Tensor y = nn::fp8_linear(l.x, {w}, {}, recipe);
    const at::Tensor z = nn::fp8_linear(l.x, {stored.t()}, {}, recipe);
    EXPECT_TRUE(torch::equal(y, z));
    y.backward(l.dy);
    z.backward(l.dy);
    EXPECT_TRUE(torch::allclose(w.grad(), stored.grad().t(), 1e-2, 1e-7));
  }
}

TEST(Fp8Linear, TheSecondBackwardAddsToTheGradient) {
  const Layer l = layer_of(48, at::kBFloat16);
  const at::Tensor w = l.weight.clone().requires_grad_();
  nn::fp8_linear(l.x, {w}, {}).backward(l.dy);
  const at::Tensor once = w.grad().clone();
  nn::fp8_linear(l.x, {w}, {}).backward(l.dy);
  EXPECT_TRUE(torch::allclose(w.grad(), 2 * once, 1e-5, 1e-9));
}

TEST(Fp8Linear, NonFiniteGradientsReachWeightAndInput) {
  for (const auto recipe : kRecipes) {
    Layer l = layer_of(32, at::kBFloat16);
    l.dy.index_put_({7, 9}, INFINITY);
    const at::Tensor x = l.x.clone().requires_grad_(), w = l.weight.clone().requires_grad_();
    nn::fp8_linear(x, {w}, {}, recipe).backward(l.dy);
    EXPECT_FALSE(torch::isfinite(w.grad()).all().item<bool>());
    EXPECT_FALSE(torch::isfinite(x.grad()).all().item<bool>());
    l.x.index_put_({0, 0}, NAN);
    EXPECT_FALSE(torch::isfinite(nn::fp8_linear(l.x, {l.weight}, {}, recipe)).all().item<bool>());
  }
}

TEST(Fp8Linear, EmptyBatches) {
  const at::Tensor x = random({0, 32}, at::kBFloat16, 1).requires_grad_();
  const at::Tensor w = random({16, 32}, at::kFloat, 2).requires_grad_();
  const at::Tensor y = nn::fp8_linear(x, {w}, {});
  EXPECT_EQ(y.sizes(), at::IntArrayRef({0, 16}));
  y.sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_EQ(w.grad().abs().max().item<float>(), 0);
}

TEST(Fp8Linear, SizesThatAreNoMultipleOf16AreComputedInTheInputsType) {
  const at::Tensor x = random({8, 20}, at::kBFloat16, 1);
  const at::Tensor v = random({16, 20}, at::kFloat, 2), w = random({5, 20}, at::kFloat, 3);
  EXPECT_FALSE(nn::fp8_covers({v}));
  const at::Tensor bias = random({21}, at::kFloat, 4);
  const at::Tensor want = torch::cat(
      {nn::linear(x, v, bias.narrow(0, 0, 16)), nn::linear(x, w, bias.narrow(0, 16, 5))}, -1);
  EXPECT_TRUE(torch::equal(nn::fp8_linear(x, {v, w}, bias), want));
}

TEST(Fp8Linear, WrongShapesAreUsageErrors) {
  const at::Tensor x = random({8, 32}, at::kBFloat16, 1), w = random({16, 48}, at::kFloat, 2);
  EXPECT_THROW(nn::fp8_linear(x, {w}, {}), lockstep::UsageError);
  EXPECT_THROW(nn::fp8_linear(x, {}, {}), lockstep::UsageError);
  EXPECT_THROW(nn::fp8_linear(x, {w.narrow(1, 0, 32)}, torch::zeros({3})), lockstep::UsageError);
  EXPECT_THROW(nn::to_fp8({x}, at::kHalf, Fp8Recipe::kRowwise), lockstep::UsageError);
  EXPECT_THROW(nn::fp8_recipe_of("delayed"), lockstep::UsageError);
}

TEST(Fp8Lora, BaseIsFp8AndTheAdapterIsNot) {
  for (const auto recipe : kRecipes) {
    const Layer l = layer_of(48, at::kBFloat16);
    const auto base = nn::to_fp8({l.weight}, kE4, recipe);
    const at::Tensor a = (random({8, 96}, at::kFloat, 11) * 0.1).requires_grad_();
    const at::Tensor b = (random({64, 8}, at::kFloat, 12) * 0.1).requires_grad_();
    const at::Tensor x = l.x.clone().requires_grad_();
    const at::Tensor y = nn::fp8_lora_linear(x, base, l.bias, a, b, {.scaling = 2});
    y.backward(l.dy);
    const at::Tensor wa = wide(a), wb = wide(b);
    const at::Tensor narrow = wide(l.x).mm(wa.t());
    const at::Tensor want = wide(cast(l.x, kE4, recipe)).mm(wide(base.matrix).t()) +
                            2 * narrow.mm(wb.t()) + wide(l.bias);
    // Roundings of bfloat16: the narrow product, the wide one, the sum, the bias.
    EXPECT_LT((wide(y) - want).abs().max().item<double>(),
              6 * 0x1p-8 * want.abs().max().item<double>());
    const at::Tensor dnarrow = 2 * wide(l.dy).mm(wb);
    const at::Tensor dx =
        wide(cast(l.dy, kE5, recipe)).mm(wide(base.transposed).t()) + dnarrow.mm(wa);
    EXPECT_LT((wide(x.grad()) - dx).abs().max().item<double>(),
              6 * 0x1p-8 * dx.abs().max().item<double>());
    const at::Tensor da = dnarrow.t().mm(wide(l.x)), db = 2 * wide(l.dy).t().mm(narrow);
    EXPECT_LT((wide(a.grad()) - da).abs().max().item<double>(),
              6 * 0x1p-8 * da.abs().max().item<double>());
    EXPECT_LT((wide(b.grad()) - db).abs().max().item<double>(),
              6 * 0x1p-8 * db.abs().max().item<double>());
  }
}

// ---------------------------------------------------------------- largest magnitudes

float largest_of(const at::Tensor& x) {
  return x.detach().abs().max().item<float>();
}

using Producer = std::function<at::Tensor(at::Tensor* amax)>;

void expect_amax(const Producer& make, const std::string& what) {
  at::Tensor amax;
  const at::Tensor made = make(&amax);
  EXPECT_TRUE(torch::equal(made, make(nullptr))) << what;
  ASSERT_EQ(amax.sizes(), at::IntArrayRef({1})) << what;
  ASSERT_EQ(amax.scalar_type(), at::kFloat) << what;
  EXPECT_EQ(amax.item<float>(), largest_of(made)) << what;
}

// Ones of either sign, and one element that is larger: its norm, too, is the largest.
at::Tensor with_spike(std::int64_t rows, std::int64_t columns, std::int64_t row,
                      std::int64_t column, at::ScalarType type) {
  at::Tensor x = random({rows, columns}, at::kFloat, 13).sign();
  x.index_put_({row, column}, -77.3);
  return x.to(type);
}

// One shape of each kernel, one that none covers (20), and on a GPU more rows than fit at once.
TEST(Fp8Input, ProducersFindTheLargestMagnitudeOfWhatTheyStore) {
  const std::int64_t rows = test_device().is_cuda() ? 1501 : 33;
  for (const auto type : {at::kBFloat16, at::kHalf, at::kFloat})
    for (const std::int64_t columns : {20, 64, 768, 1600, 2048, 3072, 5120})
      for (const auto& [row, column] : {std::pair<std::int64_t, std::int64_t>{0, 0},
                                        {rows / 2, columns - 9},
                                        {rows - 1, columns - 1}}) {
        const std::string what = std::to_string(columns) + " columns of " + c10::toString(type) +
                                 ", the largest in row " + std::to_string(row);
        const at::Tensor x = with_spike(rows, columns, row, column, type);
        const at::Tensor zeros = torch::zeros_like(x);
        const at::Tensor w = random({columns}, at::kFloat, 14),
                         b = random({columns}, at::kFloat, 15);
        expect_amax([&](auto* amax) { return nn::rms_norm(x, w, 1e-6, type, amax); }, what);
        expect_amax([&](auto* amax) { return nn::layer_norm(x, w, b, 1e-5, type, amax); }, what);
        expect_amax(
            [&](auto* amax) { return nn::add_rms_norm(zeros, x, {}, w, 1e-6, amax).normed; }, what);
        expect_amax(
            [&](auto* amax) {
              return nn::add_layer_norm(zeros.to(at::kFloat), x, b, w, b, 1e-5, amax).normed;
            },
            what);
        const at::Tensor gate_up = torch::cat({x.abs(), x}, 1);
        expect_amax([&](auto* amax) { return nn::swiglu(gate_up, amax); }, what);
      }
}

TEST(Fp8Input, ProducersSeeNonFiniteValuesZerosAndEmptyBatches) {
  const at::Tensor w = torch::ones({64}, at::TensorOptions(test_device()));
  const auto amax_of = [&](const at::Tensor& x, bool norm) {
    at::Tensor amax;
    if (norm)
      nn::rms_norm(x, w, 1e-6, {}, &amax);
    else
      nn::swiglu(x, &amax);
    return amax.item<float>();
  };
  at::Tensor x = random({40, 64}, at::kBFloat16, 16);
  for (const bool norm : {false, true}) {
    EXPECT_EQ(amax_of(torch::zeros_like(x), norm), 0);
    EXPECT_EQ(amax_of(x.narrow(0, 0, 0), norm), 0);
    x.index_put_({7, 9}, NAN);
    EXPECT_TRUE(std::isnan(amax_of(x, norm)));
  }
  x.index_put_({7, 9}, -1e30);  // silu is -0 there
  x.index_put_({8, 9}, 1e30);
  x.index_put_({8, 41}, -1e30);
  EXPECT_EQ(amax_of(x, false), INFINITY);
}

TEST(Fp8Input, IsUsedByTensorAndNotByRow) {
  const at::Tensor x = random({40, 96}, at::kBFloat16, 17);
  const at::Tensor twice = (2 * x.abs().max()).to(at::kFloat).view({1});
  for (const auto recipe : kRecipes)
    for (const at::Tensor& matrix : {x, x.narrow(0, 0, 32).t().contiguous().t()}) {
      const auto own = nn::to_fp8({matrix}, kE4, recipe),
                 given = nn::to_fp8({matrix}, kE4, recipe, {}, twice);
      const double factor =
          recipe == Fp8Recipe::kRowwise ? 1 : 2 * largest_of(x) / largest_of(matrix);
      EXPECT_TRUE(torch::allclose(given.matrix.scale, factor * own.matrix.scale, 1e-6, 0));
      EXPECT_TRUE(torch::allclose(given.transposed.scale, factor * own.transposed.scale, 1e-6, 0));
    }
  for (const at::Tensor& bad : {twice.to(at::kBFloat16), twice.expand({2})}) try {
      nn::to_fp8({x}, kE4, Fp8Recipe::kTensorwise, {}, bad);
      ADD_FAILURE() << "a wrong amax was taken";
    } catch (const lockstep::UsageError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("amax must be one float on the device"));
    }
}

// Results and gradients of one call, and how many kernels it has started.
struct Bits {
  std::vector<at::Tensor> tensors;
  std::int64_t kernels = 0;
};

Bits bits_of(const std::vector<at::Tensor>& inputs, const at::Tensor& dy,
             const std::function<at::Tensor(const std::vector<at::Tensor>&)>& call) {
  Bits bits;
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().clone().requires_grad_());
  const auto before = nn::detail::OnCuda::kernels_started();
  const at::Tensor y = call(leaves);
  y.backward(dy);
  bits.kernels = nn::detail::OnCuda::kernels_started() - before;
  bits.tensors.push_back(y.detach());
  for (const at::Tensor& leaf : leaves) bits.tensors.push_back(leaf.grad());
  return bits;
}

// `saved`: kernels that read for a largest magnitude, which a GPU does not run by tensor.
void expect_same_bits(const Bits& got, const Bits& want, Fp8Recipe recipe, int saved) {
  ASSERT_EQ(got.tensors.size(), want.tensors.size());
  for (std::size_t i = 0; i < want.tensors.size(); ++i)
    EXPECT_TRUE(torch::equal(got.tensors[i], want.tensors[i])) << "tensor " << i;
  const bool fewer = test_device().is_cuda() && recipe == Fp8Recipe::kTensorwise;
  EXPECT_EQ(got.kernels, want.kernels - (fewer ? saved : 0));
}

TEST(Fp8Input, ALayerHasTheSameBitsWithAndWithoutIt) {
  for (const auto recipe : kRecipes)
    for (const std::int64_t rows : {3, 48, 200}) {
      const Layer l = layer_of(rows, at::kBFloat16);
      const at::Tensor amax = l.x.abs().max().to(at::kFloat).view({1});
      const auto linear = [&](bool given) {
        return bits_of({l.x, l.weight, l.bias}, l.dy, [&](const auto& i) {
          return given ? nn::fp8_linear({i[0], amax}, {i[1]}, i[2], recipe)
                       : nn::fp8_linear(i[0], {i[1]}, i[2], recipe);
        });
      };
      expect_same_bits(linear(true), linear(false), recipe, 1);
      const auto base = nn::to_fp8({l.weight}, kE4, recipe);
      const auto lora = [&](bool given) {
        return bits_of({l.x, random({8, 96}, at::kFloat, 18), random({64, 8}, at::kFloat, 19)},
                       l.dy, [&](const auto& i) {
                         const nn::Fp8Input in(i[0], given ? amax : at::Tensor());
                         return nn::fp8_lora_linear(in, base, l.bias, i[1], i[2]);
                       });
      };
      expect_same_bits(lora(true), lora(false), recipe, 1);
    }
}

TEST(Fp8Swiglu, IsSwigluOfTheLayerToTheBit) {
  for (const auto recipe : kRecipes)
    for (const std::int64_t rows : {3, 48, 200})
      for (const bool joined : {false, true}) {
        const at::Tensor x = random({rows, 96}, at::kBFloat16, 20);
        const at::Tensor weight = random({128, 96}, at::kFloat, 21) * 0.1;
        const at::Tensor bias = random({128}, at::kFloat, 22);
        const at::Tensor dy = random({rows, 64}, at::kBFloat16, 23) * 1e-4;
        const auto run = [&](bool fused) {
          return bits_of({x, weight, bias}, dy, [&](const auto& i) {
            std::vector<at::Tensor> weights{i[1]};
            if (joined) weights = {i[1].narrow(0, 0, 64), i[1].narrow(0, 64, 64)};
            if (!fused) return nn::swiglu(nn::fp8_linear(i[0], weights, i[2], recipe));
            const nn::Fp8Input y = nn::fp8_swiglu(i[0], weights, i[2], recipe);
            EXPECT_EQ(y.amax.defined(), recipe == Fp8Recipe::kTensorwise);
            if (y.amax.defined()) {
              EXPECT_EQ(y.amax.template item<float>(), largest_of(y.values));
            }
            return y.values;
          });
        };
        expect_same_bits(run(true), run(false), recipe, 1);
      }
}

TEST(Fp8Swiglu, EmptyBatchesAndSizesThatFp8DoesNotCover) {
  const at::Tensor w = random({32, 20}, at::kFloat, 24), x = random({8, 20}, at::kBFloat16, 25);
  EXPECT_TRUE(torch::equal(nn::fp8_swiglu(x, {w}, {}).values, nn::swiglu(nn::linear(x, w, {}))));
  const at::Tensor covered = random({32, 48}, at::kFloat, 26).requires_grad_();
  const at::Tensor none = random({0, 48}, at::kBFloat16, 27).requires_grad_();
  const nn::Fp8Input y = nn::fp8_swiglu(none, {covered}, {});
  EXPECT_EQ(y.values.sizes(), at::IntArrayRef({0, 16}));
  EXPECT_EQ(y.amax.item<float>(), 0);
  y.values.sum().backward();
  EXPECT_EQ(covered.grad().abs().max().item<float>(), 0);
}

TEST(Fp8Autocast, GuardsNest) {
  EXPECT_FALSE(nn::Fp8Autocast::current());
  {
    const nn::Fp8Autocast outer(Fp8Recipe::kRowwise);
    EXPECT_EQ(nn::Fp8Autocast::current(), Fp8Recipe::kRowwise);
    {
      const nn::Fp8Autocast off(std::nullopt);
      EXPECT_FALSE(nn::Fp8Autocast::current());
    }
    EXPECT_EQ(nn::Fp8Autocast::current(), Fp8Recipe::kRowwise);
  }
  EXPECT_FALSE(nn::Fp8Autocast::current());
}

}  // namespace
