// How to train on a number of GPUs: by what fits, with the global batch that was asked for.
//
//   const Choice choice = choose(training, card, 4);
//   choice.strategy            // Strategy::kDdp
//   choice.batch, choice.accumulation
//   for (const Change& c : changes(training, card, 1)) c.text;     // where none fits
//
// The first that fits is taken: data parallel with the batch as given, with smaller micro-batches
// and more accumulation, with a sharded optimizer; then the layers are divided over as few GPUs as
// hold them, and what is left of the GPUs works in replicas of that (hybrid).
//
// Values and functions without state; call from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/plan/cards.h"
#include "lockstep/plan/memory.h"
#include "lockstep/plan/model_shape.h"
#include "lockstep/plan/scaling.h"

namespace lockstep::plan {

// What a training file says, as far as memory and time depend on it.
struct Training {
  Model model{};
  std::int64_t batch = 8;  // samples per device and micro-batch
  std::int64_t accumulation = 1;
  // Samples of one update over all ranks. Unset: batch x accumulation x ranks, which grows with the
  // ranks.
  std::optional<std::int64_t> global_batch{};
  bool half = false;
  bool tf32 = false;
  bool checkpointing = false;
  bool unfused = false;            // a language model of ATen's operations alone
  bool sharded_optimizer = false;  // demanded; otherwise where it helps
  int state_copies = 2;
};

enum class Strategy { kSingle, kDdp, kShardedOptimizer, kSplit, kHybrid };
// "single GPU", "DDP", "DDP, sharded optimizer", "model split over 2", "DDP of 2 x model split 2".
std::string strategy_text(Strategy strategy, int gpus, int stages);

struct Choice {
  int gpus = 1;
  Strategy strategy = Strategy::kSingle;
  int stages = 1;  // GPUs of one replica
  std::int64_t batch = 0;
  std::int64_t accumulation = 0;
  std::int64_t global_batch = 0;
  bool same_global_batch = true;  // it is what was asked for
  Memory memory{};
  bool fits = false;

  int replicas() const { return gpus / stages; }
};

// With `fits` false the choice is DDP with the smallest micro-batch.
Choice choose(const Training& training, const Card& card, int gpus);

struct Change {
  std::string text{};                // "gradient_checkpointing: true"
  std::string cost{};                // "blocks run twice: a third more computation"
  std::uint64_t alone_bytes = 0;     // a GPU's total with this change
  std::uint64_t together_bytes = 0;  // with this change and those before it
  bool alone_fits = false;
  bool together_fits = false;
};
// What makes it smaller, cheapest first: gradient checkpointing, smaller micro-batches, sharded
// optimizer, bf16, LoRA, a model split. Ends with the first that fits together with those before.
std::vector<Change> changes(const Training& training, const Card& card, int gpus);

// How fast a card computes.
struct Speed {
  double utilisation = kUtilisation;          // of the card's peak (MFU)
  std::optional<double> tokens_per_second{};  // measured on one GPU; wins

  // Measured with this library on an H200, bf16: GPT-2 124M 0.36, a GPT of 1.3B 0.52.
  static constexpr double kUtilisation = 0.4;
};

// One rank's part of a step; nothing where neither the card's arithmetic nor a measurement is
// known.
std::optional<Work> work_of(const Training& training, const Choice& choice, const Card& card,
                            const Speed& speed);

}  // namespace lockstep::plan
