#include <algorithm>
#include <limits>

#include "observe/plan/machine.h"
#include "observe/plan/model_shape.h"

namespace lockstep::plan {
namespace {

// A CUDA context with LibTorch's kernels, and NCCL's buffers beside it: what nvidia-smi shows of a
// process that has allocated nothing.
constexpr std::uint64_t kContext = 550 * kMiB;
constexpr std::uint64_t kNccl = 600 * kMiB;
constexpr std::uint64_t kWorkspace = 64 * kMiB;  // cuBLAS takes 32 MiB a stream on Hopper
constexpr double kFragmentation = 0.02;          // of the activations
constexpr double kReserve = 0.03;                // of a card's memory
// Of a parameter in 4 bits: with a byte for 64 of them, and a float for 256 of these.
constexpr double kNf4Bytes = 0.5 + 1.0 / 64 + 4.0 / (64 * 256);

std::uint64_t divided(std::uint64_t bytes, int parts) {
  const auto n = static_cast<std::uint64_t>(std::max(1, parts));
  return (bytes + n - 1) / n;
}

std::uint64_t floats(std::int64_t count) {
  return 4 * static_cast<std::uint64_t>(count);
}

// The number of ranks that what `least` divides is divided over.
int parts_of(const MemoryOptions& o, Sharding least) {
  if (o.sharding < least) return 1;
  return o.shard_ranks > 0 ? o.shard_ranks : o.ranks;
}

// Whether whole blocks are made from rows and freed again: under fsdp on several ranks, and on one
// whose rows are in the host's memory.
bool divides(const MemoryOptions& o) {
  return o.sharding >= Sharding::kFull && (parts_of(o, Sharding::kFull) > 1 || o.offload);
}

// The memory that one stage holds at every moment.
Memory resident(const Parameters& p, const MemoryOptions& o) {
  Memory memory;
  if (o.offload) {
    memory.parameters = divided(floats(p.buffers), o.stages);
    return memory;
  }
  // Frozen matrices are converted to the half type when the model is made.
  const std::int64_t converted = o.half ? p.frozen_matrices : 0;
  memory.parameters = floats(p.total() + p.buffers) - 2 * static_cast<std::uint64_t>(converted);
  memory.parameters -=
      static_cast<std::uint64_t>(((o.half ? 2 : 4) - kNf4Bytes) * static_cast<double>(p.in_4_bits));
  memory.parameters = divided(memory.parameters, o.stages * parts_of(o, Sharding::kFull));
  memory.optimizer = divided(o.state_bytes.value_or(2 * floats(p.trainable)),
                             o.stages * parts_of(o, Sharding::kOptimizer));
  return memory;
}

// The whole units that a fully sharded rank holds beside its share, in bytes.
struct WholeUnits {
  WholeUnits(const Parameters& p, std::int64_t layers, const MemoryOptions& o) {
    if (!divides(o)) return;
    const std::int64_t root_count = p.total() - layers * p.block;
    const double size = o.half ? (4.0 * static_cast<double>(p.total()) -
                                  2.0 * static_cast<double>(p.frozen_matrices)) /
                                     static_cast<double>(p.total())
                               : 4;  // bytes of a parameter, on average
    const auto bytes = [&](std::int64_t count) {
      return static_cast<std::uint64_t>(size * static_cast<double>(count));
    };
    all = bytes(p.total());
    root = bytes(root_count);
    root_gradients = floats(p.trainable - layers * p.block_trainable);
    block = bytes(p.block);
    block_gradients = floats(p.block_trainable);
    kept = o.sharding == Sharding::kGradOp ? all - root : 0;
  }
  std::uint64_t all = 0, root = 0, root_gradients = 0, block = 0, block_gradients = 0;
  std::uint64_t kept = 0;  // blocks that stay whole from forward to backward
};

// A copy of each weight in the half type, which fused operations and autocast make in forward and
// free in backward. In 8 bits it is the transposed one that backward multiplies with.
struct Copies {
  std::uint64_t all = 0;
  std::uint64_t at_loss = 0;
};

Copies copies_of(const Model& model, const Parameters& p, std::int64_t layers,
                 const MemoryOptions& o) {
  const auto copied = [&](std::int64_t weights) {
    return o.half ? 2 * static_cast<std::uint64_t>(weights) : 0;
  };
  // A frozen embedding that is the head too is copied for it.
  const bool tied = model.lora && model.causal_lm() != nullptr && model.causal_lm()->tied();
  // Counted as if all copies stayed, those of embeddings too: more than is used.
  const std::int64_t weights = o.fused ? p.trainable + (model.lora ? p.head : 0)
                                       : p.trainable_matrices + (tied ? p.head : 0);
  Copies copies{.all = divided(copied(weights), o.stages)};
  if (o.fp8 && o.fused && !model.lora)
    copies.all -= divided(static_cast<std::uint64_t>(layers * p.block_matrices), o.stages);
  // A checkpointed block frees its copies at once; those of the head stay until backward.
  const std::uint64_t head = std::min(copies.all, copied(model.lora ? 0 : p.head));
  const double again = share_again(model, o.checkpointing, o.again);
  copies.at_loss =
      head + static_cast<std::uint64_t>(static_cast<double>(copies.all - head) * (1 - again));
  if (divides(o) && o.checkpointing) copies.all = head + copied(p.block);
  return copies;
}

// The peak of a GPU that holds `p` and computes `a`, with `layers` blocks.
Memory peak_of(const Model& model, const Parameters& p, const Activations& a, std::int64_t layers,
               const MemoryOptions& o) {
  const int parts = parts_of(o, Sharding::kFull);
  WholeUnits whole(p, layers, o);
  const std::uint64_t made = o.built_whole ? whole.all : whole.root + whole.block;
  // A rank's part of the memory of whole parameters that all of them map is its share.
  if (o.shares_memory) whole.root = whole.block = whole.kept = 0;
  const std::uint64_t gradients = o.offload ? 0 : divided(floats(p.trainable), o.stages * parts);
  const bool persistent = (o.ranks > 1 && parts == 1) || o.accumulation > 1;
  const std::uint64_t before = persistent ? gradients : 0;
  // A weight's gradient is made, then added to the one that is there.
  const std::uint64_t added_next = persistent ? floats(p.largest) : 0;
  const Copies copies = copies_of(model, p, layers, o);
  // A tied embedding's two gradients are made apart, then added.
  const bool added = o.fused && !model.lora && model.causal_lm()->tied();
  const std::uint64_t saved = divided(a.saved, o.stages);
  // One matrix in 4 bits at a time is decoded for its product.
  const auto decoded = static_cast<std::uint64_t>(p.in_4_bits > 0 ? p.largest_matrix : 0);
  const std::uint64_t block =
      (o.checkpointing ? a.one_block : a.segment) + (o.half ? 2 : 4) * decoded;
  const std::uint64_t freed = o.checkpointing ? 0 : std::min(a.one_block, saved);

  Memory base = resident(p, o);
  // Ranks that share memory have each parameter once.
  const bool once = o.shares_memory && o.sharding == Sharding::kOptimizer && o.ranks > 1;
  const std::uint64_t parameters = base.parameters;
  if (once) base.parameters = divided(parameters, parts_of(o, Sharding::kOptimizer));
  const auto moment = [&](std::string_view name, std::uint64_t whole_parameters,
                          std::uint64_t all_gradients, std::uint64_t weights,
                          std::uint64_t activations, std::uint64_t head) {
    Memory memory = base;
    memory.moment = name;
    memory.parameters += whole_parameters;
    memory.gradients = all_gradients;
    memory.copies = weights;
    memory.activations = activations;
    memory.head = head;
    return memory;
  };
  const std::uint64_t forward = whole.root + whole.kept;
  Memory moments[] = {
      moment("the loss", forward, before, copies.at_loss, saved, a.head_forward),
      moment("the loss's backward", forward, before, copies.at_loss, saved, a.head_backward),
      moment("the backward of the last block", whole.root + std::max(whole.kept, 2 * whole.block),
             before + whole.root_gradients + whole.block_gradients, copies.at_loss,
             saved + block + a.working + added_next, o.fused ? a.head_backward : 0),
      // The gradients of the last block are being reduced, and its activations are free.
      moment("the backward of the block before the last",
             whole.root + std::max(whole.kept, 3 * whole.block) - whole.block,
             before + whole.root_gradients + 2 * whole.block_gradients, copies.at_loss,
             saved - freed + block + a.working + added_next, o.fused ? a.head_backward : 0),
      moment("the end of backward", whole.root, gradients + 2 * whole.root_gradients,
             o.fused && !divides(o) ? copies.at_loss : 0,
             std::min(a.one_block, saved) + a.working + added_next,
             added ? divided(floats(p.head), o.stages) : 0),
      // Before there is an optimizer. Parameters move to the memory that ranks share.
      moment("the division of the optimizer's state", once ? parameters : 0, 0, 0, 0, 0),
      // The whole model on every rank, or the root and a block.
      moment("the division of the model", made, 0, 0, 0, 0),
  };
  for (Memory* early = std::end(moments) - 2; early != std::end(moments); ++early)
    early->optimizer = 0;
  Memory peak = *std::ranges::max_element(moments, {}, &Memory::allocated);
  if (o.cpu) return peak;
  peak.workspace = kWorkspace + static_cast<std::uint64_t>(kFragmentation *
                                                           static_cast<double>(peak.activations));
  peak.context = kContext + (o.ranks > 1 || model.slices > 1 ? kNccl : 0);
  return peak;
}

// Before stages or slices are taken of a model that is made whole.
Memory made_whole(const Model& whole, const MemoryOptions& o, const Memory& peak) {
  // A GPU gets the frozen matrices converted; on a CPU they are converted where they are.
  const MemoryOptions one{.half = o.half && !o.cpu};
  Memory memory{.parameters = resident(parameters_of(whole), one).parameters,
                .context = peak.context,
                .moment = "the division of the model"};
  return memory.allocated() > peak.allocated() ? memory : peak;
}

// Micro-batches that a stage has begun and not ended. 1F1B: one for itself and one for each stage
// that follows. Interleaved, a rank begins two chunks for each of these, and all but its last chunk
// for as many micro-batches as there are ranks.
double in_flight(const MemoryOptions& o, const Stage& stage, int stages) {
  if (o.gpipe) return static_cast<double>(o.accumulation);
  const int begun = o.chunks == 1 ? stage.after + 1 : 2 * stage.after + (o.chunks - 1) * stages + 1;
  return std::min<double>(static_cast<double>(begun) / o.chunks,
                          static_cast<double>(o.accumulation));
}

// The share of `whole`'s state for `part`. The product would not fit 64 bits.
std::optional<std::uint64_t> state_of(const MemoryOptions& o, const Parameters& part,
                                      const Parameters& whole) {
  if (!o.state_bytes) return std::nullopt;
  return static_cast<std::uint64_t>(static_cast<double>(*o.state_bytes) *
                                    static_cast<double>(part.trainable) /
                                    static_cast<double>(whole.trainable));
}

}  // namespace

Memory memory_of(const Model& model, const MemoryOptions& options) {
  MemoryOptions o = options;
  Model whole = model;
  whole.slices = 1;
  o.fused &= model.causal_lm() != nullptr;
  const Activations a = activations_of(model, o);
  const Parameters all = parameters_of(model);
  if (model.slices > 1) o.state_bytes = state_of(o, all, parameters_of(whole));
  if (!o.pipeline) {
    const Memory peak = peak_of(model, all, a, model.blocks(), o);
    return o.built_whole && model.slices > 1 ? made_whole(whole, o, peak) : peak;
  }
  o.stages = 1;
  const std::uint64_t all_blocks = a.saved - a.head_saved;
  Memory most;
  for (const Stage& stage : stages_of(model, options.stages)) {
    Activations part = a;
    part.saved = static_cast<std::uint64_t>(
        static_cast<double>(all_blocks / static_cast<std::uint64_t>(model.blocks())) *
        static_cast<double>(stage.blocks) * in_flight(o, stage, options.stages));
    if (stage.last)
      part.saved += a.head_saved;
    else
      part.head_saved = part.head_forward = part.head_backward = 0;
    const Parameters parameters = parameters_of(model, all, stage);
    MemoryOptions own = o;
    own.state_bytes = state_of(o, parameters, all);
    const Memory memory = peak_of(model, parameters, part, stage.blocks, own);
    if (memory.total() > most.total()) most = memory;
  }
  return o.built_whole ? made_whole(whole, o, most) : most;
}

std::uint64_t usable_bytes(const Card& card) {
  if (card.memory_bytes == 0) return std::numeric_limits<std::uint64_t>::max();
  return static_cast<std::uint64_t>((1 - kReserve) * static_cast<double>(card.memory_bytes));
}

bool fits(const Memory& memory, const Card& card) {
  return memory.total() <= usable_bytes(card);
}

}  // namespace lockstep::plan
