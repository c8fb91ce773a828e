// Rules about ranks that wait for each other.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/monitor/diagnosis.h"
#include "lockstep/monitor/rules.h"

namespace lockstep::monitor::detail {
namespace {

using ledger::Counter;
using ledger::index;
using ledger::Phase;

constexpr double kMiB = 1u << 20;

// The share of a step that the rank which waits least spends in communication. Ranks that differ by
// some percent wait for each other a little in every step; beyond a fifth it is the reduction.
constexpr double kCommunicationShare = 0.20;
// Smaller buckets cost more for each byte than they hide (docs/benchmarks.md).
constexpr double kSmallBucketMiB = 4;
constexpr double kUsualBucketMiB = 25;
// The last bucket cannot hide behind backward: this share of a step may be exposed.
constexpr double kExposedTarget = 0.05;
// Larger buckets instead of small ones save at least this share of the reduction's time.
constexpr double kSmallBucketCost = 0.10;

// By how much of a step a rank must be slower than the others. Ranks that vary by 10 % each differ
// by 20 % at most; over many windows such variation averages out.
constexpr double kStragglerShare = 0.20;
constexpr double kStragglerShareOfMany = 0.10;
// The share of its windows in which it must be slower than the others usually are.
constexpr double kSteadyShare = 0.70;
// Fewest intervals with collectives, of a rank that counts no steps.
constexpr std::size_t kFewestWaits = 4;
// The share of the delay that a cause must explain.
constexpr double kMainPart = 0.5;
constexpr double kThrottledGroupShare = 0.2;  // of the periods of its control group
constexpr double kThrottledGpuShare = 0.5;    // of the samples
// Where the kernel does not count how long a thread waits for a core: CPU seconds for each second
// in which the rank computed, and interruptions a second.
constexpr double kStarvedYield = 0.7;
constexpr double kStarvedSwitches = 50;

struct Reduction {
  double bytes_per_s = 0;
  double bucket_bytes = 0;
  double buckets_per_step = 0;
  double step_share = 0;      // of the time from launch to completion, also behind backward
  double backward_share = 0;  // in which it can hide
};

Reduction reduction_of(const RankWindows& rank) {
  const auto buckets = static_cast<double>(count(rank, Counter::kBuckets));
  const double seconds = static_cast<double>(count(rank, Counter::kReduceNs)) / 1e9;
  const auto bytes = static_cast<double>(count(rank, Counter::kReducedBytes));
  Reduction reduction;
  if (buckets == 0 || bytes == 0 || rank.sum.seconds <= 0) return reduction;
  reduction.bucket_bytes = bytes / buckets;
  reduction.buckets_per_step = buckets / static_cast<double>(rank.sum.steps);
  reduction.bytes_per_s = seconds > 0 ? bytes / seconds : 0;
  reduction.step_share = seconds / rank.sum.seconds;
  reduction.backward_share = share(rank, Phase::kBackward);
  return reduction;
}

// On the rank that waits least, waiting is the reduction itself.
const RankWindows& least_waiting(const View& view) {
  return *std::min_element(view.ranks.begin(), view.ranks.end(), [](const auto& a, const auto& b) {
    return share(a, Phase::kCommunication) < share(b, Phase::kCommunication);
  });
}

// While a rank has no core the others wait for it, not for the reduction.
double longest_delay_share(const View& view) {
  double longest = 0;
  for (const RankWindows& rank : view.ranks) longest = std::max(longest, delay_share(rank));
  return longest;
}

struct Advice {
  std::string remedy;
  double gain = 0;
};

std::string now_text(std::int64_t value) {
  return value > 0 ? fmt::format(" (now {})", value) : "";
}

// Names the keys that decide how many samples a step has.
std::string larger_step(const View& view) {
  for (const char* key : {"global_batch_size", "tokens_per_update"})
    if (const auto size = integer_argument(view, key))
      return fmt::format("raise {}{}", key, now_text(*size));
  const RunFacts& facts = view.run.facts;
  return fmt::format(
      "raise per_device_train_batch_size{} or gradient_accumulation_steps{} (the global batch "
      "grows with them)",
      now_text(facts.per_device_batch), now_text(facts.accumulation));
}

bool is_fully_sharded(const View& view) {
  const Entry* const fsdp = view.run.facts.arguments.find("fsdp");
  return fsdp != nullptr && fsdp->value.is(NodeKind::kString) && !fsdp->value.text.empty();
}

// Every pass gathers each block for forward and again for backward, so that accumulation, which
// makes more passes, does not help.
Advice fsdp_advice(const View& view, double exposed) {
  return {
      fmt::format("gather less often: raise per_device_train_batch_size{}; where memory allows it, "
                  "fsdp: shard_grad_op does not gather blocks again for backward{}.",
                  now_text(view.run.facts.per_device_batch),
                  view.run.facts.hosts > 1 ? ", and hybrid_shard gathers inside a host" : ""),
      exposed / 2};
}

Advice bucket_advice(const View& view, const RankWindows& rank, double exposed) {
  // A sharded optimizer reduces within its step, not by these buckets.
  const bool sharded = view.run.facts.optimizer.starts_with("sharded");
  const Reduction r = sharded ? Reduction{} : reduction_of(rank);
  const double bucket_mib = r.bucket_bytes / kMiB;
  if (r.bucket_bytes > 0 && bucket_mib < kSmallBucketMiB && r.buckets_per_step >= 2)
    return {
        fmt::format("raise ddp_bucket_cap_mb to {:.0f}: buckets hold {:.1f} MiB, {:.0f} of them "
                    "in a step.",
                    kUsualBucketMiB, bucket_mib, r.buckets_per_step),
        exposed * kSmallBucketCost};
  // A bucket of this size takes as long as the share of a step that may be exposed.
  const double hidden_mib =
      std::max(r.bytes_per_s * kExposedTarget * step_s(rank) / kMiB, kSmallBucketMiB);
  if (r.bytes_per_s > 0 && r.step_share <= r.backward_share && hidden_mib < bucket_mib / 2)
    return {fmt::format("lower ddp_bucket_cap_mb to {:.0f}: the reduction of {:.1f} ms in a step "
                        "would fit behind backward, and a bucket of {:.0f} MiB begins too late.",
                        std::floor(hidden_mib), 1e3 * r.step_share * step_s(rank), bucket_mib),
            std::max(0.0, exposed - kExposedTarget)};
  return {fmt::format("reduce less often: {}; between hosts look at the interface (`lockstep "
                      "doctor`).",
                      larger_step(view)),
          exposed / 2};
}

// ------------------------------------------------------------------ stragglers

// Seconds of a step that a rank spends on its own work. The reduction makes all ranks' steps
// equally long, and the sharded optimizer reduces within its step.
double own_s(const Interval& window) {
  double shared = 0;
  for (const Phase phase :
       {Phase::kCommunication, Phase::kOptimizer, Phase::kLogging, Phase::kSaving})
    shared += spent_s(window, phase);
  return std::max(0.0, window.seconds - shared) / static_cast<double>(window.steps);
}

double own_s(const RankWindows& rank) {
  return median_of(rank, [](const Interval& window) { return own_s(window); });
}

double data_s(const RankWindows& rank) {
  return median_of(rank, [&](const Interval& window) {
    return spent_s(window, Phase::kData) / static_cast<double>(window.steps);
  });
}

// Seconds of a step in which the main thread waited for a core; nothing where it is not counted.
// The last interval of a rank that has ended lacks the figures of its process.
std::optional<double> delayed_s(const RankWindows& rank) {
  std::vector<double> values;
  for (const Interval& window : rank.windows)
    if (window.process && window.process->run_delay_share)
      values.push_back(*window.process->run_delay_share * window.seconds /
                       static_cast<double>(window.steps));
  if (values.empty()) return std::nullopt;
  return median(std::move(values));
}

template <typename Figure>
double median_of_others(const View& view, const RankWindows& rank, Figure figure) {
  std::vector<double> values;
  for (const RankWindows& other : view.ranks)
    if (other.rank != rank.rank) values.push_back(figure(other));
  return median(std::move(values));
}

struct Slow {
  const RankWindows* rank = nullptr;
  double excess_s = 0;  // of a step, above the others
  double others_s = 0;
};

Slow slowest(const View& view) {
  Slow slow;
  const auto own = of_ranks(view, [](const RankWindows& rank) { return own_s(rank); });
  for (std::size_t i = 0; i < own.size(); ++i) {
    auto others = own;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    const double others_s = median(std::move(others));
    const double excess = own[i] - others_s;
    if (slow.rank == nullptr || excess > slow.excess_s)
      slow = {.rank = &view.ranks[i], .excess_s = excess, .others_s = others_s};
  }
  return slow;
}

bool is_steady(const Slow& slow) {
  const auto& windows = slow.rank->windows;
  const auto slower = std::count_if(windows.begin(), windows.end(), [&](const Interval& window) {
    return own_s(window) > slow.others_s + slow.excess_s / 2;
  });
  return static_cast<double>(slower) >= kSteadyShare * static_cast<double>(windows.size());
}

// A limit of its control group, or the scheduler's own figure.
bool waits_for_a_core(const View& view, const Slow& slow) {
  const RankWindows& rank = *slow.rank;
  if (throttled_share(rank) >= kThrottledGroupShare) return true;
  const auto delayed = delayed_s(rank);
  if (!delayed) return false;
  const double others = median_of_others(
      view, rank, [](const RankWindows& other) { return delayed_s(other).value_or(0); });
  return *delayed - others >= kMainPart * slow.excess_s;
}

// Where the scheduler gives no figure: the rank computes, uses less of a core than that needs, and
// is interrupted often.
bool seems_cpu_starved(const Slow& slow) {
  const RankWindows& rank = *slow.rank;
  if (delayed_s(rank)) return false;
  const double busy = own_s(rank) / step_s(rank);
  const double switches = rate(rank, &ProcessRates::involuntary_switches_per_s);
  return rank.sum.process && rate(rank, &ProcessRates::cores) < kStarvedYield * busy &&
         switches >= kStarvedSwitches;
}

bool is_gpu_throttled(const View& view, const RankWindows& rank) {
  const auto gpu = gpu_of_rank(view, rank.rank);
  if (!gpu || gpu->throttled_share < kThrottledGpuShare) return false;
  // A limit that holds for all GPUs does not explain one slow rank.
  return median_of_others(view, rank, [&](const RankWindows& other) {
           const auto theirs = gpu_of_rank(view, other.rank);
           return theirs ? theirs->throttled_share : 0;
         }) < kThrottledGpuShare;
}

std::string cause_of(const View& view, const Slow& slow) {
  if (waits_for_a_core(view, slow)) return "cpu-starved";
  const double others = median_of_others(view, *slow.rank, data_s);
  if (data_s(*slow.rank) - others >= kMainPart * slow.excess_s) return "data";
  if (seems_cpu_starved(slow)) return "cpu-starved";
  return is_gpu_throttled(view, *slow.rank) ? "throttled" : "compute";
}

std::string straggler_remedy(const std::string& cause, int rank) {
  if (cause == "data")
    return fmt::format(
        "look at what rank {} loads from (disk, network, larger samples); more "
        "dataloader_num_workers hide it while its cores suffice.",
        rank);
  if (cause == "cpu-starved")
    return "give it the cores that the others have: stop what else runs on them, raise the limit "
           "of "
           "its control group, or start fewer ranks or threads (OMP_NUM_THREADS).";
  if (cause == "throttled")
    return "its GPU lowers its clock for heat or power: look at `nvidia-smi -q -d PERFORMANCE`, "
           "its "
           "cooling and its power limit.";
  return "compare its device with the others' (`lockstep doctor`), and the sizes of its batches: "
         "group samples by length where they differ.";
}

// ------------------------------------------------------------------ without steps

// For a rank that counts no steps: the share of each interval in which a collective was in
// progress. A collective ends when the last rank has begun it, so the rank that the others wait for
// has the smallest shares.
struct Waits {
  int rank = 0;
  std::vector<double> shares{};
  std::vector<double> cores{};
  std::uint64_t collectives = 0;
};

Waits waits_of(const RankRecord& record, double from_unix_s) {
  Waits waits{.rank = record.rank};
  for (const Interval& interval : record.intervals) {
    if (interval.unix_time_s < from_unix_s || !interval.collective_share) continue;
    if (interval.collectives == 0 && waits.shares.empty()) continue;  // it starts up
    waits.collectives += interval.collectives;
    waits.shares.push_back(*interval.collective_share);
    if (interval.process) waits.cores.push_back(interval.process->cores);
  }
  return waits;
}

std::optional<Finding> straggler_by_waits(const RunRecord& run) {
  std::vector<Waits> ranks;
  for (const RankRecord& record : run.ranks) {
    ranks.push_back(waits_of(record, run.facts.started_unix_s));
    if (ranks.back().shares.size() < kFewestWaits ||
        ranks.back().collectives < static_cast<std::uint64_t>(kMinSteps))
      return std::nullopt;
  }
  if (ranks.size() < 2 || ranks.size() != static_cast<std::size_t>(run.facts.world_size))
    return std::nullopt;
  const auto usual = [](const Waits& waits) { return median(waits.shares); };
  const auto slow = std::ranges::min_element(ranks, {}, usual);
  std::vector<double> others;
  for (const Waits& waits : ranks)
    if (waits.rank != slow->rank) others.push_back(usual(waits));
  const double own = usual(*slow);
  const double others_share = median(others);
  const double excess = others_share - own;
  const double limit =
      slow->shares.size() >= kManyWindows ? kStragglerShareOfMany : kStragglerShare;
  const auto low = std::ranges::count_if(
      slow->shares, [&](double share) { return share < others_share - excess / 2; });
  if (excess < limit ||
      static_cast<double>(low) < kSteadyShare * static_cast<double>(slow->shares.size()))
    return std::nullopt;
  return Finding{
      .rule = "straggler",
      .rank = slow->rank,
      .what = fmt::format("Rank {} comes to the collectives last, and the others wait for it.",
                          slow->rank),
      .evidence = fmt::format(
          "a collective is under way for {:.0f} % of its time, {:.0f} % on the "
          "others{}.",
          100 * own, 100 * others_share,
          slow->cores.empty() ? "" : fmt::format("; {:.2f} cores in use", median(slow->cores))),
      .remedy = fmt::format("look at what rank {} does between its collectives: its data, its "
                            "device, the sizes of its batches, what else runs on its cores.",
                            slow->rank),
      .gain = std::min(1.0, excess)};
}

std::string straggler_evidence(const Slow& slow, const std::string& cause, double others_data) {
  const RankWindows& rank = *slow.rank;
  std::string text = fmt::format("{:.1f} ms of its own work in a step, {:.1f} ms on the others",
                                 1e3 * own_s(rank), 1e3 * slow.others_s);
  if (cause == "data")
    text += fmt::format("; {:.1f} ms of it waiting for data, {:.1f} ms on the others",
                        1e3 * data_s(rank), 1e3 * others_data);
  if (rank.sum.process)
    text += fmt::format("; {:.2f} cores in use", rate(rank, &ProcessRates::cores));
  if (const auto delayed = delayed_s(rank); delayed && cause == "cpu-starved")
    text += fmt::format(", {:.1f} ms of a step ready to run without one", 1e3 * *delayed);
  if (throttled_share(rank) > 0)
    text +=
        fmt::format(", its group stopped in {:.0f} % of its periods", 100 * throttled_share(rank));
  return text + ".";
}

}  // namespace

// run() counts such passes when the program ends.
std::optional<Finding> never_exchanged(const View& view) {
  const RunFacts& facts = view.run.facts;
  std::uint64_t passes = 0;
  for (const RankRecord& record : view.run.ranks) {
    Interval sum;
    for (const Interval& interval : record.intervals)
      if (interval.unix_time_s >= facts.started_unix_s) join(sum, interval);
    const std::uint64_t counted = sum.counts[index(Counter::kSeparatePasses)];
    if (counted == 0) return std::nullopt;
    passes = std::max(passes, counted);
  }
  if (facts.world_size < 2 || passes == 0) return std::nullopt;
  return Finding{
      .rule = "never-exchanged",
      .what = fmt::format("{} ranks trained and never exchanged a gradient: each has a model of "
                          "its own.",
                          facts.world_size),
      .evidence = fmt::format("{} backward passes on a rank, which no wrapper saw.", passes),
      .remedy = "wrap the model (lockstep::DistributedDataParallel) and train the wrapper."};
}

std::optional<Finding> communication_bound(const View& view) {
  if (view.run.facts.world_size < 2) return std::nullopt;
  const RankWindows& rank = least_waiting(view);
  const double exposed = share(rank, Phase::kCommunication) - longest_delay_share(view);
  if (exposed < kCommunicationShare) return std::nullopt;
  const bool sharded = is_fully_sharded(view);
  const Advice advice = sharded ? fsdp_advice(view, exposed) : bucket_advice(view, rank, exposed);
  const Reduction reduction = reduction_of(rank);
  std::string evidence = fmt::format(
      "every rank waits for {} for {:.0f} % of a step of {:.1f} ms or more",
      sharded ? "gathers and reductions" : "reductions", 100 * exposed, 1e3 * step_s(rank));
  if (reduction.bytes_per_s > 0)
    evidence += fmt::format("; {:.1f} MiB in {:.0f} buckets of a step at {:.2f} GB/s",
                            reduction.bucket_bytes * reduction.buckets_per_step / kMiB,
                            reduction.buckets_per_step, reduction.bytes_per_s / 1e9);
  return Finding{.rule = "communication-bound",
                 .what = sharded ? "The ranks wait for gathered parameters and for gradients."
                                 : "The ranks wait for the gradients' reduction.",
                 .evidence = evidence + ".",
                 .remedy = advice.remedy,
                 .gain = advice.gain};
}

std::optional<Finding> straggler(const View& view) {
  if (std::ranges::all_of(view.ranks, [](const RankWindows& rank) { return rank.sum.steps == 0; }))
    return straggler_by_waits(view.run);
  if (!view.enough || view.ranks.size() < 2) return std::nullopt;
  const Slow slow = slowest(view);
  const double step = step_s(*slow.rank);
  const double limit =
      slow.rank->windows.size() >= kManyWindows ? kStragglerShareOfMany : kStragglerShare;
  if (step <= 0 || slow.excess_s / step < limit || !is_steady(slow)) return std::nullopt;
  const std::string cause = cause_of(view, slow);
  return Finding{
      .rule = "straggler",
      .rank = slow.rank->rank,
      .cause = cause,
      .what = fmt::format("Rank {} takes longer than the others, which wait for it in every step.",
                          slow.rank->rank),
      .evidence = straggler_evidence(slow, cause, median_of_others(view, *slow.rank, data_s)),
      .remedy = straggler_remedy(cause, slow.rank->rank),
      .gain = std::min(1.0, slow.excess_s / step)};
}

std::optional<Finding> find_unused_parameters(const View& view) {
  if (view.run.facts.world_size < 2) return std::nullopt;
  std::uint64_t searches = 0;
  for (const RankWindows& rank : view.ranks) {
    if (count(rank, Counter::kUnusedFound) > 0) return std::nullopt;
    searches = std::max(searches, count(rank, Counter::kUnusedSearches));
  }
  if (searches < static_cast<std::uint64_t>(kMinSteps)) return std::nullopt;
  return Finding{
      .rule = "find-unused-parameters",
      .what = "Every backward pass searches the graph for unused parameters, and there are none.",
      .evidence = fmt::format("{} searches, nothing found on any rank.", searches),
      .remedy =
          "set ddp_find_unused_parameters: false (find_unused_parameters of "
          "DistributedDataParallelOptions); "
          "backward then also learns the order of gradients."};
}

}  // namespace lockstep::monitor::detail
