// Between reduce.cpp and the files that are compiled once per instruction set.
//
// Each of those files includes vector_sum.h, whose functions are local to the file that includes
// it: code for one instruction set must never be picked by the linker for another.
#pragma once

#include "lockstep/comm/shm/arrays.h"
#include "lockstep/comm/shm/types.h"

namespace lockstep::shm {

// What happens to a sum before it is stored. A power of two is multiplied by its reciprocal, which
// gives the same bits as dividing and costs less.
enum class Scale { kNone, kMultiply, kDivide };

struct SumCall {
  Arrays arrays;
  Scale scale;
  float factor;
};
using SumKernel = void (*)(const SumCall& call);

struct SumKernels {
  const char* name;
  SumKernel f32;
  SumKernel bf16;
  SumKernel f16;  // null: this instruction set has no conversion; the plain loop serves
};

// The best set for this processor. Defined by the file that the build chooses for the architecture.
const SumKernels& sum_kernels();

// All that this processor can run, the best first; for tests.
inline constexpr int kMaxKernelSets = 4;
int all_sum_kernels(const SumKernels** sets);

// Every pair, one element after the other.
void combine_plain(DType dtype, Op op, const Arrays& arrays);

}  // namespace lockstep::shm
