// Charts as SVG: lines over an axis, stacked bars, stacked columns over time.
//
//   LineChart chart{.title = "Loss", .x_label = "step", .y_label = "loss"};
//   chart.lines.push_back({.name = "train", .points = {{10, 3.2}, {20, 2.9}}});
//   write_file_atomically("loss.svg", svg_file({draw(chart)}));
//
// Names may be any text: they are escaped, and shortened where there is no room. Values that are
// not finite leave a gap. Lines of many points are thinned to what a screen can show, extremes
// included. Colours can be distinguished by colour-blind readers and follow the reader's light or
// dark setting. Free functions without state; call them from any thread.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lockstep::report {

enum class Scale { kLinear, kLog };

// The colour of a fill. A line's colour follows from its place in the chart.
enum class Colour { kBlue, kVermilion, kGreen, kPink, kSky, kOrange, kGrey, kYellow };

struct Line {
  std::string name{};
  std::vector<std::pair<double, double>> points{};  // by x
  bool marked = false;                              // a dot or a square at each point
  bool reference = false;             // dashed and grey: what others are compared with
  std::vector<std::string> labels{};  // below the points; empty: none
};

// Something that happened at x: a dotted line, with its label at the top where there is room.
struct Mark {
  double x = 0;
  std::string label{};
};

struct LineChart {
  std::string title{};
  std::string x_label{};
  std::string y_label{};
  std::vector<Line> lines{};
  std::vector<Mark> marks{};
  Scale x_scale = Scale::kLinear;  // logarithmic: values that are not positive leave a gap
  Scale y_scale = Scale::kLinear;
  bool x_from_zero = false;
  bool y_from_zero = false;
  bool whole_x = false;                     // no ticks between whole numbers
  bool ticks_at_points = false;             // on the x axis: only where there are points
  std::string (*x_text)(double) = nullptr;  // how an x value is written; default: the number
};

struct Part {
  std::string name{};
  Colour colour = Colour::kGrey;
};

struct Bar {
  std::string label{};
  std::vector<double> values{};  // one for each part, none negative
};

// One horizontal bar below the other; the sum is written at its end.
struct BarChart {
  std::string title{};
  std::string x_label{};
  std::vector<Part> parts{};
  std::vector<Bar> bars{};
};

struct Column {
  double from = 0, to = 0;       // on the x axis
  std::vector<double> values{};  // one for each part; drawn as shares of their sum
};

struct ColumnChart {
  std::string title{};
  std::string x_label{};
  std::vector<Part> parts{};
  std::vector<Column> columns{};
};

struct Drawing {
  std::string title{};
  double width = 0, height = 0;
  std::string body{};  // elements of an SVG of that size
};

Drawing draw(const LineChart& chart);
Drawing draw(const BarChart& chart);
Drawing draw(const ColumnChart& chart);

// A file: drawings side by side, with a background and the rules for light and dark.
std::string svg_file(const std::vector<Drawing>& drawings);
// An element for an HTML page, which has chart_style() once.
std::string svg_element(const Drawing& drawing);
// CSS: how charts look where a reader has chosen a dark screen.
std::string chart_style();

}  // namespace lockstep::report
