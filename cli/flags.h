// A command's flags, parsed by CLI11 under the conventions of all commands: --flag VALUE and
// --flag=VALUE, switches without a value, and an error that names the nearest flag.
//
//   Flags flags("ledger");
//   flags.value("--records", [&](const std::string& text) { records = count_of(text); });
//   flags.toggle("--json", json);
//   const Args names = flags.read(args);        // what is no flag, in order
//
// `lockstep run` has torchrun's grammar and a parser of its own (launcher/flags.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "lockstep/core/env.h"

namespace CLI {
class App;
}

namespace lockstep::cli {

class Flags {
 public:
  explicit Flags(std::string command);
  ~Flags();
  Flags(const Flags&) = delete;
  Flags& operator=(const Flags&) = delete;

  // `names`: "--output", or "-o,--output". `set` is called for each occurrence, after all are
  // parsed; `what` describes the value in the error when it is missing.
  void value(const std::string& names, std::function<void(const std::string&)> set,
             const char* what = "a value");
  void text(const std::string& names, std::string& to, const char* what = "a value");
  void toggle(const std::string& name, bool& on);
  // A whole number within bounds, for an integer or an optional of one.
  template <typename T>
  void integer(const std::string& names, T& to, std::int64_t least, std::int64_t most,
               const char* what = "a value") {
    const auto read = [=, &to, name = names.substr(0, names.find(','))](const std::string& text) {
      to = env::parse_int(text, name, least, most);
    };
    value(names, read, what);
  }

  // Throws UsageError. With `keys`, unknown flags are keys of another parser, such as that of a
  // training file, and stay in the result.
  Args read(const Args& args, bool keys = false);

 private:
  struct Known {
    std::string name;
    const char* needs;  // null: a switch
  };
  const Known* find(const std::string& arg) const;

  std::string command_;
  std::unique_ptr<CLI::App> app_;
  std::vector<Known> known_;
};

// Prints the text if --help or -h is among the arguments, and returns whether it was.
bool print_help(const Args& args, const char* text);

}  // namespace lockstep::cli
