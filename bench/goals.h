// Goals of a benchmark (--require-... options) and how a missed one is reported.
//
//   Goals goals("step");
//   goals.at_least("gloo / fused", ratio, wanted);
//   return goals.exit_code();
//
//   const auto wanted = parse_goals("1:1.15,8:1.03", batches, {"BATCH", "batch", "--batches"});
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::bench {

class Goals {
 public:
  explicit Goals(std::string benchmark) : benchmark_(std::move(benchmark)) {}

  void at_least(const std::string& what, double is, double wanted) {
    report(is >= wanted, what, is, fmt::format("at least {}", wanted));
  }
  void at_most(const std::string& what, double is, double wanted) {
    report(is <= wanted, what, is, fmt::format("at most {}", wanted));
  }
  int exit_code() const { return missed_ ? 1 : 0; }

 private:
  void report(bool reached, const std::string& what, double is, const std::string& wanted) {
    missed_ |= !reached;
    fmt::print(stderr, "{}: {} is {:.3f}, {} required: {}\n", benchmark_, what, is, wanted,
               reached ? "reached" : "MISSED");
  }

  std::string benchmark_;
  bool missed_ = false;
};

// How messages name the numbers of parse_goals.
struct GoalWords {
  const char* form;    // "BATCH", in BATCH:RATIO
  const char* number;  // "batch"
  const char* option;  // the one that chooses what is measured, "--batches"
};

// "1:1.15,8:1.03": a ratio for some of the measured numbers.
inline std::map<int, double> parse_goals(const std::string& text, const std::vector<int>& measured,
                                         const GoalWords& words) {
  std::map<int, double> wanted;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    int number = 0;
    double ratio = 0;
    char rest = 0;
    const int read = std::sscanf(part.c_str(), "%d:%lf%c", &number, &ratio, &rest);
    if (read != 2 || !std::isfinite(ratio) || ratio <= 0)
      throw UsageError("bench", "'{}' is not {}:RATIO. Write 1:1.15,8:1.03.", part, words.form);
    if (std::find(measured.begin(), measured.end(), number) == measured.end())
      throw UsageError("bench", "{} {} is required but not measured. Add it to {}.", words.number,
                       number, words.option);
    wanted[number] = ratio;
  }
  return wanted;
}

}  // namespace lockstep::bench
