// Compiled with -mavx512f -mavx512bw -mavx512vl; called only where the processor has them.
#include <immintrin.h>

#include "lockstep/comm/shm/vector_sum.h"

namespace lockstep::shm {
namespace {

// GCC 12 warns of its own unmasked conversions; with all lanes set the masked ones are the same
// instructions.
constexpr __mmask16 kAllLanes = 0xffff;

struct Float16 {
  static constexpr std::size_t kBytes = 2;
  [[gnu::always_inline]] static void load(const std::byte* from, Floats* to) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    *to = _mm512_maskz_cvtph_ps(kAllLanes, halves);
  }
  [[gnu::always_inline]] static void store(const Floats& from, std::byte* to) {
    constexpr int kNearestEven = 0 | _MM_FROUND_NO_EXC;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_maskz_cvtps_ph(kAllLanes, from, kNearestEven));
  }
};

}  // namespace

extern const SumKernels kAvx512Kernels;
const SumKernels kAvx512Kernels = {"avx512", &vector_sum<Float>, &vector_sum<Bfloat16>,
                                   &vector_sum<Float16>};

}  // namespace lockstep::shm
