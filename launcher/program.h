// From the program's args to an argv: under Python or directly, found on PATH or at its path, and
// refused with a reason before any rank is started.
//
//   resolve_command({.args = {"train.py", "--lr=1"}});   // /usr/bin/python3 -u train.py --lr=1
#pragma once

#include <string>
#include <vector>

#include "launcher/host.h"

namespace lockstep::launch {

struct ProgramRequest {
  std::vector<std::string> args{};  // the program and its arguments, which are passed untouched
  bool module = false;              // -m
  bool no_python = false;           // --no-python
  bool run_path = false;            // --run-path: a Python file whatever its name; beats the others
};

// Whether such a command is a Python interpreter's; its ranks will connect to MASTER_PORT.
bool runs_python(const std::vector<std::string>& command);

// Throws UsageError when there is nothing to execute.
std::vector<std::string> resolve_command(const ProgramRequest& request,
                                         const Variables& variable = process_variables());

}  // namespace lockstep::launch
