// How to train on a number of GPUs: by what fits, with the global batch that was asked for.
//
//   const Choice choice = choose(training, card, 4);
//   choice.strategy            // Strategy::kDdp
//   choice.batch, choice.accumulation
//   for (const Change& c : changes(training, card, 1)) c.text;     // where none fits
//
// The first strategy that fits is taken. The file's own comes first (data parallel, fsdp, a device
// map, a pipeline, tensor parallel), with the batch as given or with smaller micro-batches and more
// accumulation; then a sharded optimizer, a fully sharded model (fsdp), and one rank that divides
// the layers over all of the GPUs (model.device_map).
//
// Values and functions without state; call from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "observe/plan/machine.h"
#include "observe/plan/memory.h"
#include "observe/plan/model_shape.h"

namespace lockstep::plan {

// How the replicas of a model share the work.
enum class Strategy {
  kSingle,  // there is one replica
  kDdp,
  kShardedOptimizer,
  kFullShard,    // fsdp: full_shard
  kShardGradOp,  // fsdp: shard_grad_op
  kHybridShard,  // fsdp: hybrid_shard; divided inside a node, copied between nodes
  kSplit,        // one rank with a device map
};
// The value of the key `fsdp` in a training file; empty: it is none of these.
std::string_view fsdp_word(Strategy strategy);

// How many GPUs are used, and how. A replica is divided into stages, and each of these into slices.
struct Parts {
  int gpus = 1;
  Strategy strategy = Strategy::kSingle;
  int stages = 1;         // pipeline_parallel_degree
  int slices = 1;         // tensor_parallel_degree
  bool sequence = false;  // sequence_parallel, of slices

  int replicas() const { return strategy == Strategy::kSplit ? 1 : gpus / (stages * slices); }
  int gpus_per_replica() const { return gpus / replicas(); }
  bool operator==(const Parts&) const = default;
};
// "single GPU" ("single rank" of a CPU), "DDP", "DDP, sharded optimizer", "fsdp: full_shard",
// "one rank, device_map over 2", "pipeline of 2 stages", "tensor parallel over 2",
// "tensor, sequence parallel over 2", "pipeline of 2, tensor over 2, full_shard".
std::string parts_text(const Parts& parts, bool cpu = false);

// What a training file says, as far as memory and time depend on it.
struct Training {
  Model model{};
  std::int64_t batch = 8;  // samples per device and micro-batch
  std::int64_t accumulation = 1;
  // Samples of one update over all ranks. Unset: batch x accumulation x ranks, which grows with the
  // ranks.
  std::optional<std::int64_t> global_batch{};
  bool half = false;
  bool bf16 = false;  // the half type is bfloat16, not float16
  bool tf32 = false;
  bool checkpointing = false;
  bool unfused = false;            // a language model of ATen's operations alone
  bool captured = false;           // compile_model: a step is one CUDA graph
  bool sharded_optimizer = false;  // shard_optimizer: true; unset, training shards where it helps
  bool may_shard = true;           // false: shard_optimizer: false
  // elastic_gpu or auto_find_batch_size: the key that sets a smaller batch. Empty: none does.
  std::string adapts{};
  std::optional<std::uint64_t> state_bytes{};  // as in MemoryOptions
  bool device_map = false;                     // the file's: one rank has all GPUs
  std::optional<Strategy> fsdp{};              // the file's
  int shard_degree = 0;                        // data_parallel_shard_degree; 0: all that can
  int node_gpus = 8;                           // hybrid_shard divides over those of a node
  bool shares_memory = true;                   // CPU ranks of a node do: their backend is shm
  bool offload = false;                        // with fsdp: as in MemoryOptions
  bool fixed_checkpointing = false;            // fsdp_config has it, which no plan changes
  bool built_whole = true;                     // as in MemoryOptions, with fsdp
  bool fp8 = false;                            // beside bf16, the products of the blocks in 8 bits
  bool rowwise = false;                        // of fp8: a scale for each row
  bool may_fp8 = false;                        // mixed_precision: fp8 may be proposed
  bool may_pipeline = false;                   // and pipeline_parallel_degree
  int pipeline = 1;                            // the file's pipeline_parallel_degree
  bool gpipe = false;                          // as in MemoryOptions
  int chunks = 1;                              // likewise
  bool may_tensor = false;                     // tensor_parallel_degree may be proposed
  int tensor = 1;                              // the file's
  std::optional<bool> sequence{};              // its sequence_parallel; unset: either may be
};

struct Choice : Parts {
  Sharding sharding = Sharding::kNone;  // over replicas
  std::int64_t batch = 0;
  std::int64_t accumulation = 0;
  std::int64_t global_batch = 0;
  bool same_global_batch = true;  // it is what was asked for
  Memory memory{};
  bool fits = false;
  bool smaller_batch = false;  // the file's micro-batch does not fit
  bool as_written = false;     // it fits, and training does this without a change to the file
};

// What these parts and this micro-batch need, whether they fit or not. The samples of a replica are
// a multiple of `batch`.
Choice make_choice(const Training& training, const Card& card, const Parts& parts,
                   std::int64_t batch);
// Whether `lockstep train` can train this model with that strategy on so many GPUs.
bool can_train(const Training& training, const Card& card, const Parts& parts);
// mixed_precision: fp8 on a card without 8-bit products. A CPU computes the same by other means.
bool lacks_fp8(const Training& training, const Card& card);
// Why `lockstep train` does not take the file on so many GPUs, however much memory they have: the
// card lacks fp8, the degree of a pipeline does not divide them or is more than the blocks, or
// replicas cannot share the global batch in the file's micro-batches. Empty: it does.
std::vector<std::string> refusals(const Training& training, const Card& card, const Choice& choice);

// Where nothing fits, the choice is what the file says, with the smallest micro-batch.
Choice choose(const Training& training, const Card& card, int gpus);
// The file's own strategy and micro-batch, whether they fit or not.
Choice as_written(const Training& training, const Card& card, int gpus);
// Replicas of the model that the file trains on so many GPUs: each needs samples of its own.
int written_copies(const Training& training, const Card& card, int gpus);

struct Change {
  std::string text{};                // "gradient_checkpointing: true"
  std::string cost{};                // "blocks run twice: a third more computation"
  std::uint64_t alone_bytes = 0;     // a GPU's total with this change
  std::uint64_t together_bytes = 0;  // with this change and those before it
  bool alone_fits = false;
  bool together_fits = false;
};
// What makes the file's own choice smaller, cheapest first: smaller micro-batches where they
// suffice, a sharded optimizer, sequence parallelism of slices, gradient checkpointing, then
// smaller micro-batches, fsdp, bf16, LoRA, a device map. Ends with the first that fits together
// with those before it.
std::vector<Change> changes(const Training& training, const Card& card, int gpus);

// How fast a card computes.
struct Speed {
  std::optional<double> utilisation{};        // of the card's peak (MFU); unset: as docs/plan.md
  std::optional<double> tokens_per_second{};  // measured on one GPU; wins
};

// Operations per second of the card in the training's type. One without bfloat16 (or TF32) computes
// it at the rate of float. 0: not known.
double peak_flops(const Training& training, const Card& card);
// The part of the peak that the file's micro-batch reaches once it is launched (docs/plan.md).
double utilisation_of(const Training& training, const Card& card);

// One rank's part of a step; nothing where neither the card's arithmetic nor a measurement is
// known.
std::optional<Work> work_of(const Training& training, const Choice& choice, const Card& card,
                            const Speed& speed);

struct Machine {
  Card card{};
  Cluster cluster{};
  Speed speed{};
};

// What is chosen for a number of GPUs, and how long its step takes where it fits and that is known.
struct Timed {
  Choice choice{};
  std::optional<StepTime> step{};
  double tokens_per_second = 0;
};
Timed timed(const Training& training, const Machine& machine, int gpus);
Timed timed(const Training& training, const Machine& machine, Choice choice);

struct ScalePoint {
  Choice choice{};  // without `fits` it has no time
  StepTime step{};
  double tokens_per_second = 0;
  double efficiency = 0;  // tokens per second and GPU, over those of one GPU
};
// A global batch that was asked for is held, and each GPU's part of it shrinks; with more GPUs than
// samples each has one, and the batch grows. Without one every GPU has the same work. Nothing where
// the speed is not known.
std::vector<ScalePoint> scale(const Training& training, const Machine& machine,
                              const std::vector<int>& gpus);
// The most GPUs, a power of two, that a search goes to: each has a sample of the global batch.
int most_gpus(const Training& training);
// The smallest power of two that fits and at which the efficiency is below `floor`; 0: none up to
// most_gpus().
int stops_at(const Training& training, const Machine& machine, double floor);

}  // namespace lockstep::plan
