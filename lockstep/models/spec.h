// The structure of a language model as plain data without torch: its blocks, and the
// shapes and names of its parameters. A family (family.h) produces the description; the
// decoder computes it, and shapes, files, device maps, adapters and plans are derived from
// it.
//
//   const DecoderSpec spec = read_config("Qwen2.5-0.5B").spec();
//   for (const io::TensorShape& tensor : tensors_of(spec)) use(tensor.name, tensor.shape);
//
// Names are relative to the module around them: a projection's to its attention or perceptron,
// those to the block. Values and functions without state; call from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/io/safetensors.h"
#include "lockstep/models/shapes.h"

namespace lockstep::models {

enum class NormKind {
  kLayer,       // mean and deviation, weight and bias
  kRms,         // root mean square: rounded to the input's type, then times weight
  kRmsPlusOne,  // times 1 + weight, in float32; the weight begins at 0
};

struct NormSpec {
  std::string name;
  NormKind kind = NormKind::kRms;
  std::int64_t width = 0;
  double epsilon = 1e-6;
  bool operator==(const NormSpec&) const = default;
};

// How a matrix is stored: [out, in] as torch.nn.Linear, or [in, out] as GPT-2's "Conv1D".
enum class WeightLayout { kOutIn, kInOut };

struct Projection {
  std::string name;
  std::int64_t in = 0;
  std::vector<std::int64_t> parts{};  // rows of what one matrix computes together
  bool bias = false;
  WeightLayout layout = WeightLayout::kOutIn;
  double deviation = 0.02;  // of the initial weights

  std::int64_t out() const;
  bool operator==(const Projection&) const = default;
};

// The parts of `in`, in this order: queries, keys, values; of one matrix or of several. Tensor
// parallelism cuts `in` by heads of its outputs, and `out` by heads of its inputs.
struct AttentionSpec {
  std::string name;
  std::int64_t heads = 0;
  std::int64_t key_value_heads = 0;
  std::int64_t width = 0;  // of a head
  std::vector<Projection> in{};
  Projection out{};
  std::optional<NormSpec> query_norm{};  // of each head, before rotation
  std::optional<NormSpec> key_norm{};
  double scale = 0;     // of the scores; 0: 1 / sqrt(width)
  double soft_cap = 0;  // scores are cap * tanh(score / cap); 0: as they are
  double dropout = 0;

  std::int64_t queries() const { return heads * width; }
  std::int64_t keys() const { return key_value_heads * width; }
  bool operator==(const AttentionSpec&) const = default;
};

// Perceptrons of one shape, of which a router chooses a few for each token: those with the largest
// softmax of its logits, which weighs their results.
struct ExpertsSpec {
  Projection router{};           // a row for each expert
  std::string list = "experts";  // of modules "0", "1", ..., each with the projections
  std::int64_t per_token = 1;    // how many a token goes to
  double load_balancing = 0;     // so much of the load balancing loss is added to the loss
  double jitter = 0;             // in training the input is times 1 - jitter to 1 + jitter

  std::int64_t count() const { return router.out(); }
  bool operator==(const ExpertsSpec&) const = default;
};

// The parts of `in`: the gate and the matrix that it multiplies, or one matrix alone. Tensor
// parallelism cuts each of them by its outputs, and `out` by its inputs.
struct MlpSpec {
  std::string name;
  std::vector<Projection> in{};  // with experts: of each of them
  Projection out{};
  Activation activation = Activation::kSilu;
  std::optional<ExpertsSpec> experts{};

  bool gated() const { return in.size() > 1 || in.front().parts.size() > 1; }
  bool operator==(const MlpSpec&) const = default;
};

struct BlockSpec {
  NormSpec attention_norm{};
  std::optional<NormSpec> attention_after{};  // of what attention adds
  NormSpec mlp_norm{};
  std::optional<NormSpec> mlp_after{};
  AttentionSpec attention{};
  MlpSpec mlp{};
  double dropout = 0;        // of what is added
  bool norms_first = false;  // in the order of parameters: each norm before what it is for
  bool operator==(const BlockSpec&) const = default;
};

struct Rotary {
  RopeConfig scaling{};
  std::int64_t width = 0;  // of a head, the part that is rotated
  bool operator==(const Rotary&) const = default;
};

struct DecoderSpec {
  std::string family;
  std::string prefix;  // of all but the head
  std::string blocks;
  std::string embedding;
  std::string positions{};  // the embedding of positions; empty: there is none
  std::int64_t vocabulary = 0;
  std::int64_t width = 0;
  std::int64_t max_positions = 0;  // a limit with an embedding of positions
  std::int64_t padding_id = -1;    // its embedding gets no gradient; -1: there is none
  bool tied = false;               // the head's weight is the token embedding's
  bool embeddings_drawn_last = false;
  double deviation = 0.02;  // of the initial embeddings
  double embedding_scale = 1;
  double embedding_dropout = 0;
  double logit_soft_cap = 0;
  BlockSpec block{};
  std::vector<std::int64_t> windows{};  // of each block: how many tokens a token sees; 0: all
  NormSpec last{};
  Projection head{};
  std::optional<Rotary> rotary{};
  // A sequence that grows beyond this many tokens uses other rotary frequencies, and its cache is
  // recomputed; 0: never.
  std::int64_t cache_limit = 0;

  std::int64_t layers() const { return static_cast<std::int64_t>(windows.size()); }
  bool positions_end() const { return !positions.empty(); }
  bool operator==(const DecoderSpec&) const = default;
};

// Parameters in the module's order, which decides how optimizers are sharded.
std::vector<io::TensorShape> tensors_of(const DecoderSpec& spec);

// Names of the parts that a device map cannot split: embeddings, blocks, last norm, head.
std::vector<std::string> part_names(const DecoderSpec& spec);
std::vector<std::string> embedding_names(const DecoderSpec& spec);

// Full names of the layers that adapters can be attached to: no routers, no experts.
std::vector<std::string> linear_layers(const DecoderSpec& spec);
std::vector<std::string> routers_and_experts(const DecoderSpec& spec);
// The weights that tensor parallelism cuts, by full name: each of `parts` along `dimension`, over
// `ranks`. Others are whole on every rank. UsageError where the model cannot be divided.
struct TensorCut {
  std::string name;
  std::int64_t dimension = 0;
  std::vector<std::int64_t> parts{};
};
std::vector<TensorCut> tensor_cuts(const DecoderSpec& spec, int ranks);
// The cuts of one block, by names relative to it; performs no checks.
std::vector<TensorCut> tensor_cuts(const BlockSpec& block);
// UsageError where the family's blocks do not have such a part.
void check_parts(const BlockParts& parts, const DecoderSpec& spec);
// Elements, over all blocks, of the experts that are not chosen for a token.
std::int64_t unused_by_a_token(const DecoderSpec& spec);

}  // namespace lockstep::models
