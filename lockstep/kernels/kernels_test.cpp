// The oracle is ATen: sums with at::add in rank order, at::div, at::mul, and at::_fused_*_ on whole
// tensors. "Equal" means the same bits; a NaN equals any NaN, since processors choose among them.
#include <ATen/Version.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>

#include "lockstep/kernels/adamw_element.h"
#include "lockstep/kernels/machine.h"
#include "lockstep/kernels/step.h"

namespace lockstep::kernels {
namespace {

template <typename T>
using Values = std::vector<T>;

template <typename T>
at::Tensor tensor_of(const Values<T>& values) {
  return at::tensor(at::ArrayRef<T>(values), at::CppTypeToScalarType<T>::value);
}

template <typename T>
bool same_bits(T a, T b) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  return std::bit_cast<Bits>(a) == std::bit_cast<Bits>(b) || (std::isnan(a) && std::isnan(b));
}

template <typename T>
testing::AssertionResult equal(const T* ours, const T* theirs, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (!same_bits(ours[i], theirs[i])) {
      return testing::AssertionFailure()
             << fmt::format("element {} of {}: {:a}, expected {:a}", i, count, ours[i], theirs[i]);
    }
  }
  return testing::AssertionSuccess();
}

template <typename T>
testing::AssertionResult equal(const Values<T>& ours, const at::Tensor& theirs) {
  return equal(ours.data(), theirs.template const_data_ptr<T>(), theirs.numel());
}

enum class Kind { kWide, kSpecial };

// Many magnitudes, with exact zeros; kSpecial adds the smallest and largest values, and NaN.
template <typename T>
Values<T> random_values(std::int64_t count, std::mt19937_64& random, Kind kind = Kind::kWide) {
  using Limits = std::numeric_limits<T>;
  const T special[] = {0,
                       -T(0),
                       Limits::denorm_min(),
                       -Limits::min() / 8,
                       Limits::max(),
                       Limits::lowest() / 2,
                       Limits::infinity(),
                       -Limits::infinity(),
                       Limits::quiet_NaN()};
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> exponent(-24, 4);
  Values<T> values(count);
  for (auto& value : values) {
    value = static_cast<T>(std::ldexp(normal(random), exponent(random)));
    if (random() % 64 == 0) value = 0;
    if (kind == Kind::kSpecial && random() % 2 == 0) value = special[random() % std::size(special)];
  }
  return values;
}

// Gradients of several ranks, and how they become one.
template <typename T>
struct Ranks {
  std::vector<Values<T>> values;
  T divisor = 1;
  T scale = 1;

  static Ranks random(int ranks, std::int64_t count, std::mt19937_64& random,
                      Kind kind = Kind::kWide) {
    Ranks made;
    made.divisor = static_cast<T>(ranks);
    for (int r = 0; r < ranks; ++r) made.values.push_back(random_values<T>(count, random, kind));
    return made;
  }

  at::Tensor mean() const {
    at::Tensor sum = tensor_of(values[0]);
    for (std::size_t r = 1; r < values.size(); ++r) sum = at::add(sum, tensor_of(values[r]));
    if (divisor != 1) sum = at::div(sum, divisor);
    return scale == 1 ? sum : at::mul(sum, scale);
  }

  std::vector<const T*> pointers(std::int64_t begin = 0) const {
    std::vector<const T*> found;
    for (const auto& v : values) found.push_back(v.data() + begin);
    return found;
  }
};

template <typename T>
Gradient<T> gradient_of(const Ranks<T>& ranks, const std::vector<const T*>& pointers) {
  return {.sources = pointers.data(),
          .count = static_cast<int>(pointers.size()),
          .divisor = ranks.divisor,
          .scale = ranks.scale};
}

std::vector<AdamStep> adam_cases() {
  std::vector<AdamStep> cases;
  for (const bool decoupled : {true, false}) {
    for (const double weight_decay : {0.0, 0.013}) {
      for (const double beta1 : {0.9, 0.3}) {
        for (const auto& [lr, eps] : {std::pair{1.3e-3, 1e-8}, std::pair{0.1, 1e-3}}) {
          cases.push_back({.lr = lr,
                           .beta1 = beta1,
                           .eps = eps,
                           .weight_decay = weight_decay,
                           .decoupled = decoupled});
        }
      }
    }
  }
  return cases;
}

std::vector<SgdStep> sgd_cases() {
  std::vector<SgdStep> cases;
  for (const double weight_decay : {0.0, 0.013}) {
    cases.push_back({.lr = 0.07, .weight_decay = weight_decay});
    for (const double dampening : {0.0, 0.3}) {
      cases.push_back(
          {.lr = 0.07, .momentum = 0.9, .dampening = dampening, .weight_decay = weight_decay});
    }
    cases.push_back({.lr = 0.07, .momentum = 0.9, .weight_decay = weight_decay, .nesterov = true});
  }
  return cases;
}

// One optimizer, ours and ATen's, over whole tensors.
template <typename T>
struct AdamPair {
  Values<T> param, exp_avg, exp_avg_sq;
  at::Tensor their_param, their_avg, their_sq;

  explicit AdamPair(const Values<T>& start)
      : param(start),
        exp_avg(start.size()),
        exp_avg_sq(start.size()),
        their_param(tensor_of(start)),
        their_avg(at::zeros_like(their_param)),
        their_sq(at::zeros_like(their_param)) {}

  std::int64_t size() const { return static_cast<std::int64_t>(param.size()); }

  // Elements [begin, end) of ours.
  void step(const AdamStep& test, const Ranks<T>& ranks, std::int64_t begin, std::int64_t end) {
    const auto pointers = ranks.pointers(begin);
    const auto gradient = gradient_of(ranks, pointers);
    const AdamTensors<T> tensors{param.data() + begin, exp_avg.data() + begin,
                                 exp_avg_sq.data() + begin};
    const Slice slice{.tensor_size = size(), .begin = begin, .count = end - begin};
    adam(gradient, tensors, slice, test);
  }

  void step_theirs(const AdamStep& s, const at::Tensor& grad) {
    const auto step = at::full({}, s.step, at::kFloat);
    const auto fused = s.decoupled ? static_cast<Fused*>(at::_fused_adamw_)
                                   : static_cast<Fused*>(at::_fused_adam_);
    fused({their_param}, {grad}, {their_avg}, {their_sq}, {}, {step}, s.lr, s.beta1, s.beta2,
          s.weight_decay, s.eps, /*amsgrad=*/false, /*maximize=*/false, {}, {});
  }

  testing::AssertionResult same() const {
    if (auto result = equal(exp_avg, their_avg); !result) return result << " in exp_avg";
    if (auto result = equal(exp_avg_sq, their_sq); !result) return result << " in exp_avg_sq";
    return equal(param, their_param);
  }

 private:
  using Fused = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                     at::TensorList, double, double, double, double, double, bool, bool,
                     const std::optional<at::Tensor>&, const std::optional<at::Tensor>&);
};

template <typename T>
struct SgdPair {
  Values<T> param, momentum;
  at::Tensor their_param, their_momentum;

  explicit SgdPair(const Values<T>& start)
      : param(start),
        momentum(start.size()),
        their_param(tensor_of(start)),
        their_momentum(at::zeros_like(their_param)) {}

  std::int64_t size() const { return static_cast<std::int64_t>(param.size()); }

  void step(const SgdStep& test, const Ranks<T>& ranks, std::int64_t begin, std::int64_t end) {
    const auto pointers = ranks.pointers(begin);
    sgd(gradient_of(ranks, pointers), SgdTensors<T>{param.data() + begin, momentum.data() + begin},
        Slice{.tensor_size = size(), .begin = begin, .count = end - begin}, test);
  }

  void step_theirs(const SgdStep& test, const at::Tensor& grad) {
    std::vector<at::Tensor> buffers;
    if (test.momentum != 0) buffers.push_back(their_momentum);
    at::_fused_sgd_({their_param}, {grad}, buffers, test.weight_decay, test.momentum, test.lr,
                    test.dampening, test.nesterov, /*maximize=*/false, test.first);
  }

  testing::AssertionResult same() const {
    if (auto result = equal(momentum, their_momentum); !result) return result << " in momentum";
    return equal(param, their_param);
  }
};

AdamStep at_step(AdamStep test, int step) {
  test.step = step;
  return test;
}

SgdStep at_step(SgdStep test, int step) {
  test.first = step == 1;
  return test;
}

std::string describe(const AdamStep& test) {
  return fmt::format("{} lr {} beta1 {} eps {} weight_decay {}", test.decoupled ? "adamw" : "adam",
                     test.lr, test.beta1, test.eps, test.weight_decay);
}

std::string describe(const SgdStep& test) {
  return fmt::format("sgd momentum {} dampening {} weight_decay {} nesterov {}", test.momentum,
                     test.dampening, test.weight_decay, test.nesterov);
}

// Five steps of a pair; ours as one slice.
template <template <typename> typename Pair, typename T, typename Case>
testing::AssertionResult follow(const Case& test, std::int64_t size, int ranks, T scale,
                                std::mt19937_64& random, Kind kind = Kind::kWide) {
  Pair<T> pair(random_values<T>(size, random, kind));
  for (int step = 1; step <= 5; ++step) {
    auto grads = Ranks<T>::random(ranks, size, random, kind);
    grads.scale = scale;
    pair.step(at_step(test, step), grads, 0, size);
    pair.step_theirs(at_step(test, step), grads.mean());
    if (auto result = pair.same(); !result) {
      return result << fmt::format(" ({} bytes, size {}, step {}, {} ranks, scale {}, {})",
                                   sizeof(T), size, step, ranks, scale, describe(test));
    }
  }
  return testing::AssertionSuccess();
}

// Sums in the tests' oracle and in ATen's kernels do not depend on the number of threads, and one
// is fastest for tensors this small.
class Kernels : public testing::Test {
 protected:
  static void SetUpTestSuite() { at::set_num_threads(1); }
  std::mt19937_64 random_{20240229};
};

template <template <typename> typename Pair, typename T, typename Case>
void follow_all_sizes(const std::vector<Case>& cases, std::mt19937_64& random) {
  std::vector<std::int64_t> sizes(70);
  std::iota(sizes.begin(), sizes.end(), 1);
  sizes.insert(sizes.end(), {4095, 4096, 4097});
  for (const auto& test : cases) {
    for (const auto size : sizes) {
      const int ranks = 1 + static_cast<int>(size % 4);
      const T scale = size % 3 == 0 ? T(0.37) : T(1);
      ASSERT_TRUE((follow<Pair, T>(test, size, ranks, scale, random)));
    }
    for (int ranks = 1; ranks <= 4; ++ranks) {
      ASSERT_TRUE((follow<Pair, T>(test, 21, ranks, T(1), random)));
    }
  }
}

TEST_F(Kernels, ChooseTheArithmeticThatAtenChose) {
  const std::string theirs = at::get_cpu_capability();
  const std::string_view ours = detail::machine().name;
  const std::map<std::string, std::string> expected{
      {"AVX2", "avx2"}, {"AVX512", "avx2"}, {"SVE256", "sve256"}};
  if (const auto found = expected.find(theirs); found != expected.end()) {
    EXPECT_EQ(ours, found->second);
  } else {
    EXPECT_THAT(ours, testing::AnyOf("any", "neon")) << theirs;
  }
}

TEST_F(Kernels, AdamIsBitEqualToAten) {
  follow_all_sizes<AdamPair, float>(adam_cases(), random_);
  follow_all_sizes<AdamPair, double>(adam_cases(), random_);
}

TEST_F(Kernels, SgdIsBitEqualToAten) {
  follow_all_sizes<SgdPair, float>(sgd_cases(), random_);
  follow_all_sizes<SgdPair, double>(sgd_cases(), random_);
}

// The decay factor is computed in double; only there does its rounding show.
TEST_F(Kernels, DecayIsRoundedAsInAten) {
  std::uniform_real_distribution<double> uniform;
  for (int i = 0; i < 2000; ++i) {
    const AdamStep test{.lr = 0.1 * uniform(random_), .weight_decay = uniform(random_)};
    ASSERT_TRUE((follow<AdamPair, double>(test, 5, 1, 1.0, random_)));
  }
}

TEST_F(Kernels, ExtremeValuesAreBitEqualToAten) {
  for (const auto& test : adam_cases()) {
    ASSERT_TRUE((follow<AdamPair, float>(test, 1027, 2, 1.0F, random_, Kind::kSpecial)));
    ASSERT_TRUE((follow<AdamPair, double>(test, 1027, 3, 1.0, random_, Kind::kSpecial)));
  }
  for (const auto& test : sgd_cases()) {
    ASSERT_TRUE((follow<SgdPair, float>(test, 1027, 2, 1.0F, random_, Kind::kSpecial)));
    ASSERT_TRUE((follow<SgdPair, double>(test, 1027, 3, 1.0, random_, Kind::kSpecial)));
  }
}

// Cut at random places, which also makes every pointer misaligned, and stepped in random order.
template <template <typename> typename Pair, typename T, typename Case>
void cut_anywhere(const Case& test, std::mt19937_64& random) {
  const std::int64_t size = 1 + static_cast<std::int64_t>(random() % 3000);
  Pair<T> pair(random_values<T>(size, random));
  for (int step = 1; step <= 2; ++step) {
    const auto grads = Ranks<T>::random(2 + static_cast<int>(random() % 2), size, random);
    std::vector<std::int64_t> cuts{0, size};
    for (int i = 0; i < 6; ++i) {
      cuts.push_back(static_cast<std::int64_t>(random() % (size + 1)));
      cuts.push_back(size - static_cast<std::int64_t>(random() % std::min<std::int64_t>(size, 12)));
    }
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::size_t> order(cuts.size() - 1);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (const auto i : order) pair.step(at_step(test, step), grads, cuts[i], cuts[i + 1]);
    pair.step_theirs(at_step(test, step), grads.mean());
    ASSERT_TRUE(pair.same()) << describe(test) << " cut at "
                             << fmt::format("{}", fmt::join(cuts, " "));
  }
}

TEST_F(Kernels, CuttingASliceAnywhereChangesNothing) {
  for (int i = 0; i < 10; ++i) {
    for (const auto& test : adam_cases()) cut_anywhere<AdamPair, float>(test, random_);
    for (const auto& test : sgd_cases()) cut_anywhere<SgdPair, float>(test, random_);
    cut_anywhere<AdamPair, double>(adam_cases()[2], random_);
    cut_anywhere<SgdPair, double>(sgd_cases()[1], random_);
  }
}

template <typename T>
void reduce_like_aten(std::int64_t size, int ranks, T scale, std::mt19937_64& random) {
  auto grads = Ranks<T>::random(ranks, size, random);
  grads.scale = scale;
  const at::Tensor expected = grads.mean();
  Values<double> sums(norm_blocks(size)), again(norm_blocks(size));
  Values<T>& out = grads.values.back();  // in place
  const auto pointers = grads.pointers();
  Values<double> alone(norm_blocks(size));
  T* const nowhere = nullptr;
  EXPECT_TRUE(reduce_with_norms(gradient_of(grads, pointers), nowhere, size, alone.data()));
  EXPECT_TRUE(reduce_with_norms(gradient_of(grads, pointers), out.data(), size, sums.data()));
  ASSERT_TRUE(equal(out, expected));
  ASSERT_TRUE(equal(alone.data(), sums.data(), norm_blocks(size)));
  EXPECT_TRUE(block_norms(out.data(), size, again.data()));
  ASSERT_TRUE(equal(sums.data(), again.data(), norm_blocks(size)));
  const double exact = expected.to(at::kDouble).square().sum().item<double>();
  EXPECT_NEAR(add_blocks(sums.data(), norm_blocks(size)), exact, 1e-12 * exact);
}

TEST_F(Kernels, ReducingGivesAtensMeanAndItsNorm) {
  for (const std::int64_t size : {1, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, 100'003}) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      reduce_like_aten<float>(size, ranks, 1.0F, random_);
      reduce_like_aten<float>(size, ranks, 0.3F, random_);
      reduce_like_aten<double>(size, ranks, 1.0, random_);
    }
  }
}

// A plain loop over lanes: the order that step.h promises, which every machine must follow.
double block_in_order(const float* values, std::int64_t count) {
  std::vector<double> lanes(detail::kNormLanes);
  for (std::int64_t i = 0; i < count; ++i) {
    const double value = values[i];
    lanes[i % detail::kNormLanes] += value * value;
  }
  for (auto half = lanes.size() / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

TEST_F(Kernels, BlockNormsDependOnTheBlockAlone) {
  constexpr std::int64_t kSize = 10 * kNormBlock + 77;
  const auto values = random_values<float>(kSize, random_);
  Values<double> whole(norm_blocks(kSize)), pieces(norm_blocks(kSize));
  EXPECT_TRUE(block_norms(values.data(), kSize, whole.data()));
  for (std::int64_t b = 0; b < norm_blocks(kSize); ++b) {
    const std::int64_t at = b * kNormBlock;
    EXPECT_EQ(whole[b], block_in_order(values.data() + at, std::min(kNormBlock, kSize - at)));
  }
  for (const std::int64_t cut : {1, 3, 9, 10}) {
    const std::int64_t at = cut * kNormBlock;
    block_norms(values.data(), at, pieces.data());
    block_norms(values.data() + at, kSize - at, pieces.data() + cut);
    EXPECT_EQ(pieces, whole);
    EXPECT_EQ(add_blocks(pieces.data(), 11), add_blocks(whole.data(), 11));
  }
}

TEST_F(Kernels, FiniteFlagSeesEveryElement) {
  for (const std::int64_t bad : {0, 63, 64, 4095, 4096, 5000}) {
    for (const float value : {INFINITY, -INFINITY, NAN}) {
      auto values = random_values<float>(5001, random_);
      double sums[2];
      EXPECT_TRUE(block_norms(values.data(), 5001, sums));
      values[bad] = value;
      EXPECT_FALSE(block_norms(values.data(), 5001, sums));
      const float* source = values.data();
      EXPECT_FALSE(reduce_with_norms<float>({.sources = &source}, nullptr, 5001, sums));
      EXPECT_FALSE(reduce_with_norms<float>({.sources = &source}, values.data(), 5001, sums));
    }
  }
  // Squares overflow here, the values did not.
  const Values<double> large(100, 1e200);
  double sum = 0;
  EXPECT_TRUE(block_norms(large.data(), 100, &sum));
  EXPECT_TRUE(std::isinf(sum));
  const double* source = large.data();
  EXPECT_TRUE(reduce_with_norms<double>({.sources = &source}, nullptr, 100, &sum));
}

TEST_F(Kernels, NothingToDoIsFine) {
  const float* source = nullptr;
  adam<float>({.sources = &source}, {}, {}, {});
  sgd<float>({.sources = &source, .count = 1, .divisor = 3}, {}, {}, {});
  EXPECT_TRUE(reduce_with_norms<float>({.sources = &source}, nullptr, 0, nullptr));
  EXPECT_EQ(add_blocks(nullptr, 0), 0);
}

TEST(StreamCopy, CopiesThatAndNothingElse) {
  for (std::size_t begin = 0; begin < 64; ++begin) {
    for (const std::size_t bytes : {0, 1, 63, 64, 65, 200, 4099}) {
      alignas(64) unsigned char to[4300];
      unsigned char from[4300];
      for (std::size_t i = 0; i < sizeof from; ++i)
        from[i] = static_cast<unsigned char>(i % 251 + 1);
      std::fill_n(to, sizeof to, static_cast<unsigned char>(0));
      stream_copy(to + begin, from + 7, bytes);
      for (std::size_t i = 0; i < sizeof to; ++i) {
        const bool inside = i >= begin && i < begin + bytes;
        ASSERT_EQ(to[i], inside ? from[7 + i - begin] : 0) << begin << " " << bytes << " " << i;
      }
    }
  }
}

// ---------------------------------------------------------------- stochastic rounding

float widened_of(Bf16 value) {
  return detail::widened(value);
}

// Of n roundings a share f goes up, f being the fraction that is cut off. The share that is seen
// has the deviation sqrt(f (1 - f) / n), and is 5 of them off once in two million draws.
TEST(StochasticRounding, HasTheValueAsItsMean) {
  constexpr std::int64_t kDraws = 1 << 20;
  for (const float value : {1.001f, -1.001f, 3.14159f, 1e-30f, 0.3333f, -6.5e20f, 1e-41f}) {
    const auto below = static_cast<Bf16>(std::bit_cast<std::uint32_t>(value) >> 16);
    const double low = widened_of(below), gap = widened_of(static_cast<Bf16>(below + 1)) - low;
    const double fraction = (value - low) / gap;
    std::int64_t up = 0;
    for (std::int64_t i = 0; i < kDraws; ++i) {
      const Bf16 rounded = detail::narrowed<Bf16>(value, detail::mixed(static_cast<unsigned>(i)));
      ASSERT_TRUE(rounded == below || rounded == below + 1);
      up += rounded != below;
    }
    const double share = static_cast<double>(up) / kDraws;
    EXPECT_NEAR(share, fraction, 5 * std::sqrt(fraction * (1 - fraction) / kDraws)) << value;
  }
}

TEST(StochasticRounding, KeepsWhatIsExactInfinityAndNan) {
  for (const std::uint64_t random : {0ull, 0x1234ull, 0xFFFFull}) {
    for (const float value : {0.0f, -0.0f, 1.0f, -2.5f, INFINITY, -INFINITY})
      EXPECT_TRUE(same_bits(widened_of(detail::narrowed<Bf16>(value, random)), value));
    for (const std::uint32_t bits : {0x7F800001u, 0xFFFFFFFFu, 0x7FC00000u})
      EXPECT_TRUE(
          std::isnan(widened_of(detail::narrowed<Bf16>(std::bit_cast<float>(bits), random))));
  }
}

// Neighbours in element, step and parameter have unrelated bits: of 64 about half differ.
TEST(StochasticRounding, DrawsOtherBitsForEveryElementStepAndParameter) {
  const auto bits = [](std::uint32_t parameter, float step, std::uint64_t element) {
    const cuda::AdamFactors factors = adamw_factors({1, 0.9f, 0.99f, 0, 0}, step, parameter);
    return detail::mixed(factors.key + element * 0x9E3779B97F4A7C15u);
  };
  double differ[3] = {};
  constexpr int kCount = 10000;
  for (std::uint32_t i = 1; i <= kCount; ++i) {
    const std::uint64_t own = bits(i, 7, i);
    differ[0] += std::popcount(own ^ bits(i, 7, i + 1));
    differ[1] += std::popcount(own ^ bits(i, 8, i));
    differ[2] += std::popcount(own ^ bits(i + 1, 7, i));
  }
  // The mean of 10000 sums of 64 fair bits has the deviation 4 / 100.
  for (const double sum : differ) EXPECT_NEAR(sum / kCount, 32, 5 * 0.04);
}

TEST(AdamW, FactorsAreThoseOfTheRule) {
  for (const float step : {1.0f, 2.0f, 10.0f, 1000.0f, 123457.0f}) {
    const cuda::AdamFactors factors = adamw_factors({3e-4f, 0.9f, 0.999f, 1e-8f, 0.1f}, step, 1);
    const double first = 1 - std::pow(double{0.9f}, step);
    const double second = 1 - std::pow(double{0.999f}, step);
    EXPECT_NEAR(factors.step_size, 3e-4f / first, 1e-7 * factors.step_size);
    EXPECT_NEAR(factors.root_correction2, 1 / std::sqrt(second), 1e-7 * factors.root_correction2);
    EXPECT_NEAR(factors.decay, 1 - 3e-4f * 0.1f, 1e-7);
  }
}

}  // namespace
}  // namespace lockstep::kernels
