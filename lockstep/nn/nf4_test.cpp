// Weights in 4 bits against known values and a plain search for the nearest number; products and
// gradients against the decoded weight, in bits. With LOCKSTEP_DEVICE=cuda the bits of the kernel
// against the CPU's (tests/gpu). tests/lora compares with bitsandbytes.
#include "lockstep/nn/nf4.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "lockstep/core/helpers_for_test.h"
#include "lockstep/kernels/nf4.h"
#include "lockstep/nn/device_for_test.h"
#include "lockstep/nn/functional.h"

namespace lockstep::nn {
namespace {

using ::testing::HasSubstr;

constexpr kernels::Nf4Numbers kNumbers = kernels::nf4_numbers();
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

at::Tensor normal(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  torch::manual_seed(static_cast<std::uint64_t>(sizes[0]));
  return torch::randn(sizes).to(type);
}

// The index of the nearest number; of two equally near ones the lower.
template <std::size_t kCount>
int nearest(const float (&numbers)[kCount], float x) {
  int best = 0;
  for (int i = 1; i < static_cast<int>(kCount); ++i)
    if (std::abs(static_cast<double>(numbers[i]) - x) <
        std::abs(static_cast<double>(numbers[best]) - x))
      best = i;
  return best;
}

TEST(Nf4, HoldsItsOwnNumbersExactly) {
  // Four times the 16 numbers in a block, and blocks whose largest magnitudes are equal.
  const at::Tensor numbers = torch::tensor(at::ArrayRef<float>(kNumbers.of_values, 16));
  const at::Tensor weight = numbers.repeat({3, 8});
  const at::Tensor bytes = to_nf4(weight);
  EXPECT_TRUE(torch::equal(from_nf4(bytes, 128, at::kFloat), weight));
  for (int i = 0; i < 8; ++i)  // the first of two in the upper half
    EXPECT_EQ(bytes.const_data_ptr<std::uint8_t>()[i], (2 * i) << 4 | (2 * i + 1));
  // The dynamic map: ascending, and 1, 0 and the largest fraction of each power of ten.
  for (int i = 1; i < 256; ++i) EXPECT_GT(kNumbers.of_magnitudes[i], kNumbers.of_magnitudes[i - 1]);
  EXPECT_EQ(kNumbers.of_magnitudes[128], 0.55f * 1e-6f);
  EXPECT_EQ(kNumbers.of_magnitudes[254], 0.99296875f);
}

TEST(Nf4, TakesTheNearestNumberAndTheNearestMagnitude) {
  for (const auto& sizes :
       std::vector<std::vector<std::int64_t>>{{1, 1}, {5, 1}, {3, 65}, {64, 64}, {257, 129}}) {
    const at::Tensor weight = normal(sizes);
    const at::Tensor bytes = to_nf4(weight), back = from_nf4(bytes, sizes[1], at::kFloat);
    EXPECT_EQ(bytes.sizes(), nf4_sizes(sizes[0], sizes[1]));
    const kernels::Nf4Layout layout(weight.numel());
    const auto* const codes = bytes.const_data_ptr<std::uint8_t>();
    const auto* const values = weight.const_data_ptr<float>();
    std::vector<float> largest(static_cast<std::size_t>(layout.blocks));
    double sum = 0;
    for (std::int64_t i = 0; i < layout.count; ++i) {
      float& most = largest[static_cast<std::size_t>(i / 64)];
      most = std::max(most, std::abs(values[i]));
    }
    for (const float one : largest) sum += one;
    const auto mean = static_cast<float>(sum / static_cast<double>(layout.blocks));
    const auto real = [&](std::int64_t at) {
      float value = 0;
      std::memcpy(&value, codes + at, sizeof value);
      return value;
    };
    EXPECT_EQ(real(layout.mean), mean);
    for (std::int64_t i = 0; i < layout.count; ++i) {
      const std::int64_t block = i / 64, group = block / 256;
      const float most = largest[static_cast<std::size_t>(block)];
      const float scale = real(layout.scales + 4 * group);
      const int code = i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
      const int magnitude = codes[layout.magnitudes + block];
      ASSERT_EQ(code, nearest(kNumbers.of_values, values[i] * (1 / most))) << i;
      ASSERT_EQ(magnitude,
                nearest(kNumbers.of_magnitudes, (most - mean) * (1 / std::max(scale, 1e-38f))));
      const float product = kNumbers.of_magnitudes[magnitude] * scale;
      const float decoded = product + mean;
      EXPECT_NEAR(back.view({-1})[i].item<float>(), kNumbers.of_values[code] * decoded, 2e-7);
    }
  }
}

TEST(Nf4, HoldsZerosAndTheSmallestNumbers) {
  EXPECT_EQ(from_nf4(to_nf4(torch::zeros({7, 31})), 31, at::kFloat).abs().max().item<float>(), 0);
  const at::Tensor small = torch::full({2, 64}, 1e-44f);
  const at::Tensor back = from_nf4(to_nf4(small), 64, at::kFloat);
  EXPECT_LE((back - small).abs().max().item<float>(), 1e-44f);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY}) {
    at::Tensor weight = torch::zeros({2, 64});
    weight[1][63] = bad;
    EXPECT_THAT(
        message_of([&] { to_nf4(weight); }),
        HasSubstr("[nf4] a weight of 2 outputs and 64 inputs has values that are not finite"));
  }
  EXPECT_THAT(message_of([&] { from_nf4(to_nf4(small), 99'999, at::kFloat); }),
              HasSubstr("is not what to_nf4 makes of one with these inputs"));
}

TEST(Nf4, EncodesTheValuesOfAnyTypeOnAnyNumberOfThreads) {
  for (const at::ScalarType type : kTypes) {
    const at::Tensor weight = normal({300, 200}, type);
    EXPECT_TRUE(torch::equal(to_nf4(weight), to_nf4(weight.to(at::kFloat))));
    EXPECT_TRUE(torch::equal(to_nf4(weight.t()), to_nf4(weight.t().contiguous())));
  }
  const at::Tensor weight = normal({300, 200}), bytes = to_nf4(weight);
  const int threads = torch::get_num_threads();
  torch::set_num_threads(3);
  EXPECT_TRUE(torch::equal(to_nf4(weight), bytes));
  torch::set_num_threads(threads);
}

// Of a shape whose vectors of eight are whole, and of others.
TEST(Nf4, DecodesToTheBitsOfTheCpu) {
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{
           {1, 1}, {3, 65}, {7, 8}, {64, 64}, {257, 129}, {1000, 1024}, {3584, 1184}}) {
    const at::Tensor bytes = to_nf4(normal(sizes)), there = bytes.to(test_device());
    const at::Tensor floats = from_nf4(bytes, sizes[1], at::kFloat);
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
      EXPECT_TRUE(torch::equal(from_nf4(there, sizes[1], type).cpu(), floats.to(type)))
          << sizes << c10::toString(type);
  }
}

TEST(Nf4, MultipliesAsTheDecodedWeightDoes) {
  for (const at::ScalarType type : kTypes) {
    const at::Tensor bytes = to_nf4(normal({40, 72})).to(test_device());
    const at::Tensor plain = from_nf4(bytes, 72, type), bias = normal({40}).to(test_device());
    const at::Tensor a = normal({8, 72}, type).to(test_device());
    const at::Tensor b = normal({40, 8}, type).to(test_device());
    for (const bool adapted : {false, true}) {
      std::vector<at::Tensor> results;
      for (const at::Tensor& weight : {bytes, plain}) {
        const at::Tensor x = normal({2, 5, 72}, type).to(test_device()).set_requires_grad(true);
        const at::Tensor low = a.clone().set_requires_grad(true);
        const at::Tensor high = b.clone().set_requires_grad(true);
        const at::Tensor y = adapted ? lora_linear(x, weight, bias, low, high, {.scaling = 0.5})
                                     : linear(x, weight, bias);
        y.square().sum().backward();
        results.insert(results.end(), {y, x.grad()});
        if (adapted) results.insert(results.end(), {low.grad(), high.grad()});
      }
      const std::size_t half = results.size() / 2;
      for (std::size_t i = 0; i < half; ++i)
        EXPECT_TRUE(torch::equal(results[i], results[half + i])) << i << c10::toString(type);
    }
  }
}

}  // namespace
}  // namespace lockstep::nn
