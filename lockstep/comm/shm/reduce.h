// The arithmetic of the engine: the types of elements, how two of them are combined, and several
// arrays combined into one, which is written to several places.
//
// The ranks' elements are combined in rank order, 0 to N-1, whichever rank computes and wherever an
// array is cut, so that the result has the same bits on every rank and in every run. Half types are
// added up as float and rounded once, to nearest even, and a NaN stays a NaN. An average is the sum
// divided by n as a correctly rounded division, so for two ranks (and every power of two) nothing
// is lost; an average of integers is the 64-bit sum divided by n towards zero.
//
//   combine(DType::kF32, Op::kSum, {inputs, 2, outputs, 2, count});
//
// Sums and averages of float, half and bfloat16 are vectorised for the processor at hand; the rest
// are plain loops. Pure functions: any thread may call them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::shm {

enum class DType : std::uint8_t { kF32, kF64, kF16, kBf16, kI8, kI16, kI32, kI64, kU8, kBool };
inline constexpr int kDTypes = 10;

enum class Op : std::uint8_t { kSum, kAvg, kMin, kMax, kProduct, kAnd, kOr, kXor };
inline constexpr int kOps = 8;

const char* name(DType dtype);
const char* name(Op op);
std::size_t size_of(DType dtype);

// Floating types have no bitwise operations, and booleans no averages: they add like `or` and
// multiply like `and`.
bool supports(DType dtype, Op op);

// The maximum number of ranks in one engine.
inline constexpr int kMaxRanks = 64;

inline constexpr int kMaxMoves = 2;
struct Move {
  std::byte* to;
  const std::byte* from;
};

// inputs[0..n) are combined element by element in that order and the result goes to all m outputs;
// an output may be one of the inputs (the same address), but must not overlap one otherwise. Arrays
// need no alignment.
struct Arrays {
  const std::byte* const* inputs;
  int n;
  std::byte* const* outputs;
  int m;
  std::size_t count;
  // Copied in the same pass: as many bytes each as the sum has. They touch none of its arrays. The
  // sum is bound by memory latency; the copies' loads are outstanding together with those of the
  // sum.
  const Move* moves = nullptr;
  int moved = 0;
  // The last output is for another processor: it need not stay in this one's cache.
  bool last_leaves = false;
};

// The pair of type and operation must be supported.
void combine(DType dtype, Op op, const Arrays& arrays);

// ---------------------------------------------------------------- for combine() alone

// What happens to a sum before it is stored. A power of two is multiplied by its reciprocal, which
// gives the same bits as dividing and costs less.
enum class Scale { kNone, kMultiply, kDivide };

struct SumCall {
  Arrays arrays;
  Scale scale;
  float factor;
};
using SumKernel = void (*)(const SumCall& call);

// Compiled once per instruction set, from a file of its own that includes vector_sum.h.
struct SumKernels {
  const char* name;
  SumKernel f32;
  SumKernel bf16;
  SumKernel f16;  // null: this instruction set has no conversion; the plain loop serves
};

// The best set for this processor.
const SumKernels& sum_kernels();

// All that this processor can run, the best first. Defined by the file that the build chooses for
// the architecture.
inline constexpr int kMaxKernelSets = 4;
int all_sum_kernels(const SumKernels** sets);

// Every type and operation, one element after the other.
void combine_plain(DType dtype, Op op, const Arrays& arrays);

}  // namespace lockstep::shm
