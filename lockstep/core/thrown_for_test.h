// What an exception says, for the tests of every layer.
//
//   EXPECT_THAT(message_of([&] { parse("depth: x"); }), HasSubstr("must be a number"));
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep {

// The text of the Error that `body` throws. Another exception, or none, gives a text that says so.
template <typename Error = UsageError, typename Body>
std::string message_of(Body&& body) {
  try {
    std::forward<Body>(body)();
  } catch (const Error& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("another exception: ") + e.what();
  }
  return "(nothing thrown)";
}

}  // namespace lockstep
