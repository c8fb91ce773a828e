// Turns a command's exceptions into one line on stderr, and 2 for the caller's mistake or 1.
//
//   int main(int argc, char** argv) { return cli::guarded([&] { return command(argc, argv); }); }
//
// A program that links LibTorch passes the result to end_at_once().
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>

#include "cli/print.h"
#include "lockstep/core/error.h"

namespace lockstep::cli {

template <typename Body>
int guarded(Body&& body) {
  try {
    return body();
  } catch (const UsageError& error) {
    print_text(stderr, "lockstep: {}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    print_text(stderr, "lockstep: {}\n", error.what());
    return 1;
  }
}

// Only for main(), when everything is done. On a normal return LibTorch unregisters its thousands
// of operators one by one, which takes as long as the start (0.2 s of a core).
inline int end_at_once(int code) {
#if !defined(__SANITIZE_ADDRESS__)  // it looks for leaks on the way out
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(code);
#endif
  return code;
}

}  // namespace lockstep::cli
