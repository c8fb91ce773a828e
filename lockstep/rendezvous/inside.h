// How `lockstep run` knows that a rank has left its world: the mark that run() holds while its body
// runs.
//
// An exit code of 0 says that a process is satisfied, not that its body has returned. std::exit(0)
// or _exit(0) in the middle of training looks like success, and its peers, whose connections break,
// look like the cause.
//
// The mark is made before the body and taken away after it, so it needs no handler at the end of
// the process, and _exit() cannot go past it. It is an empty file beside the rank's error file,
// which no child closes and no pipe can lose.
//
//   inside::enter();  body(world);  inside::leave();         // the rank
//   const bool left = inside::take_mark(error_file);         // the launcher, when it has ended
//
// enter() and leave() belong to run(), on the thread that calls it.
#pragma once

#include <string>

namespace lockstep::inside {

// Do nothing unless `lockstep run` started this process, and never throw: without the mark a rank
// that leaves is reported as before.
void enter() noexcept;
void leave() noexcept;

// Removes the mark that belongs to this error file; was there one?
bool take_mark(const std::string& error_file) noexcept;

}  // namespace lockstep::inside
