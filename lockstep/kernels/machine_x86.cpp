// x86-64. ATen has an AVX2 variant of its fused optimizers, which it also takes where there is
// AVX-512, and one for any processor. Wider vectors were measured to gain nothing here: divide and
// square root take twice as long for twice the elements.
#include "lockstep/core/env.h"
#include "lockstep/kernels/loops.h"

#define LOCKSTEP_AVX2 __attribute__((target("avx2,fma")))

namespace lockstep::kernels::detail {
namespace {

template <Rounding R, typename T>
LOCKSTEP_AVX2 void adam_avx2(const AdamSpan<T>& span, const AdamConstants<T>& c) {
  adam_loop<R>(span, c);
}

template <Rounding R, typename T>
LOCKSTEP_AVX2 void sgd_avx2(const SgdSpan<T>& span, const SgdConstants<T>& c) {
  sgd_loop<R>(span, c);
}

template <typename T>
LOCKSTEP_AVX2 void mean_squares_avx2(const Mean<T>& mean, T* out, std::int64_t count,
                                     double* lanes) {
  mean_squares_loop(mean, out, count, lanes);
}

template <typename T>
LOCKSTEP_AVX2 void squares_avx2(const T* values, std::int64_t count, double* lanes) {
  squares_loop(values, count, lanes);
}

template <typename T>
constexpr Loops<T> kLoopsAvx2{adam_avx2<kAvx2, T>,  adam_avx2<kLastElements, T>,
                              sgd_avx2<kAvx2, T>,   sgd_avx2<kLastElements, T>,
                              mean_squares_avx2<T>, squares_avx2<T>};
template <typename T>
constexpr Loops<T> kLoopsAny = kPlainLoops<kRoundAll, kRoundAll, T>;

constexpr Machine kMachineAvx2{"avx2", 32, true, kLoopsAvx2<float>, kLoopsAvx2<double>};
constexpr Machine kMachineAny{"any", 32, false, kLoopsAny<float>, kLoopsAny<double>};

}  // namespace

const Machine& machine() noexcept {
  static const Machine& chosen = env::get("ATEN_CPU_CAPABILITY") != "default" &&
                                         __builtin_cpu_supports("avx2") &&
                                         __builtin_cpu_supports("fma")
                                     ? kMachineAvx2
                                     : kMachineAny;
  return chosen;
}

}  // namespace lockstep::kernels::detail
