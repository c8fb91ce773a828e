// The subcommands of `lockstep`, one file each. A command gets the words after its name and returns
// the exit code; a UsageError becomes a line on stderr and exit code 2.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

using Words = std::vector<std::string>;

int run_command(const Words& words);         // run.cpp
int env_command(const Words& words);         // env.cpp
int config_command(const Words& words);      // config.cpp
int data_command(const Words& words);        // data.cpp
int checkpoint_command(const Words& words);  // checkpoint.cpp

// Becomes that program of libexec; returns (1) only when it cannot be executed. In main.cpp.
int execute(const char* program, const Words& words);

}  // namespace lockstep::cli
