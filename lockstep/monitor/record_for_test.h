// Records of runs that never were, for the tests of rules and of what shows their findings.
//
//   RunRecord run = run_of({Shape{}, Shape{.data = 0.4}});     // two ranks, 40 s
//   change(run, [](Interval& interval) { interval.threads = 9; });
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "lockstep/monitor/diagnosis.h"
#include "lockstep/monitor/run_figures.h"

namespace lockstep::monitor::for_test {

using ledger::Counter;
using ledger::index;
using ledger::Phase;

// One rank: how a step of so many milliseconds is spent. What is left is outside of all phases.
struct Shape {
  double step_ms = 20;
  double data = 0.02;
  double forward = 0.30;
  double backward = 0.50;
  double communication = 0.05;
  double optimizer = 0.08;
  double logging = 0.005;
  double saving = 0;
};

inline double& at(PhaseSeconds& seconds, Phase phase) {
  return seconds[index(phase)];
}
inline std::uint64_t& at(Counts& counts, Counter counter) {
  return counts[index(counter)];
}

inline ProcessRates usual_process() {
  ProcessRates rates;
  rates.seconds = 1;
  rates.cores = 0.98;
  rates.system_cores = 0.03;
  rates.minor_faults_per_s = 500;
  rates.involuntary_switches_per_s = 5;
  rates.run_delay_share = 0.01;
  return rates;
}

// About a second of it. `noise` gives the factor of each part.
inline Interval interval_of(const Shape& shape, const std::function<double()>& noise) {
  Interval interval;
  interval.steps = static_cast<std::int64_t>(1000 / shape.step_ms);
  const double whole = static_cast<double>(interval.steps) * shape.step_ms / 1e3;
  double rest = 1;
  const auto set = [&](Phase phase, double share) {
    at(interval.host_s, phase) = whole * share * noise();
    interval.seconds += at(interval.host_s, phase);
    rest -= share;
  };
  set(Phase::kData, shape.data);
  set(Phase::kForward, shape.forward);
  set(Phase::kBackward, shape.backward);
  set(Phase::kCommunication, shape.communication);
  set(Phase::kOptimizer, shape.optimizer);
  set(Phase::kLogging, shape.logging);
  set(Phase::kSaving, shape.saving);
  set(Phase::kNone, std::max(0.0, rest));
  const auto steps = static_cast<std::uint64_t>(interval.steps);
  at(interval.counts, Counter::kMicroBatches) = steps;
  at(interval.counts, Counter::kSynchronisedPasses) = steps;
  at(interval.counts, Counter::kUpdates) = steps;
  at(interval.counts, Counter::kLogs) = std::max<std::uint64_t>(steps / 10, 1);
  at(interval.counts, Counter::kBuckets) = steps;
  at(interval.counts, Counter::kReducedBytes) = steps * (25u << 20);
  at(interval.counts, Counter::kReduceNs) = steps * 4'000'000;
  at(interval.counts, Counter::kBatches) = steps;
  at(interval.counts, Counter::kLoadNs) = steps * 5'000'000;
  interval.process = usual_process();
  interval.resident_bytes = 500u << 20;
  interval.threads = 6;
  return interval;
}

inline RankRecord rank_of(int rank, const Shape& shape, int intervals,
                          const std::function<double()>& noise) {
  RankRecord record{.rank = rank};
  double now = 1e9;
  std::int64_t step = 0;
  for (int i = 0; i < intervals; ++i) {
    Interval interval = interval_of(shape, noise);
    now += interval.seconds;
    step += interval.steps;
    interval.unix_time_s = now;
    interval.step = step;
    record.intervals.push_back(interval);
  }
  return record;
}

inline RunRecord run_of(
    const std::vector<Shape>& ranks, int intervals = 40,
    const std::function<double()>& noise = [] { return 1.0; }) {
  RunRecord run;
  run.facts.world_size = static_cast<int>(ranks.size());
  run.facts.ranks_on_host = run.facts.world_size;
  run.facts.cores = 8;
  run.facts.threads_per_rank = 1;
  run.facts.device = "cpu";
  run.facts.backend = "shm";
  run.facts.program = "trainer";
  run.facts.per_device_batch = 8;
  run.facts.accumulation = 1;
  run.facts.optimizer = "sharded fused adamw";
  run.facts.arguments =
      map_node({{"dataloader_num_workers", integer_node(1)}, {"logging_steps", integer_node(10)}});
  for (std::size_t r = 0; r < ranks.size(); ++r)
    run.ranks.push_back(rank_of(static_cast<int>(r), ranks[r], intervals, noise));
  return run;
}

inline RunRecord healthy(int intervals = 40) {
  return run_of({Shape{}, Shape{}}, intervals);
}

// What the fast rank waits for is the slow one, not the reduction.
inline RunRecord with_slow_rank(double own_ms, double slow_ms, int intervals = 40) {
  const auto shape = [&](double own) {
    Shape s;
    s.step_ms = slow_ms + 1;
    s.data = 0.02;
    s.logging = 0;
    s.optimizer = 0.4 / s.step_ms;
    s.communication = (slow_ms - own + 0.6) / s.step_ms;
    s.forward = (own / s.step_ms - s.data) / 3;
    s.backward = 2 * s.forward;
    return s;
  };
  return run_of({shape(own_ms), shape(slow_ms), shape(own_ms)}, intervals);
}

inline void change(RunRecord& run, const std::function<void(Interval&)>& how, int rank = -1) {
  for (RankRecord& record : run.ranks)
    if (rank < 0 || record.rank == rank)
      for (Interval& interval : record.intervals) how(interval);
}

inline const Finding* find(const std::vector<Finding>& findings, const std::string& rule) {
  const auto found = std::find_if(findings.begin(), findings.end(),
                                  [&](const Finding& finding) { return finding.rule == rule; });
  return found == findings.end() ? nullptr : &*found;
}

inline std::string all(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) text += finding_text(finding) + "\n";
  return text;
}

// Whatever was measured, the parts of a budget add up to the whole.
inline void expect_whole(const RunRecord& run) {
  for (const RankRecord& rank : run.ranks)
    for (const Interval& interval : rank.intervals) {
      const PhaseSeconds spent = spent_s(interval);
      EXPECT_NEAR(std::reduce(spent.begin(), spent.end()), interval.seconds, 1e-9);
    }
  for (const BudgetRow& row : budget_rows(run)) {
    double sum = 0;
    for (const auto& [part, share] : row.shares) sum += share;
    EXPECT_NEAR(sum, row.budget.seconds > 0 ? 1 : 0, 1e-9);
  }
}

// The only finding, of that rule.
inline Finding only(const RunRecord& run, const std::string& rule) {
  expect_whole(run);
  const auto findings = diagnose(run);
  EXPECT_EQ(findings.size(), 1u) << all(findings);
  const Finding* found = find(findings, rule);
  EXPECT_NE(found, nullptr) << rule << " is not among\n" << all(findings);
  if (found == nullptr) return {};
  EXPECT_FALSE(found->what.empty() || found->evidence.empty() || found->remedy.empty());
  EXPECT_TRUE(found->gain >= 0 && found->gain < 1) << found->gain;
  return *found;
}

inline void expect_silence(const RunRecord& run) {
  expect_whole(run);
  EXPECT_EQ(all(diagnose(run)), "");
}

}  // namespace lockstep::monitor::for_test
