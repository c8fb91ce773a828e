// Rules about unused resources (GPUs, memory, cores), and about the parts of a step besides
// computing: batches, micro-batches, logs, checkpoints.
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

constexpr double kGiB = 1u << 30;

// Samples, one a second, in which some GPU works. Fewer may be the start of a run.
constexpr int kMinGpuSamples = 10;
// Only the newest samples count: what a run did an hour ago does not decide what it does now.
constexpr std::size_t kNewestGpuSamples = 60;
constexpr double kBusyPercent = 50;
// GPUs that work together differ by some percent; of two that take turns, one has less than half of
// the other's utilisation.
constexpr double kTurnRatio = 0.5;
constexpr double kTurnShare = 0.7;   // of the samples
constexpr double kOwnTurns = 0.1;    // of those samples, for a GPU that has turns of its own
constexpr double kIdlePercent = 10;  // a GPU below it does nothing
// GPUs that do the same work differ by a few percent. A quarter means another batch, another part
// of the model or another card.
constexpr double kSpread = 0.25;
constexpr double kMinSpreadBytes = kGiB;

// The share of time (a median) that ranks on a CPU wait for a core. A clean run of as many ranks as
// cores has 1 to 4 %.
constexpr double kStarvedShare = 0.10;
constexpr double kThrottledShare = 0.2;  // of the periods of a control group
constexpr double kAllCores = 0.9;        // of the cores, in use by the ranks

// The kernel's time for a zeroed page of 4 KiB; larger pages take longer.
constexpr double kFaultS = 0.5e-6;
constexpr double kFaultShare = 0.03;
constexpr double kMinFaultsPerStep = 256;  // 1 MiB
constexpr double kPageBytes = 4096;

// Threads of the ranks that run or wait for a core at once, for each core.
constexpr double kTooManyAtOnce = 1.2;
// The share of the cores that ranks use, if the kernel does not count waits.
constexpr double kCoresUsed = 0.5;

// ------------------------------------------------------------------ utilisation

// Which GPU has the work in one sample: its index, kTogether, or kNobody.
constexpr int kTogether = -1;
constexpr int kNobody = -2;

int working_gpu(const GpuSample& sample) {
  int first = kNobody;
  double most = 0, second = 0;
  for (std::size_t i = 0; i < sample.gpus.size(); ++i) {
    const double busy = sample.gpus[i].utilisation_percent.value_or(0);
    if (busy > most) {
      second = most;
      most = busy;
      first = static_cast<int>(i);
    } else {
      second = std::max(second, busy);
    }
  }
  if (most < kBusyPercent) return kNobody;
  return second <= kTurnRatio * most ? first : kTogether;
}

struct Turns {
  int samples = 0;         // with work
  int alone = 0;           // in which one GPU had it
  std::vector<int> own{};  // of those, by GPU
  int gpus_with_turns() const {
    return static_cast<int>(std::count_if(own.begin(), own.end(),
                                          [&](int n) { return n > 0 && n >= kOwnTurns * alone; }));
  }
  bool one_at_a_time() const { return samples >= kMinGpuSamples && alone >= kTurnShare * samples; }
};

Turns turns_of(const HostGpus& host) {
  Turns turns;
  const std::size_t first =
      host.samples.size() > kNewestGpuSamples ? host.samples.size() - kNewestGpuSamples : 0;
  for (std::size_t s = first; s < host.samples.size(); ++s) {
    const GpuSample& sample = host.samples[s];
    if (turns.own.size() < sample.gpus.size()) turns.own.resize(sample.gpus.size());
    const int gpu = sample.gpus.size() < 2 ? kNobody : working_gpu(sample);
    if (gpu == kNobody) continue;
    ++turns.samples;
    if (gpu == kTogether) continue;
    ++turns.alone;
    ++turns.own[static_cast<std::size_t>(gpu)];
  }
  return turns;
}

std::string launch_line(const RunFacts& facts, int gpus) {
  const bool known = !facts.program.empty() && facts.program != "trainer";
  return fmt::format("lockstep run --standalone --nproc-per-node={} {}", gpus,
                     known ? facts.program : "./your_program");
}

std::string utilisation_text(const HostGpus& host) {
  std::string text;
  const std::size_t shown = std::min<std::size_t>(host.samples.size(), 4);
  for (std::size_t s = host.samples.size() - shown; s < host.samples.size(); ++s) {
    std::string sample;
    for (const GpuReading& gpu : host.samples[s].gpus)
      sample += fmt::format("{}{}", sample.empty() ? "" : "/", gpu.utilisation_percent.value_or(0));
    text += fmt::format("{}{}", text.empty() ? "" : ", ", sample);
  }
  return text;
}

Finding alternating(const RunFacts& facts, const HostGpus& host, const Turns& turns) {
  const int gpus = static_cast<int>(turns.own.size());
  Finding finding{
      .rule = "not-launched",
      .cause = "alternating",
      .what =
          "The GPUs take turns instead of working together: layers of one model are spread over "
          "them, and each waits for the one before.",
      .evidence = fmt::format("in {} of {} samples one of {} GPUs had all the work; utilisation "
                              "lately {} %.",
                              turns.alone, turns.samples, gpus, utilisation_text(host)),
      .remedy =
          fmt::format("start one process for each GPU: `{}`. If the model does not fit on one "
                      "GPU, ask `lockstep plan`.",
                      launch_line(facts, gpus)),
      .gain = 1 - 1.0 / gpus};
  finding.gain *= static_cast<double>(turns.alone) / turns.samples;
  if (facts.world_size > 1)
    finding.remedy =
        "make each rank use its own GPU (LOCAL_RANK; `lockstep env` shows which), and "
        "no device_map over several.";
  return finding;
}

// A program that is not ours does not say whether it uses one.
bool uses_a_gpu(const View& view) {
  if (on_cuda(view)) return true;
  for (const HostGpus& host : view.gpus)
    for (const GpuFigures& gpu : gpu_figures(host))
      if (gpu.utilisation_percent.value_or(0) > kIdlePercent) return true;
  return false;
}

// ------------------------------------------------------------------ balance

using Member = std::optional<double> GpuFigures::*;

struct Spread {
  const GpuFigures* least = nullptr;
  const GpuFigures* most = nullptr;
  double share(Member value) const {
    return least == nullptr || *(most->*value) <= 0 ? 0 : 1 - *(least->*value) / *(most->*value);
  }
};

Spread spread_of(const std::vector<GpuFigures>& gpus, Member value) {
  Spread spread;
  for (const GpuFigures& gpu : gpus) {
    if (!(gpu.*value)) continue;
    if (spread.least == nullptr || *(gpu.*value) < *(spread.least->*value)) spread.least = &gpu;
    if (spread.most == nullptr || *(gpu.*value) > *(spread.most->*value)) spread.most = &gpu;
  }
  return spread;
}

Finding idle_gpu(const RunFacts& facts, std::size_t used) {
  return {.rule = "unbalanced",
          .cause = "idle",
          .what = "Several ranks share a GPU while others have no work.",
          .evidence =
              fmt::format("{} ranks on this host, {} GPUs with work.", facts.ranks_on_host, used),
          .remedy =
              "let LOCAL_RANK choose the device of each rank (WorldOptions::device left empty "
              "does), and unset LOCKSTEP_SHARE_DEVICE.",
          .gain = 1 - static_cast<double>(used) / facts.ranks_on_host};
}

std::optional<Finding> unbalanced_on(const View& view, const HostGpus& host) {
  const RunFacts& facts = view.run.facts;
  std::vector<GpuFigures> used = gpus_of_ranks(view, host);
  std::erase_if(used, [](const GpuFigures& gpu) {
    return gpu.utilisation_percent.value_or(0) < kIdlePercent;
  });
  const auto ranks = static_cast<std::size_t>(std::max(facts.ranks_on_host, 1));
  if (!used.empty() && used.size() < ranks && gpu_figures(host).size() >= ranks)
    return idle_gpu(facts, used.size());
  if (used.size() < 2) return std::nullopt;
  const Spread memory = spread_of(used, &GpuFigures::memory_bytes);
  if (memory.share(&GpuFigures::memory_bytes) >= kSpread &&
      *memory.most->memory_bytes - *memory.least->memory_bytes >= kMinSpreadBytes)
    return Finding{
        .rule = "unbalanced",
        .cause = "memory",
        .what = "The GPUs hold different amounts, and the fullest limits the batch of all.",
        .evidence = fmt::format("GPU {} uses {:.1f} GiB, GPU {} {:.1f} GiB.", memory.most->index,
                                *memory.most->memory_bytes / kGiB, memory.least->index,
                                *memory.least->memory_bytes / kGiB),
        .remedy =
            "look for tensors that every rank puts on GPU 0 (checkpoints loaded without "
            "map_location, a device_map), and for other processes (`nvidia-smi`)."};
  const Spread power = spread_of(used, &GpuFigures::power_w);
  if (power.share(&GpuFigures::power_w) >= kSpread)
    return Finding{
        .rule = "unbalanced",
        .cause = "power",
        .what = "The GPUs draw different power for the same work.",
        .evidence = fmt::format("GPU {} draws {:.0f} W, GPU {} {:.0f} W.", power.most->index,
                                *power.most->power_w, power.least->index, *power.least->power_w),
        .remedy =
            "compare their clocks, power limits and PCIe links (`nvidia-smi -q -d "
            "PERFORMANCE,POWER`, `lockstep doctor`): one of them works less or slower."};
  return std::nullopt;
}

// ------------------------------------------------------------------ processes

double faults_per_step(const RankWindows& rank) {
  return median_of(rank, [](const Interval& window) {
    return window.process ? window.process->minor_faults_per_s * window.seconds /
                                static_cast<double>(window.steps)
                          : 0;
  });
}

// Memory that stays is touched once. Only memory that is taken again in every step is the cause.
bool grows(const RankWindows& rank) {
  double faulted = 0;
  for (const Interval& window : rank.windows)
    if (window.process) faulted += window.process->minor_faults_per_s * window.seconds * kPageBytes;
  const double before = static_cast<double>(rank.windows.front().resident_bytes);
  const double after = static_cast<double>(rank.windows.back().resident_bytes);
  return after - before > faulted / 2;
}

// Nothing where the kernel does not count them.
std::optional<double> waiting_threads(const RankWindows& rank) {
  std::vector<double> values;
  for (const Interval& window : rank.windows)
    if (window.process && window.process->waiting_threads)
      values.push_back(*window.process->waiting_threads);
  if (values.empty()) return std::nullopt;
  return median(std::move(values));
}

}  // namespace

std::optional<Finding> not_launched(const View& view) {
  const RunFacts& facts = view.run.facts;
  if (facts.device == "cpu") return std::nullopt;
  bool together = false;
  for (const HostGpus& all : view.gpus) {
    const HostGpus host = gpus_in_use(all);
    const Turns turns = turns_of(host);
    if (turns.one_at_a_time() && turns.gpus_with_turns() >= 2)
      return alternating(facts, host, turns);
    together = together || (turns.samples >= kMinGpuSamples && !turns.one_at_a_time());
  }
  // A process may drive several GPUs at once by other means.
  if (facts.world_size != 1 || facts.gpus_visible < 2 || together || !uses_a_gpu(view))
    return std::nullopt;
  return Finding{
      .rule = "not-launched",
      .cause = "one-process",
      .what =
          fmt::format("One process trains although {} GPUs are visible: it was probably started "
                      "without a launcher.",
                      facts.gpus_visible),
      .evidence = fmt::format("world size 1, {} GPUs.", facts.gpus_visible),
      .remedy = fmt::format("start one process for each GPU: `{}`; or show it one GPU alone "
                            "(CUDA_VISIBLE_DEVICES=0).",
                            launch_line(facts, facts.gpus_visible)),
      .gain = 1 - 1.0 / facts.gpus_visible};
}

std::optional<Finding> unbalanced_gpus(const View& view) {
  const RunFacts& facts = view.run.facts;
  if (facts.world_size < 2) return std::nullopt;
  for (const HostGpus& host : view.gpus) {
    if (host.samples.size() < static_cast<std::size_t>(kMinGpuSamples)) continue;
    if (auto finding = unbalanced_on(view, host)) return finding;
  }
  return std::nullopt;
}

std::optional<Finding> page_faults(const View& view) {
  const RankWindows* worst = nullptr;
  for (const RankWindows& rank : view.ranks)
    if (!grows(rank) && (worst == nullptr || faults_per_step(rank) > faults_per_step(*worst)))
      worst = &rank;
  if (worst == nullptr || faults_per_step(*worst) < kMinFaultsPerStep) return std::nullopt;
  const double faults = rate(*worst, &ProcessRates::minor_faults_per_s);
  const double cores = rate(*worst, &ProcessRates::cores);
  const double system = rate(*worst, &ProcessRates::system_cores);
  // A share of the time that the process ran, and at most what the kernel took of it.
  const double taken = cores > 0 ? std::min(faults * kFaultS, system) / cores : 0;
  const double gain =
      bounded_gain(*worst, std::min(taken, 1.0) * (1 - share(*worst, Phase::kCommunication)));
  if (taken < kFaultShare || (worst->on_device && gain < kFaultShare)) return std::nullopt;
  return Finding{
      .rule = "page-faults",
      .what = "Memory goes back to the kernel and is taken again in every step.",
      .evidence =
          fmt::format("{:.0f} minor page faults in a step of {:.1f} ms; {:.0f} % of the CPU "
                      "time is the kernel's.",
                      faults_per_step(*worst), 1e3 * step_s(*worst), 100 * system / cores),
      .remedy =
          "use the caching CPU allocator (lockstep::run() has it unless "
          "LOCKSTEP_CPU_CACHE_MAX_BYTES=0; lockstep::cache_cpu_memory() elsewhere), or start "
          "with MALLOC_TRIM_THRESHOLD_=-1 MALLOC_MMAP_THRESHOLD_=4294967296 "
          "(docs/optimisation.md).",
      .gain = gain};
}

std::optional<Finding> too_many_threads(const View& view) {
  const RunFacts& facts = view.run.facts;
  const int threads = std::max(facts.threads_per_rank, 1) * std::max(facts.ranks_on_host, 1);
  // On several hosts the cores are those of one rank, which may be bound to some of them.
  if (facts.hosts != 1 || facts.cores <= 0 || threads <= facts.cores) return std::nullopt;
  // Threads that are not used do no harm. Those that run or wait are the ranks' own, however much
  // other programs use the cores.
  double in_use = 0, switches = 0;
  std::optional<double> waiting;
  const auto ranks = std::min(view.ranks.size(), static_cast<std::size_t>(facts.ranks_on_host));
  for (std::size_t i = 0; i < ranks; ++i) {
    in_use += rate(view.ranks[i], &ProcessRates::cores);
    switches += rate(view.ranks[i], &ProcessRates::involuntary_switches_per_s);
    if (const auto more = waiting_threads(view.ranks[i])) waiting = waiting.value_or(0) + *more;
  }
  if (waiting ? in_use + *waiting < kTooManyAtOnce * facts.cores
              : in_use < kCoresUsed * facts.cores)
    return std::nullopt;
  // Threads that interrupt each other keep the cores busy: these are kept by other programs.
  if (in_use < kCoresUsed * facts.cores && starved_share(view)) return std::nullopt;
  const int fit = facts.cores / std::max(facts.ranks_on_host, 1);
  return Finding{
      .rule = "too-many-threads",
      .cause = fit < 1 ? "ranks" : "threads",
      .what = "More threads compute than there are cores, and interrupt each other.",
      .evidence = fmt::format(
          "{} ranks with {} threads each on {} cores; {:.1f} cores in use{}, {:.0f} "
          "involuntary context switches a second.",
          facts.ranks_on_host, std::max(facts.threads_per_rank, 1), facts.cores, in_use,
          waiting ? fmt::format(", {:.1f} threads waiting for one", *waiting) : "", switches),
      .remedy = fit < 1
                    ? fmt::format("start at most {} ranks on this host.", facts.cores)
                    : fmt::format("set OMP_NUM_THREADS={} (`lockstep run` does, unless it is set).",
                                  fit)};
}

std::optional<double> starved_share(const View& view) {
  // On a GPU the host is ahead: its waits cost nothing while the device has work.
  if (!view.enough || on_cuda(view)) return std::nullopt;
  const double share = lower_median(of_ranks(view, delay_share));
  if (share <= kStarvedShare) return std::nullopt;
  return share;
}

std::optional<Finding> cpu_starved(const View& view) {
  const auto starved = starved_share(view);
  if (!starved || too_many_threads(view)) return std::nullopt;
  const RunFacts& facts = view.run.facts;
  Finding finding{.rule = "cpu-starved",
                  .cause = "other-programs",
                  .what = fmt::format("The ranks wait for a core {:.0f} % of the time because "
                                      "other programs use the cores.",
                                      100 * *starved),
                  .remedy =
                      "end the other programs (`top` shows them), or give the ranks cores of their "
                      "own (taskset, a batch system). Until then no figure of this run is that of "
                      "an idle machine.",
                  .gain = *starved};
  double in_use = 0;
  for (const RankWindows& rank : view.ranks) in_use += rate(rank, &ProcessRates::cores);
  const Interval& first = view.ranks.front().sum;
  const double throttled = lower_median(of_ranks(view, throttled_share));
  // On several hosts the cores are those of one rank, which may be bound to some of them.
  finding.evidence = facts.hosts == 1 && facts.cores > 0
                         ? fmt::format("the ranks had {:.1f} of {} cores.", in_use, facts.cores)
                         : fmt::format("the ranks had {:.1f} cores.", in_use);
  if (throttled >= kThrottledShare && first.cpu_limit_cores) {
    finding.cause = "quota";
    finding.what = fmt::format(
        "The ranks wait for a core {:.0f} % of the time because their "
        "control group has used up its CPU time.",
        100 * *starved);
    finding.evidence =
        fmt::format("limited to {:.1f} cores, and stopped in {:.0f} % of the periods.",
                    *first.cpu_limit_cores, 100 * throttled);
    finding.remedy = "raise the CPU limit of the container or job, or start fewer ranks.";
  } else if (facts.hosts == 1 && facts.cores > 0 && in_use >= kAllCores * facts.cores) {
    finding.cause = "own-threads";
    finding.what = fmt::format(
        "The ranks wait for a core {:.0f} % of the time because their own "
        "threads use all cores.",
        100 * *starved);
    finding.remedy = "lower dataloader_num_workers, or start fewer ranks: workers need cores, too.";
  } else if (facts.threads_per_rank > 1) {
    finding.remedy =
        "end the other programs (`top` shows them), or set OMP_NUM_THREADS=1 (or fewer threads per "
        "rank): threads spin while they wait for one that has lost its core. Until then no figure "
        "of this run is that of an idle machine.";
    finding.gain = 0;  // not known: the time in which threads spin is counted as computing
  }
  return finding;
}

// ---------------------------------------------------------------- besides computing

namespace {

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
