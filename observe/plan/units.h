// Units of the figures in this folder's tables.
#pragma once

#include <cstdint>

namespace lockstep::plan {

inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
inline constexpr double kGiga = 1e9;
inline constexpr double kTera = 1e12;

}  // namespace lockstep::plan
