#include "lockstep/monitor/run_figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "lockstep/monitor/run_record.h"

namespace lockstep::monitor {

namespace {

using ledger::Phase;

constexpr double kGiB = 1u << 30;
// A smaller share is shown as 0.0 %.
constexpr double kNothing = 0.0005;

// All of them, in a step's order: the shares add up to 1.
constexpr Phase kParts[] = {Phase::kData,          Phase::kForward,    Phase::kBackward,
                            Phase::kCommunication, Phase::kOptimizer,  Phase::kEvaluation,
                            Phase::kLogging,       Phase::kSaving,     Phase::kStartup,
                            Phase::kEnded,         Phase::kDeviceWait, Phase::kNone};
static_assert(std::size(kParts) == ledger::kPhases);

}  // namespace

BudgetRow budget_row(const RankRecord& rank, double from_unix_s) {
  BudgetRow row{.rank = rank.rank, .budget = budget_of(rank, 0, from_unix_s)};
  row.collective_share = mean_collective_share(rank, from_unix_s);
  for (const Phase phase : kParts)
    row.shares.emplace_back(phase_key(phase), row.budget.share(phase));
  for (const Interval& interval : rank.intervals)
    if (interval.unix_time_s >= from_unix_s) join(row.all, interval);
  return row;
}

std::vector<BudgetRow> budget_rows(const RunRecord& run) {
  std::vector<BudgetRow> rows;
  for (const RankRecord& rank : run.ranks)
    rows.push_back(budget_row(rank, run.facts.started_unix_s));
  return rows;
}

std::string table_text(const Table& table) {
  std::vector<std::size_t> widths;
  for (const std::string& head : table.heads) widths.push_back(head.size());
  for (const auto& row : table.rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  const auto add = [&](const std::vector<std::string>& cells) {
    for (std::size_t i = 0; i < cells.size(); ++i)
      text += fmt::format("  {:>{}}", cells[i], widths[i]);
  };
  add(table.heads);
  for (const auto& row : table.rows) {
    text += '\n';
    add(row);
  }
  return text;
}

Table budget_table(const std::vector<BudgetRow>& rows) {
  Table table{.title = "Where the time went", .rows = {rows.size(), std::vector<std::string>{}}};
  const auto any = [&](auto is) { return std::ranges::any_of(rows, is); };
  const auto add = [&](const char* head, auto text) {
    table.heads.emplace_back(head);
    for (std::size_t i = 0; i < rows.size(); ++i) table.rows[i].push_back(text(rows[i]));
  };
  const auto percent = [](const std::optional<double>& share) {
    return share ? fmt::format("{:.1f} %", 100 * *share) : std::string("-");
  };
  add("rank", [](const BudgetRow& row) { return std::to_string(row.rank); });
  add("steps", [](const BudgetRow& row) { return std::to_string(row.budget.steps); });
  if (any([](const BudgetRow& row) { return row.budget.steps > 0; })) {
    add("ms/step",
        [](const BudgetRow& row) { return fmt::format("{:.2f}", 1e3 * row.budget.step_s()); });
    for (std::size_t part = 0; part < std::size(kParts); ++part) {
      const auto share = [part](const BudgetRow& row) { return row.shares[part].second; };
      if (any([&](const BudgetRow& row) { return share(row) >= kNothing; }))
        add(phase_key(kParts[part]), [&](const BudgetRow& row) { return percent(share(row)); });
    }
  }
  if (any([](const BudgetRow& row) { return row.collective_share.has_value(); }))
    add("in collectives", [&](const BudgetRow& row) { return percent(row.collective_share); });
  const auto rate = [](const BudgetRow& row, double ProcessRates::*of) {
    return row.process() ? (*row.process()).*of : 0;
  };
  add("cores",
      [&](const BudgetRow& row) { return fmt::format("{:.2f}", rate(row, &ProcessRates::cores)); });
  add("memory", [](const BudgetRow& row) {
    return fmt::format("{:.2f} GiB", static_cast<double>(row.all.resident_bytes) / kGiB);
  });
  add("threads", [](const BudgetRow& row) { return std::to_string(row.all.threads); });
  add("page faults/s", [&](const BudgetRow& row) {
    return fmt::format("{:.0f}", rate(row, &ProcessRates::minor_faults_per_s));
  });
  if (any([](const BudgetRow& row) { return row.all.cpu_limit_cores.has_value(); })) {
    add("CPU limit", [](const BudgetRow& row) {
      const auto& limit = row.all.cpu_limit_cores;
      return limit ? fmt::format("{:.2f}", *limit) : std::string("-");
    });
    add("stopped by it", [&](const BudgetRow& row) { return percent(row.all.throttled_share); });
  }
  return table;
}

namespace {

std::optional<double> median_or_nothing(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  return detail::median(std::move(values));
}

GpuFigures figures_of(const HostGpus& host, std::size_t index) {
  std::vector<double> utilisation, memory, filled, power;
  double throttled = 0, read = 0;
  for (const GpuSample& sample : host.samples) {
    if (index >= sample.gpus.size() || !sample.gpus[index].problem.empty()) continue;
    const GpuReading& gpu = sample.gpus[index];
    ++read;
    if (gpu.utilisation_percent) utilisation.push_back(*gpu.utilisation_percent);
    if (gpu.power_w) power.push_back(*gpu.power_w);
    if (gpu.memory_used_bytes) memory.push_back(static_cast<double>(*gpu.memory_used_bytes));
    if (gpu.memory_used_bytes && gpu.memory_total_bytes.value_or(0) > 0)
      filled.push_back(static_cast<double>(*gpu.memory_used_bytes) /
                       static_cast<double>(*gpu.memory_total_bytes));
    if (gpu.clock_reasons && is_throttled(*gpu.clock_reasons)) ++throttled;
  }
  return {.index = index < host.gpus.size() ? host.gpus[index].index : static_cast<int>(index),
          .utilisation_percent = median_or_nothing(std::move(utilisation)),
          .memory_bytes = median_or_nothing(std::move(memory)),
          .memory_share = median_or_nothing(std::move(filled)),
          .power_w = median_or_nothing(std::move(power)),
          .throttled_share = read > 0 ? throttled / read : 0};
}

}  // namespace

std::vector<GpuFigures> gpu_figures(const HostGpus& host) {
  std::size_t gpus = 0;
  for (const GpuSample& sample : host.samples) gpus = std::max(gpus, sample.gpus.size());
  std::vector<GpuFigures> all;
  for (std::size_t i = 0; i < gpus; ++i) all.push_back(figures_of(host, i));
  return all;
}

HostGpus gpus_in_use(const HostGpus& host) {
  // A context takes some hundred MiB; a card without one shows a few.
  constexpr double kContextBytes = 256u << 20;
  constexpr unsigned kWorkPercent = 10;
  const auto all = gpu_figures(host);
  const auto in_use = [&](std::size_t place) {
    return all[place].memory_bytes.value_or(0) >= kContextBytes ||
           std::ranges::any_of(host.samples, [&](const GpuSample& sample) {
             return place < sample.gpus.size() &&
                    sample.gpus[place].utilisation_percent.value_or(0) >= kWorkPercent;
           });
  };
  HostGpus used{.host = host.host};
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!in_use(i)) continue;
    places.push_back(i);
    used.gpus.push_back(i < host.gpus.size() ? host.gpus[i] : GpuIdentity{});
    used.gpus.back().index = all[i].index;
  }
  for (const GpuSample& sample : host.samples) {
    GpuSample& own = used.samples.emplace_back(GpuSample{.unix_time_s = sample.unix_time_s});
    for (const std::size_t place : places)
      own.gpus.push_back(place < sample.gpus.size() ? sample.gpus[place] : GpuReading{});
  }
  return used;
}

double busy_together_share(const HostGpus& host) {
  constexpr unsigned kBusyPercent = 85;
  const auto busy = [](const GpuReading& gpu) {
    return gpu.utilisation_percent.value_or(0) >= kBusyPercent;
  };
  const auto together =
      std::count_if(host.samples.begin(), host.samples.end(), [&](const GpuSample& sample) {
        return !sample.gpus.empty() && std::all_of(sample.gpus.begin(), sample.gpus.end(), busy);
      });
  return host.samples.empty()
             ? 0
             : static_cast<double>(together) / static_cast<double>(host.samples.size());
}

namespace {

using ledger::index;
using ledger::Phase;

constexpr Phase kOfHost[] = {Phase::kData, Phase::kSaving, Phase::kEvaluation, Phase::kLogging,
                             Phase::kStartup};

double sum_of(const PhaseSeconds& seconds) {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

// Scales the parts down if they exceed the whole: clocks are read one after the other, and a
// device's time is recorded when it is complete, possibly in a later interval.
PhaseSeconds within(double seconds, PhaseSeconds parts) {
  const double sum = sum_of(parts);
  if (sum > seconds)
    for (double& part : parts) part *= std::max(seconds, 0.0) / sum;
  return parts;
}

// Without Phase::kNone, the time between the phases of the device's stream.
PhaseSeconds phases_of(double seconds, const PhaseSeconds& device_s) {
  PhaseSeconds phases = within(seconds, device_s);
  phases[index(Phase::kNone)] = 0;
  return phases;
}

}  // namespace

bool has_device_times(const PhaseSeconds& device_s) {
  return sum_of(device_s) > device_s[index(Phase::kNone)];
}

double idle_s(double seconds, const PhaseSeconds& device_s) {
  return std::max(0.0, seconds - sum_of(phases_of(seconds, device_s)));
}

PhaseSeconds spent_s(double seconds, const PhaseSeconds& host_s, const PhaseSeconds& device_s) {
  PhaseSeconds spent = within(seconds, host_s);
  if (has_device_times(device_s)) {
    spent = phases_of(seconds, device_s);
    double idle = idle_s(seconds, device_s);
    for (const Phase phase : kOfHost) {
      double& part = spent[index(phase)];
      const double charged = std::clamp(host_s[index(phase)] - part, 0.0, idle);
      part += charged;
      idle -= charged;
    }
  }
  double& rest = spent[index(Phase::kNone)];
  rest = 0;
  rest = std::max(0.0, seconds - sum_of(spent));
  return spent;
}

}  // namespace lockstep::monitor
