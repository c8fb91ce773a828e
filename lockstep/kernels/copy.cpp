#include "lockstep/kernels/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace lockstep::kernels {

void stream_copy(void* to, const void* from, std::size_t bytes) {
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64;
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  // Up to the first whole line of the target; only whole lines are written past the cache.
  const std::size_t past = reinterpret_cast<std::uintptr_t>(out) % kLine;
  const std::size_t head = std::min(bytes, past == 0 ? 0 : kLine - past);
  std::memcpy(out, in, head);
  const std::size_t end = head + (bytes - head) / kLine * kLine;
  for (std::size_t at = head; at < end; at += kLine) {
    __m128i line[4];
    for (int i = 0; i < 4; ++i)
      line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at) + i);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(out + at) + i, line[i]);
  }
  // Such stores are not ordered with later ones, by which other ranks learn of them.
  _mm_sfence();
  std::memcpy(out + end, in + end, bytes - end);
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace lockstep::kernels
