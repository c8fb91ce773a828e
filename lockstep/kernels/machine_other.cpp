// Processors of which no LibTorch wheel was compared: every product is rounded, as the language
// says. kernels_test says where such a machine's ATen does otherwise.
#include "lockstep/kernels/loops.h"

namespace lockstep::kernels::detail {
namespace {

template <typename T>
void adam(const AdamSpan<T>& span, const AdamConstants<T>& c) {
  adam_loop<kRoundAll>(span, c);
}

template <typename T>
void sgd(const SgdSpan<T>& span, const SgdConstants<T>& c) {
  sgd_loop<kRoundAll>(span, c);
}

template <typename T>
void mean_squares(const Mean<T>& mean, T* out, std::int64_t count, double* lanes) {
  mean_squares_loop(mean, out, count, lanes);
}

template <typename T>
void squares(const T* values, std::int64_t count, double* lanes) {
  squares_loop(values, count, lanes);
}

template <typename T>
constexpr Loops<T> kLoops{adam<T>, adam<T>, sgd<T>, sgd<T>, mean_squares<T>, squares<T>};
constexpr Machine kMachine{"any", 32, false, kLoops<float>, kLoops<double>};

}  // namespace

const Machine& machine() noexcept {
  return kMachine;
}

}  // namespace lockstep::kernels::detail
