// The subcommands of `lockstep`, one file each. A command gets the arguments after its name and
// returns the exit code; a UsageError becomes a line on stderr and exit code 2.
#pragma once

#include <string>
#include <vector>

namespace lockstep::cli {

using Args = std::vector<std::string>;

int run_command(const Args& args);         // run.cpp
int train_command(const Args& args);       // run.cpp
int env_command(const Args& args);         // env.cpp
int config_command(const Args& args);      // config.cpp
int data_command(const Args& args);        // data.cpp
int checkpoint_command(const Args& args);  // checkpoint.cpp
int plan_command(const Args& args);        // plan.cpp
int ledger_command(const Args& args);      // ledger.cpp
int report_command(const Args& args);      // report.cpp
int monitor_command(const Args& args);     // monitor.cpp
int dashboard_command(const Args& args);   // dashboard.cpp
int doctor_command(const Args& args);      // doctor.cpp
int doctor_run_command(const Args& args);  // doctor_run.cpp: with --run DIR among the arguments

// What `lockstep --version` prints, and where a page of the documentation is: beside an installed
// program, in the source tree of a build, or its name alone. In version.cpp.
std::string version_text();
std::string documentation(const std::string& page);

// Becomes that program of libexec; returns (1) only when it cannot be executed. In main.cpp.
int execute(const char* program, const Args& args);

}  // namespace lockstep::cli
