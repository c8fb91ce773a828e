// 64-bit arm. ATen has a variant of its fused optimizers for SVE of exactly 256 bits with bfloat16
// (Neoverse V1) and one for every other processor. Both are followed with NEON instructions: the
// bits are a matter of rounding, not of width.
#include <sys/auxv.h>
#include <sys/prctl.h>

#include "lockstep/core/env.h"
#include "lockstep/kernels/loops.h"

namespace lockstep::kernels::detail {
namespace {

template <Rounding R, typename T>
constexpr Loops<T> kLoops = kPlainLoops<R, kLastElements, T>;

constexpr Machine kMachineSve256{"sve256", 32, true, kLoops<kSve256, float>,
                                 kLoops<kSve256, double>};
constexpr Machine kMachineNeon{"neon", 16, true, kLoops<kNeon, float>, kLoops<kNeon, double>};

bool has_sve256() {
  constexpr unsigned long kSve = 1UL << 22;       // HWCAP_SVE
  constexpr unsigned long kBfloat16 = 1UL << 14;  // HWCAP2_BF16
  if ((getauxval(AT_HWCAP) & kSve) == 0 || (getauxval(AT_HWCAP2) & kBfloat16) == 0) return false;
  const int length = prctl(PR_SVE_GET_VL);
  return length >= 0 && (length & PR_SVE_VL_LEN_MASK) == 32;
}

}  // namespace

const Machine& machine() noexcept {
  static const Machine& chosen =
      env::get("ATEN_CPU_CAPABILITY") != "default" && has_sve256() ? kMachineSve256 : kMachineNeon;
  return chosen;
}

}  // namespace lockstep::kernels::detail
