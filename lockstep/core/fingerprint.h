// A 64-bit hash of bytes in memory, to compare them with another rank's or an earlier one's. Fast,
// but not collision-resistant against an attacker; files have SHA-256.
//
//   if (fingerprint(order.data(), order.size() * sizeof order[0]) != saved) ...
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lockstep {

inline std::uint64_t fingerprint(const void* data, std::size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  const auto mix = [](std::uint64_t hash, std::uint64_t word) {
    hash ^= word * 0x9e3779b97f4a7c15ull;
    hash = (hash << 29) | (hash >> 35);
    return hash * 0xd6e8feb86659fd93ull;
  };
  // Four lanes, so that the multiplications overlap.
  std::uint64_t lanes[4] = {1, 2, 3, bytes};
  std::uint64_t words[4];
  for (; bytes >= sizeof words; bytes -= sizeof words, p += sizeof words) {
    std::memcpy(words, p, sizeof words);
    for (int i = 0; i < 4; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  std::memset(words, 0, sizeof words);
  std::memcpy(words, p, bytes);
  for (int i = 0; i < 4; ++i) lanes[i] = mix(lanes[i], words[i]);
  return mix(mix(mix(lanes[0], lanes[1]), lanes[2]), lanes[3]);
}

}  // namespace lockstep
