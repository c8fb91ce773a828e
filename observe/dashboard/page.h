// The dashboard's page: its files, which the build embeds into the program; the charts that its
// script draws besides a run's state; and the page as one file with its data, which can be mailed.
// In run_report.cpp what it draws: a finished run's state with tables and charts, how two runs
// differ, and the scaling of a training, compared with linear scaling.
//
//   const RunView run = monitor::read_run_view("out", monitor::Detail::kAll);
//   write_file_atomically("out/report.html", page_file(report_state(run)));
//   write_file_atomically("scale.html", page_file(scale_state(scale_rows(points), setting)));
//   const Chart chart{.title = "Speed-up", .x_label = "ranks", .lines = {{"measured", points}}};
//   write_file_atomically("a.html", page_file(map_node({{"charts", charts_node({chart})}})));
//
// Free functions without state; call them from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/document.h"
#include "lockstep/monitor/run_view.h"
#include "observe/dashboard/run_summary.h"

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

// ---------------------------------------------------------------- reports

// The states that the page draws (docs/dashboard.md).
Node report_state(const RunView& run);
Node comparison_state(const RunView& a, const RunView& b);

// The tables of the report; below, its charts.
std::vector<monitor::Table> run_tables(const RunView& run);
// Over the seconds since the start: load of each GPU, cores of each rank, phases of each rank.
std::vector<Chart> charts_of(const monitor::RunRecord& run);

// A row of `budgets`: milliseconds of a step, and the shares of its phases.
Node budget_entry(const std::string& name, const monitor::Interval& budget);

// ---------------------------------------------------------------- the scaling of a training

// The measurements at one number of ranks. Rates are of all ranks, one for each round.
struct ScalePoint {
  int ranks = 1;
  std::int64_t batch = 1;  // per rank and pass
  std::int64_t accumulation = 1;
  std::vector<double> samples_per_s{};
  std::vector<double> tokens_per_s{};     // empty: samples are not made of tokens
  int cores_per_rank = 0;                 // what a rank may use on a CPU; 0: it has a GPU
  std::optional<monitor::RunView> run{};  // of the round with the median rate

  std::int64_t global_batch() const { return batch * accumulation * ranks; }
};

// Medians over rounds. Speed-up is the rate relative to that of the fewest ranks in the same round,
// times their number: if that is one rank, its speed-up is 1.
struct ScaleRow {
  ScalePoint point{};
  double step_s = 0;
  double samples_per_s = 0;
  std::optional<double> tokens_per_s{};
  double speedup = 1;
  double efficiency = 1;                // speed-up divided by ranks
  std::optional<double> utilisation{};  // 0 to 1, of the GPUs or cores that the ranks were given
  monitor::Interval budget{};           // of one rank, the mean
};

// Sorted by ranks. All points have the same number of rounds, at least one.
std::vector<ScaleRow> scale_rows(std::vector<ScalePoint> points);

struct ScaleSetting {
  std::string file{};
  bool strong = false;  // keeps the global batch constant; else the batch of a rank
  std::int64_t steps = 0;
  int rounds = 0;
  int cores = 0;  // of the host, for ranks on CPUs; 0: they have GPUs
  std::vector<std::string> notes{};
};

// The cells of scale.csv, its header first; shares and percentages are between 0 and 1.
std::vector<std::vector<std::string>> scale_csv_rows(const std::vector<ScaleRow>& rows);
Node scale_node(const std::vector<ScaleRow>& rows, const ScaleSetting& setting);  // scale.json
Node scale_state(const std::vector<ScaleRow>& rows, const ScaleSetting& setting);

}  // namespace lockstep::dashboard
