#include "lockstep/plan/strategy.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::plan {
namespace {

// The host of an H200 machine needs 16.4 ms to launch a step of 12 eager blocks of plain modules.
constexpr double kHostPerBlock_s = 16.4e-3 / 12;
// An Adam update reads gradient, weight and two states and writes the last three: in float.
constexpr double kUpdateBytes = 28;

struct Batches {
  std::int64_t batch;
  std::int64_t accumulation;
  std::int64_t global;
  bool same;
};

// The samples of one replica in an update.
std::int64_t window_of(const Training& t, int replicas) {
  if (!t.global_batch) return t.batch * t.accumulation;
  return std::max<std::int64_t>(1, *t.global_batch / replicas);
}

// How the GPUs are used.
struct Parts {
  int gpus = 1;
  int stages = 1;
  bool sharded = false;
};

Batches batches_of(const Training& t, int replicas, std::int64_t batch) {
  const std::int64_t window = window_of(t, replicas);
  const std::int64_t global = window * replicas;
  return {batch, window / batch, global, !t.global_batch || global == *t.global_batch};
}

// Micro-batches that the window is a multiple of, the largest first.
std::vector<std::int64_t> micro_batches(const Training& t, int replicas) {
  const std::int64_t window = window_of(t, replicas);
  std::vector<std::int64_t> all;
  for (std::int64_t batch = std::min(t.batch, window); batch >= 1; --batch)
    if (window % batch == 0) all.push_back(batch);
  return all;
}

Choice make_choice(const Training& t, const Card& card, const Parts& parts, std::int64_t batch) {
  const auto [gpus, stages, sharded] = parts;
  Choice choice{.gpus = gpus, .stages = stages};
  const int replicas = choice.replicas();
  const Batches batches = batches_of(t, replicas, batch);
  choice.batch = batches.batch;
  choice.accumulation = batches.accumulation;
  choice.global_batch = batches.global;
  choice.same_global_batch = batches.same;
  choice.strategy = stages > 1  ? (replicas > 1 ? Strategy::kHybrid : Strategy::kSplit)
                    : gpus == 1 ? Strategy::kSingle
                    : sharded   ? Strategy::kShardedOptimizer
                                : Strategy::kDdp;
  choice.memory = memory_of(t.model, {.batch = batches.batch,
                                      .accumulation = batches.accumulation,
                                      .half = t.half,
                                      .checkpointing = t.checkpointing,
                                      .fused = !t.unfused && !card.cpu && stages == 1,
                                      .ranks = replicas,
                                      .sharded_optimizer = sharded && replicas > 1,
                                      .state_copies = t.state_copies,
                                      .stages = stages,
                                      .cpu = card.cpu});
  choice.fits = fits(choice.memory, card);
  return choice;
}

// The largest micro-batch that fits, or the smallest one.
Choice best_of(const Training& t, const Card& card, const Parts& parts) {
  Choice choice;
  for (const std::int64_t batch : micro_batches(t, parts.gpus / parts.stages)) {
    choice = make_choice(t, card, parts, batch);
    if (choice.fits) break;
  }
  return choice;
}

// As few GPUs for a replica as hold its layers, where the replicas use all GPUs.
std::optional<Choice> split(const Training& t, const Card& card, int gpus) {
  for (int stages = 2; stages <= std::min<std::int64_t>(gpus, t.model.blocks()); ++stages) {
    if (gpus % stages != 0) continue;
    const Choice choice = best_of(t, card, {gpus, stages, false});
    if (choice.fits) return choice;
  }
  return std::nullopt;
}

}  // namespace

std::string strategy_text(Strategy strategy, int gpus, int stages) {
  switch (strategy) {
    case Strategy::kSingle:
      return "single GPU";
    case Strategy::kDdp:
      return "DDP";
    case Strategy::kShardedOptimizer:
      return "DDP, sharded optimizer";
    case Strategy::kSplit:
      return fmt::format("model split over {}", stages);
    case Strategy::kHybrid:
      break;
  }
  return fmt::format("DDP of {} x model split over {}", gpus / stages, stages);
}

Choice choose(const Training& training, const Card& card, int gpus) {
  if (gpus < 1) throw UsageError("plan", "{} GPUs do not exist. Give 1 or more.", gpus);
  if (training.global_batch && *training.global_batch < gpus)
    throw UsageError("plan",
                     "a global batch of {} samples is less than one for each of {} GPUs. Raise it, "
                     "or use fewer GPUs.",
                     *training.global_batch, gpus);
  const Choice plain = best_of(training, card, {gpus, 1, training.sharded_optimizer && gpus > 1});
  if (plain.fits) return plain;
  if (gpus > 1 && !training.sharded_optimizer) {
    const Choice sharded = best_of(training, card, {gpus, 1, true});
    if (sharded.fits) return sharded;
  }
  return split(training, card, gpus).value_or(plain);
}

namespace {

// Changes in their order, each alone and on top of those before it.
class Changes {
 public:
  Changes(const Training& training, const Card& card, int gpus)
      : gpus_(gpus),
        card_(card),
        alone_{training, training.sharded_optimizer && gpus > 1},
        together_(alone_) {}

  struct State {
    Training training;
    bool sharded = false;
    int stages = 1;
  };
  const State& together() const { return together_; }
  bool enough() const { return !all_.empty() && all_.back().together_fits; }
  bool fits_together(const State& state) const { return choice(state).fits; }
  std::vector<Change> take() { return std::move(all_); }

  // Not for what saves less than a hundredth, or takes more, as copies of weights can.
  template <typename Edit>
  void add(std::string text, std::string cost, const Edit& edit) {
    if (enough()) return;
    State alone = alone_;
    State after = together_;
    edit(alone);
    edit(after);
    const Choice one = choice(alone);
    const Choice both = choice(after);
    if (both.memory.total() > choice(together_).memory.total() / 100 * 99) return;
    together_ = after;
    all_.push_back({.text = std::move(text),
                    .cost = std::move(cost),
                    .alone_bytes = one.memory.total(),
                    .together_bytes = both.memory.total(),
                    .alone_fits = one.fits,
                    .together_fits = both.fits});
  }

 private:
  Choice choice(const State& state) const {
    const std::int64_t batch = micro_batches(state.training, gpus_ / state.stages).front();
    return make_choice(state.training, card_, {gpus_, state.stages, state.sharded}, batch);
  }

  int gpus_;
  Card card_;
  State alone_;
  State together_;
  std::vector<Change> all_;
};

// The largest that is enough, or 1.
void add_smaller_batch(const Training& training, int gpus, Changes& all) {
  const std::vector<std::int64_t> batches = micro_batches(training, gpus);
  if (batches.front() == 1 || all.enough()) return;
  std::int64_t batch = 1;
  for (const std::int64_t candidate : batches) {
    Changes::State smaller = all.together();
    smaller.training.batch = candidate;
    if (!all.fits_together(smaller)) continue;
    batch = candidate;
    break;
  }
  const std::int64_t steps = window_of(training, gpus) / batch;
  all.add(fmt::format("per_device_train_batch_size: {} with accumulation {}", batch, steps),
          "more, smaller passes; the global batch stays", [&](Changes::State& state) {
            state.training.batch = batch;
            state.training.accumulation = steps;
          });
}

}  // namespace

std::vector<Change> changes(const Training& training, const Card& card, int gpus) {
  using State = Changes::State;
  Changes all(training, card, gpus);
  if (training.model.blocks() > 0 && !training.checkpointing)
    all.add("gradient_checkpointing: true", "blocks run twice: about a third more computation",
            [](State& state) { state.training.checkpointing = true; });
  add_smaller_batch(training, gpus, all);
  if (gpus > 1 && !training.sharded_optimizer)
    all.add("shard_optimizer: true", "the update waits for its collectives",
            [](State& state) { state.sharded = true; });
  if (!training.half)
    all.add("bf16: true", "products with 8 bits of mantissa",
            [](State& state) { state.training.half = true; });
  if (training.model.causal_lm() != nullptr && !training.model.lora)
    all.add(fmt::format("{}lora: {{r: 16, target_modules: all-linear}}",
                        all.together().training.half ? "" : "bf16: true and "),
            "trains adapters instead of the model's weights", [](State& state) {
              state.training.half = true;
              models::LoraConfig lora{.r = 16, .lora_alpha = 32};
              lora.target_modules = models::ModuleNames(models::kAllLinear);
              state.training.model.lora = std::move(lora);
            });
  for (int stages = 2; stages <= std::min<std::int64_t>(gpus, training.model.blocks()); ++stages)
    if (gpus % stages == 0)
      all.add(fmt::format("a model split over {} GPUs", stages),
              "the GPUs of a replica work one after another", [&](State& state) {
                state.stages = stages;
                state.sharded = false;
              });
  return all.take();
}

std::optional<Work> work_of(const Training& t, const Choice& choice, const Card& card,
                            const Speed& speed) {
  const double peak = t.half ? card.flops : t.tf32 ? card.flops / 2 : card.float_flops;
  if (!speed.tokens_per_second && peak <= 0) return std::nullopt;
  const auto tokens = static_cast<double>(choice.batch * t.model.length);
  const double forward = forward_flops_per_token(t.model);
  const double all = flops_per_token(t.model) + (t.checkpointing ? forward : 0);
  double micro_s = 0;
  if (speed.tokens_per_second) {
    micro_s = tokens / *speed.tokens_per_second;
  } else {
    const double blocks = std::max<double>(1, static_cast<double>(t.model.blocks()));
    micro_s = std::max(tokens * all / (peak * speed.utilisation), blocks * kHostPerBlock_s);
  }
  Work work{.forward_s = micro_s * forward / all,
            .backward_s = micro_s * (1 - forward / all),
            .accumulation = choice.accumulation,
            .gradients = gradients_of(t.model)};
  for (std::int64_t& bytes : work.gradients) bytes /= choice.stages;
  const Parameters parameters = parameters_of(t.model);
  work.parameter_bytes = (t.half ? 2 : 4) * parameters.total() / choice.stages;
  // A measurement has the update in it.
  if (!speed.tokens_per_second && card.memory_bandwidth > 0)
    work.optimizer_s = kUpdateBytes * static_cast<double>(parameters.trainable) / choice.stages /
                       card.memory_bandwidth;
  if (choice.strategy == Strategy::kShardedOptimizer) work.sharding = Sharding::kOptimizer;
  return work;
}

}  // namespace lockstep::plan
