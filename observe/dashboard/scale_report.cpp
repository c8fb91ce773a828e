#include "observe/dashboard/scale_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "lockstep/core/error.h"
#include "lockstep/monitor/run_record.h"
#include "observe/dashboard/run_report.h"

namespace lockstep::dashboard {
namespace {

using ledger::Phase;
using monitor::Interval;
using monitor::RankRecord;
using monitor::RunRecord;
using monitor::Table;
using monitor::detail::median;

// As columns of the CSV file and keys of the JSON document; what is none of them is the last one.
constexpr const char* kPartKeys[] = {"data_wait", "forward",    "backward",       "communication",
                                     "optimizer", "evaluation", "logging_saving", "other"};

std::string ranks_text(int ranks) {
  return fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s");
}

std::vector<double> shares_of(const Interval& budget) {
  constexpr Phase kParts[] = {Phase::kData,          Phase::kForward,   Phase::kBackward,
                              Phase::kCommunication, Phase::kOptimizer, Phase::kEvaluation,
                              Phase::kLogging};
  std::vector<double> shares(std::size(kPartKeys));
  const monitor::PhaseSeconds spent = spent_s(budget);
  for (std::size_t i = 0; i < spent.size() && budget.seconds > 0; ++i) {
    const auto phase = static_cast<Phase>(i);
    const Phase with = phase == Phase::kSaving ? Phase::kLogging : phase;
    const auto part = std::ranges::find(kParts, with) - std::begin(kParts);
    shares[static_cast<std::size_t>(part)] += spent[i] / budget.seconds;
  }
  return shares;
}

std::optional<double> utilisation_of(const ScalePoint& point) {
  if (!point.run || !point.run->record) return std::nullopt;
  const RunRecord& record = *point.run->record;
  if (point.cores_per_rank == 0) return utilisation(record);
  const auto cores = mean_cores(record);
  if (!cores) return std::nullopt;
  return *cores / point.cores_per_rank;
}

// Percent over seconds, of the cores that the ranks were given. The intervals of ranks do not begin
// together, so each second is the sum of what overlaps it.
std::vector<std::pair<double, double>> busy_cores(const ScalePoint& point) {
  const RunRecord& record = *point.run->record;
  const double start = start_of(record);
  std::map<int, std::pair<double, double>> seconds;  // core seconds used, and given
  for (const RankRecord& rank : record.ranks) {
    for (const Interval& interval : rank.intervals) {
      if (!interval.process) continue;
      const double end = interval.unix_time_s - start, begin = end - interval.seconds;
      if (!(begin > -1) || !(end < 1e7)) continue;
      for (int second = static_cast<int>(std::max(0.0, begin)); second < end; ++second) {
        const double overlap = std::min(end, second + 1.0) - std::max<double>(begin, second);
        auto& [used, given] = seconds[second];
        used += overlap * interval.process->cores;
        given += overlap * point.cores_per_rank;
      }
    }
  }
  std::vector<std::pair<double, double>> points;
  for (const auto& [second, sums] : seconds)
    if (sums.second > 0.05) points.emplace_back(second + 0.5, 100 * sums.first / sums.second);
  return points;
}

std::vector<std::pair<double, double>> busy_gpus(const ScalePoint& point) {
  const RunRecord& record = *point.run->record;
  const double start = start_of(record);
  std::vector<std::pair<double, double>> points;
  for (const monitor::HostGpus& host : record.gpus) {
    for (const monitor::GpuSample& sample : host.samples) {
      std::vector<double> readings;
      for (const monitor::GpuReading& gpu : sample.gpus)
        if (gpu.utilisation_percent) readings.push_back(*gpu.utilisation_percent);
      // A host may have GPUs that the run does not use.
      std::ranges::sort(readings, std::greater<>());
      readings.resize(std::min(readings.size(), static_cast<std::size_t>(point.ranks)));
      double sum = 0;
      for (const double value : readings) sum += value;
      if (!readings.empty())
        points.emplace_back(sample.unix_time_s - start, sum / static_cast<double>(readings.size()));
    }
  }
  return points;
}

std::string or_empty(const std::optional<double>& value, const char* format) {
  return value ? fmt::format(fmt::runtime(format), *value) : "";
}

}  // namespace

std::vector<ScaleRow> scale_rows(std::vector<ScalePoint> points) {
  std::ranges::sort(points, {}, &ScalePoint::ranks);
  std::vector<ScaleRow> rows;
  for (const ScalePoint& point : points) {
    const ScalePoint& base = points.front();
    LOCKSTEP_ASSERT(!point.samples_per_s.empty() &&
                    point.samples_per_s.size() == base.samples_per_s.size());
    ScaleRow row{.point = point};
    row.samples_per_s = median(point.samples_per_s);
    row.step_s = static_cast<double>(point.global_batch()) / row.samples_per_s;
    if (!point.tokens_per_s.empty()) row.tokens_per_s = median(point.tokens_per_s);
    std::vector<double> ratios;
    for (std::size_t i = 0; i < point.samples_per_s.size(); ++i)
      ratios.push_back(point.samples_per_s[i] / base.samples_per_s[i]);
    row.speedup = median(ratios) * base.ranks;
    row.efficiency = row.speedup / point.ranks;
    row.utilisation = utilisation_of(point);
    if (point.run && point.run->record) row.budget = mean_budget(*point.run->record);
    rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<std::vector<std::string>> scale_csv_rows(const std::vector<ScaleRow>& rows) {
  std::vector<std::string> heads{"ranks",      "batch_per_rank", "accumulation", "global_batch",
                                 "step_ms",    "samples_per_s",  "tokens_per_s", "speedup",
                                 "efficiency", "utilisation"};
  heads.insert(heads.end(), std::begin(kPartKeys), std::end(kPartKeys));
  std::vector<std::vector<std::string>> table{heads};
  for (const ScaleRow& row : rows) {
    std::vector<std::string> cells{
        fmt::format("{}", row.point.ranks),        fmt::format("{}", row.point.batch),
        fmt::format("{}", row.point.accumulation), fmt::format("{}", row.point.global_batch()),
        fmt::format("{:.4f}", 1e3 * row.step_s),   fmt::format("{:.3f}", row.samples_per_s),
        or_empty(row.tokens_per_s, "{:.1f}"),      fmt::format("{:.4f}", row.speedup),
        fmt::format("{:.4f}", row.efficiency),     or_empty(row.utilisation, "{:.4f}")};
    for (const double share : shares_of(row.budget))
      cells.push_back(row.budget.steps > 0 ? fmt::format("{:.4f}", share) : "");
    table.push_back(std::move(cells));
  }
  return table;
}

Node scale_node(const std::vector<ScaleRow>& rows, const ScaleSetting& setting) {
  std::vector<Node> list;
  for (const ScaleRow& row : rows) {
    std::vector<Node> rates;
    for (const double rate : row.point.samples_per_s) rates.push_back(real_node(rate));
    NodeMembers members{{"ranks", integer_node(row.point.ranks)},
                        {"batch_per_rank", integer_node(row.point.batch)},
                        {"accumulation", integer_node(row.point.accumulation)},
                        {"global_batch", integer_node(row.point.global_batch())},
                        {"step_s", real_node(row.step_s)},
                        {"samples_per_s", real_node(row.samples_per_s)},
                        {"samples_per_s_of_rounds", list_node(std::move(rates))},
                        {"tokens_per_s", row.tokens_per_s ? real_node(*row.tokens_per_s) : Node{}},
                        {"speedup", real_node(row.speedup)},
                        {"efficiency", real_node(row.efficiency)},
                        {"utilisation", row.utilisation ? real_node(*row.utilisation) : Node{}}};
    if (row.budget.steps > 0) {
      NodeMembers shares;
      const auto values = shares_of(row.budget);
      for (std::size_t i = 0; i < values.size(); ++i)
        shares.emplace_back(kPartKeys[i], real_node(values[i]));
      members.emplace_back("budget", map_node(std::move(shares)));
    }
    if (row.point.run) members.emplace_back("run", text_node(row.point.run->id));
    list.push_back(map_node(std::move(members)));
  }
  return map_node({{"benchmark", text_node("scale")},
                   {"file", text_node(setting.file)},
                   {"scaling", text_node(setting.strong ? "strong" : "weak")},
                   {"steps", integer_node(setting.steps)},
                   {"rounds", integer_node(setting.rounds)},
                   {"notes", texts_node(setting.notes)},
                   {"rows", list_node(std::move(list))}});
}

namespace {

Chart speedup_chart(const std::vector<ScaleRow>& rows, const ScaleSetting& setting) {
  Chart chart{.title = fmt::format("Speed-up, {} scaling", setting.strong ? "strong" : "weak"),
              .x_label = "ranks",
              .y_label = "times the throughput",
              .lines = {{.name = "measured"}, {.name = "ideal", .reference = true}}};
  chart.from_zero = chart.dots = true;
  for (const ScaleRow& row : rows) {
    const double ranks = row.point.ranks;
    chart.lines[0].points.emplace_back(ranks, row.speedup);
    chart.lines[0].labels.push_back(
        fmt::format("{:.2f}x, {:.0f} %", row.speedup, 100 * row.efficiency));
    chart.lines[1].points.emplace_back(ranks, ranks);
    chart.x_ticks.emplace_back(ranks, fmt::format("{}", row.point.ranks));
  }
  return chart;
}

Chart utilisation_chart(const std::vector<ScaleRow>& rows) {
  const bool cores = !rows.empty() && rows.front().point.cores_per_rank > 0;
  Chart chart{.title = cores ? "Utilisation of the cores given to the ranks"
                             : "Utilisation of the ranks' GPUs",
              .x_label = "seconds since the start of the ranks",
              .y_label = "percent"};
  chart.from_zero = true;
  for (const ScaleRow& row : rows) {
    if (!row.point.run || !row.point.run->record) continue;
    auto points = cores ? busy_cores(row.point) : busy_gpus(row.point);
    if (!points.empty())
      chart.lines.push_back({.name = ranks_text(row.point.ranks), .points = std::move(points)});
  }
  return chart;
}

// The tiles for the largest number of ranks.
Node scale_tiles(const ScaleRow& row) {
  std::vector<Node> tiles;
  const auto add = [&](const char* title, const std::string& value, const std::string& unit) {
    tiles.push_back(texts_node({title, value, unit}));
  };
  add("Speed-up", fmt::format("{:.2f}", row.speedup), "with " + ranks_text(row.point.ranks));
  add("Efficiency", fmt::format("{:.0f}", 100 * row.efficiency), "%");
  add("Throughput", number_text(row.tokens_per_s.value_or(row.samples_per_s)),
      row.tokens_per_s ? "tokens/s" : "samples/s");
  if (row.utilisation) add("Utilisation", fmt::format("{:.0f}", 100 * *row.utilisation), "%");
  return list_node(std::move(tiles));
}

Table scale_figures(const std::vector<ScaleRow>& rows, const ScaleSetting& setting) {
  Table table{.title = "Figures",
              .heads = {"ranks", "batch per rank", "global batch", "time per step", "samples/s",
                        "tokens/s", "speed-up", "efficiency", "utilisation"}};
  for (const ScaleRow& row : rows)
    table.rows.push_back({fmt::format("{}", row.point.ranks),
                          row.point.accumulation > 1
                              ? fmt::format("{} x {}", row.point.batch, row.point.accumulation)
                              : fmt::format("{}", row.point.batch),
                          fmt::format("{}", row.point.global_batch()),
                          number_text(1e3 * row.step_s) + " ms", number_text(row.samples_per_s),
                          row.tokens_per_s ? number_text(*row.tokens_per_s) : "",
                          fmt::format("{:.2f}", row.speedup), percent_text(row.efficiency),
                          row.utilisation ? percent_text(*row.utilisation) : "not recorded"});
  table.notes.push_back(fmt::format(
      "{} scaling: {}. {} steps a run, {} interleaved round{}; medians.",
      setting.strong ? "Strong" : "Weak",
      setting.strong ? "the global batch stays the same" : "each rank has the same batch",
      setting.steps, setting.rounds, setting.rounds == 1 ? "" : "s"));
  return table;
}

}  // namespace

Node scale_state(const std::vector<ScaleRow>& rows, const ScaleSetting& setting) {
  std::vector<Node> budgets;
  std::vector<NamedRun> runs;
  for (const ScaleRow& row : rows) {
    const std::string name = ranks_text(row.point.ranks);
    if (row.budget.steps > 0) budgets.push_back(budget_entry(name, row.budget));
    if (row.point.run) runs.push_back({name, &*row.point.run});
  }
  std::vector<Chart> charts{speedup_chart(rows, setting), utilisation_chart(rows)};
  std::erase_if(charts, [](const Chart& chart) { return chart.lines.empty(); });
  NodeMembers members = named_findings(runs);
  members.insert(
      members.begin(),
      {{"run", map_node({{"id", text_node(setting.file)},
                         {"state", text_node("scaling")},
                         {"message", text_node(fmt::format("{}", fmt::join(setting.notes, " ")))},
                         {"recorded", bool_node(true)}})},
       {"charts", charts_node(charts)},
       {"budgets", list_node(std::move(budgets))},
       {"budget_note", text_node("The mean of the ranks, without the first seconds.")},
       {"tables", tables_node({scale_figures(rows, setting)})}});
  if (!rows.empty()) members.emplace_back("tiles", scale_tiles(rows.back()));
  return map_node(std::move(members));
}

}  // namespace lockstep::dashboard
