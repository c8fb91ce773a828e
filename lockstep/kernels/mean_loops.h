// The loops for step.h's norms, and the mean over ranks, which the loops of its steps need too;
// inlined into functions compiled for one instruction set each (loops.h).
//
//   T piece[kPiece];
//   take_mean(mean, at, piece, kPiece);
//
// For the machine_*.cpp files only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lockstep/kernels/machine.h"

#define LOCKSTEP_INLINE [[gnu::always_inline]] inline

namespace lockstep::kernels::detail {

// Short, so that the processor reaches the loads of the next piece while it still divides this one.
inline constexpr std::int64_t kPiece = 64;

// Prefetches the data of a later piece where that pays: an x86 core's own prefetching follows few
// streams and stops at every page's end. A Neoverse V1 is slower with it (32 M parameters on two
// ranks: 20.7 instead of 19.6 ms). A prefetch past an array's end does nothing.
#if defined(__x86_64__)
inline constexpr bool kSoftwarePrefetch = true;
#else
inline constexpr bool kSoftwarePrefetch = false;
#endif
inline constexpr std::int64_t kAheadBytes = 8192;  // all sources together
template <typename T>
LOCKSTEP_INLINE void fetch_piece([[maybe_unused]] const T* values) {
  if constexpr (!kSoftwarePrefetch) return;
  constexpr std::int64_t kLineBytes = 64;
  const auto* const bytes = reinterpret_cast<const char*>(values);
  for (std::int64_t at = 0; at < kPiece * static_cast<std::int64_t>(sizeof(T)); at += kLineBytes)
    __builtin_prefetch(bytes + at);
}
template <typename T>
LOCKSTEP_INLINE std::int64_t ahead_of(const Mean<T>& mean) {
  const std::int64_t share = kAheadBytes / static_cast<std::int64_t>(sizeof(T)) / mean.count;
  return std::max(share / kPiece * kPiece, 2 * kPiece);
}

// Elements [at, at + count) of the mean. `out` stays in the nearest cache, so adding one source at
// a time costs no memory traffic.
template <typename T>
LOCKSTEP_INLINE void take_mean(const Mean<T>& mean, std::int64_t at, T* __restrict out,
                               std::int64_t count) {
  const std::int64_t ahead = ahead_of(mean);
  for (int r = 0; r < mean.count; ++r) fetch_piece(mean.sources[r] + mean.offset + at + ahead);
  const T* __restrict const first = mean.sources[0] + mean.offset + at;
  // The factor applies after the last sum only; intermediate sums are multiplied by 1.
  const auto factor = [&](int added) { return added == mean.count ? mean.factor : T(1); };
  if (mean.count == 1) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = first[i] * mean.factor;
  } else {
    const T* __restrict const second = mean.sources[1] + mean.offset + at;
    const T f = factor(2);
    for (std::int64_t i = 0; i < count; ++i) out[i] = (first[i] + second[i]) * f;
  }
  for (int r = 2; r < mean.count; ++r) {
    const T* __restrict const next = mean.sources[r] + mean.offset + at;
    const T f = factor(r + 1);
    for (std::int64_t i = 0; i < count; ++i) out[i] = (out[i] + next[i]) * f;
  }
  if (mean.divides) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = out[i] / mean.divisor;
  }
  if (mean.scale != T(1)) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = out[i] * mean.scale;
  }
}

template <typename T>
LOCKSTEP_INLINE bool is_plain(const Mean<T>& mean) {
  return mean.count == 1 && !mean.divides && mean.factor == T(1) && mean.scale == T(1);
}

template <typename T>
LOCKSTEP_INLINE void squares_loop(const T* __restrict values, std::int64_t count,
                                  double* __restrict lanes) {
  std::int64_t i = 0;
  for (; i + kNormLanes <= count; i += kNormLanes) {
    for (std::int64_t lane = 0; lane < kNormLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  for (std::int64_t lane = 0; i + lane < count; ++lane) {
    const double value = values[i + lane];
    lanes[lane] += value * value;
  }
}

template <typename T>
LOCKSTEP_INLINE void mean_squares_loop(const Mean<T>& mean, T* out, std::int64_t count,
                                       double* __restrict lanes) {
  static_assert(kPiece == kNormLanes);
  alignas(64) T piece[kPiece];  // since `out` may be one of the sources
  for (std::int64_t at = 0; at < count; at += kPiece) {
    const std::int64_t size = std::min(kPiece, count - at);
    take_mean(mean, at, piece, size);
    squares_loop(piece, size, lanes);
    if (out != nullptr) std::copy_n(piece, size, out + at);
  }
}

}  // namespace lockstep::kernels::detail
