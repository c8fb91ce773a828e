// The options of an update rule by name, so that one list in the options struct serves range
// checks, the agreement of ranks, archives and a training file's optim_args.
//
//   void each(const OptionVisitor& option) {
//     option("lr", lr);
//     option("momentum", momentum, {.below = 1});
//     option("nesterov", nesterov);
//   }
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string_view>
#include <utility>

namespace lockstep::optim {

struct Range {
  double least = 0;
  double below = std::numeric_limits<double>::infinity();
  bool contains(double value) const { return value >= least && value < below; }
};

// Flags and counts are passed as doubles too.
struct Option {
  enum class Kind { kReal, kCount, kFlag };
  std::string_view name;
  double& value;
  Range range;
  Kind kind = Kind::kReal;
};

class OptionVisitor {
 public:
  explicit OptionVisitor(std::function<void(const Option&)> body) : body_(std::move(body)) {}

  void operator()(std::string_view name, double& value, Range range = {}) const {
    body_({name, value, range, Option::Kind::kReal});
  }
  void operator()(std::string_view name, std::int64_t& value, Range range = {}) const {
    auto number = static_cast<double>(value);
    body_({name, number, range, Option::Kind::kCount});
    value = static_cast<std::int64_t>(number);
  }
  void operator()(std::string_view name, bool& value) const {
    double number = value ? 1 : 0;
    body_({name, number, {}, Option::Kind::kFlag});
    value = number != 0;
  }

 private:
  std::function<void(const Option&)> body_;
};

}  // namespace lockstep::optim
