#include "observe/plan/memory.h"

#include <algorithm>
#include <limits>

namespace lockstep::plan {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
// A CUDA context with LibTorch's kernels, and NCCL's buffers beside it: what nvidia-smi shows of a
// process that has allocated nothing.
constexpr std::uint64_t kContext = 550 * kMiB;
constexpr std::uint64_t kNccl = 600 * kMiB;
constexpr std::uint64_t kWorkspace = 64 * kMiB;  // cuBLAS takes 32 MiB a stream on Hopper
constexpr double kFragmentation = 0.02;          // of the activations
constexpr double kReserve = 0.03;                // of a card's memory

std::uint64_t divided(std::uint64_t bytes, int parts) {
  const auto n = static_cast<std::uint64_t>(std::max(1, parts));
  return (bytes + n - 1) / n;
}

std::uint64_t floats(std::int64_t count) {
  return 4 * static_cast<std::uint64_t>(count);
}

// The parts that are there in every moment, of one stage.
Memory resident(const Parameters& p, const MemoryOptions& o) {
  Memory memory;
  // Frozen matrices are converted to the half type when the model is made.
  const std::int64_t converted = o.half ? p.frozen_matrices : 0;
  memory.parameters = floats(p.total() + p.buffers) - 2 * static_cast<std::uint64_t>(converted);
  memory.parameters = divided(memory.parameters, o.stages);
  memory.optimizer = divided(o.state_bytes.value_or(2 * floats(p.trainable)),
                             o.stages * (o.sharded_optimizer ? o.ranks : 1));
  return memory;
}

}  // namespace

Memory memory_of(const Model& model, const MemoryOptions& options) {
  MemoryOptions o = options;
  o.fused &= model.causal_lm() != nullptr;
  const Parameters p = parameters_of(model);
  const Activations a = activations_of(
      model,
      {.batch = o.batch, .half = o.half, .checkpointing = o.checkpointing, .fused = o.fused});
  const std::uint64_t gradients = divided(floats(p.trainable), o.stages);
  const bool persistent = o.ranks > 1 || o.accumulation > 1;
  const auto copied = [&](std::int64_t weights) {
    return o.half ? 2 * static_cast<std::uint64_t>(weights) : 0;
  };
  // A frozen embedding that is the head too is copied for it.
  const bool tied = model.lora && model.causal_lm() != nullptr && model.causal_lm()->tied();
  // Fused operations convert weights in each forward and free the copies in backward. Counted is as
  // much as if they stayed, with those of embeddings, which is more than is used.
  const std::int64_t copied_weights = o.fused ? p.trainable + (model.lora ? p.head : 0)
                                              : p.trainable_matrices + (tied ? p.head : 0);
  const std::uint64_t copies = divided(copied(copied_weights), o.stages);
  // A tied embedding's two gradients are made apart, then added.
  const bool added = o.fused && !model.lora && model.causal_lm()->tied();
  const std::uint64_t saved = divided(a.saved, o.stages);
  const std::uint64_t block = o.checkpointing ? a.one_block : 0;

  const Memory base = resident(p, o);
  const auto moment = [&](std::string_view name, bool all_gradients, std::uint64_t weights,
                          std::uint64_t activations, std::uint64_t head) {
    Memory memory = base;
    memory.moment = name;
    memory.gradients = all_gradients ? gradients : 0;
    memory.copies = weights;
    memory.activations = activations;
    memory.head = head;
    return memory;
  };
  // A checkpointed block frees its copies at once; those of the head stay until backward. The head
  // and its loss are on the last stage, which holds no more activations than the others.
  const std::uint64_t at_loss =
      o.checkpointing && !o.fused ? std::min(copies, copied(model.lora ? 0 : p.head)) : copies;
  const Memory moments[] = {
      moment("the loss", persistent, at_loss, saved, a.head_forward),
      moment("the loss's backward", persistent, at_loss, saved, a.head_backward),
      moment("the backward of the last block", persistent, at_loss, saved + block + a.working,
             o.fused ? a.head_backward : 0),
      moment("the end of backward", true, o.fused ? copies : 0,
             std::min(a.one_block, saved) + a.working,
             added ? divided(floats(p.head), o.stages) : 0),
  };
  Memory peak = *std::ranges::max_element(moments, {}, &Memory::allocated);
  if (o.cpu) return peak;
  peak.workspace = kWorkspace + static_cast<std::uint64_t>(kFragmentation *
                                                           static_cast<double>(peak.activations));
  peak.context = kContext + (o.ranks > 1 ? kNccl : 0);
  return peak;
}

std::uint64_t usable_bytes(const Card& card) {
  if (card.memory_bytes == 0) return std::numeric_limits<std::uint64_t>::max();
  return static_cast<std::uint64_t>((1 - kReserve) * static_cast<double>(card.memory_bytes));
}

bool fits(const Memory& memory, const Card& card) {
  return memory.total() <= usable_bytes(card);
}

}  // namespace lockstep::plan
