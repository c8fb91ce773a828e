#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>

#include "cli/commands.h"
#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::cli {

Flags::Flags(std::string command)
    : command_(std::move(command)), app_(std::make_unique<CLI::App>()) {
  app_->set_help_flag();
  app_->allow_extras();
}

Flags::~Flags() = default;

void Flags::value(const std::string& names, std::function<void(const std::string&)> set,
                  const char* what) {
  const auto set_each = [set = std::move(set)](const CLI::results_t& values) {
    for (const std::string& value : values) set(value);
    return true;
  };
  app_->add_option(names, set_each)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  for (const std::string& name : CLI::detail::split_names(names)) known_.push_back({name, what});
}

void Flags::text(const std::string& names, std::string& to, const char* what) {
  value(names, [&to](const std::string& value) { to = value; }, what);
}

void Flags::toggle(const std::string& name, bool& on) {
  app_->add_flag_callback(name, [&on] { on = true; });
  known_.push_back({name, nullptr});
}

const Flags::Known* Flags::find(const std::string& arg) const {
  const auto found = std::ranges::find(known_, arg.substr(0, arg.find('=')), &Known::name);
  return found == known_.end() ? nullptr : &*found;
}

Args Flags::read(const Args& args, bool keys) {
  // CLI11 would take a value for a switch, and the next argument for an empty value.
  for (const std::string& arg : args) {
    const Known* flag = arg.find('=') == arg.npos ? nullptr : find(arg);
    if (flag != nullptr && flag->needs == nullptr)
      throw UsageError(command_, "{} takes no value.", flag->name);
    if (flag != nullptr && arg.ends_with('=') && arg.size() == flag->name.size() + 1)
      throw UsageError(command_, "{} needs {}.", flag->name, flag->needs);
  }
  try {
    app_->parse(Args(args.rbegin(), args.rend()));
  } catch (const CLI::ParseError& error) {
    const Known* last = args.empty() ? nullptr : find(args.back());
    if (last != nullptr && last->needs != nullptr)
      throw UsageError(command_, "{} needs {}.", last->name, last->needs);
    throw UsageError(command_, "{}.", error.what());
  }
  Args rest = app_->remaining();
  const auto flag = std::ranges::find_if(
      rest, [](const std::string& arg) { return arg.size() > 1 && arg.starts_with('-'); });
  if (keys || flag == rest.end()) return rest;
  std::vector<std::string> names{"--help"};
  for (const Known& known : known_) names.push_back(known.name);
  const std::string name = flag->substr(0, flag->find('='));
  throw UsageError(command_, "there is no flag {}.{} 'lockstep {} --help' lists them.", name,
                   did_you_mean(name, names), command_);
}

bool print_help(const Args& args, const char* text) {
  const bool asked = std::ranges::any_of(
      args, [](const std::string& arg) { return arg == "--help" || arg == "-h"; });
  if (asked) fmt::print("{}", text);
  return asked;
}

}  // namespace lockstep::cli
