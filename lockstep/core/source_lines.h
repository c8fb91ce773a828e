// Finds file and line of addresses in a program or library, from its debug information. The host's
// addr2line reads it, as a separate process with a deadline: a failing program neither links a
// parser of debug information nor waits for one.
//
//   auto lines = source_lines("/usr/bin/train", {0x2f0f}, Deadline::after(seconds(3)));
//   lines[0];                                         // "/src/train.cpp:41"; empty: not known
//
// A free function without state. It starts a process, so it is for the report of a failure only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/deadline.h"

namespace lockstep {

// `addresses` are file addresses of the instructions themselves (one less than a return address).
// Does not throw for a file without debug information, nor without an addr2line.
std::vector<std::string> source_lines(const std::string& file,
                                      const std::vector<std::uint64_t>& addresses,
                                      const Deadline& deadline);

}  // namespace lockstep
