// 64 bits of some bytes in memory, to compare them with those of another rank or another time.
// Fast, and not a defence against somebody who wants two to be equal; files have SHA-256.
//
//   if (fingerprint(order.data(), order.size() * sizeof order[0]) != saved) ...
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

std::uint64_t fingerprint(const void* data, std::size_t bytes);

}  // namespace lockstep
