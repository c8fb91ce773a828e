// A fuzzer is one function per parser, and a driver that feeds it.
//
// The driver must survive the parser. Inputs run in a child process that shares the current input
// with its parent; whatever ends or stops the child (a signal, a sanitizer, an exception, a loop,
// running out of memory), the parent still has the bytes and saves them.
//
//   int fuzz_one(const std::uint8_t* data, std::size_t size);      // in <name>_fuzz.cpp
//   lockstep_fuzzer(name DEPENDS io)                                // in CMakeLists.txt
//
// A file with several of them has each in a namespace fuzz_<name> and ends with
// LOCKSTEP_FUZZ_ONE().
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

// Returns 0. Aborts when the parser did something that it must not do.
int fuzz_one(const std::uint8_t* data, std::size_t size);

// Defines fuzz_one() by the one of the namespace that a program is compiled for.
#define LOCKSTEP_FUZZ_ONE()                                  \
  int fuzz_one(const std::uint8_t* data, std::size_t size) { \
    return LOCKSTEP_FUZZER::fuzz_one(data, size);            \
  }

namespace lockstep::fuzz {

// Aborts with the sentence when it does not hold.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

}  // namespace lockstep::fuzz
