#include "launcher/arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iterator>
#include <utility>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::launch {
namespace {

std::string with_dashes(std::string name) {
  std::ranges::replace(name, '_', '-');
  return name;
}

// The names that mpirun, mp.spawn and accelerate use for the number of ranks are too far from ours.
std::string meant_flag(const std::string& name) {
  for (const std::string_view count : {"n", "np", "nprocs", "num-processes"})
    if (name == count) return " Did you mean --nproc-per-node?";
  std::vector<std::string> names{"help"};
  for (const FlagSpec& flag : flag_table()) names.emplace_back(flag.name);
  return name.size() > 1 ? did_you_mean(name, names, "--") : "";
}

class ArgumentReader {
 public:
  explicit ArgumentReader(const std::vector<std::string>& args) : args_(args) {}

  GivenArguments read() {
    while (next_ < args_.size() && given_.request == Request::kRun) {
      const std::string& arg = args_[next_];
      if (arg == "--") {
        ++next_;
        break;
      }
      if (arg.size() < 2 || arg[0] != '-') break;
      ++next_;
      if (arg.rfind("--", 0) == 0) {
        read_long(arg);
      } else {
        read_letters(arg);
      }
    }
    given_.program.assign(args_.begin() + static_cast<std::ptrdiff_t>(next_), args_.end());
    return std::move(given_);
  }

 private:
  void read_long(const std::string& arg) {
    const auto equals = arg.find('=');
    const std::string name =
        with_dashes(arg.substr(2, equals == std::string::npos ? equals : equals - 2));
    if (name == "list-flags") {
      given_.request = Request::kListFlags;
      return;
    }
    const FlagSpec* flag = match(name, arg);
    if (flag == nullptr) {
      given_.request = Request::kHelp;
      return;
    }
    const std::string origin = fmt::format("--{}", flag->name);
    if (!flag->is_switch()) {
      given_.values.set(
          *flag, equals != std::string::npos ? arg.substr(equals + 1) : value_argument(origin),
          origin);
    } else if (equals == std::string::npos) {
      given_.values.set(*flag, "1", origin);
    } else if (!flag->optional_value.empty()) {
      given_.values.set(*flag, arg.substr(equals + 1), origin);
    } else {
      throw UsageError("run", "{} takes no value ('{}' was given). Write {} alone.", origin, arg,
                       origin);
    }
  }

  // The flag of the table that `name` means; nothing for help.
  const FlagSpec* match(const std::string& name, const std::string& arg) const {
    std::vector<const FlagSpec*> found;
    for (const FlagSpec& flag : flag_table()) {
      if (flag.name == name) return &flag;
      if (flag.name.starts_with(name)) found.push_back(&flag);
    }
    const bool help = !name.empty() && std::string_view("help").substr(0, name.size()) == name;
    if (help && found.empty()) return nullptr;
    if (found.size() == 1) return found.front();
    // What torchrun understands means the same here, whatever flags we have in addition.
    std::vector<const FlagSpec*> theirs;
    std::ranges::copy_if(found, std::back_inserter(theirs),
                         [](const FlagSpec* flag) { return flag->torchrun; });
    if (theirs.size() == 1) return theirs.front();
    if (found.empty()) refuse(arg.substr(0, arg.find('=')), name);
    std::vector<std::string> meanings;
    for (const FlagSpec* flag : found) meanings.push_back(fmt::format("--{}", flag->name));
    throw UsageError("run", "--{} could be {}. Write more of it.", name, fmt::join(meanings, ", "));
  }

  void read_letters(const std::string& arg) {
    for (std::size_t i = 1; i < arg.size(); ++i) {
      if (arg[i] == 'h') {
        given_.request = Request::kHelp;
        return;
      }
      const auto table = flag_table();
      const auto flag =
          std::ranges::find_if(table, [&](const FlagSpec& f) { return f.letter == arg[i]; });
      if (flag == table.end()) refuse(arg, with_dashes(arg.substr(1, arg.find('=') - 1)));
      const std::string origin = fmt::format("-{}", arg[i]);
      if (flag->is_switch()) {
        given_.values.set(*flag, "1", origin);
        continue;
      }
      std::string rest = arg.substr(i + 1);
      if (!rest.empty() && rest[0] == '=') rest.erase(0, 1);
      if (rest.empty()) rest = value_argument(origin);
      given_.values.set(*flag, rest, fmt::format("--{}", flag->name));
      return;
    }
  }

  [[noreturn]] static void refuse(const std::string& arg, const std::string& name) {
    throw UsageError("run",
                     "there is no flag {}.{} Flags of the program go after the program; "
                     "'lockstep run --help' lists ours.",
                     arg, meant_flag(name));
  }

  // The next arg, unless it is plainly another flag.
  std::string value_argument(const std::string& origin) {
    const bool there = next_ < args_.size();
    const std::string arg = there ? args_[next_] : "";
    if (!there || (arg.size() > 1 && arg[0] == '-' && !to_int(arg))) {
      throw UsageError("run", "{} needs a value{}. Write {}{}VALUE.", origin,
                       there ? fmt::format(" but '{}' follows", arg) : "", origin,
                       origin.rfind("--", 0) == 0 ? "=" : " ");
    }
    ++next_;
    return arg;
  }

  const std::vector<std::string>& args_;
  std::size_t next_ = 0;
  GivenArguments given_;
};

}  // namespace

std::optional<int> to_int(std::string_view text) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

void Values::set(const FlagSpec& flag, std::string text, std::string origin) {
  values_[std::string(flag.name)] = {std::move(text), std::move(origin)};
}

const Given* Values::find(const std::string& name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : &found->second;
}

std::string Values::text(const std::string& name, std::string fallback) const {
  const Given* given = find(name);
  return given != nullptr ? given->text : fallback;
}

int Values::number(const std::string& name, int fallback, int min, int max) const {
  const Given* given = find(name);
  if (given == nullptr) return fallback;
  const auto value = to_int(given->text);
  if (!value || *value < min || *value > max) {
    throw UsageError("run", "{}='{}' is not a whole number from {} to {}.", given->origin,
                     given->text, min, max);
  }
  return *value;
}

std::chrono::milliseconds Values::seconds(const std::string& name,
                                          std::chrono::milliseconds fallback, double min_s) const {
  constexpr double kMax_s = 365.0 * 24 * 3600;
  const Given* given = find(name);
  if (given == nullptr) return fallback;
  double value = 0;
  const char* end = given->text.data() + given->text.size();
  const auto [stop, error] = std::from_chars(given->text.data(), end, value);
  if (error != std::errc() || stop != end || !(value >= min_s) || value > kMax_s) {
    throw UsageError("run", "{}='{}' is not a number of seconds of at least {}.", given->origin,
                     given->text, min_s);
  }
  return std::chrono::milliseconds(std::llround(value * 1000));
}

GivenArguments read_arguments(const std::vector<std::string>& args) {
  return ArgumentReader(args).read();
}

void fill_from_variables(Values& values, const Variables& variable) {
  for (const FlagSpec& flag : flag_table()) {
    if (values.has(std::string(flag.name))) continue;
    const std::string name = flag.variable();
    const auto text = variable(name);
    if (!text || text->empty()) continue;
    // Ports and addresses begin with a digit, or "[", and are longer than "1" and "0".
    const bool word = text->size() == 1 || std::isalpha(static_cast<unsigned char>(text->front()));
    if (!flag.is_switch() || (!flag.optional_value.empty() && !word)) {
      values.set(flag, *text, name);
    } else if (env::parse_bool(*text, name)) {
      values.set(flag, "1", name);
    }
  }
}

}  // namespace lockstep::launch
