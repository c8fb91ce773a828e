// Goals of a benchmark (--require-... options) and how a missed one is reported.
//
//   Goals goals("step");
//   goals.at_least("gloo / fused", ratio, wanted);
//   return goals.exit_code();
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <utility>

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

}  // namespace lockstep::bench
