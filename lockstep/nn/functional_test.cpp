// Products of groups of rows, and attention with a soft cap, beside the same composed of ATen's
// operations in double precision: outputs and gradients. With LOCKSTEP_DEVICE=cuda on CUDA tensors
// (tests/gpu).
#include "lockstep/nn/functional.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/nn/device_for_test.h"

namespace lockstep::nn {
namespace {

using Tensors = std::vector<at::Tensor>;

// One rounding to the type, of sums in float.
double grouped_tolerance(at::ScalarType type) {
  return type == at::kBFloat16 ? 3 * 0x1p-8 : type == at::kHalf ? 3 * 0x1p-11 : 1e-5;
}

void expect_grouped(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  if (want.numel() == 0) return;
  const double apart = (got.to(at::kDouble) - want).abs().max().item<double>();
  const double scale = want.abs().max().item<double>();
  EXPECT_LE(apart, grouped_tolerance(got.scalar_type()) * scale) << what;
}

at::Tensor random(at::IntArrayRef sizes, at::ScalarType type) {
  return torch::randn(sizes).to(test_device(), type);
}

struct Case {
  std::vector<int> ends;
  at::ScalarType type;
  std::optional<bool> one_product;
};

void check(const Case& c, const std::string& what) {
  Tensors inputs{random({c.ends.back(), 8}, c.type)}, wide;
  for (int group = 0; group < 3; ++group) inputs.push_back(random({24, 8}, c.type));
  for (at::Tensor& one : inputs) {
    one.set_requires_grad(true);
    wide.push_back(one.detach().to(at::kDouble).set_requires_grad(true));
  }
  const at::Tensor ends = torch::tensor(c.ends, at::kInt).to(test_device());
  const at::Tensor y = grouped_linear(inputs[0], {inputs[1], inputs[2], inputs[3]}, ends,
                                      {.one_product = c.one_product});
  Tensors parts;
  std::int64_t from = 0;
  for (std::size_t group = 0; group < 3; from = c.ends[group++])
    parts.push_back(torch::linear(wide[0].slice(0, from, c.ends[group]), wide[group + 1]));
  const at::Tensor want = torch::cat(parts);
  expect_grouped(y, want, what);
  const at::Tensor dy = random(y.sizes(), c.type);
  y.backward(dy);
  want.backward(dy.to(at::kDouble));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    expect_grouped(inputs[i].grad(), wide[i].grad(), what + ", input " + std::to_string(i));
    EXPECT_EQ(inputs[i].grad().scalar_type(), c.type);
  }
}

// One of the groups is empty at each place in turn, two are, and all are.
TEST(GroupedLinear, EqualsAProductForEachGroup) {
  torch::manual_seed(15);
  const std::vector<std::vector<int>> all{{3, 7, 16},  {0, 7, 16}, {5, 5, 16},
                                          {5, 16, 16}, {0, 0, 16}, {0, 0, 0}};
  for (const auto& ends : all) {
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      check({ends, type, false}, "many products");
      check({ends, type, std::nullopt}, "as the device has it");
    }
    // What a GPU chooses; on the CPU it has float as well.
    check({ends, at::kBFloat16, true}, "one product");
    if (test_device().is_cpu()) check({ends, at::kFloat, true}, "one product");
  }
}

TEST(GroupedLinear, HasGradientsForWhatNeedsThemAlone) {
  torch::manual_seed(17);
  const at::Tensor ends = torch::tensor({2, 4}, at::kInt).to(test_device());
  for (const bool one : {false, true}) {
    const auto x = random({4, 8}, at::kBFloat16).set_requires_grad(true);
    Tensors weights{random({8, 8}, at::kBFloat16), random({8, 8}, at::kBFloat16)};
    grouped_linear(x, weights, ends, {.one_product = one}).sum().backward();
    EXPECT_TRUE(x.grad().defined()) << one;
    weights[1].set_requires_grad(true);
    grouped_linear(x.detach(), weights, ends, {.one_product = one}).sum().backward();
    EXPECT_FALSE(weights[0].grad().defined()) << one;
    EXPECT_TRUE(weights[1].grad().defined()) << one;
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(grouped_linear(x, weights, ends, {.one_product = one}).requires_grad()) << one;
  }
}

TEST(GroupedLinear, GradientsOfFloatWeightsAreFloat) {
  torch::manual_seed(16);
  const at::Tensor ends = torch::tensor({4, 9}, at::kInt).to(test_device());
  const auto x = random({9, 8}, at::kBFloat16), dy = random({9, 16}, at::kBFloat16);
  Tensors weights;
  for (int i = 0; i < 2; ++i)
    weights.push_back(random({16, 8}, at::kBFloat16).to(at::kFloat).set_requires_grad(true));
  grouped_linear(x, weights, ends, {.one_product = false}).backward(dy);
  expect_grouped(weights[1].grad(),
                 at::mm(dy.slice(0, 4).t().to(at::kDouble), x.slice(0, 4).to(at::kDouble)),
                 "float gradient of bfloat16 tensors");
  for (at::Tensor& weight : weights) weight.mutable_grad().reset();
  grouped_linear(x, weights, ends, {.one_product = true}).backward(dy);
  for (const at::Tensor& weight : weights) EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
}

TEST(GroupedLinear, WeightsInOneAllocationAreNotCopied) {
  torch::manual_seed(18);
  const at::Tensor ends = torch::tensor({4, 9}, at::kInt).to(test_device());
  const auto x = random({9, 8}, at::kBFloat16);
  const Tensors weights{random({16, 8}, at::kBFloat16), random({16, 8}, at::kBFloat16)};
  const Tensors were{weights[0].clone(), weights[1].clone()};
  const at::Tensor before = grouped_linear(x, weights, ends, {.one_product = true});
  place_together(weights);
  EXPECT_EQ(static_cast<const char*>(weights[1].const_data_ptr()),
            static_cast<const char*>(weights[0].const_data_ptr()) + weights[0].nbytes());
  const void* const place = weights[0].const_data_ptr();
  place_together(weights);
  EXPECT_EQ(weights[0].const_data_ptr(), place);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(weights[i].equal(were[i]));
  EXPECT_TRUE(grouped_linear(x, weights, ends, {.one_product = true}).equal(before));
}

std::string message_of(const Tensors& weights, const at::Tensor& ends) {
  try {
    grouped_linear(torch::ones({2, 6}), weights, ends);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(GroupedLinear, RefusesShapesThatDoNotFit) {
  using ::testing::HasSubstr;
  const auto ends = torch::tensor({2}, at::kInt);
  EXPECT_THAT(message_of({torch::ones({4, 5})}, ends),
              HasSubstr("[grouped_linear] x must be [rows, in]"));
  EXPECT_THAT(message_of({}, ends), HasSubstr("each weight [out, in]"));
  EXPECT_THAT(message_of({torch::ones({4, 6}), torch::ones({3, 6})}, ends),
              HasSubstr("one shape and dtype"));
  EXPECT_THAT(message_of({torch::ones({4, 6})}, ends.to(at::kLong)),
              HasSubstr("ends must be int32, one for each weight"));
}

// ---------------------------------------------------------------- attention with a soft cap

at::Tensor plain(const Tensors& in, const CappedAttentionOptions& o) {
  const std::int64_t shared = in[0].size(1) / in[1].size(1);
  const at::Tensor keys = in[1].repeat_interleave(shared, 1);
  at::Tensor scores = torch::matmul(in[0], keys.transpose(2, 3)) * o.scale;
  scores = torch::tanh(scores / o.cap) * o.cap;
  if (o.mask.defined()) scores = scores.masked_fill(o.mask.logical_not(), -INFINITY);
  return torch::matmul(torch::softmax(scores, -1), in[2].repeat_interleave(shared, 1));
}

// Rounding of the inputs' type in two products of a row, with sums in float.
double tolerance(at::ScalarType type) {
  return type == at::kBFloat16 ? 8 * 0x1p-8 : type == at::kHalf ? 8 * 0x1p-11 : 1e-5;
}

void expect_close(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  const double apart = (got.to(at::kDouble) - want).abs().max().item<double>();
  EXPECT_LE(apart, tolerance(got.scalar_type()) * want.abs().max().item<double>()) << what;
}

TEST(CappedAttention, EqualsTheSameWithAllScoresAtOnce) {
  torch::manual_seed(3);
  constexpr std::int64_t kTime = 9, kKeys = 12, kWidth = 8;
  const auto options = at::TensorOptions(test_device());
  // Queries that follow three tokens of a cache, and see five tokens.
  const at::Tensor seen = torch::arange(kKeys, options);
  const at::Tensor own = torch::arange(3, kKeys, options).unsqueeze(1);
  const at::Tensor window = (seen <= own).logical_and(seen > own - 5);
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const std::int64_t groups : {4, 2, 1}) {
      for (const at::Tensor& mask : {at::Tensor(), window}) {
        for (const std::int64_t chunk : {0, 1, 4, 9}) {
          const std::string what = std::string(c10::toString(type)) + ", groups " +
                                   std::to_string(groups) + ", rows " + std::to_string(chunk);
          const CappedAttentionOptions o{.cap = 2, .scale = 0.5, .mask = mask, .chunk_rows = chunk};
          Tensors in{torch::randn({2, 4, kTime, kWidth}), torch::randn({2, groups, kKeys, kWidth}),
                     torch::randn({2, groups, kKeys, kWidth})};
          Tensors wide;
          for (at::Tensor& one : in) {
            one = one.to(test_device(), type).set_requires_grad(true);
            wide.push_back(one.detach().to(at::kDouble).set_requires_grad(true));
          }
          const at::Tensor y = capped_attention(in[0], in[1], in[2], o), want = plain(wide, o);
          expect_close(y, want, what);
          const at::Tensor dy = torch::randn(y.sizes()).to(test_device(), type);
          y.backward(dy);
          want.backward(dy.to(at::kDouble));
          for (std::size_t i = 0; i < in.size(); ++i) {
            EXPECT_EQ(in[i].grad().scalar_type(), type);
            expect_close(in[i].grad(), wide[i].grad(), what + ", input " + std::to_string(i));
          }
        }
      }
    }
  }
}

TEST(CappedAttention, HasItsHeadsBesideEachOther) {
  const at::Tensor x = torch::randn({2, 4, 5, 8}).to(test_device());
  const at::Tensor y = capped_attention(x, x, x, {});
  const at::Tensor joined = y.transpose(1, 2).reshape({2, 5, 32});
  EXPECT_EQ(joined.const_data_ptr(), y.const_data_ptr());
}

TEST(CappedAttention, RefusesShapesThatDoNotFit) {
  using ::testing::HasSubstr;
  const auto said = [](const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask) {
    try {
      capped_attention(torch::ones({1, 4, 3, 8}), k, v, {.mask = mask});
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was refused");
  };
  const at::Tensor keys = torch::ones({1, 2, 5, 8});
  EXPECT_THAT(said(torch::ones({1, 3, 5, 8}), keys, {}),
              HasSubstr("[capped_attention] keys must have the queries' width"));
  EXPECT_THAT(said(keys, torch::ones({1, 2, 6, 8}), {}), HasSubstr("the keys' heads and length"));
  EXPECT_THAT(said(keys, keys, torch::ones({3, 4}, at::kBool)), HasSubstr("[time, keys]"));
  EXPECT_THAT(said(keys, keys.to(at::kBFloat16), {}), HasSubstr("one dtype"));
}

}  // namespace
}  // namespace lockstep::nn
