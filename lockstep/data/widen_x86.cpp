// The same loop with the stores of AVX2 and AVX-512, where the processor has them: twice and four
// times as wide as what every x86-64 has.
#include "lockstep/data/widen.h"

namespace lockstep::data::detail {
namespace {

using std::int64_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;

void plain16(const uint16_t* tokens, int64_t* inputs, int64_t* targets, size_t n) {
  widen_shifted_loop(tokens, inputs, targets, n);
}
void plain32(const uint32_t* tokens, int64_t* inputs, int64_t* targets, size_t n) {
  widen_shifted_loop(tokens, inputs, targets, n);
}
[[gnu::target("avx2")]] void avx2_16(const uint16_t* tokens, int64_t* inputs, int64_t* targets,
                                     size_t n) {
  widen_shifted_loop(tokens, inputs, targets, n);
}
[[gnu::target("avx2")]] void avx2_32(const uint32_t* tokens, int64_t* inputs, int64_t* targets,
                                     size_t n) {
  widen_shifted_loop(tokens, inputs, targets, n);
}
[[gnu::target("avx512f,avx512bw,avx512vl,prefer-vector-width=512")]] void avx512_16(
    const uint16_t* tokens, int64_t* inputs, int64_t* targets, size_t n) {
  widen_shifted_loop(tokens, inputs, targets, n);
}
[[gnu::target("avx512f,avx512bw,avx512vl,prefer-vector-width=512")]] void avx512_32(
    const uint32_t* tokens, int64_t* inputs, int64_t* targets, size_t n) {
  widen_shifted_loop(tokens, inputs, targets, n);
}

WidenShifted choose() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return {avx512_16, avx512_32};
  if (__builtin_cpu_supports("avx2")) return {avx2_16, avx2_32};
  return {plain16, plain32};
}

}  // namespace

const WidenShifted& widen_shifted() {
  static const WidenShifted chosen = choose();
  return chosen;
}

}  // namespace lockstep::data::detail
