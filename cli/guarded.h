// What the exceptions of a command become: one line on stderr, and 2 for the caller's mistake or 1.
//
//   int main(int argc, char** argv) { return cli::guarded([&] { return command(argc, argv); }); }
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "lockstep/core/error.h"

namespace lockstep::cli {

template <typename Body>
int guarded(Body&& body) {
  try {
    return body();
  } catch (const UsageError& error) {
    fmt::print(stderr, "lockstep: {}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "lockstep: {}\n", error.what());
    return 1;
  }
}

}  // namespace lockstep::cli
