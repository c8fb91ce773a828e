#include "observe/report/axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

namespace lockstep::report {
namespace {

// The limits of what is drawn: sums and differences stay finite, and their logarithms too.
constexpr double kLargest = 1e300, kSmallest = 1e-290;

constexpr std::array<std::pair<double, const char*>, 4> kSuffixes{
    {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}}};

// 1, 2 or 5 times a power of ten, at least `raw`.
double round_step(double raw) {
  const double power = std::pow(10, std::floor(std::log10(raw)));
  const double part = raw / power;
  return power * (part <= 1.0001 ? 1 : part <= 2.0001 ? 2 : part <= 5.0001 ? 5 : 10);
}

int decimals_of(double step) {
  return std::clamp(static_cast<int>(-std::floor(std::log10(step) + 1e-9)), 0, 15);
}

// All ticks of an axis are written in one way, which the largest decides.
std::string tick_text(double value, double step, double largest) {
  if (value == 0) return "0";
  if (largest >= 1e15 || largest < 1e-3) {
    const int exponent = static_cast<int>(std::floor(std::log10(largest)));
    const double unit = std::pow(10, exponent);
    return fmt::format("{:.{}f}e{}", value / unit, decimals_of(step / unit), exponent);
  }
  if (largest >= 1e4) {
    for (const auto& [unit, suffix] : kSuffixes)
      if (largest >= unit)
        return fmt::format("{:.{}f}{}", value / unit, decimals_of(step / unit), suffix);
  }
  return fmt::format("{:.{}f}", value, decimals_of(step));
}

std::vector<Tick> linear_ticks(const Axis& axis, int count, bool whole) {
  double step = round_step((axis.high - axis.low) / count);
  if (whole) step = std::max(1.0, step);
  const double largest = std::max(std::abs(axis.low), std::abs(axis.high));
  std::vector<Tick> found;
  // By counting: adding up would carry the rounding of each to the next.
  const double first = std::ceil(axis.low / step - 1e-9);
  for (int i = 0; i <= 4 * count; ++i) {
    const double value = (first + i) * step;
    if (value > axis.high + 1e-9 * step) break;
    found.push_back({value, tick_text(value, step, largest)});
  }
  return found;
}

std::vector<Tick> log_ticks(const Axis& axis, int count) {
  const double decades = std::log10(axis.high / axis.low);
  const int stride = std::max(1, static_cast<int>(std::ceil(decades / count)));
  std::vector<Tick> found;
  const int last = static_cast<int>(std::floor(std::log10(axis.high)));
  for (int power = static_cast<int>(std::floor(std::log10(axis.low))); power <= last;
       power += stride) {
    for (const double part : {1.0, 2.0, 5.0}) {
      const double value = part * std::pow(10, power);
      if (part > 1 && decades > 2.5) continue;
      if (value >= axis.low && value <= axis.high) found.push_back({value, plain_number(value)});
    }
  }
  return found;
}

}  // namespace

bool Axis::holds(double value) const {
  return std::abs(value) <= kLargest && (!log || value > kSmallest);
}

double Axis::place(double value) const {
  const double part =
      log ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
  return from + part * (to - from);
}

Axis axis_over(const std::vector<double>& values, const AxisOptions& options) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const double value : values) {
    if (!Axis{.log = options.log}.holds(value)) continue;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  if (options.log) {
    if (!(low <= high)) return {.low = 1, .high = 10, .log = true};
    const double factor = std::max(1.05, std::pow(high / low, options.margin));
    return {.low = low / factor, .high = high * factor, .log = true};
  }
  if (!(low <= high)) return {};
  if (options.from_zero) {
    low = std::min(low, 0.0);
    high = std::max(high, 0.0);
  }
  // A range that rounding fills would have no digits to name its ticks.
  const double largest = std::max(std::abs(low), std::abs(high));
  if (high - low <= std::max(kSmallest, largest * 1e-9)) {
    const double half = largest <= kSmallest ? 0.5 : largest * 0.05;
    low -= options.from_zero && low >= 0 ? 0 : half;
    high += half;
  }
  const double margin = (high - low) * options.margin;
  return {.low = options.from_zero && low == 0 ? 0 : low - margin, .high = high + margin};
}

std::vector<Tick> ticks(const Axis& axis, int count, bool whole) {
  return axis.log ? log_ticks(axis, count) : linear_ticks(axis, count, whole);
}

std::string plain_number(double value) {
  const double size = std::abs(value);
  if (!std::isfinite(value) || size >= 1e15 || (size > 0 && size < 1e-3))
    return fmt::format("{:.3g}", value);
  if (size >= 1e4)
    for (const auto& [unit, suffix] : kSuffixes)
      if (size >= unit) return fmt::format("{:.3g}{}", value / unit, suffix);
  if (size >= 1000) return fmt::format("{:.0f}", value);
  return fmt::format("{:.3g}", value);
}

}  // namespace lockstep::report
