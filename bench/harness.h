// The parts of the benchmarks of `lockstep bench`: options, alternating rounds and a report, whose
// figures goals.py judges. The compared sides are processes (processes.h) or functions.
//
//   Options options("How long a hop takes, beside gloo's");
//   options.number("--rounds", rounds, 1, 1000, "turns of each side");
//   if (const auto code = options.parse(argc, argv)) return *code;
//   by_turns({.rounds = rounds, .unit = "ms"}, sides, [](Side& side) { return side.measure(); });
//   Report report("hop", "a hop of 2 ranks");
//   for (const Side& side : sides)
//     report.row(side.name).spread("ms", side.ms, 2).ratio("ours / this", over(side.ms, ours.ms));
//   report.publish(options);
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/deadline.h"
#include "lockstep/core/text.h"  // IWYU pragma: export

namespace CLI {
class App;
}

namespace lockstep::bench {

// ---------------------------------------------------------------- figures

struct Summary {
  double min = 0, p25 = 0, p50 = 0, p75 = 0, p99 = 0, max = 0;
};
Summary summarize(std::vector<double> samples);
double median(std::vector<double> samples);
// The ratios a[i] / b[i], because a disturbance of a round affects both sides of its ratio.
Summary over(const std::vector<double>& a, const std::vector<double>& b);

// ---------------------------------------------------------------- options

// Returns what is wrong with a value; empty if it is valid.
std::string positive_problem(const std::string& value);  // a number above zero

// The command line of a benchmark. --csv and --json also write its report to files.
class Options {
 public:
  explicit Options(const std::string& about, bool publishes = true);
  ~Options();
  // T: int, std::int64_t or double, and vectors of int (with commas).
  template <typename T>
  void number(const char* name, T& value, double least, double most, const char* help);
  void positive(const char* name, double& value, const char* help);
  void text(const char* name, std::string& value, const char* help,
            std::vector<std::string> choices = {});
  void list(const char* name, std::vector<std::string>& values, const char* help,
            std::vector<std::string> choices = {});  // with commas
  void flag(const char* name, bool& value, const char* help);
  void device(std::string& value);  // --device
  CLI::App& app() { return *app_; }

  // An exit code when the program must end: 0 after --help, which shows every option with its
  // default, 2 after a usage error, which is reported in one line.
  std::optional<int> parse(int argc, char** argv);

  std::string csv, json;

 private:
  std::unique_ptr<CLI::App> app_;
  bool publishes_;
};

// Loads CUDA if the device is a CUDA device. UsageError when there is none.
void prepare_device(const std::string& device);

// "25M" is 25 kilo^2; NAN when it is no number.
double parse_scaled(const std::string& text, double kilo);

// ---------------------------------------------------------------- rounds

struct Turns {
  int rounds = 1;
  double seconds = 0;  // no round begins after this, but there are three; 0: no limit
  const char* unit = "";
  std::string what = "round";
};

// Each side has one turn in a round, and each round begins with another side, so that drift favours
// no position. turn(side) returns the figure to show; NAN: none.
template <typename Sides, typename Turn>
void by_turns(const Turns& turns, Sides& sides, const Turn& turn) {
  constexpr int kFewest = 3;
  const auto begin = Deadline::Clock::now();
  for (int round = 0; round < turns.rounds; ++round) {
    const double elapsed = seconds_since(begin);
    if (turns.seconds > 0 && round >= kFewest && elapsed > turns.seconds) break;
    std::string shown;
    for (std::size_t k = 0; k < sides.size(); ++k) {
      auto& side = sides[(k + static_cast<std::size_t>(round)) % sides.size()];
      if (const double value = turn(side); !std::isnan(value))
        shown += fmt::format(" {} {:.2f}", side.name, value);
    }
    fmt::print(stderr, "{} {}/{}{}:{} {}\n", turns.what, round + 1, turns.rounds,
               turns.seconds > 0
                   ? fmt::format(", {:.0f} of at most {:.0f} s", elapsed, turns.seconds)
                   : "",
               shown, turns.unit);
  }
}

// ---------------------------------------------------------------- the report

// A row of the table and of the JSON document.
class Row {
 public:
  Row& text(const std::string& head, std::string cell);             // in the table
  Row& value(const std::string& key, const nlohmann::json& value);  // in the document
  // In both with a key, otherwise in the table. Absent: "-", and not in the document.
  Row& number(const std::string& head, std::optional<double> value, int decimals = 0,
              const std::string& key = "");
  // "min ms", "p50 ms", ... and min_ms, p50_ms, ...; `which` names members of Summary.
  Row& spread(const std::string& unit, const std::vector<double>& samples, int decimals,
              const char* which = "min p50 p99 max");
  // The head, "p25" and "p75", and in the document the key with its quartiles.
  Row& ratio(const std::string& head, const Summary& ratio, const std::string& key = "");

 private:
  friend class Report;
  std::vector<std::pair<std::string, std::string>> cells_;
  nlohmann::json values_ = nlohmann::json::object();
};

// A table for people, the same as CSV, and a JSON document with its rows and more.
class Report {
 public:
  // `title` is the head of the first column.
  Report(const std::string& benchmark, std::string title,
         nlohmann::json facts = nlohmann::json::object());
  Row& row(const std::string& name);
  nlohmann::json& facts() { return facts_; }
  std::string text() const;
  std::string csv() const;
  std::string json() const;
  // Prints the table, and writes the files that were asked for.
  void publish(const Options& options) const;

 private:
  std::vector<std::vector<std::string>> lines() const;
  std::string title_;
  nlohmann::json facts_;
  std::vector<std::unique_ptr<Row>> rows_;
};

// ---------------------------------------------------------------- the benchmarks

using Main = int(int argc, char** argv);
Main launch_main, allreduce_main, step_main, train_main, loader_main, kernels_main, recipes_main,
    scale_main, dp_vs_ddp_main, presets_main, ablation_main;

// A rank's main: connects to the others according to its settings, and serves orders on a socket.
using RankMain = int(const nlohmann::json& settings, const std::string& orders);
RankMain allreduce_rank, step_rank, model_rank, dp_vs_ddp_rank;

// The rank's side of `launch`: one all-reduce, printed by rank 0.
int allreduce_once_main();

}  // namespace lockstep::bench
