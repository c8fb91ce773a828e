#include "observe/dashboard/run_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <functional>
#include <limits>
#include <numeric>

#include "lockstep/io/file.h"
#include "lockstep/monitor/prometheus.h"
#include "lockstep/monitor/run_record.h"

namespace lockstep::dashboard {

namespace {

using monitor::CheckpointInfo;
using monitor::Interval;
using monitor::MetricLine;
using monitor::RankRecord;
using monitor::RunRecord;

constexpr double kLongestStart_s = 5;

std::string duration_text(double seconds) {
  if (!(seconds < 1e15)) return number_text(seconds) + " s";
  if (seconds < 60) return fmt::format("{:.3g} s", seconds);
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole % 3600 / 60);
}

}  // namespace

double begin_of(const Interval& interval) {
  return interval.unix_time_s - interval.seconds;
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

double start_of(const RunRecord& run) {
  double start = std::numeric_limits<double>::infinity();
  for (const RankRecord& rank : run.ranks)
    if (!rank.intervals.empty()) start = std::min(start, begin_of(rank.intervals.front()));
  return std::isfinite(start) ? start : run.facts.started_unix_s;
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

// ---------------------------------------------------------------- figures and events

std::string number_text(double value) {
  if (std::isnan(value)) return "not a number";
  if (std::isinf(value)) return value > 0 ? "infinite" : "-infinite";
  if (std::abs(value) < 999.95 || std::abs(value) >= 1e12) return fmt::format("{:.4g}", value);
  std::string text = fmt::format("{:.0f}", value);
  const std::size_t first = text.starts_with('-') ? 1 : 0;
  for (std::size_t at = text.size(); at > first + 3;) text.insert(at -= 3, 1, ',');
  return text;
}

std::string percent_text(double share) {
  return fmt::format("{:.1f} %", 100 * share);
}

std::string time_text(double unix_time_s) {
  if (!(unix_time_s > 0 && unix_time_s < 1e11)) return "";
  const auto whole = static_cast<std::time_t>(unix_time_s);
  std::tm parts{};
  ::gmtime_r(&whole, &parts);
  char text[64];
  const std::size_t size = std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts);
  return {text, size};
}

namespace {

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

// The end as recorded by launcher or RunLog.
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
      return io::size_text(static_cast<std::uint64_t>(std::max(0.0, *value)));
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

// An event that is not sampled each second has no time; it is placed at its step.
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

namespace {

using monitor::Prometheus;
using monitor::RankStatus;

void publish(Prometheus& page, const monitor::RankState& rank) {
  const monitor::Labels labels = {{"rank", std::to_string(rank.rank)}};
  page.set({"lockstep_rank_up", "1 while the rank runs."}, labels,
           rank.status == RankStatus::kRunning ? 1 : 0);
  page.set({"lockstep_rank_failed", "1 after the rank has failed."}, labels,
           rank.status == RankStatus::kFailed ? 1 : 0);
  if (rank.step >= 0)
    page.set({"lockstep_step", "Optimizer steps that the rank has done."}, labels,
             static_cast<double>(rank.step));
  if (rank.step_ms > 0)
    page.set({"lockstep_step_seconds", "Time of a step, the mean of about the last 5 s."}, labels,
             rank.step_ms / 1e3);
  if (rank.newest && rank.newest->seconds > 0) {
    const monitor::PhaseSeconds spent = monitor::spent_s(*rank.newest);
    for (std::size_t i = 0; i < ledger::kPhases; ++i) {
      monitor::Labels both = labels;
      both.emplace_back("phase", monitor::phase_key(static_cast<ledger::Phase>(i)));
      page.set(
          {"lockstep_phase_ratio", "Share of the last interval that the rank spent in a phase."},
          both, spent[i] / rank.newest->seconds);
    }
  }
  if (rank.position)
    page.set({"lockstep_collective_sequence",
              "Number of the rank's collective: the oldest under way, else its newest."},
             labels, static_cast<double>(rank.position->sequence));
  if (rank.process) monitor::publish(page, rank.rank, *rank.process);
  monitor::publish(page, rank.rank, rank.cgroup);
}

}  // namespace

std::string RunMetrics::text(const monitor::RunView& view) {
  Prometheus page;
  for (const char* state : {"starting", "running", "ended", "failed"})
    page.set({"lockstep_run_state", "1 for the state that the run is in."}, {{"state", state}},
             view.state == state ? 1 : 0);
  page.set({"lockstep_stall_seconds", "How long no rank has moved; 0 while they do."}, {},
           view.stall ? view.stall->seconds : 0);
  page.set({"lockstep_world_size", "Ranks of the run, on all hosts."}, {}, view.facts().world_size);
  page.set({"lockstep_run_attempt", "How often all ranks were started again."}, {}, view.attempt);
  page.set({"lockstep_run_start_time_seconds", "When the run began, since the epoch."}, {},
           view.started_s);
  if (view.facts().total_steps > 0)
    page.set({"lockstep_total_steps", "Optimizer steps that the run will have done at its end."},
             {}, static_cast<double>(view.facts().total_steps));
  if (const auto left = seconds_left(view))
    page.set({"lockstep_left_seconds", "Until the last step, as the run went so far."}, {}, *left);
  if (const auto loss = newest_logged(view, "loss"))
    page.set({"lockstep_loss", "Training loss that was logged last."}, {}, *loss);
  if (const auto rate = newest_logged(view, "tokens_per_second"))
    page.set({"lockstep_tokens_per_second", "Tokens per second of all ranks, as logged last."}, {},
             *rate);
  for (const std::string& name : monitor::metric_names(view.metrics))
    page.set({"lockstep_logged", "What the program logged last, by its name."}, {{"name", name}},
             *newest_logged(view, name));
  for (const monitor::Finding& finding : view.findings) rules_.insert(finding.rule);
  for (const std::string& rule : rules_) {
    double count = 0;
    for (const monitor::Finding& finding : view.findings) count += finding.rule == rule ? 1 : 0;
    page.set({"lockstep_findings", "What slows the run down now, by rule."}, {{"rule", rule}},
             count);
  }
  for (const monitor::RankState& rank : view.ranks) publish(page, rank);
  if (view.gpus.newest) monitor::publish(page, view.gpus);
  return page.text();
}

}  // namespace lockstep::dashboard
