// Attention with a soft cap beside the same composed of ATen's operations in double precision. With
// LOCKSTEP_DEVICE=cuda on CUDA tensors (tests/gpu).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/nn/device_for_test.h"
#include "lockstep/nn/functional.h"

namespace lockstep::nn {
namespace {

using Tensors = std::vector<at::Tensor>;

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
