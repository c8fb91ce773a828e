// Programs that benchmarks start: where they are, how they are started, and a directory for their
// files.
//
//   const Scratch scratch;
//   launch::Process process = start_lockstep({"train", scratch.file("a.yaml")});
//   if (!ended(process, std::chrono::minutes(5))) process.signal_group(SIGTERM);
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "cli/scratch_folder.h"
#include "launcher/process.h"

namespace lockstep::bench {

// A program by its path relative to this one's directory.
std::string program_beside(const std::string& relative);
// A file of bench/peers; looked for beside the source tree and in the install tree.
std::string peer(const std::string& file);
// The interpreter of peers: LOCKSTEP_PYTHON, or the one the build was configured with.
std::string python();

// Added to this process's environment; an empty value removes a variable.
using Environment = std::map<std::string, std::string>;

// Starts `lockstep ARGUMENTS...`; `output` takes stdout and stderr, -1: inherited.
launch::Process start_lockstep(const std::vector<std::string>& arguments,
                               const Environment& changed = {}, int output = -1);
// False: it is still running after that time.
bool ended(const launch::Process& process, std::chrono::milliseconds limit);
// Ends it if it is still running: a request first, then by force.
void stop(launch::Process& process);

// For the files of one benchmark run.
struct Scratch : cli::ScratchFolder {
  Scratch() : ScratchFolder("bench") {}
};

}  // namespace lockstep::bench
