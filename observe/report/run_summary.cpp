#include "observe/report/run_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lockstep/monitor/median.h"
#include "observe/report/budget_view.h"
#include "observe/report/markup.h"

namespace lockstep::report {
namespace {

using monitor::CheckpointInfo;
using monitor::Interval;
using monitor::MetricLine;
using monitor::RankRecord;

std::optional<double> last_of(const RunView& run, std::string_view metric) {
  const auto values = curve_of(run.metrics, metric);
  if (values.empty()) return std::nullopt;
  return values.back().second;
}

std::optional<double> least_of(const RunView& run, std::string_view metric) {
  std::optional<double> least;
  for (const auto& [step, value] : curve_of(run.metrics, metric))
    if (std::isfinite(value) && (!least || value < *least)) least = value;
  return least;
}

// The first line counts the start: allocations, files that are not in memory yet.
std::optional<double> median_of(const RunView& run, std::string_view metric) {
  std::vector<double> values;
  for (const auto& [step, value] : curve_of(run.metrics, metric))
    if (std::isfinite(value)) values.push_back(value);
  if (values.empty()) return std::nullopt;
  if (values.size() > 2) values.erase(values.begin());
  return monitor::detail::median(std::move(values));
}

std::optional<double> known(std::int64_t value) {
  if (value <= 0) return std::nullopt;
  return static_cast<double>(value);
}

void add_recorded(const RunView& run, std::vector<Figure>& figures) {
  std::optional<double> step_s, data, communication, busy, resident, ranks, parameters, batch,
      accumulation;
  if (run.record) {
    const monitor::RunFacts& facts = run.record->facts;
    ranks = known(facts.world_size);
    parameters = known(facts.parameters);
    batch = known(facts.per_device_batch);
    accumulation = known(facts.accumulation);
    const Interval budget = mean_budget(*run.record);
    if (budget.steps > 0) {
      step_s = budget.step_s();
      data = budget.share(ledger::Phase::kData);
      communication = budget.share(ledger::Phase::kCommunication);
    }
    busy = utilisation(*run.record);
    for (const RankRecord& rank : run.record->ranks)
      if (const std::uint64_t bytes = monitor::budget_row(rank).all.resident_bytes; bytes > 0)
        resident = std::max(resident.value_or(0), static_cast<double>(bytes));
  }
  figures.push_back({"time per step", step_s, Unit::kSeconds});
  figures.push_back({"share waiting for data", data, Unit::kPercent});
  figures.push_back({"share in exposed communication", communication, Unit::kPercent});
  figures.push_back({"utilisation of GPUs or cores", busy, Unit::kPercent});
  figures.push_back({"most resident memory of a rank", resident, Unit::kBytes});
  figures.push_back({"ranks", ranks});
  figures.push_back({"parameters", parameters});
  figures.push_back({"batch per device", batch});
  figures.push_back({"accumulation steps", accumulation});
}

void add_starts(const RunView& run, std::vector<RunEvent>& events) {
  if (!run.record || run.record->ranks.empty()) return;
  const RankRecord& rank = run.record->ranks.front();
  double end = 0;
  std::int64_t step = -1;
  for (const Interval& interval : rank.intervals) {
    const double begin = interval.unix_time_s - interval.seconds;
    if (end == 0) {
      events.push_back({{}, begin, fmt::format("Rank {} was started.", rank.rank)});
    } else if (interval.start) {
      RunEvent event{.unix_time_s = begin};
      if (step >= 0) event.step = step;
      event.text = fmt::format("Rank {} was started again after {}{}.", rank.rank,
                               duration_text(std::max(0.0, begin - end)),
                               step >= 0 ? fmt::format("; it had reached step {}", step) : "");
      events.push_back(std::move(event));
    }
    end = interval.unix_time_s;
    if (interval.step >= 0) step = interval.step;
  }
}

void add_superseded(const RunView& run, std::vector<RunEvent>& events) {
  for (const Superseded& part : superseded_of(run)) {
    std::int64_t from = -1;
    for (const CheckpointInfo& checkpoint : run.checkpoints)
      if (checkpoint.step < part.first) from = std::max(from, checkpoint.step);
    RunEvent event{.step = part.first};
    event.text = fmt::format("Resumed{}: steps {} to {} were measured again.",
                             from >= 0 ? fmt::format(", at the latest from step {}", from) : "",
                             part.first, part.last);
    events.push_back(std::move(event));
  }
}

// One event for all of them: a run may have thousands.
struct BadSteps {
  double count = 0;
  std::int64_t first = 0, last = 0;

  void add(std::int64_t step, double steps) {
    if (count == 0) first = step;
    last = step;
    count += steps;
  }
};

void add_gpu_problems(const RunView& run, std::vector<RunEvent>& events) {
  if (!run.record) return;
  for (const monitor::HostGpus& host : run.record->gpus) {
    std::vector<std::string> before(host.gpus.size());
    for (const monitor::GpuSample& sample : host.samples) {
      for (std::size_t gpu = 0; gpu < std::min(before.size(), sample.gpus.size()); ++gpu) {
        const std::string& problem = sample.gpus[gpu].problem;
        if (!problem.empty() && problem != before[gpu])
          events.push_back({{},
                            sample.unix_time_s,
                            fmt::format("Host {}, GPU {}: {}.", host.host, gpu, problem)});
        before[gpu] = problem;
      }
    }
  }
}

// "at step 120 of 400", "at step 120"
std::string at_step(const RunView& run) {
  if (run.metrics.empty()) return "";
  const std::int64_t step = run.metrics.back().step;
  const std::int64_t total = run.record ? run.record->facts.total_steps : 0;
  return total > 0 ? fmt::format(" at step {} of {}", step, total)
                   : fmt::format(" at step {}", step);
}

// As launcher or RunLog have written it down.
std::string end_text(const RunView& run, const monitor::RunFacts& facts, bool early) {
  if (!facts.failure.empty())
    return fmt::format("The run failed{}: {}{}", at_step(run), facts.failure,
                       facts.failure.ends_with('.') ? "" : ".");
  if (facts.ended_unix_s > 0)
    return fmt::format("The run {}{}, {} after its start.", early ? "was stopped" : "ended",
                       early ? at_step(run) : "",
                       duration_text(facts.ended_unix_s - facts.started_unix_s));
  return fmt::format("The run was killed{}: its process is gone and has not written an end.",
                     at_step(run));
}

}  // namespace

std::string Figure::text() const {
  if (!value) return "not recorded";
  switch (unit) {
    case Unit::kPercent:
      return percent_text(*value);
    case Unit::kSeconds:
      return *value < 1 ? number_text(1e3 * *value) + " ms" : duration_text(*value);
    case Unit::kBytes:
      return bytes_text(static_cast<std::uint64_t>(std::max(0.0, *value)));
    case Unit::kNumber:
      break;
  }
  return number_text(*value);
}

std::vector<Figure> figures_of(const RunView& run) {
  std::vector<Figure> figures;
  std::optional<double> steps;
  if (!run.metrics.empty()) steps = static_cast<double>(run.metrics.back().step);
  figures.push_back({"steps", steps});
  figures.push_back({"last loss", last_of(run, "loss")});
  figures.push_back({"lowest evaluation loss", least_of(run, "eval_loss")});
  figures.push_back({"samples per second (median)", median_of(run, "samples_per_second")});
  figures.push_back({"tokens per second (median)", median_of(run, "tokens_per_second")});
  add_recorded(run, figures);
  figures.push_back({"time since the last start", last_of(run, "train_runtime"), Unit::kSeconds});
  return figures;
}

std::vector<Superseded> superseded_of(const RunView& run) {
  std::vector<Superseded> parts;
  for (const MetricLine& line : run.superseded) {
    if (parts.empty() || line.step < parts.back().last) parts.push_back({line.step, line.step});
    parts.back().last = line.step;
  }
  return parts;
}

std::vector<RunEvent> bad_steps_of(const RunView& run) {
  std::vector<RunEvent> events;
  BadSteps skipped, lost;
  for (const MetricLine& line : run.metrics) {
    if (const double* steps = line.find("skipped_steps"); steps != nullptr && *steps > 0)
      skipped.add(line.step, *steps);
    if (const double* loss = line.find("loss"); loss != nullptr && !std::isfinite(*loss))
      lost.add(line.step, 1);
  }
  if (skipped.count > 0)
    events.push_back({skipped.first, 0,
                      fmt::format("{:.0f} steps were skipped, logged from step {} to {}: their "
                                  "gradient was not finite.",
                                  skipped.count, skipped.first, skipped.last)});
  if (lost.count > 0)
    events.push_back({lost.first, 0,
                      fmt::format("{:.0f} logged losses from step {} to {} were not finite.",
                                  lost.count, lost.first, lost.last)});
  return events;
}

// What is not sampled once a second has no time; it stands at its step.
RunEnd end_of(const RunView& run) {
  RunEnd end;
  const monitor::RunFacts* const facts = run.record ? &run.record->facts : nullptr;
  if (run.record && !run.record->ranks.empty())
    end.event.unix_time_s = run.record->ranks.front().intervals.back().unix_time_s;
  const MetricLine* const last = run.metrics.empty() ? nullptr : &run.metrics.back();
  if (last != nullptr) end.event.step = last->step;
  const monitor::Ending ending = monitor::ending_of(run);
  const bool failed = facts != nullptr && !facts->failure.empty();
  if (ending.through && !failed) {
    end.well = true;
    end.event.text = fmt::format("The run ended, {} after its last start.",
                                 duration_text(*last->find("train_runtime")));
  } else if (facts != nullptr && (failed || ending.known)) {
    end.well = !failed && !ending.killed && !ending.early;
    end.event.text = end_text(run, *facts, ending.early);
  } else if (last != nullptr) {
    end.event.text =
        "The last recorded step. There is no line of the run's end: it was stopped, has failed or "
        "still runs.";
  }
  return end;
}

std::vector<RunEvent> events_of(const RunView& run) {
  std::vector<RunEvent> events;
  add_starts(run, events);
  add_superseded(run, events);
  for (RunEvent& event : bad_steps_of(run)) events.push_back(std::move(event));
  add_gpu_problems(run, events);
  if (RunEnd end = end_of(run); !end.event.text.empty()) events.push_back(std::move(end.event));
  return events;
}

}  // namespace lockstep::report
