#include "lockstep/comm/shm/reduce.h"

#include <cstring>

#include "lockstep/core/error.h"

namespace lockstep::shm {
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
