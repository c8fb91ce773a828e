#include "observe/report/scale_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "lockstep/core/error.h"
#include "lockstep/monitor/median.h"
#include "observe/report/html.h"
#include "observe/report/markup.h"

namespace lockstep::report {
namespace {

using monitor::Interval;
using monitor::RankRecord;
using monitor::RunRecord;
using monitor::Table;
using monitor::detail::median;

// As columns of the CSV file and keys of the JSON document.
constexpr const char* kPartKeys[] = {"data_wait", "forward",    "backward",       "communication",
                                     "optimizer", "evaluation", "logging_saving", "other"};

std::string ranks_text(int ranks) {
  return fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s");
}

std::vector<double> shares_of(const Interval& budget) {
  std::vector<double> shares = by_part(spent_s(budget));
  for (double& value : shares) value = budget.seconds > 0 ? value / budget.seconds : 0;
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

LineChart speedup_chart(const std::vector<ScaleRow>& rows, const ScaleSetting& setting) {
  LineChart chart{.title = fmt::format("Speed-up, {} scaling", setting.strong ? "strong" : "weak"),
                  .x_label = "ranks",
                  .y_label = "times the throughput",
                  .x_from_zero = true,
                  .y_from_zero = true,
                  .ticks_at_points = true};
  Line ideal{.name = "ideal", .reference = true}, measured{.name = "measured", .marked = true};
  for (const ScaleRow& row : rows) {
    const double ranks = row.point.ranks;
    ideal.points.emplace_back(ranks, ranks);
    measured.points.emplace_back(ranks, row.speedup);
    measured.labels.push_back(fmt::format("{:.2f}x, {:.0f} %", row.speedup, 100 * row.efficiency));
  }
  chart.lines = {std::move(measured), std::move(ideal)};
  return chart;
}

BarChart scale_budget_chart(const std::vector<ScaleRow>& rows) {
  std::vector<NamedBudget> budgets;
  for (const ScaleRow& row : rows)
    if (row.budget.steps > 0) budgets.emplace_back(ranks_text(row.point.ranks), row.budget);
  return budget_bars("Step budget, mean of the ranks", budgets);
}

LineChart scale_utilisation_chart(const std::vector<ScaleRow>& rows) {
  const bool cores = !rows.empty() && rows.front().point.cores_per_rank > 0;
  LineChart chart{.title = cores ? "Utilisation of the cores given to the ranks"
                                 : "Utilisation of the ranks' GPUs",
                  .x_label = "seconds since the start of the ranks",
                  .y_label = "percent",
                  .y_from_zero = true};
  for (const ScaleRow& row : rows) {
    if (!row.point.run || !row.point.run->record) continue;
    auto points = cores ? busy_cores(row.point) : busy_gpus(row.point);
    if (!points.empty())
      chart.lines.push_back(
          {.name = ranks_text(row.point.ranks), .points = std::move(points), .marked = true});
  }
  return chart;
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

std::string scale_page(const std::vector<ScaleRow>& rows, const ScaleSetting& setting) {
  Table figures_table{.heads = {"ranks", "batch per rank", "global batch", "time per step",
                                "samples/s", "tokens/s", "speed-up", "efficiency", "utilisation"}};
  Table budget_table{.heads = {"ranks"}};
  for (const Part& part : budget_parts()) budget_table.heads.push_back(part.name);
  for (const ScaleRow& row : rows) {
    figures_table.rows.push_back(
        {fmt::format("{}", row.point.ranks),
         row.point.accumulation > 1
             ? fmt::format("{} x {}", row.point.batch, row.point.accumulation)
             : fmt::format("{}", row.point.batch),
         fmt::format("{}", row.point.global_batch()), number_text(1e3 * row.step_s) + " ms",
         number_text(row.samples_per_s), row.tokens_per_s ? number_text(*row.tokens_per_s) : "",
         fmt::format("{:.2f}", row.speedup), percent_text(row.efficiency),
         row.utilisation ? percent_text(*row.utilisation) : "not recorded"});
    if (row.budget.steps == 0) continue;
    budget_table.rows.push_back({fmt::format("{}", row.point.ranks)});
    for (const double share : shares_of(row.budget))
      budget_table.rows.back().push_back(percent_text(share));
  }
  std::string head = paragraph(fmt::format(
      "{} scaling of {}: {}. {} steps a run, {} interleaved round{}; medians.",
      setting.strong ? "Strong" : "Weak", setting.file,
      setting.strong ? "the global batch stays the same" : "each rank has the same batch",
      setting.steps, setting.rounds, setting.rounds == 1 ? "" : "s"));
  for (const std::string& text : setting.notes) head += note(text);
  std::vector<Drawing> drawings{draw(speedup_chart(rows, setting))};
  const BarChart budget = scale_budget_chart(rows);
  if (!budget.bars.empty()) drawings.push_back(draw(budget));
  const LineChart utilisation_chart = scale_utilisation_chart(rows);
  if (!utilisation_chart.lines.empty()) drawings.push_back(draw(utilisation_chart));
  std::string body =
      head + section("Figures", table(figures_table)) + section("Charts", figures(drawings)) +
      section("Step budget",
              budget_table.rows.empty() ? paragraph("It was not recorded.") : table(budget_table));
  for (const ScaleRow& row : rows)
    if (row.point.run)
      body += section(fmt::format("Findings with {}", ranks_text(row.point.ranks)),
                      findings_html(*row.point.run));
  return page("Scaling report", body);
}

}  // namespace lockstep::report
