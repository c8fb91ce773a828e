// The loops of the functions in step.h, as templates over a rounding (machine.h). They are inlined
// into functions compiled for one instruction set each, where std::fma is an instruction and the
// compiler vectorises; -ffp-contract=off keeps it from fusing what is not written as fused.
//
//   template <Rounding R, typename T>
//   __attribute__((target("avx2,fma"))) void adam_avx2(const AdamSpan<T>& span,
//                                                      const AdamConstants<T>& c) {
//     adam_loop<R>(span, c);
//   }
//
// For the machine_*.cpp files only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lockstep/kernels/machine.h"
#include "lockstep/kernels/mean_loops.h"

namespace lockstep::kernels::detail {

template <bool kFused, typename T>
LOCKSTEP_INLINE T product_plus(T a, T b, T c) {
  if constexpr (kFused) {
    return std::fma(a, b, c);
  } else {
    return a * b + c;
  }
}

template <Unrounded kWhich, typename T>
LOCKSTEP_INLINE T two_products(T a, T b, T c, T d) {
  if constexpr (kWhich == Unrounded::kFirst) {
    return std::fma(a, b, c * d);
  } else if constexpr (kWhich == Unrounded::kSecond) {
    return std::fma(c, d, a * b);
  } else {
    return a * b + c * d;
  }
}

template <Rounding R, bool kL2, bool kShortLerp, typename T>
LOCKSTEP_INLINE void adam_elements(const AdamSpan<T>& span, const AdamConstants<T>& constants,
                                   const T* __restrict grad, std::int64_t at, std::int64_t count) {
  T* __restrict const param = span.param + at;
  T* __restrict const exp_avg = span.exp_avg + at;
  T* __restrict const exp_avg_sq = span.exp_avg_sq + at;
  const AdamConstants<T> c = constants;
  for (std::int64_t i = 0; i < count; ++i) {
    T x = param[i];
    T g = grad[i];
    if constexpr (kL2) {
      g = product_plus<R.adam_l2>(x, c.decay, g);
    } else {
      x = x * c.decay;
    }
    // Interpolates from the nearer end, as at::lerp does.
    const T m = kShortLerp ? product_plus<R.lerp>(c.lerp, g - exp_avg[i], exp_avg[i])
                           : product_plus<R.lerp>(c.lerp - 1, g - exp_avg[i], g);
    const T v = two_products<R.variance>(exp_avg_sq[i], c.beta2, c.fresh * g, g);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    param[i] = x + c.minus_step * m / (std::sqrt(v) / c.correction + c.eps);
  }
}

template <Rounding R, bool kL2, bool kShortLerp, typename T>
LOCKSTEP_INLINE void adam_span(const AdamSpan<T>& span, const AdamConstants<T>& c) {
  if (is_plain(span.grad)) {
    const T* grad = span.grad.sources[0] + span.grad.offset;
    adam_elements<R, kL2, kShortLerp>(span, c, grad, 0, span.count);
    return;
  }
  alignas(64) T grad[kPiece];
  for (std::int64_t at = 0; at < span.count; at += kPiece) {
    const std::int64_t count = std::min(kPiece, span.count - at);
    const std::int64_t later = at + ahead_of(span.grad);
    fetch_piece(span.param + later);
    fetch_piece(span.exp_avg + later);
    fetch_piece(span.exp_avg_sq + later);
    take_mean(span.grad, at, grad, count);
    adam_elements<R, kL2, kShortLerp>(span, c, grad, at, count);
  }
}

template <Rounding R, typename T>
LOCKSTEP_INLINE void adam_loop(const AdamSpan<T>& span, const AdamConstants<T>& c) {
  if (c.lerp < T(0.5)) {
    c.l2 ? adam_span<R, true, true>(span, c) : adam_span<R, false, true>(span, c);
  } else {
    c.l2 ? adam_span<R, true, false>(span, c) : adam_span<R, false, false>(span, c);
  }
}

enum class Momentum { kNone, kFirst, kLater, kFirstNesterov, kLaterNesterov };

template <Rounding R, bool kL2, Momentum kMomentum, typename T>
LOCKSTEP_INLINE void sgd_elements(const SgdSpan<T>& span, const SgdConstants<T>& constants,
                                  const T* __restrict grad, std::int64_t at, std::int64_t count) {
  constexpr bool kFirst = kMomentum == Momentum::kFirst || kMomentum == Momentum::kFirstNesterov;
  constexpr bool kNesterov =
      kMomentum == Momentum::kFirstNesterov || kMomentum == Momentum::kLaterNesterov;
  T* __restrict const param = span.param + at;
  T* __restrict const momentum = kMomentum == Momentum::kNone ? nullptr : span.momentum + at;
  const SgdConstants<T> c = constants;
  for (std::int64_t i = 0; i < count; ++i) {
    const T x = param[i];
    T g = grad[i];
    if constexpr (kL2) g = product_plus<R.sgd_l2>(x, c.decay, g);
    if constexpr (kMomentum != Momentum::kNone) {
      const T m = kFirst ? g : two_products<R.momentum>(momentum[i], c.mu, c.fresh, g);
      momentum[i] = m;
      g = kNesterov ? product_plus<R.nesterov>(m, c.mu, g) : m;
    }
    param[i] = product_plus<R.sgd_update>(g, c.minus_lr, x);
  }
}

template <Rounding R, bool kL2, Momentum kMomentum, typename T>
LOCKSTEP_INLINE void sgd_span(const SgdSpan<T>& span, const SgdConstants<T>& c) {
  if (is_plain(span.grad)) {
    const T* grad = span.grad.sources[0] + span.grad.offset;
    sgd_elements<R, kL2, kMomentum>(span, c, grad, 0, span.count);
    return;
  }
  alignas(64) T grad[kPiece];
  for (std::int64_t at = 0; at < span.count; at += kPiece) {
    const std::int64_t count = std::min(kPiece, span.count - at);
    take_mean(span.grad, at, grad, count);
    sgd_elements<R, kL2, kMomentum>(span, c, grad, at, count);
  }
}

template <Rounding R, Momentum kMomentum, typename T>
LOCKSTEP_INLINE void sgd_either(const SgdSpan<T>& span, const SgdConstants<T>& c) {
  c.l2 ? sgd_span<R, true, kMomentum>(span, c) : sgd_span<R, false, kMomentum>(span, c);
}

template <Rounding R, typename T>
LOCKSTEP_INLINE void sgd_loop(const SgdSpan<T>& span, const SgdConstants<T>& c) {
  if (!c.momentum) {
    sgd_either<R, Momentum::kNone>(span, c);
  } else if (c.nesterov) {
    c.first ? sgd_either<R, Momentum::kFirstNesterov>(span, c)
            : sgd_either<R, Momentum::kLaterNesterov>(span, c);
  } else {
    c.first ? sgd_either<R, Momentum::kFirst>(span, c) : sgd_either<R, Momentum::kLater>(span, c);
  }
}

// The loops in the compiler's default instruction set; machines with wider ones recompile them.
template <Rounding R, typename T>
void adam(const AdamSpan<T>& span, const AdamConstants<T>& c) {
  adam_loop<R>(span, c);
}

template <Rounding R, typename T>
void sgd(const SgdSpan<T>& span, const SgdConstants<T>& c) {
  sgd_loop<R>(span, c);
}

template <typename T>
void mean_squares(const Mean<T>& mean, T* out, std::int64_t count, double* lanes) {
  mean_squares_loop(mean, out, count, lanes);
}

template <typename T>
void squares(const T* values, std::int64_t count, double* lanes) {
  squares_loop(values, count, lanes);
}

template <Rounding R, Rounding Last, typename T>
constexpr Loops<T> kPlainLoops{adam<R, T>,   adam<Last, T>,   sgd<R, T>,
                               sgd<Last, T>, mean_squares<T>, squares<T>};

}  // namespace lockstep::kernels::detail
