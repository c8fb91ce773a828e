#include "observe/plan/model_shape.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <string_view>

namespace lockstep::plan {
namespace {

using models::BlockSpec;
using models::CausalLmConfig;
using models::DecoderSpec;
using models::MlpConfig;
using models::NormKind;
using models::Projection;
using models::ResNetConfig;

std::int64_t count_of(const io::TensorShape& tensor) {
  std::int64_t count = 1;
  for (const std::int64_t size : tensor.shape) count *= size;
  return count;
}

std::string module_of(const std::string& tensor) {
  const std::size_t dot = tensor.rfind('.');
  return dot == std::string::npos ? std::string() : tensor.substr(0, dot);
}

// "model.layers.0.mlp.up_proj.weight": the first number in the name is that of the block.
bool in_first_block(const std::string& name) {
  for (std::size_t at = name.find('.'); at != std::string::npos; at = name.find('.', at + 1)) {
    const std::size_t end = name.find('.', at + 1);
    const std::string_view part = std::string_view(name).substr(at + 1, end - at - 1);
    if (end != std::string::npos && part.find_first_not_of("0123456789") == std::string::npos)
      return part == "0";
  }
  return false;
}

bool is_buffer(const std::string& name) {
  return name.ends_with(".running_mean") || name.ends_with(".running_var") ||
         name.ends_with(".num_batches_tracked");
}

// Which tensors are trained, and the adapters beside them.
class Trained {
 public:
  explicit Trained(const Model& model, const std::vector<io::TensorShape>& tensors) {
    const CausalLmConfig* lm = model.causal_lm();
    std::vector<std::string> linear;
    if (lm != nullptr) linear = models::linear_layers(lm->spec());
    for (const io::TensorShape& tensor : tensors)  // of other models every matrix
      if (lm == nullptr && tensor.shape.size() == 2) linear.push_back(module_of(tensor.name));
    linear_.insert(linear.begin(), linear.end());
    if (lm != nullptr)
      for (std::string& name : models::routers_and_experts(lm->spec())) {
        linear_.insert(name);
        experts_.insert(std::move(name));
      }
    if (!model.lora) return;
    lora_ = *model.lora;
    targets_.emplace(lora_);
    const std::vector<std::string> chosen =
        lm != nullptr ? targets_->select(lm->spec()) : targets_->select(linear);
    adapted_.insert(chosen.begin(), chosen.end());
  }

  bool is_linear(const io::TensorShape& tensor) const {
    return tensor.name.ends_with(".weight") && linear_.contains(module_of(tensor.name));
  }
  bool is_of_experts(const io::TensorShape& tensor) const {
    return experts_.contains(module_of(tensor.name));
  }
  bool is_trained(const io::TensorShape& tensor) const {
    if (!targets_) return true;
    const std::string module = module_of(tensor.name);
    if (targets_->is_saved_whole(module)) return true;
    if (!tensor.name.ends_with(".bias")) return false;
    return lora_.bias == models::LoraBias::kAll ||
           (lora_.bias == models::LoraBias::kLoraOnly && adapted_.contains(module));
  }
  // Parameters of the adapter of this weight; 0: it has none.
  std::int64_t adapter(const io::TensorShape& tensor) const {
    if (!tensor.name.ends_with(".weight")) return 0;
    const std::string module = module_of(tensor.name);
    if (!adapted_.contains(module)) return 0;
    return targets_->rank(module) * (tensor.shape.at(0) + tensor.shape.at(1));
  }
  // The rank of the adapter of the first block's layer whose name ends so; 0: it has none. Blocks
  // are equal but for layers_to_transform, which the estimate ignores.
  std::int64_t rank_of(std::string_view layer) const {
    for (const std::string& module : adapted_)
      if (module.ends_with(layer)) return targets_->rank(module);
    return 0;
  }
  bool adapters() const { return targets_.has_value(); }
  double dropout() const { return lora_.lora_dropout; }

 private:
  std::set<std::string> linear_;
  std::set<std::string> experts_;  // and routers, which are among the linear layers
  std::set<std::string> adapted_;
  models::LoraConfig lora_{};
  std::optional<models::LoraTargets> targets_;
};

// Counting goes over the names of all tensors, and a plan asks for the same few models thousands of
// times: those of a thread's last calls are kept.
template <auto count>
auto remembered(const Model& model) {
  struct Known {
    DecoderSpec spec;
    std::optional<models::LoraConfig> lora;
    int slices;
    decltype(count(model)) value;
  };
  constexpr std::size_t kMost = 16;
  thread_local std::deque<Known> all;
  if (model.causal_lm() == nullptr) return count(model);
  const auto found = std::ranges::find_if(all, [&](const Known& one) {
    return one.slices == model.slices && one.lora == model.lora &&
           one.spec == model.causal_lm()->spec();
  });
  if (found != all.end()) return found->value;
  if (all.size() == kMost) all.pop_back();
  all.push_front({model.causal_lm()->spec(), model.lora, model.slices, count(model)});
  return all.front().value;
}

std::shared_ptr<const Trained> make_trained(const Model& model) {
  return std::make_shared<const Trained>(model, model.tensors());
}

std::int64_t head_weight(const Model& model) {
  const CausalLmConfig* lm = model.causal_lm();
  if (lm == nullptr) return 0;
  return model.spec().vocabulary * lm->spec().width;
}

// ---------------------------------------------------------------- convolutions

struct Convolution {
  std::int64_t in;
  std::int64_t out;
  std::int64_t size;    // of the kernel
  std::int64_t pixels;  // of a side of the output
  bool ends_in_relu;    // of its own; the last one of a block has the block's
};

// In the order of forward, shortcuts included.
std::vector<Convolution> convolutions(const ResNetConfig& c, std::int64_t image) {
  std::int64_t side = (image + 1) / 2;
  std::vector<Convolution> all{{3, 64, 7, side, true}};
  side = (side + 1) / 2;  // the pooling after the stem
  std::int64_t in = 64;
  std::int64_t width = 64;
  const auto stages = c.blocks();
  for (std::size_t stage = 0; stage < stages.size(); ++stage, width *= 2) {
    const std::int64_t out = width * c.expansion();
    for (std::int64_t i = 0; i < stages[stage]; ++i, in = out) {
      const std::int64_t before = side;
      if (stage > 0 && i == 0) side = (side + 1) / 2;
      if (c.expansion() == 1) {
        all.push_back({in, width, 3, side, true});
        all.push_back({width, width, 3, side, true});
      } else {
        all.push_back({in, width, 1, before, true});
        all.push_back({width, width, 3, side, true});
        all.push_back({width, out, 1, side, true});
      }
      if (i == 0 && (stage > 0 || in != out)) all.push_back({in, out, 1, side, false});
    }
  }
  return all;
}

// ---------------------------------------------------------------- activations of a block

// Bytes of a token in one block. `h` is the size of an element under autocast (2) or without (4).
struct BlockBytes {
  std::int64_t saved = 0;
  std::int64_t working = 0;  // in backward
  std::int64_t stream = 0;   // the residual stream: what a checkpointed block saves
  std::int64_t segment = 0;  // of the larger part that is checkpointed, while it runs again

  // A checkpointed part saves none of its own bytes.
  void leave_out(bool checkpointed, std::int64_t own) {
    if (!checkpointed) return;
    saved -= own;
    segment = std::max(segment, own);
  }
};

// A rank's part of the activations between layers; the longest part counts.
std::int64_t between_layers(const Model& model, std::int64_t bytes) {
  const std::int64_t parts = model.sequence_parts();
  return (bytes + parts - 1) / parts;
}

// What the input of a projection costs. A trained weight saves it, in the half type a copy; so does
// the first matrix of an adapter, after dropout with its mask. `shared`: something else has saved
// the tensor already, in that type.
std::int64_t input_bytes(const Trained& trained, std::string_view layer, std::int64_t width,
                         std::int64_t h, bool shared) {
  const std::int64_t rank = trained.rank_of(layer);
  if (rank == 0) return trained.adapters() || shared ? 0 : h * width;
  const std::int64_t middle = h * rank;
  if (trained.dropout() > 0) return (h + 1) * width + middle;
  return middle + (shared ? 0 : h * width);
}

// The memory that an adapter saves beside its layer's input, in one operation with it.
std::int64_t adapter_bytes(const Trained& trained, std::string_view layer, std::int64_t width,
                           std::int64_t h) {
  const std::int64_t rank = trained.rank_of(layer);
  return rank == 0 ? 0 : h * rank + (trained.dropout() > 0 ? width : 0);
}

// The sizes that the parts of a block save and need, in elements per token.
struct BlockSizes {
  explicit BlockSizes(const BlockSpec& b, bool rotary)
      : width(b.attention_norm.width), queries(b.attention.queries()) {
    const std::int64_t keys = b.attention.keys();
    const bool packed = b.attention.in.size() == 1;
    // Rotated queries and keys are tensors of their own; one projection is saved whole for values.
    if (rotary || !packed) attended += queries + keys;
    attended += packed ? queries + 2 * keys : keys;
    if (b.attention.query_norm) normed_heads = queries + keys;
    packed_gate = b.mlp.gated() && b.mlp.in.size() == 1;
    statistics = b.attention_norm.kind == NormKind::kLayer ? 8 : 4;  // bytes of a row
  }

  std::int64_t width, queries;
  std::int64_t attended = 0;      // what attention takes
  std::int64_t normed_heads = 0;  // the inputs of norms of heads
  bool packed_gate = false;
  std::int64_t statistics = 4;
};

// Calls `add` for each projection: its name in the block, the width of its input, and whether that
// was saved before (`divided`: between layers, as a part of the sequence).
template <typename Add>
void each_projection(const BlockSpec& b, std::int64_t h, bool divided, const Add& add) {
  // Without autocast projections of one tensor save that tensor; with it, a copy each.
  const bool one = h == 4;
  const auto all = [&](const std::string& module, const std::vector<Projection>& in,
                       const Projection& out, bool shared_out) {
    for (std::size_t i = 0; i < in.size(); ++i)
      add(module + "." + in[i].name, in[i].in, divided || (i > 0 && one));
    add(module + "." + out.name, out.in, shared_out);
  };
  all(b.attention.name, b.attention.in, b.attention.out, /*shared_out=*/true);
  if (b.mlp.experts)
    add(b.mlp.name + "." + b.mlp.experts->router.name, b.mlp.experts->router.in, false);
  else
    all(b.mlp.name, b.mlp.in, b.mlp.out, /*shared_out=*/false);
}

// What a perceptron saves: before and after the activation; or gate, up and their product, and the
// activated gate where that is an operation of its own, which fused SwiGLU has not. `inputs`: the
// inputs of its products, which are counted with them otherwise. Experts save theirs always, for
// each one that a token goes to, and their results; and the router its probabilities, and indices
// of 8 bytes.
std::int64_t mlp_bytes(const models::MlpSpec& mlp, std::int64_t h, bool inputs) {
  const std::int64_t inner = mlp.out.in;
  if (!mlp.experts) {
    const bool one_operation = inputs && mlp.activation == models::Activation::kSilu;
    const std::int64_t all = !mlp.gated() ? 2 : one_operation ? 3 : 4;
    return (inputs ? all : all - 1) * h * inner;
  }
  const std::int64_t chosen = mlp.experts->per_token;
  const std::int64_t routing = 4 * mlp.experts->count() + 4 + chosen * (8 + 8 + 8 + 4 + 4);
  return routing + chosen * h * (2 * mlp.out.out() + (mlp.gated() ? 4 : 2) * inner);
}

// Temporaries of its backward, `values` for each unit of its inner width. Those of experts begin
// with the gradient of their weighted results.
std::int64_t mlp_working(const models::MlpSpec& mlp, std::int64_t h, std::int64_t values) {
  const std::int64_t own = values * h * mlp.out.in;
  if (!mlp.experts) return own;
  return mlp.experts->per_token * ((4 + h) * mlp.out.out() + own);
}

// Scores that a soft cap changes exist as a whole where dropout acts on them: their tangents and
// shares. So do keys and values of heads that share them, once for each.
std::int64_t score_bytes(const BlockSpec& b, std::int64_t length, std::int64_t h) {
  return b.attention.soft_cap > 0 && b.attention.dropout > 0
             ? b.attention.heads * length * 8 + 2 * h * (b.attention.queries() - b.attention.keys())
             : 0;
}

// Norms of what is added: input and, where the weight is trained, what it multiplies.
std::int64_t norms_after(const BlockSpec& b) {
  return (b.attention_after ? 1 : 0) + (b.mlp_after ? 1 : 0);
}

// Every layer's input is saved, trained or not, and a norm's input and output are of the half type.
BlockBytes fused_block_bytes(const Model& model, const DecoderSpec& spec, const Trained& trained,
                             std::int64_t h, const MemoryOptions& options) {
  const BlockSpec& b = spec.block;
  const models::BlockParts& again = options.again;
  const BlockSizes s(b, spec.rotary.has_value());
  BlockBytes bytes{.stream = between_layers(model, h * s.width)};
  const std::int64_t masks = b.dropout > 0 ? 2 * s.width : 0;
  bytes.saved =
      between_layers(model, (2 + norms_after(b)) * (2 * h * s.width + s.statistics) + masks);
  std::int64_t attention = h * (s.attended + s.normed_heads) + h * s.queries +
                           4 * b.attention.heads + score_bytes(b, model.length, h);
  std::int64_t mlp = mlp_bytes(b.mlp, h, /*inputs=*/true);
  each_projection(b, h, false, [&](const std::string& layer, std::int64_t in, bool) {
    (layer.starts_with(b.mlp.name + ".") ? mlp : attention) += adapter_bytes(trained, layer, in, h);
  });
  // Inputs of products take a byte instead of two; attention keeps its result beside that. Norms of
  // parts of a sequence keep these, beside the bytes of the whole.
  const std::int64_t inputs = model.sequence_parts() > 1 ? -2 * s.width : 2 * s.width;
  const bool eight = options.fp8 && !trained.adapters() && !b.mlp.experts;
  if (eight) {
    bytes.saved -= inputs;
    attention += s.queries;
    mlp -= b.mlp.out.in;
  }
  if (again.swiglu) mlp -= (eight ? 1 : h) * b.mlp.out.in;
  bytes.saved += attention + mlp;
  bytes.leave_out(again.attention, attention);
  bytes.leave_out(again.mlp, mlp);
  for (int i = 0; i < (b.mlp.experts ? 1 : 2) && model.sequence_parts() == 1; ++i) {
    const bool segment = i == 0 ? again.attention : again.mlp;
    const std::int64_t normed = eight && !segment ? s.width : h * s.width;
    if (eight && segment) bytes.saved += s.width;  // what it reads, in 16 bits
    if (again.norm) bytes.saved -= normed;
  }
  bytes.working = 3 * h * s.width + mlp_working(b.mlp, h, b.mlp.gated() ? 3 : 1);
  return bytes;
}

BlockBytes block_bytes(const Model& model, const DecoderSpec& spec, const Trained& trained,
                       std::int64_t h, const models::BlockParts& again) {
  const BlockSpec& b = spec.block;
  const BlockSizes s(b, spec.rotary.has_value());
  const bool divided = model.sequence_parts() > 1;
  BlockBytes bytes{.stream = between_layers(model, 4 * s.width)};
  // The inputs of the norms; with a trained weight of an RMSNorm what it multiplies as well.
  const std::int64_t norms = 2 + norms_after(b);
  const bool multiplied = b.attention_norm.kind != NormKind::kLayer && !trained.adapters();
  std::int64_t between = norms * ((multiplied ? 8 : 4) * s.width + s.statistics);
  if (b.dropout > 0) between += 2 * s.width;  // masks
  if (divided) between += 2 * h * s.width;    // what attention and perceptron gather again
  bytes.saved = between_layers(model, between);
  // The result, and logarithms of the softmax's sums.
  std::int64_t attention = (4 + (multiplied ? h : 0)) * s.normed_heads + h * s.attended +
                           h * s.queries + 4 * b.attention.heads + score_bytes(b, model.length, h);
  std::int64_t mlp = mlp_bytes(b.mlp, h, /*inputs=*/false);
  each_projection(b, h, divided, [&](const std::string& layer, std::int64_t in, bool shared) {
    (layer.starts_with(b.mlp.name + ".") ? mlp : attention) +=
        input_bytes(trained, layer, in, h, shared);
  });
  bytes.saved += attention + mlp;
  bytes.leave_out(again.attention, attention);
  bytes.leave_out(again.mlp, mlp);
  bytes.saved += (again.attention + again.mlp) * 4 * s.width;  // what they read
  // The two halves of a packed projection's gradient are made apart, then joined.
  bytes.working = 4 * s.width + h * s.width + mlp_working(b.mlp, h, s.packed_gate ? 3 : 2);
  return bytes;
}

std::uint64_t bytes_of(std::int64_t value) {
  return static_cast<std::uint64_t>(value);
}

// Logits as a whole: in forward the product, its copy in float and the logarithms of softmax; in
// backward those, their gradient and the product's. In chunks both are small, and the gradients of
// the hidden states and of the weight are made in forward.
void add_head(const Model& model, const Parameters& parameters, const MemoryOptions& options,
              Activations& all) {
  const DecoderSpec& spec = model.causal_lm()->spec();
  const std::int64_t tokens = options.batch * model.length;
  const std::int64_t logits = tokens * (parameters.head / spec.width);
  const std::int64_t width = spec.width;
  const std::int64_t h = options.half ? 2 : 4;
  const bool trained = !model.lora.has_value();
  const std::int64_t normed = trained && spec.last.kind != NormKind::kLayer ? 4 : 0;
  const std::int64_t input = trained || model.sequence_parts() > 1 ? h : 0;
  // The last norm's input and output; of plain modules what its weight multiplies, too, and the
  // head's input.
  const std::int64_t saved = options.fused ? 2 * h : 4 + normed + input;
  all.head_saved = bytes_of(tokens * between_layers(model, saved * width));
  all.saved += all.head_saved;
  // A soft cap of the logits is not part of the loss in chunks.
  if (options.fused && spec.logit_soft_cap == 0 && model.slices == 1) {
    const std::int64_t gradients = tokens * h * width + (trained ? 4 * parameters.head : 0);
    all.head_forward = std::min(bytes_of(logits * h), kChunkBytes) + bytes_of(gradients);
    all.head_backward = bytes_of(gradients);
    return;
  }
  const std::int64_t gradients = trained ? (h + 4) * parameters.head : 0;
  if (model.slices > 1) {
    // A slice has the product, shifted by the largest, in float, and its shares, which are saved.
    all.head_forward = bytes_of(logits * (h + (options.half ? 4 : 0) + 8));
    all.head_backward = bytes_of(
        logits * 4 + std::max(logits * (4 + (options.half ? 2 : 0)), logits * h + gradients));
    return;
  }
  all.head_forward = bytes_of(options.half ? logits * (2 + 4 + 4) : logits * 8);
  all.head_backward = bytes_of(std::max(12 * logits, logits * h + gradients));
}

Activations language_activations(const Model& model, const MemoryOptions& options) {
  const auto known = remembered<&make_trained>(model);
  const Trained& trained = *known;
  const CausalLmConfig& lm = *model.causal_lm();
  const std::int64_t h = options.half ? 2 : 4;
  const DecoderSpec spec = model.spec();
  const BlockBytes block = options.fused ? fused_block_bytes(model, spec, trained, h, options)
                                         : block_bytes(model, spec, trained, h, options.again);
  const std::int64_t tokens = options.batch * model.length;
  const std::int64_t embedding =  // a mask
      spec.embedding_dropout > 0 ? between_layers(model, spec.width) : 0;
  Activations all;
  all.one_block = bytes_of(tokens * block.saved);
  all.segment = bytes_of(tokens * block.segment);
  all.working = bytes_of(tokens * block.working);
  all.saved = bytes_of(
      tokens * (lm.layers() * (options.checkpointing ? block.stream : block.saved) + embedding));
  // No gradient flows before the first adapter, so the norm there saves no input.
  if (model.lora && !options.checkpointing && lm.layers() > 0)
    all.saved -= bytes_of(tokens * block.stream);
  add_head(model, parameters_of(model), options, all);
  return all;
}

Activations image_activations(const Model& model, const ResNetConfig& c,
                              const MemoryOptions& options) {
  const std::int64_t h = options.half ? 2 : 4;
  const auto all = convolutions(c, model.image_size);
  std::int64_t bytes = h * 3 * model.image_size * model.image_size;
  std::int64_t largest = 0;
  for (const Convolution& one : all) {
    const std::int64_t output = h * one.out * one.pixels * one.pixels;
    bytes += output;                        // the input of its batch norm
    if (one.ends_in_relu) bytes += output;  // which is the next one's input
    largest = std::max(largest, output);
  }
  const std::int64_t pooled = (all.front().pixels + 1) / 2;
  bytes += (h + 8) * 64 * pooled * pooled;  // the pooling's output and places
  Activations activations;
  activations.saved = bytes_of(options.batch * bytes);
  activations.working = bytes_of(options.batch * 3 * largest);
  return activations;
}

Activations mlp_activations(const MlpConfig& c, const MemoryOptions& options) {
  const std::int64_t h = options.half ? 2 : 4;
  const std::int64_t layer = c.hidden * (h + (c.batch_norm ? h : 0) + (c.dropout > 0 ? h + 1 : 0));
  Activations all;
  all.saved = bytes_of(options.batch * (h * c.inputs + c.layers * layer + 4 * c.outputs));
  all.working = bytes_of(options.batch * 2 * h * std::max(c.hidden, c.outputs));
  return all;
}

}  // namespace

// The first rank has the fewest of an uneven width, and the last one the most.
models::DecoderSpec Model::spec() const {
  DecoderSpec spec = causal_lm()->spec();
  const auto cut = [this](std::int64_t& width) { width = (width + slices - 1) / slices; };
  const auto cut_pair = [&](std::vector<Projection>& in, Projection& out) {
    for (Projection& one : in) std::ranges::for_each(one.parts, cut);
    cut(out.in);
  };
  cut(spec.vocabulary);
  std::ranges::for_each(spec.head.parts, cut);
  cut(spec.block.attention.heads);
  cut(spec.block.attention.key_value_heads);
  cut_pair(spec.block.attention.in, spec.block.attention.out);
  cut_pair(spec.block.mlp.in, spec.block.mlp.out);
  return spec;
}

std::vector<io::TensorShape> Model::tensors() const {
  if (causal_lm() != nullptr) return models::tensors_of(spec());
  return std::visit([](const auto& sizes) { return models::tensors_of(sizes); }, config);
}

std::int64_t Model::blocks() const {
  return causal_lm() != nullptr ? causal_lm()->layers() : 0;
}

namespace {

Parameters count_parameters(const Model& model) {
  const std::vector<io::TensorShape> tensors = model.tensors();
  const Trained trained(model, tensors);
  Parameters all;
  for (const io::TensorShape& tensor : tensors) {
    const std::int64_t count = count_of(tensor);
    if (is_buffer(tensor.name)) {
      all.buffers += count;
      continue;
    }
    const bool own = trained.is_trained(tensor);
    (own ? all.trainable : all.frozen) += count;
    if (trained.is_linear(tensor)) (own ? all.trainable_matrices : all.frozen_matrices) += count;
    const std::int64_t adapter = trained.adapter(tensor);
    all.trainable += adapter;
    all.trainable_matrices += adapter;
    all.tensors += (own ? 1 : 0) + (adapter > 0 ? 2 : 0);
    if (model.blocks() == 0 || !in_first_block(tensor.name)) continue;
    all.block += count + adapter;
    all.block_trainable += (own ? count : 0) + adapter;
    if (own) all.largest = std::max(all.largest, count);
    if (!trained.is_linear(tensor) || trained.is_of_experts(tensor)) continue;
    all.block_matrices += count;
    all.largest_matrix = std::max(all.largest_matrix, count);
    all.block_widths += tensor.shape.at(0) + tensor.shape.at(1);
  }
  all.head = head_weight(model);
  // A tied head multiplies with the embedding, which is copied for it too.
  const CausalLmConfig* lm = model.causal_lm();
  if (lm != nullptr && lm->tied() && !model.lora) all.trainable_matrices += all.head;
  if (lm != nullptr) all.unused = models::unused_by_a_token(model.spec());
  return all;
}

}  // namespace

Parameters parameters_of(const Model& model) {
  Parameters all = remembered<&count_parameters>(model);
  if (model.nf4) all.in_4_bits = model.blocks() * all.block_matrices;
  return all;
}

std::vector<Stage> stages_of(const Model& model, int stages) {
  const std::int64_t extra = model.blocks() % stages;
  const std::int64_t first_with_more = (stages - extra) / 2;
  std::vector<Stage> all;
  for (int i = 0; i < stages; ++i) {
    const bool more = i >= first_with_more && i < first_with_more + extra;
    all.push_back({.blocks = model.blocks() / stages + (more ? 1 : 0),
                   .first = i == 0,
                   .last = i + 1 == stages,
                   .after = stages - 1 - i});
  }
  return all;
}

Parameters parameters_of(const Model& model, const Parameters& whole, const Stage& stage) {
  const bool tied = model.causal_lm()->tied();
  const std::int64_t layers = model.blocks();
  const std::int64_t head = stage.last ? whole.head : 0;
  const auto of_blocks = [&](std::int64_t all) { return all / layers * stage.blocks; };
  // Embeddings are on the first stage and the head on the last: a tied one is on both.
  const auto outside = [&](std::int64_t all, bool has_head) {
    const std::int64_t embeddings = all - (has_head && !tied ? whole.head : 0);
    return (stage.first ? embeddings : 0) + (has_head ? head : 0);
  };
  const bool frozen_head = model.lora.has_value();  // an adapted model trains no head
  const std::int64_t block_frozen = whole.block - whole.block_trainable;
  Parameters part = whole;
  part.trainable = stage.blocks * whole.block_trainable +
                   outside(whole.trainable - layers * whole.block_trainable, !frozen_head);
  part.frozen =
      stage.blocks * block_frozen + outside(whole.frozen - layers * block_frozen, frozen_head);
  part.trainable_matrices = frozen_head ? of_blocks(whole.trainable_matrices)
                                        : of_blocks(whole.trainable_matrices - whole.head) + head;
  part.frozen_matrices = frozen_head && !tied ? of_blocks(whole.frozen_matrices - whole.head) + head
                                              : of_blocks(whole.frozen_matrices);
  part.head = head;
  return part;
}

double largest_share(const Model& model, int stages) {
  const double whole = forward_flops_per_token(model);
  const double head = 2.0 * static_cast<double>(parameters_of(model).head);
  const double block = (whole - head) / static_cast<double>(model.blocks());
  double most = 0;
  for (const Stage& stage : stages_of(model, stages))
    most = std::max(most, static_cast<double>(stage.blocks) * block + (stage.last ? head : 0));
  return most / whole;
}

std::vector<io::TensorShape> trained_tensors(const Model& model) {
  const std::vector<io::TensorShape> tensors = model.tensors();
  const Trained trained(model, tensors);
  std::vector<io::TensorShape> all;
  for (const io::TensorShape& tensor : tensors) {
    if (is_buffer(tensor.name)) continue;
    if (trained.is_trained(tensor)) all.push_back(tensor);
    if (const std::int64_t count = trained.adapter(tensor); count > 0) {
      const std::int64_t rank = count / (tensor.shape.at(0) + tensor.shape.at(1));
      const std::string module = module_of(tensor.name);
      all.push_back({module + ".lora_A.weight", tensor.dtype, {rank, tensor.shape.at(1)}});
      all.push_back({module + ".lora_B.weight", tensor.dtype, {tensor.shape.at(0), rank}});
    }
  }
  return all;
}

namespace {

std::vector<std::int64_t> list_gradients(const Model& model) {
  const std::vector<io::TensorShape> tensors = model.tensors();
  const Trained trained(model, tensors);
  std::vector<std::int64_t> bytes;
  for (const io::TensorShape& tensor : tensors) {
    if (is_buffer(tensor.name)) continue;
    const std::int64_t count =
        (trained.is_trained(tensor) ? count_of(tensor) : 0) + trained.adapter(tensor);
    if (count > 0) bytes.push_back(4 * count);
  }
  std::ranges::reverse(bytes);
  return bytes;
}

SharedGradients count_shared(const Model& model) {
  Model whole = model;
  whole.slices = 1;
  const std::vector<io::TensorShape> tensors = trained_tensors(whole), own = trained_tensors(model);
  SharedGradients shared;
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (own[i].shape != tensors[i].shape) continue;
    const std::int64_t bytes = 4 * count_of(own[i]);
    shared.all += bytes;
    if (own[i].name.find(".lora_") != std::string::npos) shared.adapters += bytes;
  }
  return shared;
}

}  // namespace

SharedGradients shared_gradients(const Model& model) {
  return remembered<&count_shared>(model);
}

std::vector<std::int64_t> gradients_of(const Model& model) {
  return remembered<&list_gradients>(model);
}

double forward_flops_per_token(const Model& model) {
  if (const auto* resnet = std::get_if<ResNetConfig>(&model.config)) {
    double flops = 0;
    for (const Convolution& one : convolutions(*resnet, model.image_size))
      flops += 2.0 * static_cast<double>(one.in * one.out * one.size * one.size) *
               static_cast<double>(one.pixels * one.pixels);
    return flops + 2.0 * 512.0 * static_cast<double>(resnet->expansion() * resnet->num_classes);
  }
  const Parameters all = parameters_of(model);
  const CausalLmConfig* lm = model.causal_lm();
  // With adapters a tied head's embedding is frozen and in neither count.
  const std::int64_t tied = lm != nullptr && lm->tied() && model.lora ? all.head : 0;
  const double products =
      2.0 * static_cast<double>(all.trainable_matrices + all.frozen_matrices + tied - all.unused);
  if (lm == nullptr) return products;
  std::int64_t seen = 0;  // tokens, over all blocks
  for (const std::int64_t window : lm->spec().windows)
    seen += window > 0 ? std::min(window, model.length) : model.length;
  const std::int64_t width = model.spec().block.attention.queries();
  return products + 4.0 * static_cast<double>(width) * static_cast<double>(seen);
}

double share_again(const Model& model, bool checkpointing, const models::BlockParts& again) {
  if (checkpointing) return 1;
  if (model.causal_lm() == nullptr || !(again.mlp || again.attention)) return 0;
  const DecoderSpec spec = model.spec();
  const auto products = [](const std::vector<Projection>& in, const Projection& out) {
    std::int64_t count = out.in * out.out();
    for (const Projection& one : in) count += one.in * one.out();
    return 2 * count;
  };
  const models::AttentionSpec& attention = spec.block.attention;
  const std::int64_t operations =
      (again.mlp ? products(spec.block.mlp.in, spec.block.mlp.out) : 0) +
      (again.attention
           ? products(attention.in, attention.out) + 4 * attention.queries() * model.length
           : 0);
  return std::min(1.0,
                  static_cast<double>(spec.layers() * operations) / forward_flops_per_token(model));
}

double flops_per_token(const Model& model) {
  // Backward: the gradient of the input, and for what is trained that of the weight. Both operands
  // of attention's products have a gradient.
  const double forward = forward_flops_per_token(model);
  if (!model.lora) return 3 * forward;
  Model products = model;
  products.length = 0;
  const double attention = forward - forward_flops_per_token(products);
  return 2 * forward + attention +
         2.0 * static_cast<double>(parameters_of(model).trainable_matrices);
}

Activations activations_of(const Model& model, const MemoryOptions& options) {
  if (model.causal_lm() != nullptr) return language_activations(model, options);
  if (const auto* resnet = std::get_if<ResNetConfig>(&model.config))
    return image_activations(model, *resnet, options);
  return mlp_activations(std::get<MlpConfig>(model.config), options);
}

}  // namespace lockstep::plan
