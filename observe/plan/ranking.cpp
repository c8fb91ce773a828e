#include "observe/plan/ranking.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace lockstep::plan {
namespace {

// A hundredth of a step's time is worth neither the memory of a larger batch nor a change to the
// file.
constexpr double kWorthMemory = 0.01;

// Divisors of the samples that a replica computes in an update, the smallest first. Among very many
// those in the middle are of no interest: a micro-batch of a thousand is past every optimum.
std::vector<std::int64_t> divisors_of(std::int64_t window) {
  constexpr std::int64_t kMost = 4096;
  std::vector<std::int64_t> all;
  for (std::int64_t batch = 1; batch <= std::min(window, kMost); ++batch)
    if (window % batch == 0) all.push_back(batch);
  return all;
}

// Strategies that need fewer changes to a file come first.
constexpr Distribution kDistributions[] = {
    Distribution::kSingle,    Distribution::kDdp,         Distribution::kShardedOptimizer,
    Distribution::kFullShard, Distribution::kShardGradOp, Distribution::kHybridShard,
    Distribution::kSplit};

// How a training computes and where, before its micro-batch is chosen.
struct Variant {
  Training training;
  Parts parts;
};

// The fastest micro-batch, by `seconds(choice)`, which is empty where the speed is not known.
template <typename Seconds>
std::optional<Choice> best_batch(const Variant& variant, const Card& card, const Seconds& seconds) {
  const auto& [training, parts] = variant;
  const int replicas = parts.replicas();
  if (*training.global_batch % replicas != 0) return std::nullopt;
  std::vector<std::pair<double, Choice>> fitting;
  for (const std::int64_t batch : divisors_of(*training.global_batch / replicas)) {
    Choice choice = make_choice(training, card, parts, batch);
    if (!choice.fits) break;  // a larger one needs more
    // Batch norms of fewer samples are another training.
    if (std::holds_alternative<models::ResNetConfig>(training.model.config) &&
        batch < training.batch)
      continue;
    const std::optional<double> time = seconds(choice);
    if (!time) return std::nullopt;
    fitting.emplace_back(*time, std::move(choice));
  }
  if (fitting.empty()) return std::nullopt;
  const auto time = [](const auto& one) { return one.first; };
  const double least = time(*std::ranges::min_element(fitting, {}, time));
  const auto fast = [&](const auto& one) { return time(one) <= least * (1 + kWorthMemory); };
  const auto written = std::ranges::find_if(
      fitting, [&](const auto& one) { return fast(one) && one.second.batch == training.batch; });
  return written != fitting.end() ? written->second : std::ranges::find_if(fitting, fast)->second;
}

// The keys that a file needs to train as `strategy` does.
std::vector<Setting> settings_of(const Training& file, const Strategy& strategy, int gpus) {
  std::vector<Setting> all;
  const Choice& c = strategy.choice;
  if (c.batch != file.batch)
    all.push_back({"per_device_train_batch_size", std::to_string(c.batch)});
  // With global_batch_size or tokens_per_update the accumulation follows.
  if (!file.global_batch && (c.accumulation != file.accumulation || c.replicas() != gpus))
    all.push_back({"gradient_accumulation_steps", std::to_string(c.accumulation)});
  // fsdp_config ends with fsdp, which has no effect on one GPU and stays.
  const std::string_view fsdp = fsdp_word(c.distribution);
  const std::string_view file_fsdp = fsdp_word(file.fsdp.value_or(Distribution::kDdp));
  const bool fsdp_changes = c.distribution != Distribution::kSingle && fsdp != file_fsdp;
  const bool file_checkpoints =
      file.checkpointing && !(file.fixed_checkpointing && fsdp_changes && fsdp.empty());
  if (strategy.checkpointing != file_checkpoints)
    all.push_back({"gradient_checkpointing", strategy.checkpointing ? "true" : "false"});
  if (strategy.fp8 != file.fp8)
    all.push_back({"mixed_precision", strategy.fp8 ? "fp8" : "bf16"});
  else if (strategy.half != file.half)
    all.push_back({"bf16", "true"});
  if (c.stages != file.pipeline)
    all.push_back({"pipeline_parallel_degree", std::to_string(c.stages)});
  if (c.slices != file.tensor) all.push_back({"tensor_parallel_degree", std::to_string(c.slices)});
  if (c.slices > 1 && c.sequence != file.sequence.value_or(false))
    all.push_back({"sequence_parallel", c.sequence ? "true" : "false"});
  // Batches are tried on a whole model.
  if (c.slices > 1 && !file.adapts.empty()) all.push_back({file.adapts, "false"});
  const bool sharded = c.distribution == Distribution::kShardedOptimizer;
  if (sharded != file.sharded_optimizer && (sharded || c.distribution == Distribution::kDdp))
    all.push_back({"shard_optimizer", sharded ? "true" : "false"});
  if (fsdp_changes) all.push_back({"fsdp", fsdp.empty() ? "\"\"" : std::string(fsdp)});
  if (c.distribution == Distribution::kSplit && !file.device_map)
    all.push_back({"model.device_map", "balanced"});
  return all;
}

// The fastest first. Of those that are as fast as an estimate can tell, the one with the fewest
// changes to the file leads.
void sort_strategies(std::vector<Strategy>& strategies) {
  const auto seconds = [](const Strategy& strategy) { return strategy.step->total_s(); };
  std::ranges::stable_sort(strategies, {}, seconds);
  if (strategies.empty()) return;
  const double limit = seconds(strategies.front()) * (1 + kWorthMemory);
  const auto end = std::ranges::upper_bound(strategies, limit, {}, seconds);
  const auto simplest =
      std::ranges::min_element(strategies.begin(), end, {},
                               [](const Strategy& strategy) { return strategy.settings.size(); });
  std::rotate(strategies.begin(), simplest, simplest + 1);
}

// All numbers up to 16; above, the powers of two and the number itself.
std::vector<int> counts_of(int gpus) {
  std::vector<int> counts{gpus};
  for (int n = gpus - 1; n >= 1; --n)
    if (gpus <= 16 || (n & (n - 1)) == 0) counts.push_back(n);
  return counts;
}

// How the file computes first, so that of two equally fast strategies the one with fewer changes
// leads.
std::vector<Training> computations(const Training& training, const Machine& machine) {
  std::vector<Training> all{training};
  if (lacks_fp8(training, machine.card)) all.front().fp8 = false;
  // --tokens-per-second was measured with the file's own type and checkpointing.
  if (machine.speed.tokens_per_second) return all;
  const bool has_blocks = training.model.blocks() > 0 && !training.fixed_checkpointing;
  const bool may_halve = !training.half && machine.card.bfloat16 && !machine.card.cpu;
  for (const bool half : {false, true}) {
    if (half && !may_halve) continue;
    for (const bool other : {false, true}) {
      if ((!half && !other) || (other && !has_blocks)) continue;
      Training one = all.front();
      if (half) one.half = one.bf16 = true;
      if (other) one.checkpointing = !one.checkpointing;
      if (one.checkpointing) one.again = {};
      all.push_back(std::move(one));
    }
  }
  const std::size_t wider = all.size();
  for (std::size_t i = 0; training.may_fp8 && machine.card.fp8 && i < wider; ++i) {
    if (!all[i].bf16 || all[i].fp8 || training.model.causal_lm() == nullptr) continue;
    Training one = all[i];
    one.fp8 = true;
    all.push_back(std::move(one));
  }
  return all;
}

// Replicas of stages, of slices, and of both, that are copied or fully sharded. Degrees are powers
// of two and the file's own.
std::vector<Parts> divided_replicas(const Training& training, int gpus) {
  std::vector<Parts> all;
  if (training.device_map) return all;
  const auto degrees = [&](int written) {
    std::vector<int> found;
    for (int degree = 1; degree <= gpus; ++degree)
      if ((degree & (degree - 1)) == 0 || degree == written) found.push_back(degree);
    return found;
  };
  for (const int stages : degrees(training.pipeline))
    for (const int slices : degrees(training.tensor))
      for (const bool sequence : {false, true}) {
        Parts parts{gpus, Distribution::kDdp, stages, slices, sequence};
        if (stages * slices == 1 || gpus % (stages * slices) != 0 || (sequence && slices == 1))
          continue;
        all.push_back(parts);
        if (parts.replicas() == 1) continue;
        parts.distribution = training.fsdp.value_or(Distribution::kFullShard);
        all.push_back(parts);
      }
  return all;
}

}  // namespace

std::vector<Strategy> rank_strategies(const Training& training, const Machine& machine, int gpus) {
  std::vector<Strategy> strategies;
  const std::int64_t global =
      training.global_batch.value_or(training.batch * training.accumulation * gpus);
  for (Training& computed : computations(training, machine)) {
    computed.global_batch = global;
    for (const int n : counts_of(gpus)) {
      const auto add = [&](const Parts& parts) {
        if (!can_train(computed, machine.card, parts)) return;
        const auto choice = best_batch({computed, parts}, machine.card, [&](const Choice& c) {
          const auto step = timed(computed, machine, c).step;
          return step ? std::optional(step->total_s()) : std::nullopt;
        });
        if (!choice) return;
        Strategy strategy{timed(computed, machine, *choice), computed.checkpointing, computed.half,
                          computed.fp8};
        strategy.settings = settings_of(training, strategy, gpus);
        strategy.estimate = *strategy.step;
        strategies.push_back(std::move(strategy));
      };
      for (const Distribution distribution : kDistributions) {
        // fsdp_config belongs to the file's own word.
        const bool other_word =
            training.fsdp && !fsdp_word(distribution).empty() && distribution != training.fsdp;
        const bool mapped = n == 1 || !training.device_map || distribution == Distribution::kSplit;
        if (mapped && !other_word) add({n, distribution});
      }
      for (const Parts& parts : divided_replicas(training, n)) add(parts);
    }
  }
  sort_strategies(strategies);
  return strategies;
}

Measurement measurement_of(const Strategy& strategy, double step_s, std::uint64_t memory_bytes) {
  return {.parts = strategy.choice,
          .batch = strategy.choice.batch,
          .accumulation = strategy.choice.accumulation,
          .checkpointing = strategy.checkpointing,
          .half = strategy.half,
          .fp8 = strategy.fp8,
          .step_s = step_s,
          .memory_bytes = memory_bytes};
}

bool Measurement::is_like(const Measurement& other) const {
  Measurement same = other;
  same.step_s = step_s;
  same.memory_bytes = memory_bytes;
  same.tokens = tokens;
  same.disturbance = disturbance;
  return same == *this;
}

bool Measurement::is_of(const Strategy& strategy) const {
  return is_like(measurement_of(strategy, step_s, memory_bytes));
}

void use_measurements(std::vector<Strategy>& strategies, const Training& training,
                      const std::vector<Measurement>& measurements) {
  std::vector<double> ratios;
  auto tokens = static_cast<double>(training.model.length);  // of a sample
  const auto set = [&](Strategy& strategy, const StepTime& step) {
    strategy.step = step;
    strategy.tokens_per_second =
        static_cast<double>(strategy.choice.global_batch) * tokens / step.total_s();
  };
  for (Strategy& strategy : strategies) {
    const auto found = std::ranges::find_if(
        measurements, [&](const Measurement& one) { return one.is_of(strategy); });
    if (found == measurements.end()) continue;
    ratios.push_back(found->step_s / strategy.estimate.total_s());
    strategy.measured = true;
    strategy.run_bytes = found->memory_bytes;
    strategy.disturbance = found->disturbance;
    if (found->tokens > 0) tokens = found->tokens;
    set(strategy, {.compute_s = found->step_s});
  }
  if (ratios.empty()) return;
  std::ranges::sort(ratios);
  const double ratio = ratios[ratios.size() / 2];
  for (Strategy& strategy : strategies) {
    if (strategy.measured) continue;
    const StepTime& s = strategy.estimate;
    set(strategy, {ratio * s.compute_s, ratio * s.optimizer_s, ratio * s.communication_s,
                   ratio * s.exposed_s});
  }
  sort_strategies(strategies);
}

Choice fastest_batch(const Training& training, const Card& card, int ranks) {
  const Choice usual = choose(training, card, ranks);
  if (card.cpu || !usual.fits || usual.gpus_per_replica() > 1 || !usual.same_global_batch)
    return usual;
  Training held = training;
  held.global_batch = usual.global_batch;
  // How micro-batches compare depends little on the card: one that is not known is taken for an
  // A100.
  Card known = card;
  if (known.flops <= 0) {
    const Card a100 = parse_devices("A100-80GB").card;
    known.flops = a100.flops;
    known.float_flops = a100.float_flops;
    known.memory_bandwidth = a100.memory_bandwidth;
    known.bfloat16 = a100.bfloat16;
    known.fp8 = training.fp8;  // one that trains so has it
  }
  const auto best = best_batch({held, {ranks, usual.distribution}}, known, [&](const Choice& c) {
    const auto work = work_of(held, c, known, {});
    return work ? std::optional(static_cast<double>(c.accumulation) *
                                (work->forward_s + work->backward_s))
                : std::nullopt;
  });
  return best.value_or(usual);
}

}  // namespace lockstep::plan
