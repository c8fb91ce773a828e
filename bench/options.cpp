// Command lines of the benchmarks: CLI11 with the conventions of the other commands.
#include <CLI/CLI.hpp>
#include <cstdlib>

#include "bench/harness.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::bench {
namespace {

std::string device_problem(const std::string& value) {
  const std::string number = value.starts_with("cuda:") ? value.substr(5) : "";
  const bool numbered = !number.empty() && number.size() < 4 &&
                        number.find_first_not_of("0123456789") == std::string::npos;
  if (value == "cpu" || value == "cuda" || numbered) return "";
  return fmt::format("'{}' is not a device; use cpu, cuda or cuda:N", value);
}

// The first word that no option took, if it looks like an option.
std::optional<std::string> unknown_option(const CLI::App& app) {
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

}  // namespace

std::string positive_problem(const std::string& value) {
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (!value.empty() && *end == '\0' && std::isfinite(number) && number > 0) return "";
  return fmt::format("'{}' is not a number above zero", value);
}

void prepare_device(const std::string& device) {
  if (device == "cpu") return;
  const int visible = cuda_device_count();
  const auto colon = device.find(':');
  if ((colon == std::string::npos ? 0 : std::stoll(device.substr(colon + 1))) >= visible)
    throw UsageError("bench", "--device {}: {} CUDA device{} visible. Use --device cpu{}.", device,
                     visible, visible == 1 ? " is" : "s are",
                     visible > 0 ? ", or a smaller number" : "");
  load_cuda();
}

Options::Options(const std::string& about, bool publishes)
    : app_(std::make_unique<CLI::App>(about)), publishes_(publishes) {}
Options::~Options() = default;

template <typename T>
void Options::number(const char* name, T& value, double least, double most, const char* help) {
  CLI::Option* option = app_->add_option(name, value, help);
  if constexpr (std::is_same_v<T, double>)
    option->check(CLI::Range(least, most));
  else
    option->check(CLI::Range(static_cast<std::int64_t>(least), static_cast<std::int64_t>(most)));
  // What follows a list may be a file.
  if constexpr (std::is_same_v<T, std::vector<int>>)
    option->delimiter(',')->allow_extra_args(false);
}
template void Options::number(const char*, int&, double, double, const char*);
template void Options::number(const char*, std::int64_t&, double, double, const char*);
template void Options::number(const char*, double&, double, double, const char*);
template void Options::number(const char*, std::vector<int>&, double, double, const char*);

void Options::positive(const char* name, double& value, const char* help) {
  app_->add_option(name, value, help)->check(positive_problem, "POSITIVE");
}

void Options::text(const char* name, std::string& value, const char* help,
                   std::vector<std::string> choices) {
  CLI::Option* option = app_->add_option(name, value, help);
  if (!choices.empty()) option->check(CLI::IsMember(std::move(choices)));
}

void Options::list(const char* name, std::vector<std::string>& values, const char* help,
                   std::vector<std::string> choices) {
  CLI::Option* option =
      app_->add_option(name, values, help)->delimiter(',')->allow_extra_args(false);
  if (!choices.empty()) option->check(CLI::IsMember(std::move(choices)));
}

void Options::flag(const char* name, bool& value, const char* help) {
  app_->add_flag(name, value, help);
}

void Options::device(std::string& value) {
  app_->add_option("--device", value, "cpu, cuda or cuda:N")->check(device_problem);
}

std::optional<int> Options::parse(int argc, char** argv) {
  const std::string name = fmt::format("lockstep bench {}", argv[0]);
  app_->name(name);
  if (publishes_) {
    text("--csv", csv, "also write the table to this file");
    text("--json", json, "also write the figures, with those of every round, to this file");
  }
  for (CLI::Option* option : app_->get_options()) option->capture_default_str();
  app_->failure_message([&name](const CLI::App* failed, const CLI::Error& error) {
    return fmt::format("{}: {}. '{} --help' lists its options.\n", name,
                       unknown_option(*failed).value_or(error.what()), name);
  });
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    constexpr int kUsage = 2;  // CLI11 has a code of its own for each kind of mistake
    return app_->exit(error) == 0 ? 0 : kUsage;
  }
  return std::nullopt;
}

}  // namespace lockstep::bench
