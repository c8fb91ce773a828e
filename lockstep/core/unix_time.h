// Seconds since 1970 by this host's clock, for what other hosts and later readers compare.
#pragma once

#include <chrono>

namespace lockstep {

inline double unix_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace lockstep
