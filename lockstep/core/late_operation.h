// A TimeoutError that knows its cause: why() is the part of its message after the time, such as
// which ranks did not arrive.
//
//   throw LateOperation({"shm", text, context}, ": rank 1 did not arrive. It is stopped.");
#pragma once

#include <string>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep {

class LateOperation : public TimeoutError {
 public:
  LateOperation(const TimeoutError& error, std::string why)
      : TimeoutError(error), why_(std::move(why)) {}
  // Empty: not known.
  const std::string& why() const { return why_; }

 private:
  std::string why_;
};

}  // namespace lockstep
