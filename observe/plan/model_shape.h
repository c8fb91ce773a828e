// What a model costs, from its sizes alone: parameters, floating-point operations and the bytes of
// the tensors that autograd saves. No torch, and no weights are read.
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
#include <variant>
#include <vector>

#include "lockstep/models/hugging_face.h"
#include "lockstep/models/lora_config.h"
#include "lockstep/models/shapes.h"

namespace lockstep::plan {

// What is trained, and on samples of which size.
struct Model {
  std::variant<models::CausalLmConfig, models::ResNetConfig, models::MlpConfig> config{};
  std::optional<models::LoraConfig> lora{};
  std::int64_t length = 1;      // tokens of a sample; 1 for images and rows of numbers
  std::int64_t image_size = 0;  // pixels of a side, of a resnet
  // What one of so many tensor parallel ranks has of a language model: its heads, hidden units and
  // rows of the vocabulary, and all norms (models::tensor_cuts()). Ranks differ by a row at most.
  int slices = 1;
  bool sequence_parallel = false;  // those ranks have parts of the sequence between layers

  std::vector<io::TensorShape> tensors() const;
  const models::CausalLmConfig* causal_lm() const {
    return std::get_if<models::CausalLmConfig>(&config);
  }
  models::DecoderSpec spec() const;  // of a language model, or of a slice of it
  // What is computed between layers is divided by this.
  int sequence_parts() const { return sequence_parallel ? slices : 1; }
  // Blocks that gradient checkpointing and a model split work with; 0: there are none.
  std::int64_t blocks() const;
};

struct Parameters {
  std::int64_t trainable = 0;
  std::int64_t frozen = 0;  // the base of adapters
  // Those among them that are weights of linear layers: autocast multiplies copies of them in the
  // half type, and frozen ones are converted for good.
  std::int64_t trainable_matrices = 0;
  std::int64_t frozen_matrices = 0;
  std::int64_t head = 0;  // weight of the output head, tied or not; 0: not a language model
  std::int64_t buffers = 0;
  std::int64_t tensors = 0;  // that are trained
  std::int64_t unused = 0;   // of experts that a token does not go to
  std::int64_t block = 0;    // of one block, adapters included; 0: there are no blocks
  std::int64_t block_trainable = 0;
  std::int64_t block_matrices = 0;  // weights of linear layers in one block, without experts
  std::int64_t block_widths = 0;    // inputs and outputs of those layers
  std::int64_t largest = 0;         // tensor of a block that is trained

  std::int64_t total() const { return trainable + frozen; }
};

// UsageError when `lora` selects no layer.
Parameters parameters_of(const Model& model);

// What one rank of a pipeline has: some of the blocks, the first one the embeddings as well, the
// last one the head.
struct Stage {
  std::int64_t blocks = 0;
  bool first = true;
  bool last = true;
  int after = 0;  // stages that follow
};
// As lockstep::Pipeline divides blocks: stages in the middle get one more first.
std::vector<Stage> stages_of(const Model& model, int stages);
Parameters parameters_of(const Model& model, const Parameters& whole, const Stage& stage);
// The forward operations of the stage that has most, over those of the model.
double largest_share(const Model& model, int stages);

// The tensors that are trained, adapters among them.
std::vector<io::TensorShape> trained_tensors(const Model& model);

// Bytes of the gradients in the order in which backward produces them: the last layer first.
std::vector<std::int64_t> gradients_of(const Model& model);

// Bytes of the gradients of what every one of `slices` tensor parallel ranks has whole.
struct SharedGradients {
  std::int64_t all = 0;
  std::int64_t adapters = 0;  // among them
};
SharedGradients shared_gradients(const Model& model);

// For one token (one sample for images), forward and backward: two for each multiply-add.
// Attention counts every pair of tokens, as is usual for utilisation figures. A frozen weight needs
// no gradient of its own. Recomputation for gradient checkpointing is not in it.
double flops_per_token(const Model& model);
double forward_flops_per_token(const Model& model);

struct ActivationOptions {
  std::int64_t batch = 8;      // samples of the micro-batch
  bool half = false;           // autocast to bfloat16 or float16
  bool checkpointing = false;  // gradient checkpointing: blocks run a second time in backward
  // Language models as they compute on a GPU by default (docs/optimisation.md): the residual stream
  // is in the half type, and the loss is computed in chunks of rows, so that the logits never exist
  // as a whole.
  bool fused = false;
  bool fp8 = false;  // blocks of a fused model multiply in 8 bits, and save what they multiply so
};

// Bytes at the moments that can be the peak.
struct Activations {
  std::uint64_t saved = 0;          // of all blocks and the head from forward to backward
  std::uint64_t head_saved = 0;     // the head's part of it
  std::uint64_t one_block = 0;      // what a checkpointed block saves while it runs again
  std::uint64_t working = 0;        // temporaries of a block's backward
  std::uint64_t head_forward = 0;   // logits and what the loss makes of them
  std::uint64_t head_backward = 0;  // at its largest
};
Activations activations_of(const Model& model, const ActivationOptions& options);

// Logits of a chunk in lockstep::nn::linear_cross_entropy.
inline constexpr std::uint64_t kChunkBytes = std::uint64_t{512} << 20;

}  // namespace lockstep::plan
