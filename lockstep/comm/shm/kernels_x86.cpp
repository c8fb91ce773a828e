// x86-64: the plain instruction set of every such processor, and the choice at run time.
#include <cpuid.h>

#include "lockstep/comm/shm/vector_sum.h"

namespace lockstep::shm {

extern const SumKernels kAvx512Kernels;
extern const SumKernels kAvx2Kernels;

namespace {

const SumKernels kSse2Kernels = {"sse2", &vector_sum<Float>, &vector_sum<Bfloat16>, nullptr};

// Not every compiler lets __builtin_cpu_supports ask for it.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace

int all_sum_kernels(const SumKernels** sets) {
  int count = 0;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    sets[count++] = &kAvx512Kernels;
  }
  if (__builtin_cpu_supports("avx2") && has_f16c()) sets[count++] = &kAvx2Kernels;
  sets[count++] = &kSse2Kernels;
  return count;
}

}  // namespace lockstep::shm
