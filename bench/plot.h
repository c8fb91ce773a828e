// Line charts as SVG.
//
//   write_file_atomically(path, svg({{.title = "Time", .y_label = "us", .lines = {...}}}));
//
// Both axes are logarithmic; panels stand side by side and share one legend.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lockstep::bench {

struct Line {
  std::string name;
  std::vector<std::pair<double, double>> points;  // both positive
};

struct Panel {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<Line> lines;
  std::string (*x_text)(double) = nullptr;  // how an x value is written; default: the number
};

std::string svg(const std::vector<Panel>& panels);

}  // namespace lockstep::bench
