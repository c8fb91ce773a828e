// What the engine knows of an array: the type of its elements and how two of them are combined.
//
// Rule: the ranks' elements are combined in rank order, 0 to N-1, whichever computes and wherever
// an array is cut, so that the result has the same bits on every rank and in every run.
//
//   if (supports(DType::kBf16, Op::kAvg)) engine->all_reduce(data, count, DType::kBf16, Op::kAvg);
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

}  // namespace lockstep::shm
