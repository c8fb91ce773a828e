// The process whose end is the end of a run: named in the run's record, so that a reader on the
// same host knows at once that nothing more will come.
//
//   facts.writer = process_identity(::getpid());
//   if (has_ended(facts.writer)) ...
#pragma once

#include <sys/types.h>

#include <string>

namespace lockstep::monitor {

// Boot, PID namespace, PID and start time, which no other process has; empty: not known.
std::string process_identity(pid_t pid);
// Only where it is certain: not for a process of another host or PID namespace.
bool has_ended(const std::string& identity);

}  // namespace lockstep::monitor
