// The vectorised sum, written once for every instruction set: the compiler's own vector types take
// the width that the including file is compiled for. Everything is in an unnamed namespace and uses
// no inline function of the standard library: the linker must never pick a function that was
// compiled for one instruction set for the code of another.
//
//   const SumKernels kKernels = {"avx2", &vector_sum<Float>, &vector_sum<Bfloat16>, nullptr};
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/comm/shm/reduce.h"
#include "lockstep/comm/shm/vector_formats.h"

namespace lockstep::shm {
namespace {

template <Scale kScale>
[[gnu::always_inline]] inline void apply(Floats* sum, float factor) {
  if constexpr (kScale == Scale::kMultiply) *sum *= factor;
  if constexpr (kScale == Scale::kDivide) *sum /= factor;
}

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

// Software prefetch, where it pays: an x86 core's own prefetching stops at the end of every 4 KiB
// page, and large sums of several arrays take a tenth less with it. A Neoverse V1 takes twice as
// long with it (100 MB from two ranks: 7.7 instead of 3.6 ms). Past an array's end a prefetch does
// nothing.
constexpr std::size_t kAheadBytes = 8192;  // of all inputs together, a share of the first cache
constexpr std::size_t kCacheLine = 64;
[[gnu::always_inline]] inline std::size_t ahead_of(int n) {
  const std::size_t share = kAheadBytes / static_cast<std::size_t>(n) / kCacheLine * kCacheLine;
  return share < 8 * kCacheLine ? 8 * kCacheLine : share;
}
[[gnu::always_inline]] inline void fetch(const std::byte* from, std::size_t bytes) {
  if constexpr (kSoftwarePrefetch)
    for (std::size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(from + at);
}

// kStep vectors at once, so that the additions of one do not wait for the loads of another.
template <typename Format, Scale kScale, int kStep, bool kLastLeaves = false>
[[gnu::always_inline]] inline void sum_step(const std::byte* const* in, int n,
                                            std::byte* const* out, int m, std::size_t at,
                                            float factor) {
  constexpr std::size_t kStride = kLanes * Format::kBytes;
  Floats sum[kStep];
  for (int v = 0; v < kStep; ++v) Format::load(in[0] + at + v * kStride, &sum[v]);
  for (int r = 1; r < n; ++r) {
    const std::byte* from = in[r] + at;
    for (int v = 0; v < kStep; ++v) {
      Floats next;
      Format::load(from + v * kStride, &next);
      sum[v] += next;
    }
  }
  for (int v = 0; v < kStep; ++v) apply<kScale>(&sum[v], factor);
  const int stored = kLastLeaves ? m - 1 : m;
  for (int o = 0; o < stored; ++o) {
    for (int v = 0; v < kStep; ++v) Format::store(sum[v], out[o] + at + v * kStride);
  }
  if constexpr (kLastLeaves) {
    for (int v = 0; v < kStep; ++v) store_away(sum[v], out[stored] + at + v * kStride);
  }
}

// Whole lines, together with what is moved in the same pass.
constexpr std::size_t kMoveBytes = 256;
template <typename Format, Scale kScale, bool kLastLeaves>
[[gnu::always_inline]] inline std::size_t sum_and_move(const Arrays& arrays,
                                                       const std::byte* const* in,
                                                       std::byte* const* out, float factor) {
  constexpr int kStep = static_cast<int>(kMoveBytes / (kLanes * Format::kBytes));
  Move moves[kMaxMoves];
  const int moved = arrays.moved;
  for (int i = 0; i < moved; ++i) moves[i] = arrays.moves[i];
  const int n = arrays.n, m = arrays.m;
  const std::size_t end = arrays.count * Format::kBytes;
  const std::size_t ahead = ahead_of(n + moved);
  std::size_t at = 0;
  for (; at + kMoveBytes <= end; at += kMoveBytes) {
    for (int r = 0; r < n; ++r) fetch(in[r] + at + ahead, kMoveBytes);
    for (int i = 0; i < moved; ++i) fetch(moves[i].from + at + ahead, kMoveBytes);
    sum_step<Format, kScale, kStep, kLastLeaves>(in, n, out, m, at, factor);
    for (int i = 0; i < moved; ++i) {
      for (std::size_t v = 0; v < kMoveBytes; v += kVectorBytes) {
        Floats value;
        Float::load(moves[i].from + at + v, &value);
        Float::store(value, moves[i].to + at + v);
      }
    }
  }
  for (int i = 0; i < moved; ++i) __builtin_memcpy(moves[i].to + at, moves[i].from + at, end - at);
  if (kLastLeaves) settle_stores();
  return at;
}

// The last elements go through padded vectors: the same instructions as all others.
template <typename Format, Scale kScale>
[[gnu::noinline]] void sum_tail(const Arrays& arrays, std::size_t at, std::size_t bytes,
                                float factor) {
  alignas(64) std::byte padded[kVectorBytes] = {};
  Floats sum;
  __builtin_memcpy(padded, arrays.inputs[0] + at, bytes);
  Format::load(padded, &sum);
  for (int r = 1; r < arrays.n; ++r) {
    __builtin_memcpy(padded, arrays.inputs[r] + at, bytes);
    Floats next;
    Format::load(padded, &next);
    sum += next;
  }
  apply<kScale>(&sum, factor);
  Format::store(sum, padded);
  for (int o = 0; o < arrays.m; ++o) __builtin_memcpy(arrays.outputs[o] + at, padded, bytes);
}

// kFixed is n where it is known (two ranks are the common case), else 0.
template <typename Format, Scale kScale, int kFixed>
void sum_arrays(const Arrays& arrays, float factor) {
  constexpr int kUnrolled = 4;
  constexpr std::size_t kStride = kLanes * Format::kBytes;
  const int n = kFixed != 0 ? kFixed : arrays.n;
  const int m = arrays.m;
  // Own copies: a store to an output could otherwise be a store to these lists.
  const std::byte* in[kMaxRanks];
  std::byte* out[kMaxRanks + 1];
  for (int r = 0; r < n; ++r) in[r] = arrays.inputs[r];
  for (int o = 0; o < m; ++o) out[o] = arrays.outputs[o];

  const std::size_t end = arrays.count * Format::kBytes;
  std::size_t at = 0;
  const bool leaves = kSame<Format, Float> && arrays.last_leaves && m > 0 &&
                      reinterpret_cast<std::uintptr_t>(out[m - 1]) % kVectorBytes == 0;
  if constexpr (kSame<Format, Float>) {
    if (leaves) at = sum_and_move<Format, kScale, true>(arrays, in, out, factor);
  }
  if (!leaves && arrays.moved > 0)
    at = sum_and_move<Format, kScale, false>(arrays, in, out, factor);
  const std::size_t ahead = ahead_of(n);
  for (; at + ahead + kUnrolled * kStride <= end; at += kUnrolled * kStride) {
    for (int r = 0; r < n; ++r) fetch(in[r] + at + ahead, kUnrolled * kStride);
    sum_step<Format, kScale, kUnrolled>(in, n, out, m, at, factor);
  }
  for (; at + kUnrolled * kStride <= end; at += kUnrolled * kStride)
    sum_step<Format, kScale, kUnrolled>(in, n, out, m, at, factor);
  for (; at + kStride <= end; at += kStride) sum_step<Format, kScale, 1>(in, n, out, m, at, factor);
  if (at < end) sum_tail<Format, kScale>(arrays, at, end - at, factor);
}

template <typename Format, Scale kScale>
void sum_scaled(const SumCall& call) {
  if (call.arrays.n == 2)
    sum_arrays<Format, kScale, 2>(call.arrays, call.factor);
  else
    sum_arrays<Format, kScale, 0>(call.arrays, call.factor);
}

template <typename Format>
void vector_sum(const SumCall& call) {
  switch (call.scale) {
    case Scale::kNone:
      return sum_scaled<Format, Scale::kNone>(call);
    case Scale::kMultiply:
      return sum_scaled<Format, Scale::kMultiply>(call);
    case Scale::kDivide:
      return sum_scaled<Format, Scale::kDivide>(call);
  }
}

}  // namespace
}  // namespace lockstep::shm
