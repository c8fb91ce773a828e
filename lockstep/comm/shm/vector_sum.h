// The vectorised sum, written once for every instruction set: the compiler's own vector types take
// the width that the including file is compiled for. Everything is in an unnamed namespace and uses
// no inline function of the standard library, so that no code of this file is shared between
// translation units (see kernels.h).
//
//   const SumKernels kKernels = {"avx2", &vector_sum<Float>, &vector_sum<Bfloat16>, nullptr};
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/comm/shm/kernels.h"

namespace lockstep::shm {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Words = std::uint32_t __attribute__((vector_size(kVectorBytes)));
using LooseFloats = float __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
using Halves = std::uint16_t __attribute__((vector_size(kVectorBytes / 2)));
using LooseHalves =
    std::uint16_t __attribute__((vector_size(kVectorBytes / 2), aligned(1), may_alias));

struct Float {
  static constexpr std::size_t kBytes = 4;
  [[gnu::always_inline]] static void load(const std::byte* from, Floats* to) {
    *to = *reinterpret_cast<const LooseFloats*>(from);
  }
  [[gnu::always_inline]] static void store(const Floats& from, std::byte* to) {
    *reinterpret_cast<LooseFloats*>(to) = from;
  }
};

struct Bfloat16 {
  static constexpr std::size_t kBytes = 2;
  [[gnu::always_inline]] static void load(const std::byte* from, Floats* to) {
    const Halves halves = *reinterpret_cast<const LooseHalves*>(from);
    *to = reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
  }
  [[gnu::always_inline]] static void store(const Floats& from, std::byte* to) {
    const Words bits = reinterpret_cast<Words>(from);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet = (bits >> 16) | 0x40;
    const Words result = from != from ? quiet : rounded;
    *reinterpret_cast<LooseHalves*>(to) = __builtin_convertvector(result, Halves);
  }
};

template <Scale kScale>
[[gnu::always_inline]] inline void apply(Floats* sum, float factor) {
  if constexpr (kScale == Scale::kMultiply) *sum *= factor;
  if constexpr (kScale == Scale::kDivide) *sum /= factor;
}

// kStep vectors at once, so that the additions of one do not wait for the loads of another.
template <typename Format, Scale kScale, int kStep>
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
  for (int o = 0; o < m; ++o) {
    for (int v = 0; v < kStep; ++v) Format::store(sum[v], out[o] + at + v * kStride);
  }
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
