// The command line of `lockstep run` (one argument per line) and the PET_ variables
// ("=NAME=value"): parsed into a plan or refused with an error.
#include <map>
#include <string>
#include <vector>

#include "launcher/flags.h"
#include "lockstep/core/error.h"
#include "tests/fuzz/driver.h"

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  using fuzz::require;
  std::vector<std::string> arguments;
  std::map<std::string, std::string> variables;
  std::string_view text(reinterpret_cast<const char*>(data), size);
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    line = line.substr(0, line.find('\0'));  // neither an argument nor a variable can hold one
    if (const auto equals = line.find('=', 1); line.starts_with('=') && equals != line.npos)
      variables[line.substr(1, equals - 1)] = line.substr(equals + 1);
    else
      arguments.push_back(std::move(line));
  }
  launch::LaunchContext context;
  context.variable = [&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
  context.cores = [] { return 4; };
  context.gpus = [] { return launch::Gpus{}; };
  try {
    const launch::ParsedFlags parsed = launch::parse_flags(arguments, context);
    if (parsed.help) return 0;
    require(parsed.plan.nnodes >= 1 && parsed.plan.nproc_per_node >= 1, "a plan for nobody");
  } catch (const UsageError& error) {
    require(error.what()[0] == '[', "an error without its component");
  }
  return 0;
}
