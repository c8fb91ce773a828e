#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/io/file.h"
#include "lockstep/monitor/run_figures.h"
#include "lockstep/monitor/run_record.h"
#include "observe/dashboard/page.h"

namespace lockstep::dashboard {
namespace {

using monitor::CheckpointInfo;
using monitor::ConfigValue;
using monitor::Interval;
using monitor::RankRecord;
using monitor::RunRecord;
using monitor::Table;

constexpr std::size_t kMostEvents = 200;
constexpr std::size_t kMostLines = 16;    // ranks or GPUs in one chart
constexpr std::size_t kMostOverTime = 8;  // ranks with a chart of their own
constexpr std::size_t kColumns = 120;     // of a chart over time

// ---------------------------------------------------------------- charts

Chart over_seconds(const std::string& title, const std::string& y_label, std::size_t all,
                   const char* what) {
  Chart chart{.title = title, .x_label = "seconds since the start", .y_label = y_label};
  chart.from_zero = true;
  if (all > kMostLines) chart.note = fmt::format("{} of {} {} are shown.", kMostLines, all, what);
  return chart;
}

Chart cores_over_time(const RunRecord& run) {
  Chart chart = over_seconds("CPU: cores that each rank uses", "cores", run.ranks.size(), "ranks");
  const double start = start_of(run);
  for (const RankRecord& rank : run.ranks) {
    if (chart.lines.size() == kMostLines) break;
    ChartLine line{.name = fmt::format("rank {}", rank.rank)};
    double end = 0;
    for (const Interval& interval : rank.intervals) {
      if (!interval.process) continue;
      // The end of one attempt and the start of the next are not joined.
      if (end > 0 && begin_of(interval) > end + 2)
        line.points.emplace_back(interval.unix_time_s - start, NAN);
      end = interval.unix_time_s;
      line.points.emplace_back(interval.unix_time_s - start, interval.process->cores);
    }
    if (!line.points.empty()) chart.lines.push_back(std::move(line));
  }
  return chart;
}

Chart gpus_over_time(const RunRecord& run) {
  std::size_t all = 0;
  for (const monitor::HostGpus& host : run.gpus) all += host.gpus.size();
  Chart chart = over_seconds("GPU: time with a kernel running", "percent", all, "GPUs");
  const double start = start_of(run);
  for (const monitor::HostGpus& host : run.gpus) {
    for (std::size_t gpu = 0; gpu < host.gpus.size(); ++gpu) {
      if (chart.lines.size() == kMostLines) return chart;
      ChartLine line{.name = run.gpus.size() > 1 ? fmt::format("host {} GPU {}", host.host, gpu)
                                                 : fmt::format("GPU {}", gpu)};
      for (const monitor::GpuSample& sample : host.samples) {
        const bool known =
            gpu < sample.gpus.size() && sample.gpus[gpu].utilisation_percent.has_value();
        line.points.emplace_back(sample.unix_time_s - start,
                                 known ? *sample.gpus[gpu].utilisation_percent : NAN);
      }
      chart.lines.push_back(std::move(line));
    }
  }
  return chart;
}

Chart budget_over_time(const RankRecord& rank, double start_unix_s) {
  Chart chart{.title = fmt::format("Rank {}: where its time went", rank.rank),
              .x_label = "seconds since the start"};
  for (std::size_t phase = 0; phase < ledger::kPhases; ++phase)
    chart.parts.emplace_back(monitor::phase_key(static_cast<ledger::Phase>(phase)));
  if (rank.intervals.empty()) return chart;
  const double width = (rank.intervals.back().unix_time_s - begin_of(rank.intervals.front())) /
                       static_cast<double>(kColumns);
  for (const Interval& interval : rank.intervals) {
    const double from = begin_of(interval) - start_unix_s, to = interval.unix_time_s - start_unix_s;
    // Neighbours share a column until it is wide enough to be seen; the time between two starts
    // stays open.
    const bool extends =
        !chart.columns.empty() && !interval.start && to - chart.columns.back().from <= width;
    if (!extends) chart.columns.push_back({from, to, std::vector<double>(chart.parts.size())});
    ChartColumn& column = chart.columns.back();
    column.to = to;
    const monitor::PhaseSeconds spent = spent_s(interval);
    for (std::size_t phase = 0; phase < spent.size(); ++phase) column.shares[phase] += spent[phase];
  }
  for (ChartColumn& column : chart.columns) {
    const double sum = std::accumulate(column.shares.begin(), column.shares.end(), 0.0);
    for (double& share : column.shares) share = sum > 0 ? share / sum : 0;
  }
  return chart;
}

}  // namespace

std::vector<Chart> charts_of(const RunRecord& run) {
  std::vector<Chart> charts{gpus_over_time(run), cores_over_time(run)};
  std::erase_if(charts, [](const Chart& chart) { return chart.lines.empty(); });
  if (!counts_steps(run)) return charts;
  const std::size_t shown = std::min(run.ranks.size(), kMostOverTime);
  for (std::size_t i = 0; i < shown; ++i)
    charts.push_back(budget_over_time(run.ranks[i], start_of(run)));
  if (shown < run.ranks.size())
    charts.back().note = fmt::format("{} of {} ranks are shown.", shown, run.ranks.size());
  return charts;
}

// ---------------------------------------------------------------- tables

namespace {

// The table has two measures of speed, which need not agree.
constexpr const char* kSpeeds =
    "Time per step has evaluations and saves in it. Samples and tokens per second are those of the "
    "steps alone, without either.";

Table summary_table(const RunView& run) {
  Table table{.title = "Figures", .heads = {"figure", "value"}};
  for (const Figure& figure : figures_of(run))
    if (figure.value) table.rows.push_back({figure.name, figure.text()});
  if (run.record && mean_budget(*run.record).steps > 0) table.notes.push_back(kSpeeds);
  return table;
}

Table gpus_table(const RunView& run) {
  Table table{.title = "GPUs",
              .heads = {"GPU", "utilisation", "memory", "of the card", "power", "throttled"}};
  if (!run.record) return table;
  for (const monitor::HostGpus& host : run.record->gpus) {
    for (const monitor::GpuFigures& gpu : monitor::gpu_figures(host)) {
      const auto text = [](const std::optional<double>& value, const char* unit) {
        return value ? number_text(*value) + unit : "not known";
      };
      table.rows.push_back(
          {fmt::format("{} of host {}", gpu.index, host.host), text(gpu.utilisation_percent, " %"),
           gpu.memory_bytes ? io::size_text(static_cast<std::uint64_t>(*gpu.memory_bytes))
                            : "not known",
           gpu.memory_share ? percent_text(*gpu.memory_share) : "not known",
           text(gpu.power_w, " W"), percent_text(gpu.throttled_share)});
    }
    if (host.gpus.size() > 1)
      table.notes.push_back(fmt::format("Host {}: all GPUs worked at once in {} of the samples.",
                                        host.host,
                                        percent_text(monitor::busy_together_share(host))));
  }
  return table;
}

// Over all starts.
Table ranks_table(const RunView& run) {
  std::vector<monitor::BudgetRow> rows;
  if (run.record)
    for (const RankRecord& rank : run.record->ranks) rows.push_back(monitor::budget_row(rank));
  return monitor::budget_table(rows);
}

Table checkpoints_table(const RunView& run) {
  Table table{.title = "Checkpoints", .heads = {"folder", "step", "size", "written", "state"}};
  for (const CheckpointInfo& one : run.checkpoints) {
    std::string state = one.problem.empty() ? "whole" : one.problem;
    if (run.best_step == one.step) state += ", best";
    table.rows.push_back({one.name, fmt::format("{}", one.step), io::size_text(one.bytes),
                          time_text(one.unix_time_s), state});
  }
  if (run.best_metric && run.best_step)
    table.notes.push_back(
        fmt::format("Best evaluation when the newest one was saved: {} at step {}.",
                    number_text(*run.best_metric), *run.best_step));
  table.notes.push_back(
      table.rows.empty()
          ? "There is no checkpoint."
          : "Names and sizes were checked; lockstep checkpoint verify checks bytes.");
  if (run.record && run.record->facts.program == "trainer" && !end_of(run).well) {
    const auto whole = std::ranges::find_if(run.checkpoints.rbegin(), run.checkpoints.rend(),
                                            [](const auto& one) { return one.problem.empty(); });
    if (whole != run.checkpoints.rend())
      table.notes.push_back(
          fmt::format("lockstep train --resume auto continues from {}.", whole->name));
  }
  return table;
}

Table events_table(const RunView& run) {
  const auto events = events_of(run);
  Table table{.title = "Events", .heads = {"step", "time", "what"}, .numbers = false};
  for (const RunEvent& event : events) {
    if (table.rows.size() == kMostEvents) break;
    table.rows.push_back({event.step ? fmt::format("{}", *event.step) : "",
                          time_text(event.unix_time_s), event.text});
  }
  if (events.empty()) table.notes.push_back("Nothing was recorded.");
  if (table.rows.size() < events.size())
    table.notes.push_back(
        fmt::format("{} of {} events are shown.", table.rows.size(), events.size()));
  return table;
}

// What was set, and the defaults; without origins all of it in the first.
std::pair<Table, Table> config_tables(const RunView& run) {
  const bool origins =
      std::ranges::any_of(run.config, [](const ConfigValue& value) { return !value.from.empty(); });
  const bool overrides = std::ranges::any_of(
      run.config, [](const ConfigValue& value) { return !value.beats.empty(); });
  Table set{.title = "Configuration", .heads = {"key", "value"}, .numbers = false};
  Table defaults = set;
  if (run.config.empty())
    set.notes.push_back("The configuration was not recorded.");
  else if (!origins)
    set.notes.push_back("Where each value comes from is not recorded.");
  if (origins) set.heads.push_back("from");
  if (origins && overrides) set.heads.push_back("overrides");
  for (const ConfigValue& value : run.config) {
    Table& table = origins && value.from == "default" ? defaults : set;
    table.rows.push_back({value.key, value.value});
    if (&table == &defaults || !origins) continue;
    table.rows.back().push_back(value.from);
    if (overrides) table.rows.back().push_back(fmt::format("{}", fmt::join(value.beats, ", ")));
  }
  defaults.title = fmt::format("{} defaults", defaults.rows.size());
  return {std::move(set), std::move(defaults)};
}

}  // namespace

std::vector<Table> run_tables(const RunView& run) {
  auto [config, defaults] = config_tables(run);
  std::vector<Table> tables{summary_table(run),     gpus_table(run),   ranks_table(run),
                            checkpoints_table(run), events_table(run), std::move(config),
                            std::move(defaults)};
  Table missing{.title = "Not recorded", .notes = run.missing};
  if (const std::string ranks = run.record ? missing_ranks_text(*run.record) : ""; !ranks.empty())
    missing.notes.push_back(ranks);
  tables.insert(tables.begin(), std::move(missing));
  std::erase_if(tables, [](const Table& one) { return one.rows.empty() && one.notes.empty(); });
  return tables;
}

// ---------------------------------------------------------------- what the page draws

namespace {

std::vector<std::string> about(const RunView& run) {
  std::vector<std::string> parts;
  if (!run.record) return parts;
  const monitor::RunFacts& facts = run.record->facts;
  if (facts.hosts > 1) parts.push_back(fmt::format("{} hosts", facts.hosts));
  for (const auto& [name, value] :
       {std::pair{"", facts.device}, {"backend ", facts.backend}, {"", facts.optimizer}})
    if (!value.empty()) parts.push_back(name + value);
  if (!facts.program.empty() && facts.program != "trainer") parts.push_back(facts.program);
  if (facts.started_unix_s > 0) parts.push_back("started " + time_text(facts.started_unix_s));
  return parts;
}

// The steps that resumed runs repeated, as marks.
Node marks_node(const RunView& run) {
  std::vector<Node> marks;
  for (const Superseded& part : superseded_of(run))
    marks.push_back(list_node({integer_node(part.first), text_node("resumed")}));
  return list_node(std::move(marks));
}

std::string budget_note(const RunRecord& run) {
  const bool device = std::ranges::any_of(run.ranks, [](const RankRecord& rank) {
    return monitor::has_device_times(settled_budget(rank).device_s);
  });
  return fmt::format("{}. Communication is what backward did not hide.",
                     device ? "Where each rank spent its steps, by its device's clock; what the "
                              "host did besides counts while the device had no work"
                            : "What the training thread of each rank did in all steps");
}

std::string ratio_text(const Figure& a, const Figure& b) {
  if (!a.value || !b.value || *a.value == 0) return "";
  const double ratio = *b.value / *a.value;
  return std::isfinite(ratio) ? fmt::format("{:.3f}", ratio) : "";
}

std::string name_of(const RunView& run) {
  std::error_code error;
  const auto path = std::filesystem::absolute(run.id, error).lexically_normal();
  const std::string name = path.filename().string();
  return name.empty() ? path.parent_path().filename().string() : name;
}

struct NamedRun {
  std::string name{};
  const RunView* run = nullptr;
};

// Names that distinguish them, also where the folders' last parts are the same.
std::vector<NamedRun> named(const RunView& a, const RunView& b) {
  std::vector<NamedRun> runs{{name_of(a), &a}, {name_of(b), &b}};
  if (runs[0].name == runs[1].name) {
    runs[0].name = "A: " + a.id;
    runs[1].name = "B: " + b.id;
  }
  return runs;
}

Table runs_table(const std::vector<NamedRun>& runs) {
  Table table{.title = "Runs", .heads = {"run", "folder", "how it ran", "how it ended"}};
  table.numbers = false;
  for (const NamedRun& run : runs) {
    std::vector<std::string> parts = about(*run.run);
    if (run.run->record)
      parts.insert(parts.begin(), fmt::format("{} rank{}", run.run->facts().world_size,
                                              run.run->facts().world_size == 1 ? "" : "s"));
    std::string end = end_of(*run.run).event.text;
    for (const RunEvent& event : bad_steps_of(*run.run)) end += " " + event.text;
    table.rows.push_back(
        {run.name, run.run->id, fmt::format("{}", fmt::join(parts, ", ")), std::move(end)});
    for (const std::string& what : run.run->missing)
      table.notes.push_back(fmt::format("{}: {}", run.name, what));
  }
  return table;
}

// The figures that both runs have, as tiles: the second run's relative to the first's.
Node ratio_tiles(const std::vector<Figure>& a, const std::vector<Figure>& b,
                 const std::string& first) {
  std::vector<Node> tiles;
  for (const char* name : {"last loss", "lowest evaluation loss", "tokens per second (median)",
                           "samples per second (median)", "time per step"}) {
    const auto at = std::ranges::find(a, name, &Figure::name) - a.begin();
    const std::string ratio =
        ratio_text(a[static_cast<std::size_t>(at)], b[static_cast<std::size_t>(at)]);
    std::string title = name;
    title[0] = static_cast<char>(title[0] - 'a' + 'A');
    if (!ratio.empty()) tiles.push_back(texts_node({title, ratio, "times " + first}));
  }
  return list_node(std::move(tiles));
}

Table compared_figures(const std::vector<NamedRun>& runs, const std::vector<Figure>& a,
                       const std::vector<Figure>& b) {
  Table table{.title = "Figures",
              .heads = {"figure", runs[0].name, runs[1].name, "second / first"}};
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].value || b[i].value)
      table.rows.push_back({a[i].name, a[i].text(), b[i].text(), ratio_text(a[i], b[i])});
  table.notes.push_back(kSpeeds);
  return table;
}

Table differences(const std::vector<NamedRun>& runs) {
  Table table{.title = "Configuration: what differs",
              .heads = {"key", runs[0].name, "from", runs[1].name, "from"},
              .numbers = false};
  const std::vector<ConfigValue>&a = runs[0].run->config, &b = runs[1].run->config;
  if (a.empty() || b.empty()) {
    table.notes.push_back("The configuration of one of them is not recorded.");
    return table;
  }
  for (const ConfigValue& value : a) {
    const auto other = std::ranges::find(b, value.key, &ConfigValue::key);
    if (other == b.end())
      table.rows.push_back({value.key, value.value, value.from, "not there", ""});
    else if (value.value != other->value)
      table.rows.push_back({value.key, value.value, value.from, other->value, other->from});
  }
  for (const ConfigValue& value : b)
    if (std::ranges::find(a, value.key, &ConfigValue::key) == a.end())
      table.rows.push_back({value.key, "not there", "", value.value, value.from});
  if (table.rows.empty()) table.notes.push_back("All keys have the same values.");
  return table;
}

// The members `findings`, each with its run's name, and `verdict`, for runs without findings.
NodeMembers named_findings(const std::vector<NamedRun>& runs) {
  std::vector<Node> findings;
  std::string text;
  for (const NamedRun& run : runs) {
    for (Node& finding : monitor::findings_node(run.run->findings).items) {
      finding.entries.push_back({"of", {}, text_node(run.name)});
      findings.push_back(std::move(finding));
    }
    const std::string& verdict = run.run->verdict.text;
    if (run.run->findings.empty() && !verdict.empty())
      text += fmt::format("{}{}: {}", text.empty() ? "" : " ", run.name, verdict);
  }
  return {{"findings", list_node(std::move(findings))},
          {"verdict", map_node({{"healthy", bool_node(false)}, {"text", text_node(text)}})}};
}

}  // namespace

Node budget_entry(const std::string& name, const Interval& budget) {
  return map_node({{"name", text_node(name)},
                   {"step_ms", real_node(1e3 * budget.step_s())},
                   {"budget", monitor::shares_node(budget)}});
}

Node report_state(const RunView& run) {
  Node state = monitor::snapshot_node(run);
  const auto add = [&](const char* key, Node value) {
    state.entries.push_back({key, {}, std::move(value)});
  };
  add("about", texts_node(about(run)));
  add("marks", marks_node(run));
  if (run.record) {
    add("charts", charts_node(charts_of(*run.record)));
    add("budget_note", text_node(budget_note(*run.record)));
  }
  add("tables", tables_node(run_tables(run)));
  return state;
}

Node comparison_state(const RunView& a, const RunView& b) {
  const std::vector<NamedRun> runs = named(a, b);
  const auto first = figures_of(a), second = figures_of(b);
  std::vector<Node> curves, budgets;
  std::vector<Table> tables{runs_table(runs), compared_figures(runs, first, second),
                            differences(runs)};
  for (const NamedRun& run : runs) {
    curves.push_back(map_node({{"name", text_node(run.name)},
                               {"series", monitor::snapshot_node(*run.run).at("series")}}));
    if (run.run->record && counts_steps(*run.run->record))
      budgets.push_back(budget_entry(run.name, mean_budget(*run.run->record)));
    else
      tables[0].notes.push_back(fmt::format("{} has no record of its step budget.", run.name));
    tables.push_back(events_table(*run.run));
    tables.back().title = "Events of " + run.name;
  }
  NodeMembers members = named_findings(runs);
  members.insert(members.begin(),
                 {{"run", map_node({{"id", text_node(runs[0].name + " and " + runs[1].name)},
                                    {"state", text_node("two runs")},
                                    {"recorded", bool_node(true)}})},
                  {"tiles", ratio_tiles(first, second, runs[0].name)},
                  {"curves", list_node(std::move(curves))},
                  {"budgets", list_node(std::move(budgets))},
                  {"budget_note", text_node("The mean of the ranks, without the first seconds.")},
                  {"tables", tables_node(tables)}});
  return map_node(std::move(members));
}

// ---------------------------------------------------------------- the scaling of a training

namespace {

using ledger::Phase;
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
