// The subcommands of `lockstep`, and their common functions: flags, text for a terminal, errors as
// exit codes, environment variables, progress of a long read.
//
//   int main(int argc, char** argv) { return cli::guarded([&] { return command(argc, argv); }); }
//   print_text("{}: {} tensors\n", name_in_a_file, count);
//   data::load_instructions(path, ReadingProgress(path));
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace CLI {
class App;
}

namespace lockstep::cli {

using Args = std::vector<std::string>;

// A command gets the arguments after its name and returns the exit code; a UsageError becomes a
// line on stderr and exit code 2.
int run_command(const Args& args);         // run.cpp
int train_command(const Args& args);       // run.cpp
int env_command(const Args& args);         // env.cpp
int config_command(const Args& args);      // config.cpp
int data_command(const Args& args);        // data.cpp
int checkpoint_command(const Args& args);  // checkpoint.cpp
int plan_command(const Args& args);        // plan.cpp
int ledger_command(const Args& args);      // runs.cpp
int report_command(const Args& args);      // runs.cpp
int monitor_command(const Args& args);     // runs.cpp
int dashboard_command(const Args& args);   // runs.cpp
int doctor_command(const Args& args);      // doctor.cpp

// Replaces this process by that program of libexec; returns 1 only on failure. In main.cpp.
int execute(const char* program, const Args& args);

// Names and texts from files go to a terminal without control characters (core/text.h).
template <typename... Args>
void print_text(std::FILE* to, fmt::format_string<Args...> format, Args&&... args) {
  const std::string text = printable_lines(fmt::format(format, std::forward<Args>(args)...));
  std::fwrite(text.data(), 1, text.size(), to);
}

template <typename... Args>
void print_text(fmt::format_string<Args...> format, Args&&... args) {
  print_text(stdout, format, std::forward<Args>(args)...);
}

// ---------------------------------------------------------------- flags
//
// A command's flags, parsed by CLI11 under the conventions of all commands: --flag VALUE and
// --flag=VALUE, switches without a value, and an error that names the nearest flag.
//
//   Flags flags("ledger");
//   flags.value("--records", [&](const std::string& text) { records = count_of(text); });
//   flags.toggle("--json", json);
//   const Args names = flags.read(args);        // what is no flag, in order
//
// `lockstep run` has torchrun's grammar and a parser of its own (launcher/flags.h).

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

// ---------------------------------------------------------------- errors, progress

// Turns a command's exceptions into one line on stderr, and 2 for the caller's mistake or 1. A
// program that links LibTorch passes the result to end_at_once().
template <typename Body>
int guarded(Body&& body) {
  try {
    return body();
  } catch (const UsageError& error) {
    print_text(stderr, "lockstep: {}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    print_text(stderr, "lockstep: {}\n", error.what());
    return 1;
  }
}

// Only for main(), when everything is done. Skips LibTorch's unregistering of thousands of
// operators at a normal exit, which takes as long as the start (0.2 s of a core).
inline int end_at_once(int code) {
#if !defined(__SANITIZE_ADDRESS__)  // it looks for leaks on the way out
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(code);
#endif
  return code;
}

// A line for each LOCKSTEP_ variable of this process that no code of ours reads, with the name that
// was probably meant. In env.cpp.
std::vector<std::string> unread_variables();

// Progress of a long read: silent for two seconds, then a line on stderr. On a terminal the line is
// overwritten in place; elsewhere a new one is printed every ten seconds. One object per reading,
// one thread. The clock is a parameter for tests.
class ReadingProgress {
 public:
  using Clock = std::chrono::steady_clock;
  using Now = std::function<Clock::time_point()>;

  explicit ReadingProgress(std::string what, std::FILE* to = stderr, Now now = Clock::now)
      : what_(std::move(what)),
        to_(to),
        now_(std::move(now)),
        terminal_(::isatty(::fileno(to)) == 1),
        start_(now_()),
        next_(start_ + std::chrono::seconds(2)) {}

  void operator()(std::uint64_t done, std::uint64_t total) {
    const Clock::time_point now = now_();
    const bool last = done == total;
    if (over_ || (now < next_ && !(last && said_))) return;
    over_ = last;
    next_ = now + (terminal_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10));
    said_ = true;
    const double part = total == 0 ? 1.0 : static_cast<double>(done) / static_cast<double>(total);
    fmt::print(to_, "{}reading {}: {:.0f} % after {:.0f} s{}", terminal_ ? "\r" : "", what_,
               100 * part, std::chrono::duration<double>(now - start_).count(),
               terminal_ && !last ? "\033[K" : "\n");
    std::fflush(to_);
  }

 private:
  std::string what_;
  std::FILE* to_;
  Now now_;
  bool terminal_;
  bool said_ = false;
  bool over_ = false;
  Clock::time_point start_;
  Clock::time_point next_;
};

}  // namespace lockstep::cli
