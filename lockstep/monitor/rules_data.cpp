// Rules about the parts of a step besides computing: batches, micro-batches, logs, checkpoints.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/monitor/diagnosis.h"
#include "lockstep/monitor/rules.h"

namespace lockstep::monitor::detail {
namespace {

using ledger::Counter;
using ledger::Phase;

// A loader that is far enough ahead causes no waits; a tenth of a step is no accident.
constexpr double kDataShare = 0.10;
// Loading times vary from batch to batch: workers are planned for this much more than the mean.
constexpr double kLoaderReserve = 1.1;

// Logging more than the first share is too often; after the change it takes the second.
constexpr double kLoggingShare = 0.03;
constexpr double kLoggingTarget = 0.01;
// The same of checkpoints. They buy safety, so they may take more.
constexpr double kSavingShare = 0.05;
constexpr double kSavingTarget = 0.02;
// Two may be the first and the last of a run.
constexpr std::uint64_t kMinEvents = 3;

// A device that is idle for this share of a step waits for the host to enqueue its kernels.
constexpr double kIdleShare = 0.30;
// The limit where accumulation can be reduced instead: the change is free, the global batch stays.
constexpr double kIdleShareAccumulating = 0.15;
// The share of the device's memory that larger micro-batches may fill.
constexpr double kMemoryLimit = 0.85;
// Optimizer and reduction cost the same for any batch: beyond this share the batch is small.
constexpr double kFixedShare = 0.40;

double batch_s(const RankWindows& rank) {
  const auto batches = count(rank, Counter::kBatches);
  return batches == 0 ? 0
                      : static_cast<double>(count(rank, Counter::kLoadNs)) / 1e9 /
                            static_cast<double>(batches);
}

// For the rank whose batches take longest: all ranks have the same number of workers.
int sufficient_workers(const View& view) {
  double most = 0;
  for (const RankWindows& rank : view.ranks) {
    const double passes = std::max(static_cast<double>(count(rank, Counter::kMicroBatches)),
                                   static_cast<double>(rank.sum.steps));
    double waiting = 0;
    for (const Interval& window : rank.windows) waiting += spent_s(window, Phase::kData);
    const double pass_s = (rank.sum.seconds - waiting) / passes;
    if (pass_s > 0) most = std::max(most, kLoaderReserve * batch_s(rank) / pass_s);
  }
  return static_cast<int>(std::ceil(std::min(most, 1024.0)));
}

std::string loader_remedy(const View& view, int needed) {
  const RunFacts& facts = view.run.facts;
  if (needed == 0)
    return "load batches ahead, in threads beside the training thread "
           "(dataloader_num_workers of the Trainer, num_workers of a Loader).";
  const auto present = integer_argument(view, "dataloader_num_workers");
  if (present && needed <= *present)
    return fmt::format(
        "{} workers would suffice and {} are there, so they lack cores or wait for the disk: make "
        "loading cheaper (tokenize beforehand with `lockstep data tokenize`) or raise "
        "dataloader_prefetch_factor.",
        needed, *present);
  std::string text = fmt::format("set dataloader_num_workers to {}{}.", needed,
                                 present ? fmt::format(" (now {})", *present) : "");
  if (facts.cores > 0 && needed * facts.ranks_on_host > facts.cores)
    text += fmt::format(
        " That is {} threads on {} cores: make loading cheaper as well (`lockstep data "
        "tokenize`).",
        needed * facts.ranks_on_host, facts.cores);
  return text;
}

// Events that come every few steps (logs, checkpoints): the share of time that they take, and how
// many steps lie between two of them now and after the change.
struct Habit {
  double share = 0;
  double steps_between = 1;
  std::int64_t steps_wanted = 1;
  double gain() const {
    return share * std::max(0.0, 1 - steps_between / static_cast<double>(steps_wanted));
  }
};

// The habit of the rank that spends most on it, for which the others wait.
std::optional<Habit> habit_of(const View& view, Phase phase, Counter events, double target) {
  std::optional<Habit> worst;
  for (const RankWindows& rank : view.ranks) {
    const std::uint64_t happened = count(rank, events);
    if (happened < kMinEvents) continue;
    double spent = 0;
    for (const Interval& window : rank.windows) spent += spent_s(window, phase);
    Habit habit{
        .share = spent / rank.sum.seconds,
        .steps_between = static_cast<double>(rank.sum.steps) / static_cast<double>(happened)};
    habit.steps_wanted = round_up(std::max(1.0, habit.steps_between) * habit.share / target);
    if (!worst || habit.share > worst->share) worst = habit;
  }
  return worst;
}

// The keys by which `what`, "save" or "logging", happens after so many steps. A run that does it
// once an epoch does not read the number of steps.
std::string remedy_in_steps(const View& view, std::string_view what, std::int64_t steps) {
  const Entry* const strategy = view.run.facts.arguments.find(fmt::format("{}_strategy", what));
  const bool by_steps = strategy == nullptr || strategy->value.text == "steps";
  return by_steps ? fmt::format("set {}_steps to {}.", what, steps)
                  : fmt::format("set {0}_strategy to steps (now {1}) and {0}_steps to {2}.", what,
                                strategy->value.text, steps);
}

std::string more_passes_text(const View& view) {
  const std::int64_t batch = view.run.facts.per_device_batch;
  return batch > 0 ? fmt::format("per_device_train_batch_size from {} to {}", batch, 2 * batch)
                   : "per_device_train_batch_size to twice its value";
}

// A GPU that waits for its kernels can also be helped without another batch size.
const char* or_one_graph(const View& view) {
  const Entry* const entry = view.run.facts.arguments.find("compile_model");
  const bool captures =
      entry != nullptr &&
      (entry->value.is(NodeKind::kBool) ? entry->value.boolean : entry->value.text != "false");
  return captures ? "" : ", or set compile_model: true, which enqueues a step as one CUDA graph";
}

// The host cannot enqueue kernels as fast as the device computes them.
std::optional<Finding> device_waits_for_host(const View& view) {
  std::vector<double> shares;
  for (const RankWindows& rank : view.ranks)
    if (const auto share = idle_share(view, rank)) shares.push_back(*share);
  if (shares.empty()) return std::nullopt;
  const double idle = lower_median(std::move(shares));
  const double passes = passes_per_update(view);
  const auto filled = memory_share(view);
  const double room = filled && *filled > 0 ? std::floor(kMemoryLimit / *filled) : 1;
  const double factor = std::min(std::floor(passes + 0.01), room);
  Finding finding{
      .rule = "micro-batch-too-small",
      .cause = "launch",
      .what =
          "The GPU waits for the host to enqueue its kernels: the micro-batch is "
          "too small to occupy it.",
      .evidence = fmt::format("no kernel runs on the GPU for {:.0f} % of a step of {:.1f} ms.",
                              100 * idle, 1e3 * step_s(view.ranks.front()))};
  if (factor >= 2 && idle >= kIdleShareAccumulating) {
    finding.rule = "accumulation-too-high";
    finding.cause.clear();
    finding.what = "Small micro-batches are accumulated although larger ones fit into memory.";
    finding.evidence +=
        fmt::format(" {:.1f} passes for each update, and {:.0f} % of the GPU's memory in use.",
                    passes, 100 * *filled);
    finding.remedy = fmt::format(
        "multiply per_device_train_batch_size by {0:.0f} and divide gradient_accumulation_steps by "
        "{0:.0f}: the global batch stays{1}.",
        factor, or_one_graph(view));
    finding.gain = idle * (1 - 1 / factor);
    return finding;
  }
  if (idle < kIdleShare) return std::nullopt;
  finding.remedy = fmt::format("raise {} (the global batch grows with it){}.",
                               more_passes_text(view), or_one_graph(view));
  finding.gain = idle / 2;  // twice the work for each kernel that is enqueued
  return finding;
}

}  // namespace

std::optional<Finding> loader_bound(const View& view) {
  // If ranks lack cores, so do their loaders: that part of the wait is for a core.
  const double waiting = usual_share(view, Phase::kData) - starved_share(view).value_or(0);
  if (waiting < kDataShare) return std::nullopt;
  const int needed = sufficient_workers(view);
  Finding finding{
      .rule = "loader-bound",
      .what = "The ranks wait for batches.",
      .evidence = fmt::format("{:.0f} % of a step of {:.1f} ms is spent waiting for data",
                              100 * waiting, 1e3 * step_s(view.ranks.front())),
      .remedy = loader_remedy(view, needed),
      .gain = waiting};
  finding.evidence += needed == 0 ? "."
                                  : fmt::format("; a batch takes {:.1f} ms to load.",
                                                1e3 * batch_s(view.ranks.front()));
  return finding;
}

std::optional<Finding> logging_too_often(const View& view) {
  const auto habit = habit_of(view, Phase::kLogging, Counter::kLogs, kLoggingTarget);
  if (!habit || habit->share < kLoggingShare) return std::nullopt;
  const RankWindows& rank = view.ranks.front();
  return Finding{
      .rule = "logging-too-often",
      .what = "Metrics are logged so often that it costs training time.",
      .evidence = fmt::format(
          "logging takes {:.1f} % of the time, every {:.1f} steps; {:.1f} waits of the host for "
          "the device in a step.",
          100 * habit->share, habit->steps_between,
          static_cast<double>(count(rank, Counter::kHostSyncs)) /
              static_cast<double>(rank.sum.steps)),
      .remedy = remedy_in_steps(view, "logging", habit->steps_wanted),
      .gain = habit->gain()};
}

std::optional<Finding> saving_too_often(const View& view) {
  const auto habit = habit_of(view, Phase::kSaving, Counter::kSaves, kSavingTarget);
  if (!habit || habit->share < kSavingShare) return std::nullopt;
  return Finding{.rule = "saving-too-often",
                 .what = "Checkpoints are written so often that it costs training time.",
                 .evidence = fmt::format("saving takes {:.1f} % of the time, every {:.1f} steps.",
                                         100 * habit->share, habit->steps_between),
                 .remedy = remedy_in_steps(view, "save", habit->steps_wanted),
                 .gain = habit->gain()};
}

std::optional<Finding> micro_batch_too_small(const View& view) {
  if (view.ranks.front().on_device) return device_waits_for_host(view);
  const double optimizer = least_share(view, Phase::kOptimizer);
  const double communication = least_share(view, Phase::kCommunication);
  const double fixed = optimizer + communication;
  // If communication is the larger part, its own rule reports it.
  if (fixed < kFixedShare || communication > optimizer) return std::nullopt;
  return Finding{
      .rule = "micro-batch-too-small",
      .cause = "update",
      .what =
          "Each update is computed from so few samples that updating costs more than learning "
          "from them.",
      .evidence =
          fmt::format("optimizer {:.0f} % and communication {:.0f} % of a step of {:.1f} ms, "
                      "whatever the batch.",
                      100 * optimizer, 100 * communication, 1e3 * step_s(view.ranks.front())),
      .remedy =
          fmt::format("raise {}; the global batch grows with it, so look at the learning rate.",
                      more_passes_text(view)),
      .gain = fixed / 2};  // twice the samples share the same cost
}

std::optional<Finding> accumulation_synchronises(const View& view) {
  if (view.run.facts.world_size < 2) return std::nullopt;
  const RankWindows& rank = view.ranks.front();
  const auto updates = static_cast<double>(count(rank, Counter::kUpdates));
  const auto synchronised = static_cast<double>(count(rank, Counter::kSynchronisedPasses));
  // One synchronised pass per update is right. A record that begins within an update may have a
  // little more, but never two.
  constexpr double kTwice = 1.9;
  if (updates < static_cast<double>(kMinEvents) || synchronised < kTwice * updates)
    return std::nullopt;
  const double communication = least_share(view, Phase::kCommunication);
  return Finding{
      .rule = "accumulation-synchronises",
      .what =
          "Gradients are averaged over the ranks in every micro-step, although only the last "
          "one before an update needs it.",
      .evidence = fmt::format("{:.1f} synchronised backward passes for each update; communication "
                              "takes {:.0f} % of the time.",
                              synchronised / updates, 100 * communication),
      .remedy =
          "open model.no_sync() before the backward passes that do not end a step, or take windows "
          "of the loader and call model.backward(loss, micro.last) (gradient_accumulation_steps of "
          "the Trainer).",
      .gain = communication * (1 - updates / synchronised)};
}

}  // namespace lockstep::monitor::detail
