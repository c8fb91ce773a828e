// Loads and stores of each number format: the part of vector_sum.h that depends on the instruction
// set. As there, everything is local to the file that includes it.
//
//   Floats value;
//   Bfloat16::load(from, &value);
//   Bfloat16::store(value, to);
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep::shm {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;
#if defined(__x86_64__)
constexpr bool kSoftwarePrefetch = true;
#else
constexpr bool kSoftwarePrefetch = false;
#endif

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Words = std::uint32_t __attribute__((vector_size(kVectorBytes)));
using LooseFloats = float __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
using Halves = std::uint16_t __attribute__((vector_size(kVectorBytes / 2)));
using LooseHalves =
    std::uint16_t __attribute__((vector_size(kVectorBytes / 2), aligned(1), may_alias));

struct Float {
  static constexpr std::size_t kBytes = 4;
  [[gnu::always_inline]] static void load(const std::byte* from, Floats* to) {
    *to = *reinterpret_cast<const LooseFloats*>(from);
  }
  [[gnu::always_inline]] static void store(const Floats& from, std::byte* to) {
    *reinterpret_cast<LooseFloats*>(to) = from;
  }
};

struct Bfloat16 {
  static constexpr std::size_t kBytes = 2;
  [[gnu::always_inline]] static void load(const std::byte* from, Floats* to) {
    const Halves halves = *reinterpret_cast<const LooseHalves*>(from);
    *to = reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
  }
  [[gnu::always_inline]] static void store(const Floats& from, std::byte* to) {
    const Words bits = reinterpret_cast<Words>(from);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet = (bits >> 16) | 0x40;
    const Words result = from != from ? quiet : rounded;
    *reinterpret_cast<LooseHalves*>(to) = __builtin_convertvector(result, Halves);
  }
};

// Stores that bypass the caches, where the processor has them. A cache line that another processor
// holds is then invalidated with one message instead of being fetched first.
[[gnu::always_inline]] inline void store_away(const Floats& from, std::byte* to) {
#if defined(__AVX512F__)
  _mm512_stream_ps(reinterpret_cast<float*>(to), from);
#elif defined(__AVX2__)
  _mm256_stream_ps(reinterpret_cast<float*>(to), from);
#elif defined(__x86_64__)
  _mm_stream_ps(reinterpret_cast<float*>(to), from);
#else
  Float::store(from, to);
#endif
}

// Orders the stores that bypass the caches before any later store of this processor.
[[gnu::always_inline]] inline void settle_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace lockstep::shm
