// The rules of diagnose() and what they share. Internal to diagnosis.cpp and rules*.cpp.
//
// A rule looks at a View and returns a finding or nothing. It reads medians over windows, not sums,
// wherever something happens in every step, so that one slow second is nobody's habit.
//
//   const View view = make_view(run);
//   if (const auto finding = loader_bound(view)) use(*finding);
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/monitor/finding.h"
#include "lockstep/monitor/gpu_figures.h"
#include "lockstep/monitor/median.h"
#include "lockstep/monitor/run_record.h"

namespace lockstep::monitor::detail {

// Steps in the whole record before a run is judged. Twenty are enough to name a rank that waits for
// its data, so the limit is below that.
inline constexpr std::int64_t kMinSteps = 10;
// With fewer windows a difference between ranks must be larger to count.
inline constexpr std::size_t kManyWindows = 30;

struct RankView {
  int rank = 0;
  // Intervals joined until a step ended in each, without start-up and evaluation in `seconds`, and
  // without the first where there are enough: it holds warm-up and the first allocations. Of a rank
  // with a device's clock, those that have its times: the host alone would look fast in all phases.
  std::vector<Interval> windows{};
  Interval sum{};          // of the windows
  bool on_device = false;  // the device's clock is there
};

struct View {
  const RunRecord& run;          // its ranks and GPUs may have more: what an earlier start recorded
  std::vector<HostGpus> gpus{};  // since this start
  std::vector<RankView> ranks{};
  bool enough = false;  // steps on every rank
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

double lower_median(std::vector<double> values);  // of two the smaller: what half of them have

std::uint64_t count(const RankView& rank, ledger::Counter counter);
double spent_s(const Interval& window, ledger::Phase phase);  // budget.h

template <typename Figure>
double median_of(const RankView& rank, Figure figure) {
  std::vector<double> values;
  for (const Interval& window : rank.windows) values.push_back(figure(window));
  return median(std::move(values));
}
double step_s(const RankView& rank);  // median
double share(const RankView& rank, ledger::Phase phase);
// What a change of the host's work can save: no more than the device's idle time, where that is
// known.
double bounded_gain(const RankView& rank, double gain);
double delay_share(const RankView& rank);      // in which its main thread could run and had no core
double throttled_share(const RankView& rank);  // of its control group's periods
double rate(const RankView& rank, double ProcessRates::*which);  // median

template <typename Figure>
std::vector<double> of_ranks(const View& view, Figure figure) {
  std::vector<double> values;
  for (const RankView& rank : view.ranks) values.push_back(figure(rank));
  return values;
}
// What every rank has at least. A rank that is ahead waits in communication, so the smallest share
// is what communication itself costs.
double least_share(const View& view, ledger::Phase phase);
double usual_share(const View& view, ledger::Phase phase);  // lower median over ranks
// Forward and backward passes of one optimizer step.
double passes_per_update(const View& view);

// ------------------------------------------------------------------ facts and GPUs

// A value of the training arguments; empty where the key is not there.
std::optional<std::int64_t> integer_argument(const View& view, std::string_view key);
bool on_cuda(const View& view);
// 7 -> 10, 23 -> 50: what a person would write, not below the value.
std::int64_t round_up(double value);

// Those of a host that the run's ranks use, which take them in order. The sampler records all GPUs
// of a host: of more than there are ranks, those in use. Empty where more are in use than there are
// ranks: some belong to others, and it is not known which.
std::vector<GpuFigures> gpus_of_ranks(const View& view, const HostGpus& host);
std::optional<GpuFigures> gpu_of_rank(const View& view, int rank);
// Time in which no kernel ran on its GPU although the host waited for nothing: the gaps between
// kernels lie within the phases of the device's clock, so only the driver's samples have them.
std::optional<double> idle_share(const View& view, const RankView& rank);
// The most of a GPU's memory that is used on any of those that work.
std::optional<double> memory_share(const View& view);

}  // namespace lockstep::monitor::detail
