// Axes of charts: where a value is drawn, and which values are named.
//
//   Axis axis = axis_over(values, {.margin = 0.05});
//   axis.from = 40; axis.to = 500;                       // pixels
//   for (const Tick& tick : ticks(axis, 6, false)) label(axis.place(tick.value), tick.text);
//
// Free functions without state; call them from any thread.
#pragma once

#include <string>
#include <vector>

namespace lockstep::report {

struct Axis {
  double low = 0, high = 1;  // values; low < high
  double from = 0, to = 1;   // their positions
  bool log = false;          // then both are positive

  bool holds(double value) const;  // finite, and positive on a logarithmic one
  double place(double value) const;
};

struct AxisOptions {
  bool log = false;
  bool from_zero = false;
  double margin = 0;  // beyond the values at both ends, as a share of the range
};

// Over finite values; over [0, 1] or [1, 10] where there are none.
Axis axis_over(const std::vector<double>& values, const AxisOptions& options);

struct Tick {
  double value = 0;
  std::string text{};
};

// About `count` round values, written with as many digits as distinguish them.
std::vector<Tick> ticks(const Axis& axis, int count, bool whole);

// Three significant digits, with k, M, G or an exponent where that is shorter: "1.25", "48.2k".
std::string plain_number(double value);

}  // namespace lockstep::report
