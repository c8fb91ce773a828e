// The dashboard's page: its files, which the build embeds into the program; the charts that its
// script draws besides a run's state; and the page as one file with its data, which can be mailed.
//
//   const Chart chart{.title = "Speed-up", .x_label = "ranks", .lines = {{"measured", points}}};
//   write_file_atomically("a.html", page_file(map_node({{"charts", charts_node({chart})}})));
//
// Free functions without state; call them from any thread.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/monitor/run_view.h"

namespace lockstep::dashboard {

struct PageFile {
  std::string_view path;  // "/", "/page.css"
  std::string_view type;
  std::string_view body;
};
std::span<const PageFile> page_files();

// The page with `state` (docs/dashboard.md) embedded. It loads nothing, and its policy allows the
// browser only the page's own script.
std::string page_file(const Node& state);

// Values that are not finite leave a gap. Long lines are thinned, extremes included.
struct ChartLine {
  std::string name{};
  monitor::Curve points{};
  bool reference = false;             // dashed: the line to compare others with
  std::vector<std::string> labels{};  // at the points; empty: none
};

// The division of one interval of time: its shares, one for each of the chart's parts.
struct ChartColumn {
  double from = 0, to = 0;
  std::vector<double> shares{};
};

// A chart of lines, or of stacked columns.
struct Chart {
  std::string title{};
  std::string x_label{};
  std::string y_label{};
  std::vector<ChartLine> lines{};
  std::vector<std::string> parts{};
  std::vector<ChartColumn> columns{};
  bool log = false;        // both axes; values that are not positive leave a gap
  bool from_zero = false;  // both axes
  bool dots = false;       // at the points
  std::vector<std::pair<double, std::string>> x_ticks{};  // empty: round numbers
  std::string note{};
};
Node charts_node(const std::vector<Chart>& charts);
Node tables_node(const std::vector<monitor::Table>& tables);

}  // namespace lockstep::dashboard
