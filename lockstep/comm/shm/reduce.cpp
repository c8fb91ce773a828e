// Every type and operation, as loops the compiler may vectorise by itself (the build asks for -O3).
#include "lockstep/comm/shm/reduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "lockstep/core/error.h"

namespace lockstep::shm {
namespace {

float from_half(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 31u;
  const std::uint32_t mantissa = half & 0x3ffu;
  if (exponent == 31) {
    const std::uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent == 0) {
    constexpr float kSmallest = 0x1p-24f;
    const float magnitude = static_cast<float>(mantissa) * kSmallest;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

std::uint16_t to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half = 0;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below the smallest normal half. The last bit of 0.5f is worth exactly one such subnormal, so
    // the addition does the rounding.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    half = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5f);
  } else {
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    half = (magnitude - 0x38000000u) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

float from_bfloat(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t to_bfloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (value != value) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The representation of a type in memory, and the type of its sums. Integers are summed as
// unsigned, where overflow wraps around instead of being undefined.
template <typename T>
struct Number {
  using Stored = T;
  using Sum = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};
// Averages of integers: the sum of narrow ones does not fit into their own type.
template <typename T>
struct Wide {
  using Stored = T;
  using Sum = std::int64_t;
  static std::int64_t load(T value) { return value; }
  static T store(std::int64_t value) { return static_cast<T>(value); }
};
struct Half {
  using Stored = std::uint16_t;
  using Sum = float;
  static float load(std::uint16_t value) { return from_half(value); }
  static std::uint16_t store(float value) { return to_half(value); }
};
struct Bfloat {
  using Stored = std::uint16_t;
  using Sum = float;
  static float load(std::uint16_t value) { return from_bfloat(value); }
  static std::uint16_t store(float value) { return to_bfloat(value); }
};
struct Truth {
  using Stored = std::uint8_t;
  using Sum = std::uint8_t;
  static std::uint8_t load(std::uint8_t value) { return value != 0; }
  static std::uint8_t store(std::uint8_t value) { return value; }
};

constexpr auto kAdd = []<typename T>(T a, T b) -> T {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
};
constexpr auto kMultiply = []<typename T>(T a, T b) -> T {
  if constexpr (std::is_integral_v<T>) {
    // 64 bits: two 16-bit factors would otherwise be multiplied as signed int.
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  } else {
    return a * b;
  }
};
// A NaN on either side wins: it is the one value that differs from itself.
constexpr auto kLeast = []<typename T>(T a, T b) -> T {
  return a != a || a < b ? a : (b != b ? b : (b < a ? b : a));
};
constexpr auto kGreatest = []<typename T>(T a, T b) -> T {
  return a != a || a > b ? a : (b != b ? b : (b > a ? b : a));
};
constexpr auto kBitAnd = []<typename T>(T a, T b) { return static_cast<T>(a & b); };
constexpr auto kBitOr = []<typename T>(T a, T b) { return static_cast<T>(a | b); };
constexpr auto kBitXor = []<typename T>(T a, T b) { return static_cast<T>(a ^ b); };

template <typename Type, auto kCombine, bool kAverage = false>
void loop(const Arrays& arrays) {
  using Stored = typename Type::Stored;
  using Sum = typename Type::Sum;
  constexpr std::size_t kBlock = 512;
  Stored stored[kBlock];
  Sum sum[kBlock];
  for (std::size_t start = 0; start < arrays.count; start += kBlock) {
    const std::size_t count = std::min(kBlock, arrays.count - start);
    const std::size_t at = start * sizeof(Stored);
    const std::size_t bytes = count * sizeof(Stored);
    for (int r = 0; r < arrays.n; ++r) {
      std::memcpy(stored, arrays.inputs[r] + at, bytes);  // the array may lie at any address
      if (r == 0) {
        for (std::size_t i = 0; i < count; ++i) sum[i] = Type::load(stored[i]);
      } else {
        for (std::size_t i = 0; i < count; ++i) sum[i] = kCombine(sum[i], Type::load(stored[i]));
      }
    }
    if constexpr (kAverage) {
      for (std::size_t i = 0; i < count; ++i) sum[i] = sum[i] / static_cast<Sum>(arrays.n);
    }
    for (std::size_t i = 0; i < count; ++i) stored[i] = Type::store(sum[i]);
    for (int o = 0; o < arrays.m; ++o) std::memcpy(arrays.outputs[o] + at, stored, bytes);
  }
}

template <typename Type>
void bits(Op op, const Arrays& arrays) {
  switch (op) {
    case Op::kAnd:
      return loop<Type, kBitAnd>(arrays);
    case Op::kOr:
      return loop<Type, kBitOr>(arrays);
    case Op::kXor:
      return loop<Type, kBitXor>(arrays);
    default:
      LOCKSTEP_ASSERT(false);
  }
}

template <typename Type>
void numbers(Op op, const Arrays& arrays) {
  constexpr bool kWhole = std::is_integral_v<typename Type::Sum>;
  using Averaged = std::conditional_t<kWhole, Wide<typename Type::Stored>, Type>;
  switch (op) {
    case Op::kSum:
      return loop<Type, kAdd>(arrays);
    case Op::kAvg:
      return loop<Averaged, kAdd, true>(arrays);
    case Op::kMin:
      return loop<Type, kLeast>(arrays);
    case Op::kMax:
      return loop<Type, kGreatest>(arrays);
    case Op::kProduct:
      return loop<Type, kMultiply>(arrays);
    default:
      if constexpr (kWhole) return bits<Type>(op, arrays);
      LOCKSTEP_ASSERT(false);
  }
}

void truths(Op op, const Arrays& arrays) {
  LOCKSTEP_ASSERT(op != Op::kAvg);
  if (op == Op::kSum || op == Op::kMax) op = Op::kOr;
  if (op == Op::kProduct || op == Op::kMin) op = Op::kAnd;
  bits<Truth>(op, arrays);
}

}  // namespace

void combine_plain(DType dtype, Op op, const Arrays& arrays) {
  switch (dtype) {
    case DType::kF32:
      return numbers<Number<float>>(op, arrays);
    case DType::kF64:
      return numbers<Number<double>>(op, arrays);
    case DType::kF16:
      return numbers<Half>(op, arrays);
    case DType::kBf16:
      return numbers<Bfloat>(op, arrays);
    case DType::kI8:
      return numbers<Number<std::int8_t>>(op, arrays);
    case DType::kI16:
      return numbers<Number<std::int16_t>>(op, arrays);
    case DType::kI32:
      return numbers<Number<std::int32_t>>(op, arrays);
    case DType::kI64:
      return numbers<Number<std::int64_t>>(op, arrays);
    case DType::kU8:
      return numbers<Number<std::uint8_t>>(op, arrays);
    case DType::kBool:
      return truths(op, arrays);
  }
}

// ---------------------------------------------------------------- types and operations

namespace {

struct DTypeFacts {
  const char* name;
  std::size_t bytes;
  bool floating;
};
constexpr DTypeFacts kFacts[kDTypes] = {
    {"float32", 4, true}, {"float64", 8, true}, {"float16", 2, true}, {"bfloat16", 2, true},
    {"int8", 1, false},   {"int16", 2, false},  {"int32", 4, false},  {"int64", 8, false},
    {"uint8", 1, false},  {"bool", 1, false},
};
constexpr const char* kOpNames[kOps] = {"sum", "avg", "min", "max", "product", "and", "or", "xor"};

const DTypeFacts& facts(DType dtype) {
  return kFacts[static_cast<int>(dtype)];
}

SumKernel vectorised(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return sum_kernels().f32;
    case DType::kBf16:
      return sum_kernels().bf16;
    case DType::kF16:
      return sum_kernels().f16;
    default:
      return nullptr;
  }
}

}  // namespace

const SumKernels& sum_kernels() {
  static const SumKernels* const best = [] {
    const SumKernels* sets[kMaxKernelSets];
    all_sum_kernels(sets);
    return sets[0];
  }();
  return *best;
}

const char* name(DType dtype) {
  return facts(dtype).name;
}
const char* name(Op op) {
  return kOpNames[static_cast<int>(op)];
}
std::size_t size_of(DType dtype) {
  return facts(dtype).bytes;
}

bool supports(DType dtype, Op op) {
  const bool bitwise = op == Op::kAnd || op == Op::kOr || op == Op::kXor;
  if (facts(dtype).floating) return !bitwise;
  return dtype != DType::kBool || op != Op::kAvg;
}

void combine(DType dtype, Op op, const Arrays& arrays) {
  LOCKSTEP_ASSERT(supports(dtype, op) && arrays.n >= 1 && arrays.n <= kMaxRanks &&
                  arrays.m <= kMaxRanks + 1 && arrays.moved <= kMaxMoves);
  const SumKernel kernel = op == Op::kSum || op == Op::kAvg ? vectorised(dtype) : nullptr;
  if (kernel == nullptr) {
    combine_plain(dtype, op, arrays);
    for (int i = 0; i < arrays.moved; ++i)
      std::memcpy(arrays.moves[i].to, arrays.moves[i].from, arrays.count * size_of(dtype));
    return;
  }
  SumCall call{arrays, Scale::kNone, 1.0f};
  if (op == Op::kAvg) {
    const bool power_of_two = (arrays.n & (arrays.n - 1)) == 0;
    call.scale = power_of_two ? Scale::kMultiply : Scale::kDivide;
    call.factor = static_cast<float>(arrays.n);
    if (power_of_two) call.factor = 1.0f / call.factor;
  }
  kernel(call);
}

}  // namespace lockstep::shm
