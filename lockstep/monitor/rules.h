// The rules of diagnose() and their common functions. Internal to diagnosis.cpp and rules*.cpp.
//
// A rule looks at a View and returns a finding or nothing. What happens in every step it reads as a
// median over windows, not as a sum, so that one slow second does not decide.
//
//   const View view = make_view(run);
//   if (const auto finding = loader_bound(view)) use(*finding);
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/monitor/run_figures.h"

namespace lockstep::monitor {

struct Finding;  // diagnosis.h

namespace detail {

// The number of steps that a record needs to be judged. Twenty must be enough to name a rank that
// waits for its data, so the limit is below that.
inline constexpr std::int64_t kMinSteps = 10;
// With fewer windows a difference between ranks must be larger to count.
inline constexpr std::size_t kManyWindows = 30;

struct RankWindows {
  int rank = 0;
  // Intervals joined until a step has ended in each; `seconds` is without start-up and evaluation.
  // The first window (warm-up, first allocations) is dropped where there are enough. Where a
  // device's clock is recorded, so are windows without its times: by the host alone every phase
  // looks short.
  std::vector<Interval> windows{};
  Interval sum{};          // of the windows
  bool on_device = false;  // the device's clock is recorded
};

struct View {
  const RunRecord& run;          // also of earlier starts
  std::vector<HostGpus> gpus{};  // samples since this start
  std::vector<RankWindows> ranks{};
  bool enough = false;  // at least kMinSteps on every rank
};

View make_view(const RunRecord& run);

using Rule = std::optional<Finding> (*)(const View&);

std::optional<Finding> not_launched(const View& view);
std::optional<Finding> never_exchanged(const View& view);
std::optional<Finding> unbalanced_gpus(const View& view);
std::optional<Finding> logging_too_often(const View& view);
std::optional<Finding> saving_too_often(const View& view);
std::optional<Finding> micro_batch_too_small(const View& view);
std::optional<Finding> accumulation_synchronises(const View& view);
std::optional<Finding> loader_bound(const View& view);
std::optional<Finding> communication_bound(const View& view);
std::optional<Finding> straggler(const View& view);
std::optional<Finding> find_unused_parameters(const View& view);
std::optional<Finding> page_faults(const View& view);
std::optional<Finding> too_many_threads(const View& view);
std::optional<Finding> cpu_starved(const View& view);

std::optional<double> starved_share(const View& view);  // as in diagnosis.h

// ------------------------------------------------------------------ figures

double lower_median(std::vector<double> values);  // half of the values are at least this

std::uint64_t count(const RankWindows& rank, ledger::Counter counter);
double spent_s(const Interval& window, ledger::Phase phase);  // run_record.h

template <typename Figure>
double median_of(const RankWindows& rank, Figure figure) {
  std::vector<double> values;
  for (const Interval& window : rank.windows) values.push_back(figure(window));
  return median(std::move(values));
}
double step_s(const RankWindows& rank);  // median
double share(const RankWindows& rank, ledger::Phase phase);
// The gain of less host work: at most the device's idle time, if that is known.
double bounded_gain(const RankWindows& rank, double gain);
double delay_share(const RankWindows& rank);  // of time in which the main thread waited for a core
double throttled_share(
    const RankWindows& rank);  // of periods in which its control group was stopped
double rate(const RankWindows& rank, double ProcessRates::*which);  // median

template <typename Figure>
std::vector<double> of_ranks(const View& view, Figure figure) {
  std::vector<double> values;
  for (const RankWindows& rank : view.ranks) values.push_back(figure(rank));
  return values;
}
// The smallest share of any rank. A rank that is ahead waits in communication, so the smallest
// share is the cost of communication itself.
double least_share(const View& view, ledger::Phase phase);
double usual_share(const View& view, ledger::Phase phase);  // lower median over ranks
// Forward and backward passes of one optimizer step.
double passes_per_update(const View& view);

// ------------------------------------------------------------------ facts and GPUs

// A value of the training arguments; empty if the key is missing.
std::optional<std::int64_t> integer_argument(const View& view, std::string_view key);
bool on_cuda(const View& view);
// 7 -> 10, 23 -> 50: the next number that a person would write.
std::int64_t round_up(double value);

// This host's GPUs, in rank order. Where the host has more GPUs than ranks, those in use count.
// Empty where more are in use than there are ranks: some belong to other programs, and nobody knows
// which.
std::vector<GpuFigures> gpus_of_ranks(const View& view, const HostGpus& host);
std::optional<GpuFigures> gpu_of_rank(const View& view, int rank);
// The share of time in which no kernel ran although the host did not wait. Gaps between kernels lie
// inside the device clock's phases, so only the driver's samples show them.
std::optional<double> idle_share(const View& view, const RankWindows& rank);
// Peak memory share over busy GPUs.
std::optional<double> memory_share(const View& view);

}  // namespace detail
}  // namespace lockstep::monitor
