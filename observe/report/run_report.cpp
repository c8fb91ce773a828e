#include "observe/report/run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "lockstep/monitor/run_figures.h"
#include "observe/report/budget_view.h"
#include "observe/report/html.h"
#include "observe/report/markup.h"
#include "observe/report/run_summary.h"

namespace lockstep::report {
namespace {

using monitor::CheckpointInfo;
using monitor::ConfigValue;
using monitor::RankRecord;
using monitor::RunRecord;
using monitor::RunView;
using monitor::Table;

constexpr std::size_t kMostBars = 32;     // ranks in a chart of budgets
constexpr std::size_t kMostOverTime = 8;  // ranks with a chart of their own
constexpr std::size_t kMostOtherMetrics = 12;
constexpr std::size_t kMostEvents = 200;

std::string name_of(const RunView& run) {
  std::error_code error;
  const auto path = std::filesystem::absolute(run.id, error).lexically_normal();
  const std::string name = path.filename().string();
  return name.empty() ? path.parent_path().filename().string() : name;
}

// What a Trainer can continue from; its record says whether the run was one.
std::string continued_text(const RunView& run) {
  const auto whole = std::ranges::find_if(run.checkpoints.rbegin(), run.checkpoints.rend(),
                                          [](const auto& one) { return one.problem.empty(); });
  if (!run.record || run.record->facts.program != "trainer") return "";
  if (whole == run.checkpoints.rend()) return " There is no checkpoint to continue from.";
  return fmt::format(" lockstep train --resume auto continues from {}.", whole->name);
}

std::string head_of(const RunView& run) {
  std::string text = run.id;
  if (run.record) {
    const monitor::RunFacts& facts = run.record->facts;
    text += fmt::format(": {} rank{} on {} host{}", facts.world_size,
                        facts.world_size == 1 ? "" : "s", facts.hosts, facts.hosts == 1 ? "" : "s");
    if (!facts.device.empty()) text += ", " + facts.device;
    if (!facts.backend.empty()) text += ", backend " + facts.backend;
    if (!facts.optimizer.empty()) text += ", optimizer " + facts.optimizer;
    if (!facts.program.empty() && facts.program != "trainer") text += ", " + facts.program;
    if (facts.started_unix_s > 0) text += ", started " + time_text(facts.started_unix_s);
  }
  std::string out = paragraph(text + ".");
  const RunEnd end = end_of(run);
  if (end.well) {
    out += paragraph(end.event.text);
  } else if (!end.event.text.empty()) {
    out += note(end.event.text + continued_text(run));
  }
  for (const RunEvent& event : bad_steps_of(run)) out += note(event.text);
  for (const std::string& what : run.missing) out += note(what);
  return out;
}

// Two figures of speed stand in one table and need not agree.
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

// ---------------------------------------------------------------- training

std::vector<Mark> marks_of(const RunView& run) {
  std::vector<Mark> marks;
  for (const Superseded& part : superseded_of(run))
    marks.push_back({static_cast<double>(part.first), "resumed"});
  std::ranges::sort(marks, {}, &Mark::x);
  return marks;
}

LineChart over_steps(const std::string& title, const std::string& y_label, bool zero = false) {
  return {
      .title = title, .x_label = "step", .y_label = y_label, .y_from_zero = zero, .whole_x = true};
}

void add_series(LineChart& chart, const std::string& name, const RunView& run,
                const std::string& metric, bool marked = false) {
  auto points = curve_of(run.metrics, metric);
  if (!points.empty())
    chart.lines.push_back({.name = name, .points = std::move(points), .marked = marked});
}

const char* throughput_metric(const RunView& run) {
  return curve_of(run.metrics, "tokens_per_second").empty() ? "samples_per_second"
                                                            : "tokens_per_second";
}

LineChart throughput_over_steps(const std::string& metric) {
  return over_steps("Throughput of all ranks",
                    metric == "tokens_per_second" ? "tokens/s" : "samples/s", true);
}

std::string training_html(const RunView& run) {
  if (run.metrics.empty()) return paragraph("Nothing was logged.");
  const auto marks = marks_of(run);
  std::vector<Drawing> drawings;
  const auto add = [&](LineChart chart, const std::string& name, const std::string& metric,
                       bool marked = false) {
    add_series(chart, name, run, metric, marked);
    if (chart.lines.empty()) return;
    chart.marks = marks;
    drawings.push_back(draw(chart));
  };
  const std::string rate = throughput_metric(run);
  LineChart loss = over_steps("Loss", "loss");
  add_series(loss, "training", run, "loss");
  add(loss, "evaluation", "eval_loss", true);
  add(throughput_over_steps(rate), rate, rate);
  add(over_steps("Learning rate", "learning rate", true), "learning rate", "learning_rate");
  add(over_steps("Gradient norm before clipping", "norm", true), "gradient norm", "grad_norm");
  std::string out = figures(drawings);
  drawings.clear();
  for (const std::string& name : metric_names(run.metrics)) {
    const bool shown = name == "loss" || name == "eval_loss" || name == rate ||
                       name == "learning_rate" || name == "grad_norm" || name == "skipped_steps";
    if (!shown && drawings.size() < kMostOtherMetrics)
      add(over_steps(name, name), name, name, true);
  }
  if (!drawings.empty()) out += details("Other metrics", figures(drawings));
  return out;
}

// ---------------------------------------------------------------- ranks

std::string shown_text(std::size_t shown, std::size_t all, const char* what) {
  return shown < all ? paragraph(fmt::format("{} of {} {} are shown.", shown, all, what)) : "";
}

std::string budget_html(const RunView& run) {
  if (!run.record || run.record->ranks.empty())
    return paragraph("The step budget was not recorded.");
  const RunRecord& record = *run.record;
  if (!counts_steps(record))
    return paragraph(fmt::format("There is no step budget ({}).", monitor::without_steps(record)));
  std::vector<NamedBudget> budgets;
  for (const RankRecord& rank : record.ranks)
    if (budgets.size() < kMostBars)
      budgets.emplace_back(fmt::format("rank {}", rank.rank), settled_budget(rank));
  const bool device = std::ranges::any_of(
      budgets, [](const auto& named) { return monitor::has_device_times(named.second.device_s); });
  std::string out =
      paragraph(fmt::format("{}, without the first seconds. Communication is what backward did not "
                            "hide.",
                            device ? "Where the time of each rank went by its device's clock; what "
                                     "the host did besides counts while the device had no work"
                                   : "What the training thread of each rank did")) +
      figures({draw(budget_bars("Step budget", budgets))}) +
      shown_text(budgets.size(), record.ranks.size(), "ranks");
  std::vector<Drawing> drawings;
  const double start = start_of(record);
  for (const RankRecord& rank : record.ranks)
    if (drawings.size() < kMostOverTime) drawings.push_back(draw(budget_over_time(rank, start)));
  return out + figures(drawings) + shown_text(drawings.size(), record.ranks.size(), "ranks");
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
           gpu.memory_bytes ? bytes_text(static_cast<std::uint64_t>(*gpu.memory_bytes))
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

std::string utilisation_html(const RunView& run) {
  if (!run.record) return paragraph("Utilisation was not recorded.");
  const RunRecord& record = *run.record;
  std::vector<Drawing> drawings;
  const LineChart cores = cores_over_time(record), gpus = gpus_over_time(record);
  if (!gpus.lines.empty()) drawings.push_back(draw(gpus));
  if (!cores.lines.empty()) drawings.push_back(draw(cores));
  if (drawings.empty()) return paragraph("Utilisation was not recorded.");
  return figures(drawings) + shown_text(cores.lines.size(), record.ranks.size(), "ranks") +
         table(gpus_table(run)) + table(ranks_table(run));
}

// ---------------------------------------------------------------- files and events

Table checkpoints_table(const RunView& run) {
  Table table{.title = "Checkpoints", .heads = {"folder", "step", "size", "written", "state"}};
  for (const CheckpointInfo& one : run.checkpoints) {
    std::string state = one.problem.empty() ? "whole" : one.problem;
    if (run.best_step == one.step) state += ", best";
    table.rows.push_back({one.name, fmt::format("{}", one.step), bytes_text(one.bytes),
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

std::string config_html(const RunView& run) {
  const auto [set, defaults] = config_tables(run);
  return table(set) + (defaults.rows.empty() ? "" : details(defaults.title, table(defaults)));
}

// ---------------------------------------------------------------- two runs

std::string ratio_text(const Figure& a, const Figure& b) {
  if (!a.value || !b.value || *a.value == 0) return "";
  const double ratio = *b.value / *a.value;
  return std::isfinite(ratio) ? fmt::format("{:.3f}", ratio) : "";
}

struct Pair {
  const RunView& a;
  const RunView& b;
  std::string a_name, b_name;
};

// Names that distinguish them, also where the folders' last parts are the same.
Pair pair_of(const RunView& a, const RunView& b) {
  Pair pair{a, b, name_of(a), name_of(b)};
  if (pair.a_name == pair.b_name) {
    pair.a_name = "A: " + a.id;
    pair.b_name = "B: " + b.id;
  }
  return pair;
}

std::string figures_table(const Pair& runs) {
  Table rows{.heads = {"figure", runs.a_name, runs.b_name, "second / first"}};
  const auto a = figures_of(runs.a), b = figures_of(runs.b);
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].value || b[i].value)
      rows.rows.push_back({a[i].name, a[i].text(), b[i].text(), ratio_text(a[i], b[i])});
  rows.notes.push_back(kSpeeds);
  return table(rows);
}

Drawing overlaid(const Pair& runs, LineChart chart, const std::string& metric) {
  const bool marked = metric == "eval_loss";
  add_series(chart, runs.a_name, runs.a, metric, marked);
  add_series(chart, runs.b_name, runs.b, metric, marked);
  return draw(chart);
}

std::string curves_html(const Pair& runs) {
  std::vector<Drawing> drawings{overlaid(runs, over_steps("Training loss", "loss"), "loss")};
  if (!curve_of(runs.a.metrics, "eval_loss").empty() ||
      !curve_of(runs.b.metrics, "eval_loss").empty())
    drawings.push_back(overlaid(runs, over_steps("Evaluation loss", "loss"), "eval_loss"));
  const std::string rate = throughput_metric(runs.a);
  drawings.push_back(overlaid(runs, throughput_over_steps(rate), rate));
  drawings.push_back(overlaid(runs, over_steps("Learning rate", "learning rate"), "learning_rate"));
  return figures(drawings);
}

std::string budgets_html(const Pair& runs) {
  std::vector<NamedBudget> budgets;
  std::string out;
  for (const auto& [run, name] : {std::pair{&runs.a, runs.a_name}, {&runs.b, runs.b_name}}) {
    if (run->record && counts_steps(*run->record) && !run->record->ranks.empty())
      budgets.emplace_back(name, mean_budget(*run->record));
    else
      out += note(fmt::format("{} has no record of its step budget.", name));
  }
  if (budgets.empty()) return out;
  return out + figures({draw(budget_bars("Step budget, mean of the ranks", budgets))});
}

std::string differences_html(const Pair& runs) {
  if (runs.a.config.empty() || runs.b.config.empty())
    return paragraph("The configuration of one of them is not recorded.");
  Table rows{.heads = {"key", runs.a_name, "from", runs.b_name, "from"}, .numbers = false};
  const auto find = [](const RunView& run, const std::string& key) -> const ConfigValue* {
    const auto found = std::ranges::find(run.config, key, &ConfigValue::key);
    return found == run.config.end() ? nullptr : &*found;
  };
  for (const ConfigValue& a : runs.a.config) {
    const ConfigValue* b = find(runs.b, a.key);
    if (b == nullptr)
      rows.rows.push_back({a.key, a.value, a.from, "not there", ""});
    else if (a.value != b->value)
      rows.rows.push_back({a.key, a.value, a.from, b->value, b->from});
  }
  for (const ConfigValue& b : runs.b.config)
    if (find(runs.a, b.key) == nullptr)
      rows.rows.push_back({b.key, "not there", "", b.value, b.from});
  if (rows.rows.empty()) return paragraph("All keys have the same values.");
  return table(rows);
}

}  // namespace

std::string findings_html(const RunView& run) {
  if (!run.record) return paragraph("Without a record there is nothing to judge.");
  std::string out;
  for (const monitor::Finding& finding : run.findings) {
    Table rows{
        .heads = {fmt::format("{}{}{}", finding.rule,
                              finding.cause.empty() ? "" : ": " + finding.cause,
                              finding.rank >= 0 ? fmt::format(" (rank {})", finding.rank) : ""),
                  finding.what},
        .numbers = false};
    rows.rows.push_back({"evidence", finding.evidence});
    rows.rows.push_back({"change", finding.remedy});
    rows.rows.push_back({"expected gain", finding.gain > 0
                                              ? percent_text(finding.gain) + " of the step time"
                                              : "not known"});
    out += table(rows);
  }
  const std::string missing = monitor::missing_ranks_text(*run.record);
  if (!missing.empty()) out += paragraph(missing);
  if (!out.empty()) return out;
  if (monitor::enough_to_judge(*run.record)) return paragraph("No rule found anything to change.");
  return paragraph(counts_steps(*run.record) ? "There are too few recorded steps to judge."
                                             : fmt::format("Nothing was found ({}).",
                                                           monitor::without_steps(*run.record)));
}

std::vector<Table> run_tables(const RunView& run) {
  auto [config, defaults] = config_tables(run);
  std::vector<Table> tables{summary_table(run),     gpus_table(run),   ranks_table(run),
                            checkpoints_table(run), events_table(run), std::move(config),
                            std::move(defaults)};
  if (!run.missing.empty())
    tables.insert(tables.begin(), Table{.title = "Not recorded", .notes = run.missing});
  std::erase_if(tables, [](const Table& one) { return one.rows.empty() && one.notes.empty(); });
  return tables;
}

std::string run_report(const RunView& run) {
  return page(
      fmt::format("Run {}", name_of(run)),
      head_of(run) + section("Figures", table(summary_table(run))) +
          section("Findings", findings_html(run)) + section("Training", training_html(run)) +
          section("Step budget", budget_html(run)) + section("Utilisation", utilisation_html(run)) +
          section("Checkpoints", table(checkpoints_table(run))) +
          section("Events", table(events_table(run))) + section("Configuration", config_html(run)));
}

std::string comparison_report(const RunView& a, const RunView& b) {
  const Pair runs = pair_of(a, b);
  return page(fmt::format("{} and {}", runs.a_name, runs.b_name),
              head_of(a) + head_of(b) + section("Figures", figures_table(runs)) +
                  section("Curves", curves_html(runs)) +
                  section("Step budget", budgets_html(runs)) +
                  section("Configuration: what differs", differences_html(runs)) +
                  section(fmt::format("Findings of {}", runs.a_name), findings_html(a)) +
                  section(fmt::format("Findings of {}", runs.b_name), findings_html(b)) +
                  section(fmt::format("Events of {}", runs.a_name), table(events_table(a))) +
                  section(fmt::format("Events of {}", runs.b_name), table(events_table(b))));
}

}  // namespace lockstep::report
