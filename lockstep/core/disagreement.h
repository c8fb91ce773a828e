// A CommError without a dead rank: the ranks are alive and called operations that do not match.
//
// Its reporter need not wait for a launcher to report a rank that ended.
//
//   throw Disagreement("shm", "ranks disagree on collective #3: ...", {.peer = 1});
#pragma once

#include "lockstep/core/error.h"

namespace lockstep {

class Disagreement : public CommError {
 public:
  using CommError::CommError;
};

}  // namespace lockstep
