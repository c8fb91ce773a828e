// Processors for which no LibTorch wheel was compared: every product is rounded, as the language
// says. kernels_test reports where such a machine's ATen does otherwise.
#include "lockstep/kernels/loops.h"

namespace lockstep::kernels::detail {
namespace {

constexpr Machine kMachine{"any", 32, false, kPlainLoops<kRoundAll, kRoundAll, float>,
                           kPlainLoops<kRoundAll, kRoundAll, double>};

}  // namespace

const Machine& machine() noexcept {
  return kMachine;
}

}  // namespace lockstep::kernels::detail
