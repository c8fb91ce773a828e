// Compiled with -mavx2 -mf16c; called only where the processor has them.
#include <immintrin.h>

#include "lockstep/comm/shm/vector_sum.h"

namespace lockstep::shm {
namespace {

struct Float16 {
  static constexpr std::size_t kBytes = 2;
  [[gnu::always_inline]] static void load(const std::byte* from, Floats* to) {
    *to = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  [[gnu::always_inline]] static void store(const Floats& from, std::byte* to) {
    constexpr int kNearestEven = 0 | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(from, kNearestEven));
  }
};

}  // namespace

extern const SumKernels kAvx2Kernels;
const SumKernels kAvx2Kernels = {"avx2", &vector_sum<Float>, &vector_sum<Bfloat16>,
                                 &vector_sum<Float16>};

}  // namespace lockstep::shm
