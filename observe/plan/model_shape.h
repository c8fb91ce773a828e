// The cost of a model from its sizes alone: parameters, floating-point operations and the bytes of
// the tensors that autograd saves; and the peak memory of a training step per GPU. Needs no torch,
// and reads no weights.
//
//   const Model model{.config = models::read_config("gpt2/config.json"), .length = 1024};
//   parameters_of(model).trainable;                              // 124'439'808
//   activations_of(model, {.batch = 8, .half = true}).saved;     // bytes of one micro-batch
//
// The activations are those of the modules in lockstep/models, operation by operation, under
// autocast: the residual stream in float, products in the half type, attention that saves its
// inputs, its output and one number for each row. models::tensors_of() counts the parameters.
//
// Values and functions without state; call from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/models/hugging_face.h"
#include "lockstep/models/lora_config.h"
#include "lockstep/models/shapes.h"
#include "observe/plan/machine.h"

namespace lockstep::plan {

// The model to train, and the size of its samples.
struct Model {
  std::variant<models::CausalLmConfig, models::ResNetConfig, models::MlpConfig> config{};
  std::optional<models::LoraConfig> lora{};
  bool nf4 = false;             // model.load_in_4bit: the base's linear layers in blocks
  std::int64_t length = 1;      // tokens of a sample; 1 for images and rows of numbers
  std::int64_t image_size = 0;  // height and width in pixels, for a resnet
  // The number of tensor parallel slices of a language model: of heads, hidden units and rows of
  // the vocabulary, with all norms (models::tensor_cuts()). Slices differ by at most a row.
  int slices = 1;
  bool sequence_parallel = false;  // those ranks divide the sequence between layers

  std::vector<io::TensorShape> tensors() const;
  const models::CausalLmConfig* causal_lm() const {
    return std::get_if<models::CausalLmConfig>(&config);
  }
  models::DecoderSpec spec() const;  // for a language model, or a slice of one
  // The divisor of the activations between layers.
  int sequence_parts() const { return sequence_parallel ? slices : 1; }
  // The number of blocks, for gradient checkpointing and splitting; 0: there are none.
  std::int64_t blocks() const;
};

struct Parameters {
  std::int64_t trainable = 0;
  std::int64_t frozen = 0;  // the base of adapters
  // The parameters among these that are weights of linear layers: autocast multiplies half-type
  // copies of them, and frozen ones are converted permanently.
  std::int64_t trainable_matrices = 0;
  std::int64_t frozen_matrices = 0;
  std::int64_t head = 0;  // weight of the output head, tied or not; 0: not a language model
  std::int64_t buffers = 0;
  std::int64_t tensors = 0;  // that are trained
  std::int64_t unused = 0;   // in experts that a token is not routed to
  std::int64_t block = 0;    // of one block, adapters included; 0: there are no blocks
  std::int64_t block_trainable = 0;
  std::int64_t block_matrices = 0;  // weights of linear layers in one block, without experts
  std::int64_t block_widths = 0;    // inputs and outputs of those layers
  std::int64_t largest = 0;         // the largest trained tensor of a block
  std::int64_t largest_matrix = 0;  // of block_matrices
  std::int64_t in_4_bits = 0;       // frozen matrices

  std::int64_t total() const { return trainable + frozen; }
};

// UsageError when `lora` selects no layer.
Parameters parameters_of(const Model& model);

// One pipeline stage: some of the blocks; the first stage has the embeddings as well, the last one
// the head.
struct Stage {
  std::int64_t blocks = 0;
  bool first = true;
  bool last = true;
  int after = 0;  // stages that follow
};
// Divides blocks as lockstep::Pipeline does: stages in the middle get one more first.
std::vector<Stage> stages_of(const Model& model, int stages);
Parameters parameters_of(const Model& model, const Parameters& whole, const Stage& stage);
// The largest stage's share of the model's forward operations.
double largest_share(const Model& model, int stages);

// The trained tensors, adapters included.
std::vector<io::TensorShape> trained_tensors(const Model& model);

// Bytes of the gradients in the order in which backward produces them: the last layer first.
std::vector<std::int64_t> gradients_of(const Model& model);

// Bytes of the gradients of parameters that all of the `slices` tensor parallel ranks hold whole.
struct SharedGradients {
  std::int64_t all = 0;
  std::int64_t adapters = 0;  // among them
};
SharedGradients shared_gradients(const Model& model);

// Operations for one token (one sample for images), forward and backward: two for each
// multiply-add. Attention counts every pair of tokens, as is usual for utilisation figures. Frozen
// weights have no gradient. Excludes recomputation for gradient checkpointing.
double flops_per_token(const Model& model);
double forward_flops_per_token(const Model& model);

// The share of a block's forward operations that backward computes a second time.
double share_again(const Model& model, bool checkpointing, const models::BlockParts& again);

struct MemoryOptions {
  std::int64_t batch = 8;  // samples of the micro-batch
  std::int64_t accumulation = 1;
  bool half = false;           // autocast to bfloat16 or float16
  bool checkpointing = false;  // gradient checkpointing: blocks run a second time in backward
  models::BlockParts again{};  // or parts of them
  // Language models as computed on a GPU by default (docs/optimisation.md): the residual stream is
  // in the half type, and the loss is computed in chunks of rows, so that the logits never exist as
  // a whole.
  bool fused = false;
  bool fp8 = false;  // blocks of a fused model multiply in fp8 and save fp8 operands
  // Below: for memory_of() alone.
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

// Bytes of activations at the candidate moments of the peak.
struct Activations {
  std::uint64_t saved = 0;          // of all blocks and the head from forward to backward
  std::uint64_t head_saved = 0;     // the head's part of it
  std::uint64_t one_block = 0;      // of a block, while it runs again where it is checkpointed
  std::uint64_t segment = 0;        // of a checkpointed part of a block, while that runs again
  std::uint64_t working = 0;        // temporaries of a block's backward
  std::uint64_t head_forward = 0;   // logits, and temporaries of the loss
  std::uint64_t head_backward = 0;  // peak of the head's backward
};
Activations activations_of(const Model& model, const MemoryOptions& options);

// Logits in a chunk of lockstep::nn::linear_cross_entropy.
inline constexpr std::uint64_t kChunkBytes = std::uint64_t{512} << 20;

// ---------------------------------------------------------------- memory of a GPU (memory.cpp)
//
// The peak of a training step is at one of these moments: the loss (all activations and the
// logits), the backward of the last block, the end of backward (all gradients), the update. A
// Memory has the bytes at the largest of them, part by part; parts that do not exist at that moment
// are 0.
//
// Gradients exist from step to step where they lie in DistributedDataParallel's buckets (several
// ranks) or are accumulated; otherwise backward makes them as it frees activations. A fully sharded
// rank has a part of parameters, gradients and state, the root's whole parameters in a step, and in
// backward two whole blocks and two blocks' gradients (docs/fully_shard.md).
//
//   const Memory memory = memory_of(model, {.batch = 8, .half = true, .ranks = 4});
//   memory.total() <= usable_bytes(card)

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
