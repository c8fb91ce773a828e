// Estimates the peak memory of a training step per GPU, and whether it fits.
//
//   const Memory memory = memory_of(model, {.batch = 8, .half = true, .ranks = 4});
//   memory.total() <= usable_bytes(card)
//
// The peak is at one of these moments: the loss (all activations and the logits), the backward of
// the last block, the end of backward (all gradients), the update. A Memory has the bytes at the
// largest of them, part by part; parts that do not exist at that moment are 0.
//
// Gradients exist from step to step where they lie in DistributedDataParallel's buckets (several
// ranks) or are accumulated; otherwise backward makes them as it frees activations. A fully sharded
// rank has a part of parameters, gradients and state, the root's whole parameters in a step, and in
// backward two whole blocks and two blocks' gradients (docs/fully_shard.md).
//
// Values and functions without state; call from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "observe/plan/machine.h"
#include "observe/plan/model_shape.h"

namespace lockstep::plan {

struct MemoryOptions {
  std::int64_t batch = 8;  // samples of the micro-batch
  std::int64_t accumulation = 1;
  bool half = false;  // bf16 or fp16
  bool checkpointing = false;
  bool fused = false;  // as in ActivationOptions
  bool fp8 = false;
  int ranks = 1;                               // data parallel
  Sharding sharding = Sharding::kNone;         // what of parameters, gradients, state is divided
  int shard_ranks = 0;                         // over so many ranks; 0: over all of them
  std::optional<std::uint64_t> state_bytes{};  // of the optimizer, undivided; unset: AdamW's
  int stages = 1;              // GPUs that the layers of one replica are divided over
  bool pipeline = false;       // by blocks, with 1F1B: the GPU that needs most counts
  bool gpipe = false;          // a stage holds all micro-batches of an update, not those of 1F1B
  int chunks = 1;              // stages of a rank, with interleaved 1F1B
  bool cpu = false;            // no CUDA, no NCCL
  bool shares_memory = false;  // the ranks that divide something map each other's memory
  bool offload = false;        // fsdp's rows, their gradients and state are in the host's memory
  // False: blocks are divided while the model is made (ShardedConstruction).
  bool built_whole = true;
};

struct Memory {
  std::uint64_t parameters = 0;  // and buffers
  std::uint64_t copies = 0;      // of weights in the half type
  std::uint64_t gradients = 0;   // buckets included
  std::uint64_t optimizer = 0;
  std::uint64_t activations = 0;  // saved tensors and temporaries
  std::uint64_t head = 0;         // logits and their gradients
  std::uint64_t workspace = 0;    // of cuBLAS; what the caching allocator cannot reuse
  std::uint64_t context = 0;      // of CUDA and NCCL, outside the allocator
  std::string_view moment{};      // "the loss": when the peak is

  // What torch.cuda.max_memory_allocated() shows.
  std::uint64_t allocated() const {
    return parameters + copies + gradients + optimizer + activations + head;
  }
  // What nvidia-smi shows.
  std::uint64_t total() const { return allocated() + workspace + context; }
};

// `options.state_bytes` covers the whole model, even if `model` is one of its slices.
Memory memory_of(const Model& model, const MemoryOptions& options);

// The memory without a reserve: a card that is full to the last byte fails at the first longer
// batch. UINT64_MAX if the memory is not known.
std::uint64_t usable_bytes(const Card& card);
bool fits(const Memory& memory, const Card& card);

}  // namespace lockstep::plan
