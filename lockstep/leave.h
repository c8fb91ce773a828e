// Ends the process of a rank without waiting for anything that its world may have left behind.
// For run() and spawn(), which own the process; nothing else in the library ends it.
//
//   detail::leave(1);
#pragma once

namespace lockstep::detail {

// Is a body of run() or spawn() on the stack of this process? One at a time, on one thread.
bool inside_run();

// Flushes stdout and the like, for a bounded time, and ends the process.
[[noreturn]] void leave(int code);

}  // namespace lockstep::detail
