#include "observe/plan/strategy.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::plan {
namespace {

// What the host takes to launch a block's kernels, from steps of GPT-2 124M (12 blocks) with one
// sample on an H200 (docs/benchmarks.md). A captured step is launched as one. A ResNet's blocks are
// plain modules.
constexpr double kPlainLaunch_s = 16.4e-3 / 12;
constexpr double kFusedLaunch_s = 12.7e-3 / 12;
// What the device takes (docs/plan.md): matrix products at a part of the peak; the operations
// between them, which move activations through memory, fused ones fewer times; and for each block
// the beginnings and ends of its kernels, in which the GPU is not filled. From captured steps of
// GPT-2 124M with 1 and 64 samples, of GPT 1.3B, and a plain step of 64 samples.
constexpr double kProducts = 0.74;
constexpr double kFusedMoves = 5.5;
constexpr double kPlainMoves = 13;
constexpr double kBlockEnds_s = 0.185e-3;
// Operations for a byte of memory bandwidth where that is not known: an H200 has 206, an A100 153.
constexpr double kFlopsPerByte = 200;
// The share of the peak that a ResNet's products reach at most.
constexpr double kUtilisation = 0.4;
// Most of a ResNet's step are batch norms and activations, which move memory and compute little.
// ResNet-50 in 16 bits, images/s published by NVIDIA (docs/plan.md): 1156 on a V100, 2470 on an
// A100-80GB are 30 operations for each byte per second of the card's memory; in float the bytes are
// twice as many. 79 TFLOP/s are 3200 images/s, what is assumed of an H100.
constexpr double kResNetPerByte = 30;
constexpr double kResNetMost = 79e12;
constexpr int kMostGpus = 65'536;
// Products in 8 bits over those in bfloat16, measured on an H200: 1450 and 810 TFLOP/s, and 1090
// and 665 at a width of 768. Casts move 6 bytes of memory for each value; what they reach of the
// bandwidth, and the beginnings and ends of their kernels in a block, are assumed.
constexpr double kFp8Wide = 1450.0 / 810;
constexpr double kFp8Narrow = 1090.0 / 665;
constexpr std::int64_t kWide = 2048;
constexpr double kCastBytes = 6 / 0.7;
constexpr double kCastEnds_s = 0.1e-3;
// What a micro-batch moves for each weight on a CPU, however few its samples are: forward and
// backward read it, and its gradient is written, read and added.
constexpr double kPassBytes = 28;
// An Adam update reads gradient, weight and two states and writes the last three: in float.
constexpr double kUpdateBytes = 28;
// A rank alone has a thread for each core of a CPU, of which twice as many compute this power of
// two as much: parts of a step run on one thread (docs/plan.md).
constexpr double kThreadGain = 0.85;

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

bool is_fsdp(Distribution distribution) {
  return !fsdp_word(distribution).empty();
}

Sharding sharding_of(Distribution distribution) {
  if (distribution == Distribution::kShardedOptimizer) return Sharding::kOptimizer;
  if (distribution == Distribution::kShardGradOp) return Sharding::kGradOp;
  return is_fsdp(distribution) ? Sharding::kFull : Sharding::kNone;
}

// Ranks that a fully sharded model is divided over, as mesh_for() has them; 0: all that hold the
// same part of it.
int shard_ranks_of(const Training& t, const Choice& choice) {
  if (!is_fsdp(choice.distribution)) return 0;
  if (choice.distribution != Distribution::kHybridShard) return t.shard_degree;
  const int local = std::min(t.node_gpus, choice.gpus);
  return local % choice.slices == 0 ? std::gcd(choice.replicas(), local / choice.slices) : 1;
}

// fsdp of the file on one GPU, too: its blocks come and go.
bool offloads(const Training& t, const Card& card, const Choice& choice) {
  return t.offload && !card.cpu && t.fsdp &&
         (is_fsdp(choice.distribution) || choice.distribution == Distribution::kSingle);
}

// A rank's slice of the model.
Model part_of(const Model& model, const Choice& choice) {
  Model part = model;
  part.slices = choice.slices;
  part.sequence_parallel = choice.sequence;
  return part;
}

// A rank that has a part of the layers alone computes as one that has all of them; a device map's
// does not use fused operations.
bool is_fused(const Training& t, const Card& card, const Choice& choice) {
  return t.model.causal_lm() != nullptr && !t.unfused &&
         choice.distribution != Distribution::kSplit && !card.cpu;
}

// Whether training does it without a change to the file.
bool is_written(const Training& t, const Choice& choice) {
  const Distribution distribution = choice.distribution;
  if (distribution == Distribution::kSplit) return t.device_map;
  if (choice.stages != t.pipeline || choice.slices != t.tensor ||
      choice.sequence != (t.tensor > 1 && t.sequence.value_or(false)))
    return false;
  if (is_fsdp(distribution))
    return t.fsdp == distribution || (!t.fsdp && t.adapts == "elastic_gpu" && t.may_shard &&
                                      distribution == Distribution::kFullShard);
  return distribution != Distribution::kShardedOptimizer || t.sharded_optimizer || t.may_shard;
}

// The largest micro-batch that fits, or the smallest one.
Choice best_of(const Training& t, const Card& card, const Parts& parts) {
  Choice choice;
  for (const std::int64_t batch : micro_batches(t, parts.replicas())) {
    choice = make_choice(t, card, parts, batch);
    if (choice.fits) break;
  }
  return choice;
}

// The file's own strategy on this many GPUs.
Parts written_parts(const Training& t, const Card& card, int gpus) {
  if (gpus == 1) return {};
  const Parts split{gpus, Distribution::kSplit};
  if (t.device_map && can_train(t, card, split)) return split;
  const Distribution copies =
      t.fsdp.value_or(t.sharded_optimizer ? Distribution::kShardedOptimizer : Distribution::kDdp);
  const Parts all{gpus, copies, t.pipeline, t.tensor, t.tensor > 1 && t.sequence.value_or(false)};
  Parts copied = all;
  copied.distribution = Distribution::kDdp;
  return can_train(t, card, copied) ? all : Parts{gpus, copies};
}

// All linear layers, or those of attention where routers and experts are beside them.
models::ModuleNames adapted_modules(const Model& model) {
  const models::BlockSpec& block = model.causal_lm()->spec().block;
  if (!block.mlp.experts) return models::kAllLinear;
  std::vector<std::string> names;
  for (const models::Projection& one : block.attention.in) names.push_back(one.name);
  names.push_back(block.attention.out.name);
  return names;
}

// Changes in their order, each alone and on top of those before it.
class Changes {
 public:
  Changes(const Training& training, const Card& card, int gpus)
      : card_(card), alone_{training, written_parts(training, card, gpus)}, together_(alone_) {}

  struct State {
    Training training;
    Parts parts;
  };
  const State& together() const { return together_; }
  bool enough() const { return !all_.empty() && all_.back().together_fits; }
  bool fits_together(const State& state) const { return choice(state).fits; }
  std::vector<Change> take() { return std::move(all_); }

  // Skips changes that save less than a hundredth, or use more, as copies of weights can.
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
    const std::int64_t batch = micro_batches(state.training, state.parts.replicas()).front();
    return make_choice(state.training, card_, state.parts, batch);
  }

  Card card_;
  State alone_;
  State together_;
  std::vector<Change> all_;
};

// The largest that is enough, or 1; `alone`: nothing where none is.
void add_smaller_batch(const Training& training, int replicas, Changes& all, bool alone = false) {
  const std::vector<std::int64_t> batches = micro_batches(training, replicas);
  if (batches.front() == 1 || all.enough()) return;
  std::int64_t batch = 0;
  for (const std::int64_t candidate : batches) {
    Changes::State smaller = all.together();
    smaller.training.batch = candidate;
    if (!all.fits_together(smaller)) continue;
    batch = candidate;
    break;
  }
  if (batch == 0 && alone) return;
  batch = std::max<std::int64_t>(batch, 1);
  const std::int64_t steps = window_of(training, replicas) / batch;
  all.add(fmt::format("per_device_train_batch_size: {} with accumulation {}", batch, steps),
          "more, smaller passes; the global batch stays", [&](Changes::State& state) {
            state.training.batch = batch;
            state.training.accumulation = steps;
          });
}

double share_again(const Training& t) {
  return share_again(t.model, t.checkpointing, t.again);
}

// Operations of a micro-batch, including recomputation.
double operations_of(const Training& t, std::int64_t batch) {
  const double again = share_again(t) * forward_flops_per_token(t.model);
  return static_cast<double>(batch * t.model.length) * (flops_per_token(t.model) + again);
}

// Bytes that lie between matrix products: saved activations, logits, and what adapters read and
// write again of their projections' inputs and outputs.
double moved_bytes(const Training& t, std::int64_t batch, bool fused) {
  const auto saved = static_cast<double>(
      activations_of(t.model, {.batch = batch, .half = t.half, .fused = fused}).saved);
  double values =
      t.model.causal_lm() != nullptr ? static_cast<double>(t.model.spec().vocabulary) : 0;
  if (t.model.lora)
    values += static_cast<double>(parameters_of(t.model).trainable_matrices / t.model.lora->r);
  const double once =
      saved + (t.half ? 2 : 4) * values * static_cast<double>(batch * t.model.length);
  return once * (1 + share_again(t) / 3);  // forward runs again
}

// What the products of the blocks in 8 bits save, less the casts: what goes into a layer and the
// gradient of what comes out, 6 bytes of traffic each, and 4 more for each weight than bf16 has
// (docs/optimisation.md). Negative for narrow layers and few tokens.
double fp8_saves_s(const Training& t, const Card& card, std::int64_t batch) {
  if (!t.fp8 || !card.fp8 || card.memory_bandwidth <= 0) return 0;
  const Parameters p = parameters_of(t.model);
  const auto blocks = static_cast<double>(t.model.blocks());
  const auto matrices = blocks * static_cast<double>(p.block_matrices);
  const double share = 2 * matrices / forward_flops_per_token(t.model);
  const double passes = 1 + share_again(t) / 3;
  const double casts =
      passes * (kCastBytes * blocks * static_cast<double>(p.block_widths * batch * t.model.length) +
                4 * matrices);
  const double faster = t.model.causal_lm()->spec().width < kWide ? kFp8Narrow : kFp8Wide;
  return share * operations_of(t, batch) / (kProducts * peak_flops(t, card)) * (1 - 1 / faster) -
         casts / card.memory_bandwidth - blocks * kCastEnds_s;
}

// Weights in 4 bits are read, written in the type of the products and read again by these.
double decode_s(const Training& t, double bandwidth) {
  const double passes = t.checkpointing ? 3 : 2, bytes = 0.5 + 2 * (t.half ? 2 : 4);
  return passes * bytes * static_cast<double>(parameters_of(t.model).in_4_bits) / bandwidth;
}

// A card's time for a micro-batch. `fused`: with the fused operations of language models.
double device_s(const Training& t, const Card& card, std::int64_t batch, bool fused) {
  const double peak = peak_flops(t, card);
  if (std::holds_alternative<models::ResNetConfig>(t.model.config)) {
    const double part = t.half ? 1 : 0.5;
    double reached = std::min(kUtilisation * peak, part * kResNetMost);
    if (card.memory_bandwidth > 0)
      reached = std::min(reached, part * kResNetPerByte * card.memory_bandwidth);
    return operations_of(t, batch) / reached;
  }
  const double bandwidth =
      card.memory_bandwidth > 0 ? card.memory_bandwidth : card.flops / kFlopsPerByte;
  return static_cast<double>(t.model.blocks()) * kBlockEnds_s +
         operations_of(t, batch) / (kProducts * peak) - fp8_saves_s(t, card, batch) +
         decode_s(t, bandwidth) +
         (fused ? kFusedMoves : kPlainMoves) * moved_bytes(t, batch, fused) / bandwidth +
         (card.cpu ? kPassBytes * static_cast<double>(parameters_of(t.model).trainable) / bandwidth
                   : 0);
}

// The host launches a micro-batch's kernels in no less than this, however small the batch is.
double launch_s(const Training& t, const Choice& choice, const Card& card) {
  double blocks = std::max<double>(1, static_cast<double>(t.model.blocks()));
  if (const auto* resnet = std::get_if<models::ResNetConfig>(&t.model.config)) {
    blocks = 0;
    for (const std::int64_t stage : resnet->blocks()) blocks += static_cast<double>(stage);
  }
  // A step with anything sharded cannot be captured.
  if (card.cpu ||
      (t.captured && choice.gpus_per_replica() == 1 && choice.sharding == Sharding::kNone))
    return 0;
  return blocks * (is_fused(t, card, choice) ? kFusedLaunch_s : kPlainLaunch_s);
}

// The conditions under which models::tensor_cuts() divides the model.
bool divides_layers(const Model& model, int degree) {
  if (model.causal_lm() == nullptr) return false;
  const models::DecoderSpec& spec = model.causal_lm()->spec();
  const models::AttentionSpec& attention = spec.block.attention;
  return attention.heads % degree == 0 && attention.key_value_heads % degree == 0 &&
         std::min(spec.vocabulary, spec.block.mlp.out.in) >= degree;
}

// What tensor parallel ranks of a stage send in a micro-batch: sums after the embedding, whose
// weights are in float, and twice in each block, and in backward as many, in the type of
// activations (of plain modules in float, as norms are); and the loss's, a number for a token and
// two. Where they divide the sequence each sum is a reduce-scatter and a gather, and what layers
// have read is gathered once more in backward.
void add_tensor_work(const Training& t, const Choice& choice, bool fused, Work& work) {
  const auto tokens = static_cast<double>(choice.batch * t.model.length);
  const double stream = tokens * static_cast<double>(t.model.spec().width);
  const double half = (t.half ? 2 : 4) * stream;
  const std::int64_t blocks = (t.model.blocks() + choice.stages - 1) / choice.stages;
  const auto pairs = static_cast<std::size_t>(2 * blocks);
  const std::size_t forwards = t.checkpointing ? 2 : 1;
  work.tensor_ranks = t.model.slices;
  // Gradients of what every rank has and uses with slices, or on its part of the sequence, are
  // added up together, once in an update.
  const SharedGradients shared = shared_gradients(t.model);
  work.tensor_once =
      static_cast<double>(t.model.sequence_parts() > 1 ? shared.all : shared.adapters) /
      choice.stages;
  work.tensor_sums = {4 * tokens, 8 * tokens};
  if (t.model.sequence_parts() > 1) {
    // The embedding's and its gradient's, which a frozen one does not have; the head's three.
    work.tensor_gathers.assign(t.model.lora ? 1 : 2, 4 * stream);
    work.tensor_gathers.insert(work.tensor_gathers.end(), (2 * forwards + 3) * pairs + 3, half);
    return;
  }
  work.tensor_sums.push_back(4 * stream);
  work.tensor_sums.insert(work.tensor_sums.end(), forwards * pairs, half);
  work.tensor_sums.insert(work.tensor_sums.end(), pairs + 1, fused ? half : 4 * stream);
}

}  // namespace

Choice make_choice(const Training& t, const Card& card, const Parts& parts, std::int64_t batch) {
  Choice choice{parts};
  const int replicas = choice.replicas();
  const bool split = choice.distribution == Distribution::kSplit && choice.gpus > 1;
  if (replicas == 1 && !split) choice.distribution = Distribution::kSingle;
  const Batches batches = batches_of(t, replicas, batch);
  choice.batch = batches.batch;
  choice.accumulation = batches.accumulation;
  choice.global_batch = batches.global;
  choice.same_global_batch = batches.same;
  const bool offload = offloads(t, card, choice);
  const int shard_ranks = shard_ranks_of(t, choice);
  choice.sharding = sharding_of(offload ? *t.fsdp : choice.distribution);
  choice.memory = memory_of(
      part_of(t.model, choice),
      {.batch = batches.batch,
       .accumulation = batches.accumulation,
       .half = t.half,
       .checkpointing = t.checkpointing,
       .again = t.again,
       .fused = is_fused(t, card, choice),
       .fp8 = t.fp8,
       .ranks = replicas,
       .sharding = choice.sharding,
       .shard_ranks = shard_ranks,
       .state_bytes = t.state_bytes,
       .stages = split ? choice.gpus : choice.stages,
       .pipeline = choice.stages > 1,
       .gpipe = t.gpipe,
       .chunks = t.chunks,
       .cpu = card.cpu,
       .shares_memory = card.cpu && t.shares_memory &&
                        (shard_ranks > 0 ? shard_ranks : replicas) * choice.slices <= t.node_gpus,
       .offload = offload,
       // Adapters convert the base, which must be whole then.
       .built_whole = (t.model.lora && t.half) ||
                      (t.built_whole && choice.stages == 1 && choice.slices == 1)});
  choice.fits = fits(choice.memory, card);
  choice.smaller_batch = batch < micro_batches(t, replicas).front();
  choice.as_written = choice.fits && is_written(t, choice) && refusals(t, card, choice).empty() &&
                      (!choice.smaller_batch || !t.adapts.empty());
  return choice;
}

bool lacks_fp8(const Training& t, const Card& card) {
  return t.fp8 && !card.fp8 && !card.cpu;
}

std::vector<std::string> refusals(const Training& t, const Card& card, const Choice& choice) {
  std::vector<std::string> all;
  const char* devices = card.cpu ? "ranks" : "GPUs";
  if (lacks_fp8(t, card))
    all.push_back(fmt::format(
        "fp8 needs compute capability 8.9 or later, and {} has less. Write mixed_precision: bf16",
        card.name));
  if (t.pipeline > 1 && t.pipeline > t.model.blocks())
    all.push_back(fmt::format("pipeline_parallel_degree {} is more than the model's {} blocks",
                              t.pipeline, t.model.blocks()));
  else if (t.pipeline > 1 && t.tensor > 1 && choice.gpus % (t.pipeline * t.tensor) != 0)
    all.push_back(fmt::format(
        "pipeline_parallel_degree {} x tensor_parallel_degree {} trains on multiples of {} {}: use "
        "such a number, or smaller degrees",
        t.pipeline, t.tensor, t.pipeline * t.tensor, devices));
  else if (choice.gpus % (t.pipeline * t.tensor) != 0)
    all.push_back(
        fmt::format("{0} {1} trains on multiples of {1} {2}: use such a number, or set {0}: 1",
                    t.pipeline > 1 ? "pipeline_parallel_degree" : "tensor_parallel_degree",
                    t.pipeline * t.tensor, devices));
  if (t.fsdp && choice.replicas() % std::max(1, t.shard_degree) != 0)
    all.push_back(fmt::format(
        "data_parallel_shard_degree {} does not divide the {} {} that hold the same part of the "
        "model: use a multiple, or delete it",
        t.shard_degree, choice.replicas(), devices));
  const std::int64_t global = t.global_batch.value_or(0);
  const std::int64_t pass = t.batch * choice.replicas();
  const std::int64_t below = global / pass * pass;
  if (!choice.same_global_batch)
    all.push_back(fmt::format(
        "{} {} cannot share a global batch of {}: {} is the nearest below; with a micro-batch of "
        "{} lockstep train takes {}{}",
        choice.gpus, devices, global, choice.global_batch, t.batch,
        below > 0 ? fmt::format("{} or ", below) : "", below + pass));
  else if (below != global && t.adapts != "elastic_gpu")
    all.push_back(
        fmt::format("{} {} cannot share a global batch of {} in micro-batches of {}: set "
                    "per_device_train_batch_size: {}",
                    choice.gpus, devices, global, t.batch, choice.batch));
  return all;
}

bool can_train(const Training& t, const Card& card, const Parts& parts) {
  const auto [gpus, distribution, stages, slices, sequence] = parts;
  const std::int64_t blocks = t.model.blocks();
  if (gpus % (stages * slices) != 0) return false;
  if (stages > 1 && (!t.may_pipeline || stages > blocks)) return false;
  if (slices > 1 &&
      ((!t.may_tensor && slices != t.tensor) || (sequence && !t.sequence.value_or(true)) ||
       (t.fp8 && t.model.lora) || (slices > t.node_gpus && slices != t.tensor) ||
       !divides_layers(t.model, slices)))
    return false;
  const bool divided = stages * slices > 1;
  if (t.model.nf4 && (divided || is_fsdp(distribution))) return false;
  if (divided &&
      (distribution == Distribution::kSplit || distribution == Distribution::kShardedOptimizer))
    return false;
  if (gpus == 1 || (divided && parts.replicas() == 1))
    return divided || distribution == Distribution::kSingle;
  if (distribution == Distribution::kSplit)
    return !card.cpu && gpus <= blocks && gpus <= t.node_gpus;  // one process has them all
  // Units are a model's blocks: without them it would be whole in every step.
  if (is_fsdp(distribution) && (blocks == 0 || parts.replicas() % std::max(1, t.shard_degree) != 0))
    return false;
  if (distribution == Distribution::kHybridShard)
    return gpus > t.node_gpus && gpus % t.node_gpus == 0 && t.shard_degree == 0;
  return distribution != Distribution::kSingle;
}

std::string_view fsdp_word(Distribution distribution) {
  switch (distribution) {
    case Distribution::kFullShard:
      return "full_shard";
    case Distribution::kShardGradOp:
      return "shard_grad_op";
    case Distribution::kHybridShard:
      return "hybrid_shard";
    default:
      return "";
  }
}

std::string parts_text(const Parts& parts, bool cpu) {
  const auto& [gpus, distribution, stages, slices, sequence] = parts;
  if (stages > 1 || slices > 1) {
    std::string text =
        stages == 1 ? fmt::format("tensor{} parallel over {}", sequence ? ", sequence" : "", slices)
        : slices == 1 ? fmt::format("pipeline of {} stages", stages)
                      : fmt::format("pipeline of {}, tensor{} over {}", stages,
                                    sequence ? " and sequence" : "", slices);
    if (is_fsdp(distribution)) text += fmt::format(", {}", fsdp_word(distribution));
    return text;
  }
  switch (distribution) {
    case Distribution::kSingle:
      return cpu ? "single rank" : "single GPU";
    case Distribution::kDdp:
      return "DDP";
    case Distribution::kShardedOptimizer:
      return "DDP, sharded optimizer";
    case Distribution::kSplit:
      return fmt::format("one rank, device_map over {}", gpus);
    default:
      return fmt::format("fsdp: {}", fsdp_word(distribution));
  }
}

int written_copies(const Training& training, const Card& card, int gpus) {
  return written_parts(training, card, gpus).replicas();
}

Choice choose(const Training& training, const Card& card, int gpus) {
  if (gpus < 1) throw UsageError("plan", "{} GPUs do not exist. Give 1 or more.", gpus);
  const Parts parts = written_parts(training, card, gpus);
  if (training.global_batch && *training.global_batch < parts.replicas())
    throw UsageError("plan",
                     "a global batch of {} samples is less than one for each of {} GPUs. Raise it, "
                     "or use fewer GPUs.",
                     *training.global_batch, gpus);
  const Distribution written = parts.distribution;
  const Choice plain = best_of(training, card, parts);
  if (plain.fits || written == Distribution::kSplit || parts.stages * parts.slices > 1)
    return plain;
  for (const Distribution next :
       {Distribution::kShardedOptimizer, Distribution::kFullShard, Distribution::kSplit}) {
    // A fully sharded model's optimizer is sharded already.
    if (next < written || next == written || !can_train(training, card, {gpus, next})) continue;
    const Choice other = best_of(training, card, {gpus, next});
    if (other.fits) return other;
  }
  return plain;
}

Choice as_written(const Training& training, const Card& card, int gpus) {
  const Parts parts = written_parts(training, card, gpus);
  return make_choice(training, card, parts, micro_batches(training, parts.replicas()).front());
}

std::vector<Change> changes(const Training& training, const Card& card, int gpus) {
  using State = Changes::State;
  Changes all(training, card, gpus);
  const Parts parts = all.together().parts;
  const bool whole = parts.stages == 1 && parts.slices == 1;
  add_smaller_batch(training, all.together().parts.replicas(), all, /*alone=*/true);
  if (whole && parts.distribution == Distribution::kDdp)
    all.add("shard_optimizer: true", "the update waits for its collectives",
            [](State& state) { state.parts.distribution = Distribution::kShardedOptimizer; });
  if (parts.slices > 1 && !parts.sequence)
    all.add("sequence_parallel: true", "what layers read is gathered once more in backward",
            [](State& state) { state.parts.sequence = true; });
  if (training.model.blocks() > 0 && !training.checkpointing)
    all.add("gradient_checkpointing: true", "blocks run twice: about a third more computation",
            [](State& state) {
              state.training.checkpointing = true;
              state.training.again = {};
            });
  add_smaller_batch(training, all.together().parts.replicas(), all);
  Parts divided = parts;
  divided.distribution = Distribution::kFullShard;
  if (parts.distribution < Distribution::kFullShard && parts.replicas() > 1 &&
      can_train(training, card, divided))
    all.add("fsdp: full_shard", "every micro-batch gathers the parameters twice",
            [](State& state) { state.parts.distribution = Distribution::kFullShard; });
  const char* half = card.bfloat16 ? "bf16: true" : "fp16: true";
  if (!training.half)
    all.add(half,
            card.bfloat16 ? "products with 8 bits of mantissa"
                          : "products with 11 bits of mantissa, and the loss is scaled",
            [](State& state) { state.training.half = true; });
  if (training.model.causal_lm() != nullptr && !training.model.lora) {
    const models::ModuleNames targets = adapted_modules(training.model);
    all.add(
        fmt::format("{}lora: {{r: 16, target_modules: {}}}",
                    all.together().training.half ? "" : std::string(half) + " and ",
                    targets.regex.empty() ? fmt::format("[{}]", fmt::join(targets.suffixes, ", "))
                                          : targets.regex),
        "trains adapters instead of the model's weights", [&](State& state) {
          state.training.half = true;
          state.training.model.lora =
              models::LoraConfig{.r = 16, .lora_alpha = 32, .target_modules = targets};
        });
  }
  // Of a model with a config.json.
  if (whole && all.together().training.model.lora && !training.model.nf4 &&
      !is_fsdp(parts.distribution) && !training.model.causal_lm()->source.is(NodeKind::kNull))
    all.add("model: {..., load_in_4bit: true}", "the frozen base is rounded to 4 bits",
            [](State& state) { state.training.model.nf4 = state.training.model.lora.has_value(); });
  if (whole && parts.distribution != Distribution::kSplit &&
      can_train(training, card, {gpus, Distribution::kSplit}))
    all.add(fmt::format("model: {{..., device_map: balanced}} and one rank, {} GPUs", gpus),
            "the GPUs work one after another",
            [](State& state) { state.parts.distribution = Distribution::kSplit; });
  return all.take();
}

double peak_flops(const Training& t, const Card& card) {
  if (t.half && (card.bfloat16 || !t.bf16)) return card.flops;
  return t.tf32 && !t.half && card.bfloat16 ? card.flops / 2 : card.float_flops;
}

double utilisation_of(const Training& t, const Card& card) {
  const double peak = peak_flops(t, card);
  if (peak <= 0) return 0;
  return operations_of(t, t.batch) / peak / device_s(t, card, t.batch, is_fused(t, card, {}));
}

std::optional<Work> work_of(const Training& whole, const Choice& choice, const Card& card,
                            const Speed& speed) {
  Training t = whole;
  t.model = part_of(whole.model, choice);
  const int stages = choice.gpus_per_replica() / choice.slices;
  const double peak = peak_flops(t, card);
  if (!speed.tokens_per_second && peak <= 0) return std::nullopt;
  const auto tokens = static_cast<double>(choice.batch * t.model.length);
  const double forward = forward_flops_per_token(t.model);
  const double all = flops_per_token(t.model) + share_again(t) * forward;
  const double launch = launch_s(t, choice, card);
  double micro_s = 0;
  double idle_s = 0;  // of the GPU, which waits for the host
  if (speed.tokens_per_second) {
    // The time of the file's micro-batch; a smaller one takes as long to launch.
    const double measured_s =
        static_cast<double>(t.batch * t.model.length) / *speed.tokens_per_second;
    const double share = flops_per_token(t.model) / flops_per_token(whole.model);
    micro_s = std::max(tokens / *speed.tokens_per_second * share, std::min(measured_s, launch));
  } else {
    const double busy_s = speed.utilisation
                              ? operations_of(t, choice.batch) / (peak * *speed.utilisation)
                              : device_s(t, card, choice.batch, is_fused(t, card, choice));
    micro_s = std::max(busy_s, launch);
    idle_s = micro_s - busy_s;
  }
  Work work{.forward_s = micro_s * forward / all,
            .backward_s = micro_s * (1 - forward / all),
            .accumulation = static_cast<double>(choice.accumulation),
            .gradients = gradients_of(t.model)};
  for (std::int64_t& bytes : work.gradients) bytes /= stages;
  if (choice.slices > 1) add_tensor_work(t, choice, is_fused(t, card, choice), work);
  if (choice.stages > 1) {
    // Stages compute at once at the pace of the one that has most to do, and wait while the
    // pipeline fills and empties: (p-1)/(m+p-1), and with v chunks for a v-th of that time.
    const double share = largest_share(t.model, choice.stages);
    work.forward_s *= share;
    work.backward_s *= share;
    work.accumulation += static_cast<double>(choice.stages - 1) / t.chunks;
    work.stages = choice.stages;
  }
  const Parameters parameters = parameters_of(t.model);
  // Parameters travel as they are held, in float, and frozen matrices in the half type; the
  // matrices of blocks in the type that they are computed in (nn::Block::products). Rows in the
  // host's memory, and those that have a scale each, travel as they are held.
  const bool rounded = t.half && !offloads(t, card, choice) && !(t.fp8 && t.rowwise);
  const std::int64_t products = rounded ? parameters.block_matrices * t.model.blocks() : 0;
  const std::int64_t halved = t.half ? parameters.frozen_matrices : 0;
  work.parameter_bytes = (4 * parameters.total() - 2 * halved - (t.model.lora ? 0 : 2 * products) -
                          (t.fp8 ? products : 0)) /
                         stages;
  // A measurement has the update in it, and so has the time of launching.
  if (!speed.tokens_per_second && card.memory_bandwidth > 0)
    work.optimizer_s = std::max(0.0, kUpdateBytes * static_cast<double>(parameters.trainable) /
                                             stages / card.memory_bandwidth -
                                         idle_s);
  work.sharding = choice.sharding;
  if (is_fsdp(choice.distribution) && !speed.tokens_per_second && card.memory_bandwidth > 0) {
    // What travels is one buffer for a block, copied to and from its tensors.
    const double once =
        static_cast<double>(work.parameter_bytes + 4 * parameters.total() / stages) /
        card.memory_bandwidth;
    const double gathers = work.sharding == Sharding::kFull ? 1 : 0;
    work.forward_s += once;
    work.backward_s += gathers * once + 8 * static_cast<double>(parameters.trainable) / stages /
                                            card.memory_bandwidth;
  }
  work.shard_ranks = shard_ranks_of(t, choice);
  return work;
}

// How long a choice takes, whether it fits or not.
Timed timed(const Training& training, const Machine& machine, Choice choice) {
  Timed one{.choice = std::move(choice)};
  auto work = work_of(training, one.choice, machine.card, machine.speed);
  if (!work) return one;
  if (const int cores = machine.cluster.cores; machine.card.cpu && cores > 1) {
    const int threads = std::max(1, cores / one.choice.gpus);
    const double slower = std::pow(static_cast<double>(cores) / threads, kThreadGain);
    for (double* seconds : {&work->forward_s, &work->backward_s, &work->optimizer_s})
      *seconds *= slower;
  }
  one.step = step_time(*work, machine.cluster, one.choice.replicas());
  one.tokens_per_second =
      static_cast<double>(one.choice.global_batch * training.model.length) / one.step->total_s();
  return one;
}

Timed timed(const Training& training, const Machine& machine, int gpus) {
  const Choice choice = choose(training, machine.card, gpus);
  if (!choice.fits) return {.choice = choice};
  return timed(training, machine, choice);
}

std::vector<ScalePoint> scale(const Training& training, const Machine& machine,
                              const std::vector<int>& gpus) {
  // What one GPU computes is the measure, also where it does not hold the model.
  const double alone =
      timed(training, machine, choose(training, machine.card, 1)).tokens_per_second;
  std::vector<ScalePoint> points;
  for (const int n : gpus) {
    Training at = training;
    if (at.global_batch) at.global_batch = std::max<std::int64_t>(*at.global_batch, n);
    const Timed one = timed(at, machine, choose(at, machine.card, n));
    if (!one.step) return {};
    points.push_back(one.choice.fits ? ScalePoint{one, one.tokens_per_second / (n * alone)}
                                     : ScalePoint{{.choice = one.choice}});
  }
  return points;
}

int most_gpus(const Training& training) {
  if (!training.global_batch) return kMostGpus;
  int most = 1;
  while (most < kMostGpus && 2 * most <= *training.global_batch) most *= 2;
  return most;
}

int stops_at(const Training& training, const Machine& machine, double floor) {
  for (int gpus = 2; gpus <= most_gpus(training); gpus *= 2) {
    const std::vector<ScalePoint> point = scale(training, machine, {gpus});
    if (!point.empty() && point.front().choice.fits && point.front().efficiency < floor)
      return gpus;
  }
  return 0;
}

}  // namespace lockstep::plan
