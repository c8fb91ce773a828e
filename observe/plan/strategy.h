// Chooses how to train on a number of GPUs so that it fits, with the requested global batch.
//
//   const Choice choice = choose(training, card, 4);
//   choice.distribution        // Distribution::kDdp
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
#include "observe/plan/model_shape.h"

namespace lockstep::plan {

// How the replicas or parts of a model are distributed.
enum class Distribution {
  kSingle,  // there is one replica
  kDdp,
  kShardedOptimizer,
  kFullShard,    // fsdp: full_shard
  kShardGradOp,  // fsdp: shard_grad_op
  kHybridShard,  // fsdp: hybrid_shard; divided inside a node, copied between nodes
  kSplit,        // one rank with a device map
};
// The value of the key `fsdp` in a training file; empty: it is none of these.
std::string_view fsdp_word(Distribution distribution);

// The GPUs that are used, and for what. A replica is divided into stages, a stage into slices.
struct Parts {
  int gpus = 1;
  Distribution distribution = Distribution::kSingle;
  int stages = 1;         // pipeline_parallel_degree
  int slices = 1;         // tensor_parallel_degree
  bool sequence = false;  // sequence_parallel, of slices

  int replicas() const {
    return distribution == Distribution::kSplit ? 1 : gpus / (stages * slices);
  }
  int gpus_per_replica() const { return gpus / replicas(); }
  bool operator==(const Parts&) const = default;
};
// "single GPU" ("single rank" of a CPU), "DDP", "DDP, sharded optimizer", "fsdp: full_shard",
// "one rank, device_map over 2", "pipeline of 2 stages", "tensor parallel over 2",
// "tensor, sequence parallel over 2", "pipeline of 2, tensor over 2, full_shard".
std::string parts_text(const Parts& parts, bool cpu = false);

// The settings of a training file that affect memory and time.
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
  models::BlockParts again{};      // parts of blocks, where it is not on for whole ones
  bool unfused = false;            // a language model of ATen's operations alone
  bool captured = false;           // compile_model: a step is one CUDA graph
  bool sharded_optimizer = false;  // shard_optimizer: true; unset, training shards where it helps
  bool may_shard = true;           // false: shard_optimizer: false
  // The key that allows a smaller batch: elastic_gpu or auto_find_batch_size. Empty: none.
  std::string adapts{};
  std::optional<std::uint64_t> state_bytes{};  // as in MemoryOptions
  bool device_map = false;                     // the file's: one rank has all GPUs
  std::optional<Distribution> fsdp{};          // the file's
  int shard_degree = 0;                        // data_parallel_shard_degree; 0: all that can
  int node_gpus = 8;                           // hybrid_shard divides over those of a node
  bool shares_memory = true;                   // CPU ranks of a node do: their backend is shm
  bool offload = false;                        // with fsdp: as in MemoryOptions
  bool fixed_checkpointing = false;            // set in fsdp_config, which no plan changes
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
  bool same_global_batch = true;  // it is the requested one
  Memory memory{};
  bool fits = false;
  bool smaller_batch = false;  // the file's micro-batch does not fit
  bool as_written = false;     // it fits, and training runs it with the file unchanged
};

// The requirements of these parts and this micro-batch, whether they fit or not. The samples of a
// replica are a multiple of `batch`.
Choice make_choice(const Training& training, const Card& card, const Parts& parts,
                   std::int64_t batch);
// Whether `lockstep train` supports that strategy for this model on this many GPUs.
bool can_train(const Training& training, const Card& card, const Parts& parts);
// Whether fp8 is set but the card lacks 8-bit products. A CPU emulates them.
bool lacks_fp8(const Training& training, const Card& card);
// Why `lockstep train` refuses the file on this many GPUs, regardless of memory: the card lacks
// fp8, the degree of a pipeline does not divide them or exceeds the blocks, or replicas cannot
// share the global batch in the file's micro-batches. Empty: it accepts the file.
std::vector<std::string> refusals(const Training& training, const Card& card, const Choice& choice);

// If nothing fits, returns the file's own strategy with the smallest micro-batch.
Choice choose(const Training& training, const Card& card, int gpus);
// The file's own strategy and micro-batch, whether they fit or not.
Choice as_written(const Training& training, const Card& card, int gpus);
// The replicas that the file trains on this many GPUs: each needs samples of its own.
int written_copies(const Training& training, const Card& card, int gpus);

struct Change {
  std::string text{};                // "gradient_checkpointing: true"
  std::string cost{};                // "blocks run twice: a third more computation"
  std::uint64_t alone_bytes = 0;     // a GPU's total with this change
  std::uint64_t together_bytes = 0;  // with this change and those before it
  bool alone_fits = false;
  bool together_fits = false;
};
// The changes that reduce the memory of the file's own choice, cheapest first: smaller
// micro-batches if they suffice, a sharded optimizer, sequence parallelism of slices, gradient
// checkpointing, then smaller micro-batches, fsdp, bf16, LoRA, a device map. Ends with the first
// that fits together with those before it.
std::vector<Change> changes(const Training& training, const Card& card, int gpus);

// A card's computing speed.
struct Speed {
  std::optional<double> utilisation{};        // of the card's peak (MFU); unset: as docs/plan.md
  std::optional<double> tokens_per_second{};  // measured on one GPU; wins
};

// The card's peak operations per second in the training's type. A card without bfloat16 (or TF32)
// computes it at the rate of float. 0: not known.
double peak_flops(const Training& training, const Card& card);
// The fraction of the peak that the file's micro-batch reaches once launched (docs/plan.md).
double utilisation_of(const Training& training, const Card& card);

// One rank's share of a step; nothing if neither the card's arithmetic rate nor a measurement is
// known.
std::optional<Work> work_of(const Training& training, const Choice& choice, const Card& card,
                            const Speed& speed);

struct Machine {
  Card card{};
  Cluster cluster{};
  Speed speed{};
};

// The choice for a number of GPUs, with its step time if it fits and the time is known.
struct Timed {
  Choice choice{};
  std::optional<StepTime> step{};
  double tokens_per_second = 0;
};
Timed timed(const Training& training, const Machine& machine, int gpus);
Timed timed(const Training& training, const Machine& machine, Choice choice);

struct ScalePoint : Timed {
  double efficiency = 0;  // tokens per second and GPU, over those of one GPU
};
// A requested global batch is kept, so each GPU's share shrinks; with more GPUs than samples each
// has one, and the batch grows. Otherwise every GPU has constant work. Nothing if the speed is not
// known.
std::vector<ScalePoint> scale(const Training& training, const Machine& machine,
                              const std::vector<int>& gpus);
// The upper bound of the search, a power of two: each GPU has a sample of the global batch.
int most_gpus(const Training& training);
// The smallest power of two that fits and whose efficiency is below `floor`; 0: none up to
// most_gpus().
int stops_at(const Training& training, const Machine& machine, double floor);

}  // namespace lockstep::plan
