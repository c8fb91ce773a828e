// Architectures without code of their own: whatever the compiler makes of its vector types.
#include "lockstep/comm/shm/vector_sum.h"

namespace lockstep::shm {
namespace {

const SumKernels kGenericKernels = {"generic", &vector_sum<Float>, &vector_sum<Bfloat16>, nullptr};

}  // namespace

int all_sum_kernels(const SumKernels** sets) {
  sets[0] = &kGenericKernels;
  return 1;
}

const SumKernels& sum_kernels() {
  return kGenericKernels;
}

}  // namespace lockstep::shm
