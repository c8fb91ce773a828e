// How a loop of the user's own numbers its steps on the ledger; ledger.h says what is counted.
//
//   ledger::continue_at(438);   // resumed: the next step that is counted is 439
//   ledger::reach_step(450);    // 450 steps have been taken
//
// As with every function of the ledger, any thread may call it, and it neither waits nor throws.
#pragma once

#include <cstdint>

namespace lockstep::ledger {

// It counts no step as ended. A negative number does nothing.
void continue_at(std::int64_t step) noexcept;

// Where nothing counts the steps (one rank without Accumulation), all since the last one that was
// named have ended; otherwise only the number is corrected.
void reach_step(std::int64_t step) noexcept;

}  // namespace lockstep::ledger
