// The width of the terminal that a stream ends at, even through the launcher's pipe.
//
// A rank's stdout is a pipe to `lockstep run`, so isatty() says no even where a person watches. The
// launcher therefore names the terminal's width in LOCKSTEP_TERMINAL, together with the pipe it
// means (<device>:<inode>:<columns>): a child of the rank whose stdout is redirected inherits the
// variable, and must not draw into a file.
//
//   const bool bar = terminal::columns(STDOUT_FILENO) > 0;
//
// Functions without state; columns() reads the environment.
#pragma once

#include <string>

namespace lockstep::terminal {

inline constexpr const char* kVariable = "LOCKSTEP_TERMINAL";

// 0: it is neither a terminal nor a pipe that leads to one.
int columns(int fd);

// What kVariable says to a process that writes to the pipe `fd`; "" when it cannot be said.
std::string describe_pipe(int fd, int columns);

}  // namespace lockstep::terminal
