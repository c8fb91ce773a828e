// `lockstep run`: parses the arguments into a plan (lockstep/launch/flags.h) and runs it
// (lockstep/launch/supervisor.h).
#include <cstdio>

#include "cli/commands.h"
#include "lockstep/core/log.h"
#include "lockstep/launch/flags.h"
#include "lockstep/launch/supervisor.h"

namespace lockstep::cli {

int run_command(const Args& args) {
  const launch::ParsedFlags parsed = launch::parse_flags(args);
  switch (parsed.request) {
    case launch::Request::kHelp:
      fmt::print("{}", launch::run_help());
      return 0;
    case launch::Request::kListFlags:
      fmt::print("{}", launch::flag_list());
      return 0;
    case launch::Request::kRun:
      break;
  }
  for (const std::string& note : parsed.notes) log::warning("run", "{}", note);
  return launch::supervise(parsed.plan);
}

}  // namespace lockstep::cli
