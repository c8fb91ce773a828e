// Where a loop that resumes has its ledger count from; ledger.h says what is counted.
//
//   ledger::continue_at(438);   // the next step that is counted is 439
//
// As with every function of the ledger, any thread may call it, and it neither waits nor throws.
#pragma once

#include <cstdint>

namespace lockstep::ledger {

// No step has ended by it. A negative number does nothing.
void continue_at(std::int64_t step) noexcept;

}  // namespace lockstep::ledger
