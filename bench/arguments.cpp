// Argument parsing of the benchmarks: CLI11 with the conventions of the other commands.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdlib>

#include "bench/bench.h"
#include "lockstep/core/spelling.h"

namespace lockstep::bench {

std::string positive_problem(const std::string& value) {
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (!value.empty() && *end == '\0' && std::isfinite(number) && number > 0) return "";
  return fmt::format("'{}' is not a number above zero", value);
}

std::string device_problem(const std::string& value) {
  const std::string number = value.starts_with("cuda:") ? value.substr(5) : "";
  const bool numbered = !number.empty() && number.size() < 4 &&
                        number.find_first_not_of("0123456789") == std::string::npos;
  if (value == "cpu" || value == "cuda" || numbered) return "";
  return fmt::format("'{}' is not a device; use cpu, cuda or cuda:N", value);
}

// The first word that no option took, if it looks like an option.
static std::optional<std::string> unknown_option(const CLI::App& app) {
  for (const std::string& word : app.remaining()) {
    if (!word.starts_with("--")) continue;
    std::vector<std::string> known;
    for (const CLI::Option* option : app.get_options())
      for (const std::string& known_name : option->get_lnames()) known.push_back("--" + known_name);
    const auto meant = nearest(word, known);
    return fmt::format("there is no option {}{}", word,
                       meant ? fmt::format(" (did you mean {}?)", *meant) : "");
  }
  return std::nullopt;
}

std::optional<int> parse_arguments(CLI::App& app, int argc, char** argv) {
  const std::string name = fmt::format("lockstep bench {}", argv[0]);
  app.name(name);
  for (CLI::Option* option : app.get_options()) option->capture_default_str();
  app.failure_message([&name](const CLI::App* failed, const CLI::Error& error) {
    return fmt::format("{}: {}. '{} --help' lists its options.\n", name,
                       unknown_option(*failed).value_or(error.what()), name);
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    constexpr int kUsage = 2;  // CLI11 has a code of its own for each kind of mistake
    return app.exit(error) == 0 ? 0 : kUsage;
  }
  return std::nullopt;
}

}  // namespace lockstep::bench
