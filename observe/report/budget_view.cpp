#include "observe/report/budget_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace lockstep::report {
namespace {

using ledger::Phase;
using monitor::Interval;
using monitor::PhaseSeconds;
using monitor::RankRecord;
using monitor::RunRecord;

constexpr std::size_t kColumns = 120;  // of a chart over time
constexpr double kLongestStart_s = 5;

// By the place in budget_parts().
std::size_t part_of(Phase phase) {
  constexpr Phase kParts[] = {Phase::kData,          Phase::kForward,   Phase::kBackward,
                              Phase::kCommunication, Phase::kOptimizer, Phase::kEvaluation,
                              Phase::kLogging};
  const Phase with = phase == Phase::kSaving ? Phase::kLogging : phase;
  return static_cast<std::size_t>(std::ranges::find(kParts, with) - std::begin(kParts));
}

double begin_of(const Interval& interval) {
  return interval.unix_time_s - interval.seconds;
}

void add(std::vector<double>& sums, const std::vector<double>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) sums[i] += values[i];
}

}  // namespace

const std::vector<Part>& budget_parts() {
  static const std::vector<Part> parts{
      {"data wait", Colour::kOrange},       {"forward", Colour::kSky},
      {"backward", Colour::kBlue},          {"communication", Colour::kVermilion},
      {"optimizer", Colour::kGreen},        {"evaluation", Colour::kPink},
      {"logging, saving", Colour::kYellow}, {"other", Colour::kGrey}};
  return parts;
}

std::vector<double> by_part(const PhaseSeconds& seconds) {
  std::vector<double> sums(budget_parts().size());
  for (std::size_t i = 0; i < seconds.size(); ++i)
    sums[part_of(static_cast<Phase>(i))] += seconds[i];
  return sums;
}

Interval settled_budget(const RankRecord& rank) {
  double recorded = 0;
  for (const Interval& interval : rank.intervals) recorded += interval.seconds;
  const Interval settled = budget_of(rank, std::min(kLongestStart_s, recorded / 4));
  return settled.steps > 0 ? settled : budget_of(rank);
}

Interval mean_budget(const RunRecord& run) {
  Interval mean;
  for (const RankRecord& rank : run.ranks) join(mean, settled_budget(rank));
  const double count = std::max(1.0, static_cast<double>(run.ranks.size()));
  mean.seconds /= count;
  mean.steps = std::llround(static_cast<double>(mean.steps) / count);
  for (double& seconds : mean.host_s) seconds /= count;
  for (double& seconds : mean.device_s) seconds /= count;
  return mean;
}

BarChart budget_bars(const std::string& title, const std::vector<NamedBudget>& budgets) {
  BarChart chart{.title = title, .x_label = "milliseconds per step", .parts = budget_parts()};
  for (const auto& [label, budget] : budgets) {
    std::vector<double> values = by_part(spent_s(budget));
    for (double& value : values)
      value = budget.steps > 0 ? 1e3 * value / static_cast<double>(budget.steps) : 0;
    chart.bars.push_back({label, std::move(values)});
  }
  return chart;
}

ColumnChart budget_over_time(const RankRecord& rank, double start_unix_s) {
  ColumnChart chart{.title = fmt::format("Rank {}: where its time went", rank.rank),
                    .x_label = "seconds since the start",
                    .parts = budget_parts()};
  if (rank.intervals.empty()) return chart;
  const double width = (rank.intervals.back().unix_time_s - begin_of(rank.intervals.front())) /
                       static_cast<double>(kColumns);
  for (const Interval& interval : rank.intervals) {
    const double from = begin_of(interval) - start_unix_s, to = interval.unix_time_s - start_unix_s;
    // Neighbours share a column until it is wide enough to be seen; the time between two starts
    // stays open.
    const bool extends =
        !chart.columns.empty() && !interval.start && to - chart.columns.back().from <= width;
    if (!extends) chart.columns.push_back({from, to, std::vector<double>(budget_parts().size())});
    chart.columns.back().to = to;
    add(chart.columns.back().values, by_part(spent_s(interval)));
  }
  return chart;
}

double start_of(const RunRecord& run) {
  double start = std::numeric_limits<double>::infinity();
  for (const RankRecord& rank : run.ranks)
    if (!rank.intervals.empty()) start = std::min(start, begin_of(rank.intervals.front()));
  return std::isfinite(start) ? start : run.facts.started_unix_s;
}

LineChart cores_over_time(const RunRecord& run) {
  LineChart chart{.title = "CPU: cores that each rank uses",
                  .x_label = "seconds since the start",
                  .y_label = "cores",
                  .y_from_zero = true};
  const double start = start_of(run);
  for (const RankRecord& rank : run.ranks) {
    if (chart.lines.size() == kMostLines) break;
    Line line{.name = fmt::format("rank {}", rank.rank), .marked = true};
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

LineChart gpus_over_time(const RunRecord& run) {
  LineChart chart{.title = "GPU: time with a kernel running",
                  .x_label = "seconds since the start",
                  .y_label = "percent",
                  .y_from_zero = true};
  const double start = start_of(run);
  for (const monitor::HostGpus& host : run.gpus) {
    for (std::size_t gpu = 0; gpu < host.gpus.size(); ++gpu) {
      if (chart.lines.size() == kMostLines) return chart;
      Line line{.name = run.gpus.size() > 1 ? fmt::format("host {} GPU {}", host.host, gpu)
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

std::optional<double> mean_gpu_percent(const RunRecord& run) {
  double first = std::numeric_limits<double>::infinity(), last = 0;
  for (const RankRecord& rank : run.ranks) {
    for (const Interval& interval : rank.intervals) {
      if (interval.steps == 0) continue;
      first = std::min(first, begin_of(interval));
      last = std::max(last, interval.unix_time_s);
    }
  }
  // A host may have GPUs that the run does not use: the busiest count, one for each rank.
  std::vector<double> means;
  for (const monitor::HostGpus& host : run.gpus) {
    std::vector<double> of_host;
    for (std::size_t gpu = 0; gpu < host.gpus.size(); ++gpu) {
      double sum = 0, count = 0;
      for (const monitor::GpuSample& sample : host.samples) {
        if (last > 0 && (sample.unix_time_s < first || sample.unix_time_s > last)) continue;
        if (gpu >= sample.gpus.size() || !sample.gpus[gpu].utilisation_percent) continue;
        sum += *sample.gpus[gpu].utilisation_percent;
        ++count;
      }
      if (count > 0) of_host.push_back(sum / count);
    }
    std::ranges::sort(of_host, std::greater<>());
    const auto used = static_cast<std::size_t>(std::max(1, run.facts.ranks_on_host));
    if (of_host.size() > used) of_host.resize(used);
    means.insert(means.end(), of_host.begin(), of_host.end());
  }
  if (means.empty()) return std::nullopt;
  return std::accumulate(means.begin(), means.end(), 0.0) / static_cast<double>(means.size());
}

std::optional<double> mean_cores(const RunRecord& run) {
  double sum = 0;
  for (const RankRecord& rank : run.ranks) {
    const auto process = monitor::budget_row(rank).process();
    if (!process) return std::nullopt;
    sum += process->cores;
  }
  if (run.ranks.empty()) return std::nullopt;
  return sum / static_cast<double>(run.ranks.size());
}

std::optional<double> utilisation(const RunRecord& run) {
  const bool unknown = run.facts.device.empty() && !run.gpus.empty();
  if (run.facts.device.starts_with("cuda") || unknown) {
    const auto percent = mean_gpu_percent(run);
    if (!percent) return std::nullopt;
    return *percent / 100;
  }
  const int available = run.facts.cores * std::max(1, run.facts.hosts);
  const auto cores = mean_cores(run);
  if (!cores || available <= 0) return std::nullopt;
  return *cores * static_cast<double>(run.ranks.size()) / available;
}

}  // namespace lockstep::report
