// For architectures without code of their own: the compiler's translation of vector types.
#include "lockstep/comm/shm/vector_sum.h"

namespace lockstep::shm {
namespace {

const SumKernels kGenericKernels = {"generic", &vector_sum<Float>, &vector_sum<Bfloat16>, nullptr};

}  // namespace

int all_sum_kernels(const SumKernels** sets) {
  sets[0] = &kGenericKernels;
  return 1;
}

}  // namespace lockstep::shm
