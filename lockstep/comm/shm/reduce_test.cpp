#include "lockstep/comm/shm/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::shm {
namespace {

// ---------------------------------------------------------------- an independent arithmetic

// A 16-bit floating type by its definition, slow and obvious.
struct SmallFloat {
  int exponent_bits;
  int mantissa_bits;

  double decode(std::uint16_t bits) const {
    const int top = (1 << exponent_bits) - 1;
    const int exponent = (bits >> mantissa_bits) & top;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1 : 1;
    if (exponent == top) return mantissa != 0 ? std::nan("") : sign * HUGE_VAL;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  // The nearest number of the type; of two equally near ones the even one.
  std::uint16_t encode(double value) const {
    const std::uint16_t infinity =
        static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity | 1);
    const double magnitude = std::fabs(value);
    // Bit patterns of positive numbers are ordered like the numbers.
    int low = 0, high = infinity;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (decode(static_cast<std::uint16_t>(middle)) <= magnitude ? low : high) = middle;
    }
    const double below = decode(static_cast<std::uint16_t>(low));
    // Past the largest number: as if the type continued.
    const double above = high == infinity ? 2 * decode(static_cast<std::uint16_t>(infinity - 1)) -
                                                decode(static_cast<std::uint16_t>(infinity - 2))
                                          : decode(static_cast<std::uint16_t>(high));
    if (magnitude == HUGE_VAL) return static_cast<std::uint16_t>(sign | infinity);
    const double down = magnitude - below, up = above - magnitude;
    const bool take_low = down < up || (down == up && low % 2 == 0);
    return static_cast<std::uint16_t>(sign | (take_low ? low : high));
  }
};
constexpr SmallFloat kHalf{5, 10};
constexpr SmallFloat kBfloat{8, 7};

template <typename T>
T combine_two(Op op, T a, T b) {
  switch (op) {
    case Op::kSum:
    case Op::kAvg:
      return static_cast<T>(a + b);
    case Op::kMin:
      return a != a ? a : b != b ? b : std::min(a, b);
    case Op::kMax:
      return a != a ? a : b != b ? b : std::max(a, b);
    case Op::kProduct:
      return static_cast<T>(a * b);
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == Op::kAnd) return static_cast<T>(a & b);
    if (op == Op::kOr) return static_cast<T>(a | b);
    if (op == Op::kXor) return static_cast<T>(a ^ b);
  }
  return a;
}

template <typename T>
T fold(Op op, const std::vector<T>& values) {
  T result = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) result = combine_two(op, result, values[i]);
  if (op == Op::kAvg) result = static_cast<T>(result / static_cast<T>(values.size()));
  return result;
}

template <typename T>
void expect_element(Op op, const std::vector<const std::byte*>& inputs, std::size_t at,
                    const std::byte* got) {
  std::vector<T> values;
  for (const std::byte* input : inputs) {
    T value;
    std::memcpy(&value, input + at * sizeof(T), sizeof value);
    values.push_back(value);
  }
  const T want = fold(op, values);
  T have;
  std::memcpy(&have, got + at * sizeof(T), sizeof have);
  if (want != want)
    EXPECT_NE(have, have) << name(op) << " at " << at;
  else
    EXPECT_EQ(have, want) << name(op) << " at " << at;
}

void expect_small(const SmallFloat& type, Op op, const std::vector<const std::byte*>& inputs,
                  std::size_t at, const std::byte* got) {
  std::vector<float> values;
  for (const std::byte* input : inputs) {
    std::uint16_t bits;
    std::memcpy(&bits, input + at * 2, 2);
    values.push_back(static_cast<float>(type.decode(bits)));
  }
  const float want = fold(op, values);
  std::uint16_t have;
  std::memcpy(&have, got + at * 2, 2);
  if (std::isnan(want))
    EXPECT_TRUE(std::isnan(type.decode(have))) << name(op) << " at " << at;
  else
    EXPECT_EQ(have, type.encode(want)) << name(op) << " at " << at << " of " << want;
}

void expect_bool(Op op, const std::vector<const std::byte*>& inputs, std::size_t at,
                 const std::byte* got) {
  bool result = inputs[0][at] != std::byte{0};
  for (std::size_t i = 1; i < inputs.size(); ++i) {
    const bool next = inputs[i][at] != std::byte{0};
    if (op == Op::kXor)
      result = result != next;
    else if (op == Op::kSum || op == Op::kMax || op == Op::kOr)
      result = result || next;
    else
      result = result && next;
  }
  EXPECT_EQ(got[at], std::byte{result}) << name(op) << " at " << at;
}

void expect_at(DType dtype, Op op, const std::vector<const std::byte*>& inputs, std::size_t at,
               const std::byte* got) {
  switch (dtype) {
    case DType::kF32:
      return expect_element<float>(op, inputs, at, got);
    case DType::kF64:
      return expect_element<double>(op, inputs, at, got);
    case DType::kF16:
      return expect_small(kHalf, op, inputs, at, got);
    case DType::kBf16:
      return expect_small(kBfloat, op, inputs, at, got);
    case DType::kI8:
      return expect_element<std::int8_t>(op, inputs, at, got);
    case DType::kI16:
      return expect_element<std::int16_t>(op, inputs, at, got);
    case DType::kI32:
      return expect_element<std::int32_t>(op, inputs, at, got);
    case DType::kI64:
      return expect_element<std::int64_t>(op, inputs, at, got);
    case DType::kU8:
      return expect_element<std::uint8_t>(op, inputs, at, got);
    case DType::kBool:
      return expect_bool(op, inputs, at, got);
  }
}

// ---------------------------------------------------------------- data

// Random numbers of every size; `wild` ones have any bit pattern, also NaN and infinity. Integers
// stay small where their products would overflow, which the reference does not model.
std::vector<std::byte> random_array(DType dtype, std::size_t count, unsigned seed, bool wild) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count * size_of(dtype));
  const auto put = [&](std::size_t at, auto value) {
    std::memcpy(bytes.data() + at * sizeof value, &value, sizeof value);
  };
  std::normal_distribution<double> normal(0, 3);
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = random();
    const int small = static_cast<int>(bits % 5) - 2;
    switch (dtype) {
      case DType::kF32:
        put(i, wild ? std::bit_cast<float>(static_cast<std::uint32_t>(bits))
                    : static_cast<float>(normal(random)));
        break;
      case DType::kF64:
        put(i, wild ? std::bit_cast<double>(bits) : normal(random));
        break;
      case DType::kF16:
        put(i, wild ? static_cast<std::uint16_t>(bits) : kHalf.encode(normal(random)));
        break;
      case DType::kBf16:
        put(i, wild ? static_cast<std::uint16_t>(bits) : kBfloat.encode(normal(random)));
        break;
      case DType::kI8:
        put(i, static_cast<std::int8_t>(small));
        break;
      case DType::kI16:
        put(i, static_cast<std::int16_t>(small));
        break;
      case DType::kI32:
        put(i, small);
        break;
      case DType::kI64:
        put(i, static_cast<std::int64_t>(small));
        break;
      case DType::kU8:
        put(i, static_cast<std::uint8_t>(bits % 4));
        break;
      case DType::kBool:
        put(i, static_cast<std::uint8_t>(bits % 4));  // true is not only 1
        break;
    }
  }
  return bytes;
}

struct Reduced {
  std::vector<std::vector<std::byte>> arrays;
  std::vector<const std::byte*> inputs;
  std::vector<std::byte> result;
};

// `shift` puts all arrays at unaligned addresses.
Reduced reduce_random(DType dtype, Op op, int n, std::size_t count, bool wild, std::size_t shift) {
  Reduced reduced;
  for (int r = 0; r < n; ++r) {
    auto array = random_array(dtype, count, static_cast<unsigned>(r * 7919 + count), wild);
    array.insert(array.begin(), shift, std::byte{0});
    reduced.arrays.push_back(std::move(array));
  }
  for (const auto& array : reduced.arrays) reduced.inputs.push_back(array.data() + shift);
  std::vector<std::byte> first(count * size_of(dtype) + shift), second(first);
  std::byte* outputs[] = {first.data() + shift, second.data() + shift};
  combine(dtype, op, {reduced.inputs.data(), n, outputs, 2, count});
  EXPECT_EQ(first, second);
  reduced.result.assign(first.begin() + static_cast<std::ptrdiff_t>(shift), first.end());
  return reduced;
}

bool pair_exists(int dtype, int op) {
  return supports(static_cast<DType>(dtype), static_cast<Op>(op));
}

TEST(Reduce, EveryTypeAndOperationAgreesWithTheDefinition) {
  int pairs = 0;
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kOps; ++o) {
      if (!pair_exists(d, o)) continue;
      ++pairs;
      for (const int n : {1, 2, 3, 5}) {
        for (const std::size_t count : {0, 1, 17, 257}) {
          const auto dtype = static_cast<DType>(d);
          const auto op = static_cast<Op>(o);
          const Reduced got = reduce_random(dtype, op, n, count, count == 257, count % 2);
          for (std::size_t i = 0; i < count; ++i)
            expect_at(dtype, op, got.inputs, i, got.result.data());
          ASSERT_FALSE(HasFailure()) << name(dtype) << " " << name(op) << " of " << n << " x "
                                     << count << " with " << sum_kernels().name;
        }
      }
    }
  }
  EXPECT_EQ(pairs, 4 * 5 + 5 * 8 + 7);
}

// Every finite half and bfloat survives a sum with zero, and every kernel of this processor gives
// the same bits as the plain loop.
TEST(Reduce, EveryKernelGivesTheSameBits) {
  const SumKernels* sets[kMaxKernelSets];
  const int count = all_sum_kernels(sets);
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const int n : {2, 3, 4, 7}) {
      for (const Op op : {Op::kSum, Op::kAvg}) {
        const std::size_t elements = 1021;
        std::vector<std::vector<std::byte>> arrays;
        std::vector<const std::byte*> inputs;
        for (int r = 0; r < n; ++r)
          arrays.push_back(random_array(dtype, elements, static_cast<unsigned>(r), false));
        for (const auto& array : arrays) inputs.push_back(array.data());
        std::vector<std::byte> want(arrays[0].size()), have(want);
        std::byte* outputs[] = {want.data()};
        combine_plain(dtype, op, {inputs.data(), n, outputs, 1, elements});
        for (int s = 0; s < count; ++s) {
          const SumKernel kernel = dtype == DType::kF32    ? sets[s]->f32
                                   : dtype == DType::kBf16 ? sets[s]->bf16
                                                           : sets[s]->f16;
          if (kernel == nullptr) continue;
          outputs[0] = have.data();
          const Scale scale = op == Op::kSum ? Scale::kNone : Scale::kDivide;
          kernel({{inputs.data(), n, outputs, 1, elements}, scale, static_cast<float>(n)});
          EXPECT_EQ(want, have) << sets[s]->name << " " << name(dtype) << " " << name(op) << n;
        }
      }
    }
  }
}

TEST(Reduce, EveryHalfSurvivesASumWithZero) {
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    const SmallFloat& type = dtype == DType::kF16 ? kHalf : kBfloat;
    std::vector<std::uint16_t> all(65536), zero(65536, 0x8000), sum(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    const std::byte* inputs[] = {reinterpret_cast<const std::byte*>(all.data()),
                                 reinterpret_cast<const std::byte*>(zero.data())};
    std::byte* outputs[] = {reinterpret_cast<std::byte*>(sum.data())};
    for (const bool plain : {false, true}) {
      const Arrays arrays{inputs, 2, outputs, 1, all.size()};
      plain ? combine_plain(dtype, Op::kSum, arrays) : combine(dtype, Op::kSum, arrays);
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (std::isnan(type.decode(all[i])))
          ASSERT_TRUE(std::isnan(type.decode(sum[i]))) << name(dtype) << " " << i;
        else
          ASSERT_EQ(sum[i], all[i]) << name(dtype) << " plain " << plain;
      }
    }
  }
}

// The same element must get the same bits wherever its array is cut.
TEST(Reduce, CutsDoNotChangeBits) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBf16, DType::kF64}) {
    const std::size_t count = 211;
    const Reduced whole = reduce_random(dtype, Op::kAvg, 3, count, false, 0);
    for (const std::size_t cut : {1, 2, 3, 7, 63, 64, 65, 100, 209, 210}) {
      std::vector<std::byte> pieces(whole.result.size());
      for (const auto& [begin, end] : {std::pair<std::size_t, std::size_t>{0, cut}, {cut, count}}) {
        std::vector<const std::byte*> inputs;
        for (const std::byte* input : whole.inputs)
          inputs.push_back(input + begin * size_of(dtype));
        std::byte* outputs[] = {pieces.data() + begin * size_of(dtype)};
        combine(dtype, Op::kAvg, {inputs.data(), 3, outputs, 1, end - begin});
      }
      EXPECT_EQ(pieces, whole.result) << name(dtype) << " cut at " << cut;
    }
  }
}

// What is copied along the way arrives, and neither that nor a last output that leaves the cache
// changes the sum, even where an output is not aligned for it.
TEST(Reduce, MovesByTheWay) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16, DType::kI32}) {
    for (const std::size_t count : {0, 1, 63, 64, 128, 1021}) {
      for (const std::size_t shift : {0, 4}) {
        const std::size_t bytes = count * size_of(dtype);
        std::vector<std::byte> first = random_array(dtype, count, 1, false);
        const std::vector<std::byte> second = random_array(dtype, count, 2, false);
        const std::byte* inputs[] = {first.data(), second.data()};
        std::vector<std::byte> want(bytes), memory(bytes + 128);
        std::byte* outputs[] = {want.data(), nullptr};
        combine(dtype, Op::kSum, {inputs, 2, outputs, 1, count});

        auto* const line =
            memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
        outputs[0] = first.data();
        outputs[1] = line + shift;
        std::vector<std::byte> from[2], to[2];
        Move moves[2];
        for (int i = 0; i < 2; ++i) {
          from[i] = random_array(dtype, count, static_cast<unsigned>(3 + i), false);
          to[i].resize(bytes + 1, std::byte{42});
          moves[i] = {to[i].data(), from[i].data()};
        }
        combine(dtype, Op::kSum, {inputs, 2, outputs, 2, count, moves, 2, true});
        EXPECT_EQ(first, want) << name(dtype) << " x " << count;
        EXPECT_TRUE(std::equal(want.begin(), want.end(), line + shift)) << name(dtype);
        for (int i = 0; i < 2; ++i) {
          EXPECT_TRUE(std::equal(from[i].begin(), from[i].end(), to[i].begin())) << name(dtype);
          EXPECT_EQ(to[i].back(), std::byte{42}) << "written past the end";
        }
      }
    }
  }
}

TEST(Reduce, WorksInPlace) {
  std::vector<float> a(1000, 1.5f), b(1000, 2.0f);
  std::byte* outputs[] = {reinterpret_cast<std::byte*>(a.data()),
                          reinterpret_cast<std::byte*>(b.data())};
  const std::byte* inputs[] = {outputs[0], outputs[1]};
  combine(DType::kF32, Op::kSum, {inputs, 2, outputs, 2, a.size()});
  EXPECT_EQ(a, std::vector<float>(1000, 3.5f));
  EXPECT_EQ(b, a);
}

TEST(Reduce, IntegersWrapAround) {
  const std::int16_t a = 30000, b = 30000;
  std::int16_t sum = 0;
  const std::byte* inputs[] = {reinterpret_cast<const std::byte*>(&a),
                               reinterpret_cast<const std::byte*>(&b)};
  std::byte* outputs[] = {reinterpret_cast<std::byte*>(&sum)};
  combine(DType::kI16, Op::kSum, {inputs, 2, outputs, 1, 1});
  EXPECT_EQ(sum, static_cast<std::int16_t>(60000));
  combine(DType::kI16, Op::kProduct, {inputs, 2, outputs, 1, 1});
  EXPECT_EQ(sum, static_cast<std::int16_t>(900000000));
}

// Towards zero, as NCCL divides; but the sum of narrow integers does not overflow.
TEST(Reduce, AveragesOfIntegersAreRoundedTowardsZero) {
  const auto average = [](DType dtype, auto... values) {
    using T = std::common_type_t<decltype(values)...>;
    const T array[] = {values...};
    std::vector<const std::byte*> inputs;
    for (const T& value : array) inputs.push_back(reinterpret_cast<const std::byte*>(&value));
    T result{};
    std::byte* outputs[] = {reinterpret_cast<std::byte*>(&result)};
    combine(dtype, Op::kAvg, {inputs.data(), static_cast<int>(inputs.size()), outputs, 1, 1});
    return static_cast<std::int64_t>(result);
  };
  EXPECT_EQ(average(DType::kI32, 3, 4), 3);
  EXPECT_EQ(average(DType::kI32, -3, -4), -3);
  EXPECT_EQ(average(DType::kI32, -2, 0, 0), 0);
  EXPECT_EQ(average(DType::kI64, std::int64_t{-7}, std::int64_t{2}), -2);
  EXPECT_EQ(average(DType::kI8, std::int8_t{127}, std::int8_t{127}, std::int8_t{125}), 126);
  EXPECT_EQ(average(DType::kI8, std::int8_t{-128}, std::int8_t{-128}), -128);
  EXPECT_EQ(average(DType::kU8, std::uint8_t{255}, std::uint8_t{254}), 254);
  EXPECT_EQ(average(DType::kI16, std::int16_t{30000}, std::int16_t{30001}), 30000);
  EXPECT_EQ(average(DType::kI32, std::numeric_limits<int>::max(), 5), 1073741826);
}

TEST(Reduce, PairsWithoutMeaningAreRefused) {
  EXPECT_FALSE(supports(DType::kF32, Op::kAnd));
  EXPECT_FALSE(supports(DType::kBool, Op::kAvg));
  EXPECT_THROW(combine(DType::kF32, Op::kXor, {nullptr, 1, nullptr, 1, 0}), InternalError);
}

}  // namespace
}  // namespace lockstep::shm
