#include "lockstep/models/decoder.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/nn/divided.h"
#include "lockstep/nn/functional.h"
#include "lockstep/nn/tensor_group.h"

namespace lockstep::models::detail {
namespace {

// ---------------------------------------------------------------- small parts

// Copies to memory of its own, even if two stages share a device; gradients are copied back.
at::Tensor copied(const at::Tensor& x, c10::Device device) {
  return x.to(x.options().device(device), /*non_blocking=*/false, /*copy=*/true);
}

// [batch, time, heads * width] -> [batch, time, heads, width]
at::Tensor in_heads(const at::Tensor& x, std::int64_t heads) {
  return x.view({x.size(0), x.size(1), heads, x.size(2) / heads});
}

// The input of the cast to fp8, converted to autocasting's type if that is on.
nn::Fp8Input fp8_input(const nn::Fp8Input& x) {
  const at::ScalarType type = compute_type(x.values.device(), x.values.scalar_type());
  return x.values.scalar_type() == type ? x : x.values.to(type);
}

// Ranks whose slices have unequal widths all compute in the other type, because they exchange the
// results. One slice does not tell: of 6 columns 4 ranks have 1, 2, 1 and 2, and all of these
// widths divide 6. Only a width above the number of equal slices cannot come from an unequal
// division, so smaller widths count as unequal.
bool slices_equally(const Linear& layer) {
  const at::Tensor& slice = layer->weight;
  const std::int64_t in = layer->options.in_features(), out = layer->options.out_features();
  if (slice.numel() == in * out) return true;
  const std::int64_t rows = layer->options.layout() == WeightLayout::kOutIn ? out : in;
  const std::int64_t width = slice.size(0) == rows ? slice.size(1) : slice.size(0);
  return in * out % slice.numel() == 0 && width > in * out / slice.numel();
}

bool computes_in_fp8(const Linear& layer, const Pass& pass) {
  if (!pass.fp8 || layer->options.nf4()) return false;
  if (!slices_equally(layer)) {
    nn::warn_not_in_fp8(layer->options.in_features(), layer->options.out_features(),
                        "because tensor parallel ranks have slices of unequal width of it");
    return false;
  }
  if (pass.tensor && layer->has_lora() && !layer->merged())
    throw UsageError("tensor_parallel",
                     "adapters on a base in fp8 are not divided. Train in bf16, or without tensor "
                     "parallelism.");
  return true;
}

at::Tensor project(Linear layer, const nn::Fp8Input& x, const Pass& pass, bool with_bias = true) {
  if (computes_in_fp8(layer, pass))
    return layer->forward_fp8(fp8_input(x), *pass.fp8, with_bias || !pass.fused);
  return pass.fused ? layer->forward_fused(x.values, with_bias, pass.tensor)
                    : layer->forward(x.values, true, pass.tensor);
}

// A weight that every rank has, and may use on its part of the sequence.
at::Tensor shared(const at::Tensor& weight, const Pass& pass) {
  return pass.sequence > 0 ? nn::enter_weight(weight, pass.tensor) : weight;
}

// Sums the results of the ranks' slices, and adds the bias to the sum.
at::Tensor leave(const at::Tensor& y, const at::Tensor& bias, const Pass& pass) {
  const at::Tensor sum =
      pass.sequence > 0 ? nn::leave_sequence(y, pass.tensor) : nn::leave(y, pass.tensor);
  return bias.defined() ? sum + shared(bias, pass).to(sum.scalar_type()) : sum;
}

// In training, of the stream.
at::Tensor dropped(const at::Tensor& x, double p, std::int64_t sequence,
                   const nn::TensorGroupPtr& tensor) {
  return sequence > 0 ? nn::sliced_dropout(x, p, 1, sequence, tensor)
                      : torch::dropout(x, p, /*train=*/true);
}

// The last layer of a branch, whose inputs a TensorGroup divides.
at::Tensor project_out(Linear layer, const nn::Fp8Input& x, const Pass& pass, bool with_bias) {
  if (!pass.tensor) return project(layer, x, pass, with_bias);
  const at::Tensor y = computes_in_fp8(layer, pass)
                           ? layer->forward_fp8(fp8_input(x), *pass.fp8, false)
                       : pass.fused ? layer->forward_fused(x.values, false, pass.tensor)
                                    : layer->forward(x.values, false, pass.tensor);
  return leave(y, with_bias ? layer->bias : at::Tensor(), pass);
}

// Layers of one input whose weights can be rows of one matrix.
bool can_stack(const std::vector<Linear>& layers) {
  return layers.size() > 1 && std::ranges::all_of(layers, [&](const Linear& layer) {
           return !layer->has_lora() && !layer->stored_fp8() && !layer->options.nf4() &&
                  layer->bias.defined() == layers.front()->bias.defined() &&
                  layer->options.layout() == WeightLayout::kOutIn;
         });
}

// Whether fp8 computes several projections as one product, for which their input is cast once.
bool joins_in_fp8(const std::vector<Linear>& layers) {
  if (!can_stack(layers) || !std::ranges::all_of(layers, slices_equally)) return false;
  std::vector<at::Tensor> weights;
  for (const Linear& layer : layers) weights.push_back(layer->weight);
  return nn::fp8_covers(weights);
}

// Whether projections are computed as one product. In half precision that pays on a GPU where some
// are narrow, as those of keys and values that heads share, and where the weights are converted,
// and so copied, in any case. Products that are wide by themselves are faster apart.
bool are_joined(const std::vector<Linear>& layers, const Pass& pass) {
  constexpr std::int64_t kNarrow = 1024;
  if (pass.fp8) return joins_in_fp8(layers);
  const auto converted = [&](const Linear& layer) {
    return layer->weight.is_cuda() && layer->weight.scalar_type() == at::kFloat;
  };
  const auto narrow = [](const Linear& layer) { return layer->weight.size(0) <= kNarrow; };
  return pass.fused && pass.type != at::kFloat && can_stack(layers) &&
         std::ranges::all_of(layers, converted) && std::ranges::any_of(layers, narrow);
}

// As nn::Block::products(). Slices of unequal widths are not computed in fp8 and are not listed.
void add_products(std::vector<std::vector<at::Tensor>>& lists, const std::vector<Linear>& in,
                  const Linear& out) {
  if (joins_in_fp8(in)) {
    lists.emplace_back();
    for (const Linear& layer : in) lists.back().push_back(layer->weight);
  } else {
    for (const Linear& layer : in)
      if (slices_equally(layer)) lists.push_back({layer->weight});
  }
  if (slices_equally(out)) lists.push_back({out->weight});
}

// Returns the projections' outputs side by side; `gated`: swiglu() of them.
nn::Fp8Input project_joined(const std::vector<Linear>& layers, const nn::Fp8Input& x,
                            const Pass& pass, bool gated = false) {
  std::vector<at::Tensor> weights, biases;
  for (const Linear& layer : layers) {
    weights.push_back(layer->weight);
    if (layer->bias.defined()) biases.push_back(layer->bias);
  }
  const at::Tensor bias = biases.empty() ? at::Tensor() : torch::cat(biases);
  if (!pass.fp8 && gated) return nn::swiglu(nn::linear(x.values, weights, bias));
  if (!pass.fp8) return nn::linear(x.values, weights, bias);
  if (gated) return nn::fp8_swiglu(fp8_input(x), weights, bias, *pass.fp8);
  return nn::fp8_linear(fp8_input(x), weights, bias, *pass.fp8);
}

// The parts of several projections of one input, in order.
std::vector<at::Tensor> project_all(const std::vector<Linear>& layers,
                                    const std::vector<Projection>& specs, const nn::Fp8Input& x,
                                    const Pass& pass) {
  std::vector<at::Tensor> all;
  const auto add_widths = [&](std::vector<std::int64_t>& widths, const Projection& spec) {
    for (const std::int64_t part : spec.parts) widths.push_back(nn::local_size(part, pass.tensor));
  };
  if (are_joined(layers, pass)) {
    std::vector<std::int64_t> widths;
    for (const Projection& spec : specs) add_widths(widths, spec);
    return project_joined(layers, x, pass).values.split_with_sizes(widths, -1);
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const at::Tensor y = project(layers[i], x, pass);
    std::vector<std::int64_t> widths;
    add_widths(widths, specs[i]);
    if (widths.size() == 1)
      all.push_back(y);
    else
      for (at::Tensor& part : y.split_with_sizes(widths, -1)) all.push_back(std::move(part));
  }
  return all;
}

// ---------------------------------------------------------------- attention

// A pair is an element of the first half of the rotated part and its counterpart in the second.
at::Tensor rotated(const at::Tensor& x, const Pass& pass) {
  const std::int64_t width = pass.cos.size(1), rest = x.size(3) - width;
  const at::Tensor turned = rest > 0 ? x.narrow(3, 0, width) : x;
  const at::Tensor first = turned.narrow(3, 0, width / 2);
  const at::Tensor second = turned.narrow(3, width / 2, width / 2);
  const at::Tensor y = turned * pass.cos + torch::cat({-second, first}, 3) * pass.sin;
  return rest > 0 ? torch::cat({y, x.narrow(3, width, rest)}, 3) : y;
}

// `masked`: build a mask even where `causal` would do.
Sight sight_of(const at::Tensor& ids, std::int64_t past, std::int64_t window, bool masked) {
  const std::int64_t total = past + ids.size(1);
  Sight sight{.causal = past == 0};
  const bool cut = window > 0 && total > window;
  if (!cut && !masked && (past == 0 || ids.size(1) == 1)) return sight;
  sight.causal = false;
  const at::Tensor seen = torch::arange(total, ids.options());
  const at::Tensor own = torch::arange(past, total, ids.options()).unsqueeze(1);
  sight.mask = seen <= own;
  if (cut) sight.mask = sight.mask.logical_and(seen > own - window);
  return sight;
}

// Scores with a soft cap, and dropout of the attention weights: all scores exist at once.
at::Tensor capped_and_dropped(const at::Tensor& queries, at::Tensor keys, at::Tensor values,
                              const Sight& sight, double scale, double cap, double dropout) {
  const std::int64_t shared = queries.size(1) / keys.size(1);
  if (shared > 1) {
    keys = keys.repeat_interleave(shared, 1);
    values = values.repeat_interleave(shared, 1);
  }
  at::Tensor scores = torch::matmul(queries, keys.transpose(2, 3)) * scale;
  scores = torch::tanh(scores / cap) * cap;
  if (sight.mask.defined()) scores = scores.masked_fill(sight.mask.logical_not(), -INFINITY);
  const at::Tensor shares = torch::softmax(scores, -1, at::kFloat).to(queries.scalar_type());
  return torch::matmul(torch::dropout(shares, dropout, /*train=*/true), values);
}

class RmsNorm : public torch::nn::Module {
 public:
  RmsNorm(std::int64_t width, bool from_zero)
      : weight(register_parameter("weight",
                                  from_zero ? torch::zeros({width}) : torch::ones({width}))) {}

  at::Tensor weight;
};

torch::nn::Embedding make_embedding(std::int64_t rows, std::int64_t width,
                                    const ParameterOptions& parameters) {
  torch::nn::EmbeddingOptions options(rows, width);
  if (!parameters.draw)
    options._weight(torch::zeros(
        {rows, width}, at::TensorOptions().dtype(parameters.dtype).device(parameters.device)));
  return torch::nn::Embedding(options);
}

// The types of the fused path.
struct FusedTypes {
  at::ScalarType compute;   // that of autocasting on the device, otherwise `weight`'s
  at::ScalarType residual;  // of the stream between blocks
};

// The stream is float where that is asked for, and always with float16: its values can overflow
// there, which no loss scale prevents.
FusedTypes fused_types(c10::Device device, const at::Tensor& weight, bool residual_in_fp32) {
  const at::ScalarType compute = compute_type(device, weight.scalar_type());
  const bool wide = compute == at::kHalf || (residual_in_fp32 && compute == at::kBFloat16);
  return {compute, wide ? at::kFloat : compute};
}

}  // namespace

// What a block's two branches share: projections of their input, and a last layer.
template <typename Spec>
class DecoderBranch : public torch::nn::Module {
 public:
  DecoderBranch(const Spec& spec, const ParameterOptions& parameters) : spec_(spec) {
    for (const Projection& one : spec.in)
      in_.push_back(register_module(one.name, make_linear(one, parameters)));
    out_ = register_module(spec.out.name, make_linear(spec.out, parameters));
  }

  const at::Tensor& last_bias() const { return out_->bias; }
  void add_products_to(std::vector<std::vector<at::Tensor>>& lists) const {
    add_products(lists, in_, out_);
  }

 protected:
  Spec spec_;
  std::vector<Linear> in_;
  Linear out_{nullptr};
};

class DecoderAttention : public DecoderBranch<AttentionSpec> {
 public:
  DecoderAttention(const AttentionSpec& spec, std::int64_t window, std::size_t layer,
                   const ParameterOptions& parameters)
      : DecoderBranch(spec, parameters), window_(window), layer_(layer) {
    if (spec.query_norm) query_norm_ = Norm(*this, *spec.query_norm, /*of_heads=*/true);
    if (spec.key_norm) key_norm_ = Norm(*this, *spec.key_norm, /*of_heads=*/true);
  }

  at::Tensor forward(const nn::Fp8Input& x, const Pass& pass, bool with_bias) {
    const nn::EnteredSequence in(x.values, pass.sequence, pass.tensor);
    const std::vector<at::Tensor> parts =
        in.release(project_all(in_, spec_.in, {in.whole(), x.amax, x.again}, pass));
    const std::int64_t shared = nn::local_size(spec_.key_value_heads, pass.tensor);
    at::Tensor q = in_heads(parts[0], nn::local_size(spec_.heads, pass.tensor));
    at::Tensor k = in_heads(parts[1], shared);
    const at::Tensor v = in_heads(parts[2], shared).transpose(1, 2);
    if (query_norm_) q = query_norm_.forward(q, pass);
    if (key_norm_) k = key_norm_.forward(k, pass);
    q = q.transpose(1, 2), k = k.transpose(1, 2);
    if (pass.cos.defined() && pass.fused)
      std::tie(q, k) = nn::rope(q, k, pass.cos, pass.sin);
    else if (pass.cos.defined())
      q = rotated(q, pass), k = rotated(k, pass);
    const at::Tensor y = attend(q, k, v, pass);
    return project_out(out_, y.transpose(1, 2).reshape(parts[0].sizes()), pass, with_bias);
  }

 private:
  at::Tensor attend(const at::Tensor& q, at::Tensor k, at::Tensor v, const Pass& pass) {
    const Sight& sight = pass.sights.at(window_);
    const double dropout = is_training() ? spec_.dropout : 0;
    const std::optional<double> scale = spec_.scale > 0 ? std::optional(spec_.scale) : std::nullopt;
    if (pass.cache != nullptr) std::tie(k, v) = pass.cache->append(layer_, k, v);
    if (spec_.soft_cap > 0) {
      const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(spec_.width)));
      if (dropout > 0) return capped_and_dropped(q, k, v, sight, factor, spec_.soft_cap, dropout);
      // Under autocasting in its type, as ATen's attention.
      const at::ScalarType type = compute_type(q.device(), q.scalar_type());
      return nn::capped_attention(q.to(type), k.to(type), v.to(type),
                                  {.cap = spec_.soft_cap, .scale = factor, .mask = sight.mask});
    }
    if (pass.fused && sight.causal)
      return nn::attention(q, k, v, {.causal = true, .dropout = dropout, .scale = scale});
    const std::optional<at::Tensor> mask =
        sight.mask.defined() ? std::optional<at::Tensor>(sight.mask) : std::nullopt;
    return torch::scaled_dot_product_attention(q, k, v, mask, dropout, sight.causal, scale,
                                               /*enable_gqa=*/q.size(1) != k.size(1));
  }

  std::int64_t window_;
  std::size_t layer_;
  Norm query_norm_, key_norm_;
};

class DecoderMlp : public DecoderBranch<MlpSpec> {
 public:
  using DecoderBranch::DecoderBranch;

  at::Tensor forward(const nn::Fp8Input& stream, const Pass& pass, bool with_bias) {
    const nn::EnteredSequence in(stream.values, pass.sequence, pass.tensor);
    const nn::Fp8Input x(in.whole(), stream.amax, stream.again);
    const Linear& first = in_.front();
    const bool one = pass.fused && in_.size() == 1, joined = pass.fused && are_joined(in_, pass);
    const bool swiglu = pass.fused && spec_.gated() && spec_.activation == Activation::kSilu;
    if (swiglu && joined) {
      nn::Fp8Input y = project_joined(in_, x, pass, /*gated=*/true);
      if (!pass.again.swiglu) y.again = nullptr;
      const at::Tensor product = y.values;
      y.values = in.release({product})[0];
      const at::Tensor out = project_out(out_, y, pass, with_bias);
      nn::make_again(product, out, y.again);
      return out;
    }
    if (swiglu) {
      at::Tensor amax;
      at::Tensor* const to = pass.amax_to(amax);
      const std::vector<at::Tensor> parts = in.release(one ? std::vector{project(first, x, pass)}
                                                           : project_all(in_, spec_.in, x, pass));
      const at::Tensor y = one ? nn::swiglu(parts[0], to) : nn::swiglu(parts[0], parts[1], to);
      std::function<at::Tensor()> again;
      if (pass.again.swiglu)
        again = [parts, one] {
          return one ? nn::swiglu(parts[0]) : nn::swiglu(parts[0], parts[1]);
        };
      const at::Tensor out = project_out(out_, {y, amax, again}, pass, with_bias);
      nn::make_again(y, out, std::move(again));
      return out;
    }
    const at::Tensor bias = with_bias ? out_->bias : at::Tensor();
    if (one && !pass.fp8 && !spec_.gated() && spec_.activation == Activation::kGeluTanh &&
        first->bias.defined() && !first->has_lora() && !out_->has_lora() && !first->options.nf4()) {
      const at::Tensor y = nn::gelu_mlp(x.values, first->out_in(), first->bias, out_->out_in(),
                                        pass.tensor ? at::Tensor() : bias);
      return pass.tensor ? leave(in.release({y})[0], bias, pass) : y;
    }
    const std::vector<at::Tensor> parts = in.release(project_all(in_, spec_.in, x, pass));
    at::Tensor y = activate(spec_.activation, parts[0]);
    if (spec_.gated()) y = y * parts[1];
    return project_out(out_, y, pass, with_bias);
  }
};

// ---------------------------------------------------------------- norms

Norm::Norm(torch::nn::Module& parent, const NormSpec& spec, bool of_heads)
    : of_heads_(of_heads), kind_(spec.kind), epsilon_(spec.epsilon) {
  if (kind_ == NormKind::kLayer) {
    layer_ = parent.register_module(
        spec.name, torch::nn::LayerNorm(torch::nn::LayerNormOptions({spec.width}).eps(epsilon_)));
    return;
  }
  const auto rms = parent.register_module(
      spec.name, std::make_shared<RmsNorm>(spec.width, kind_ == NormKind::kRmsPlusOne));
  weight_ = rms->weight;
  rms_ = rms;
}

at::Tensor Norm::weight(const Pass& pass) const {
  const at::Tensor& own = kind_ == NormKind::kLayer ? layer_->weight : weight_;
  return of_heads_ ? nn::enter_weight(own, pass.tensor) : shared(own, pass);
}

at::Tensor Norm::bias(const Pass& pass) const {
  return of_heads_ ? nn::enter_weight(layer_->bias, pass.tensor) : shared(layer_->bias, pass);
}

at::Tensor Norm::plain(const at::Tensor& x, const Pass& pass) const {
  const at::Tensor own = weight(pass);
  if (kind_ == NormKind::kLayer)
    return torch::layer_norm(x, layer_->options.normalized_shape(), own, bias(pass), epsilon_);
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor variance = wide.pow(2).mean(-1, /*keepdim=*/true);
  const at::Tensor normed = wide * torch::rsqrt(variance + epsilon_);
  if (kind_ == NormKind::kRmsPlusOne)
    return (normed * (1 + own.to(at::kFloat))).to(x.scalar_type());
  return own * normed.to(x.scalar_type());
}

// The kernels take a weight that is float or has the norm's type.
at::Tensor Norm::rms_weight(const Pass& pass) const {
  const at::Tensor own = weight(pass);
  if (kind_ == NormKind::kRmsPlusOne) return 1 + own.to(at::kFloat);
  const bool fits = own.scalar_type() == at::kFloat || own.scalar_type() == pass.type;
  return fits ? own : own.to(pass.type);
}

at::Tensor Norm::forward(const at::Tensor& x, const Pass& pass) const {
  Stream alone{.sum = x};
  return forward(alone, pass);
}

nn::Fp8Input Norm::input(Stream& x, const Pass& pass) const {
  at::Tensor amax;
  const at::Tensor normed = forward(x, pass, pass.amax_to(amax));
  return {normed, amax};
}

at::Tensor Norm::forward(Stream& x, const Pass& pass, at::Tensor* amax) const {
  if (!pass.fused) return plain(x.sum, pass);
  const bool layer = kind_ == NormKind::kLayer;
  if (!x.delta.defined())
    return layer ? nn::layer_norm(x.sum, weight(pass), bias(pass), epsilon_, pass.type, amax)
                 : nn::rms_norm(x.sum, rms_weight(pass), epsilon_, pass.type, amax);
  auto [sum, normed] =
      layer ? nn::add_layer_norm(x.sum, x.delta, x.delta_bias, weight(pass), bias(pass), epsilon_,
                                 amax)
            : nn::add_rms_norm(x.sum, x.delta, x.delta_bias, rms_weight(pass), epsilon_, amax);
  x = {.sum = sum};
  return normed;
}

// ---------------------------------------------------------------- blocks

at::Tensor Stream::total() const {
  if (!delta.defined()) return sum;
  return delta_bias.defined() ? sum + (delta + delta_bias.to(delta.scalar_type())) : sum + delta;
}

DecoderBlock::DecoderBlock(const DecoderSpec& spec, std::size_t layer,
                           const ParameterOptions& parameters)
    : cuts_(tensor_cuts(spec.block)), dropout_(spec.block.dropout) {
  const BlockSpec& b = spec.block;
  if (b.norms_first) attention_norm_ = Norm(*this, b.attention_norm);
  attention_ = register_module(
      b.attention.name,
      std::make_shared<DecoderAttention>(b.attention, spec.windows[layer], layer, parameters));
  if (b.norms_first) mlp_norm_ = Norm(*this, b.mlp_norm);
  if (b.mlp.experts)
    experts_ = register_module(b.mlp.name, std::make_shared<Experts>(b.mlp, parameters));
  else
    mlp_ = register_module(b.mlp.name, std::make_shared<DecoderMlp>(b.mlp, parameters));
  if (!b.norms_first) attention_norm_ = Norm(*this, b.attention_norm);
  if (b.attention_after) attention_after_ = Norm(*this, *b.attention_after);
  if (!b.norms_first) mlp_norm_ = Norm(*this, b.mlp_norm);
  if (b.mlp_after) mlp_after_ = Norm(*this, *b.mlp_after);
}

std::vector<nn::Sliced::Cut> DecoderBlock::cuts(int) const {
  const auto parameters = named_parameters();
  std::vector<Cut> cuts;
  for (const TensorCut& cut : cuts_)
    cuts.push_back({parameters[cut.name], cut.dimension, cut.parts});
  return cuts;
}

// Experts choose the type of their products themselves.
std::vector<std::vector<at::Tensor>> DecoderBlock::products() const {
  std::vector<std::vector<at::Tensor>> lists;
  attention_->add_products_to(lists);
  if (mlp_) mlp_->add_products_to(lists);
  return lists;
}

at::Tensor DecoderBlock::branch(Stream& x, const Norm& norm, const Pass& pass, bool segment,
                                const Branch& body) {
  nn::Fp8Input in = norm.input(x, pass);
  // Where ranks divide the sequence, layers read another tensor, which backward gathers.
  if (pass.again.norm && pass.fused && pass.sequence == 0)
    in.again = [norm, pass, sum = x.sum.detach()] { return norm.forward(sum, pass); };
  const at::Tensor y =
      segment ? (*pass.segment)([body, pass, amax = in.amax](
                                    const auto& part) { return body({part.at(0), amax}, pass); },
                                {in.values})
              : body(in, pass);
  nn::make_again(in.values, y, in.again);
  return y;
}

void DecoderBlock::forward(Stream& x, const Pass& pass) {
  const bool later = defers_bias(attention_after_, pass);
  add(x,
      branch(x, attention_norm_, pass, pass.again.attention,
             [part = attention_, later](const nn::Fp8Input& in, const Pass& its) {
               return part->forward(in, its, !later);
             }),
      later ? shared(attention_->last_bias(), pass) : at::Tensor(), attention_after_, pass);
  if (experts_ != nullptr) {
    at::Tensor* const logits = pass.router_logits ? &x.router_logits : nullptr;
    const at::Tensor normed = mlp_norm_.forward(x, pass);  // which replaces the stream
    const nn::EnteredSequence in(normed, pass.sequence, pass.tensor);
    std::vector<at::Tensor> made{experts_->forward(in.whole(), pass, logits)};
    if (logits != nullptr) made.push_back(*logits);
    made = in.release(std::move(made));
    if (logits != nullptr) *logits = made[1];
    add(x, leave(made[0], {}, pass), {}, mlp_after_, pass);
    return;
  }
  const bool later_mlp = defers_bias(mlp_after_, pass);
  add(x,
      branch(x, mlp_norm_, pass, pass.again.mlp,
             [part = mlp_, later_mlp](const nn::Fp8Input& in, const Pass& its) {
               return part->forward(in, its, !later_mlp);
             }),
      later_mlp ? shared(mlp_->last_bias(), pass) : at::Tensor(), mlp_after_, pass);
}

// Only with LayerNorm, whose families have these biases. Elsewhere the product adds the bias, so
// that rounding stays the same.
bool DecoderBlock::defers_bias(const Norm& after, const Pass& pass) const {
  return pass.fused && !after && mlp_norm_.kind() == NormKind::kLayer;
}

void DecoderBlock::add(Stream& x, const at::Tensor& y, const at::Tensor& bias, const Norm& after,
                       const Pass& pass) const {
  const bool drops = dropout_ > 0 && is_training();
  const auto after_dropout = [&](const at::Tensor& t) {
    return drops ? dropped(t, dropout_, pass.sequence, pass.tensor) : t;
  };
  const at::Tensor added = after ? after.forward(y, pass) : y;
  if (!pass.fused) {
    x.sum = x.sum + after_dropout(added);
    return;
  }
  // Dropout applies to the sum with the bias, so the norm cannot add the bias later.
  x.delta = after_dropout(bias.defined() && drops ? added + bias.to(added.scalar_type()) : added);
  x.delta_bias = drops ? at::Tensor() : bias;
}

// ---------------------------------------------------------------- the decoder

Decoder::Decoder(const DecoderSpec& spec, const ParameterOptions& parameters) : spec_(spec) {
  if (spec.rotary) angles_.emplace(*spec.rotary);
  tokens_ =
      register_module(spec.embedding, make_embedding(spec.vocabulary, spec.width, parameters));
  if (!spec.positions.empty())
    positions_ =
        register_module(spec.positions, make_embedding(spec.max_positions, spec.width, parameters));
  const auto draw_embeddings = [&] {
    if (!parameters.draw) return;
    draw(tokens_->weight, spec.deviation);
    if (positions_) draw(positions_->weight, spec.deviation);
  };
  if (!spec.embeddings_drawn_last) draw_embeddings();
  blocks_ = register_module(spec.blocks, torch::nn::ModuleList());
  for (std::int64_t i = 0; i < spec.layers(); ++i) {
    const auto block =
        std::make_shared<DecoderBlock>(spec, static_cast<std::size_t>(i), parameters);
    block->to(parameters.device, parameters.dtype);  // as the others are in the end
    blocks_->push_back(nn::made(block));
  }
  last_norm_ = Norm(*this, spec.last);
  if (spec.embeddings_drawn_last) draw_embeddings();
}

Pass Decoder::begin(const at::Tensor& ids, const Run& run, at::ScalarType table_type) {
  const std::int64_t past = run.cache != nullptr ? run.cache->length() : 0;
  Pass pass{.fused = run.fused,
            .cache = run.cache,
            .router_logits = run.router_logits != nullptr,
            .tensor = run.tensor,
            .sequence = run.sequence};
  if (run.cache == nullptr) pass.fp8 = nn::Fp8Autocast::current();
  const bool masked = spec_.block.attention.soft_cap > 0;
  for (const std::int64_t window : spec_.windows)
    if (!pass.sights.contains(window)) pass.sights[window] = sight_of(ids, past, window, masked);
  if (angles_)
    std::tie(pass.cos, pass.sin) = angles_->find({.past = past,
                                                  .time = ids.size(1),
                                                  .like = ids.options().dtype(table_type),
                                                  .halves = run.fused});
  return pass;
}

at::Tensor Decoder::embedded(const at::Tensor& ids, const Run& run, at::ScalarType residual) {
  at::Tensor x;
  if (run.fused && !run.tensor) {
    x = nn::embedding(ids, tokens_->weight, positions_ ? positions_->weight : at::Tensor(),
                      {.dtype = residual, .padding_index = spec_.padding_id});
  } else {
    x = nn::own_embedding(ids, tokens_->weight, spec_.vocabulary, spec_.padding_id, run.tensor);
    x = run.sequence > 0 ? nn::leave_sequence(x, run.tensor) : nn::leave(x, run.tensor);
    const std::int64_t past = run.cache != nullptr ? run.cache->length() : 0;
    if (positions_) {
      at::Tensor rows = positions_->weight;
      at::Tensor places = torch::arange(past, past + ids.size(1), ids.options());
      if (run.sequence > 0) {
        const nn::Range mine = run.tensor->range(run.sequence);
        rows = nn::enter_weight(rows, run.tensor);
        places = places.narrow(0, mine.begin, mine.length);
      }
      x = x + torch::embedding(rows, places);
    }
    if (run.fused) x = x.to(residual);
  }
  // The factor is rounded to the weight's type first, as in transformers.
  if (spec_.embedding_scale != 1)
    x = x *
        torch::scalar_tensor(spec_.embedding_scale, tokens_->weight.scalar_type()).item<double>();
  return spec_.embedding_dropout > 0 && is_training()
             ? dropped(x, spec_.embedding_dropout, run.sequence, run.tensor)
             : x;
}

at::Tensor Decoder::forward(const at::Tensor& ids, const Run& run) {
  FusedTypes types{at::kFloat, at::kFloat};
  if (run.fused) types = fused_types(ids.device(), tokens_->weight, run.residual_in_fp32);
  static const nn::Staged::Stage whole;
  const nn::Staged::Stage& stage = run.stage != nullptr ? *run.stage : whole;
  const at::Tensor x = stage.first ? embedded(ids, run, types.residual) : stage.input;
  Pass pass = begin(ids, run, run.fused ? at::kFloat : x.scalar_type());
  pass.type = types.compute;
  // The code that gathers the blocks' parameters must see the type they compute in.
  const nn::Fp8Autocast fp8(pass.fp8);
  Stream stream = through_blocks({.sum = x}, pass, run, stage);
  return stage.last ? last_norm_.forward(stream, pass) : stream.total();
}

nn::Staged::Parts Decoder::parts() const {
  nn::Staged::Parts parts{.first = tokens_->parameters()};
  if (positions_) parts.first.push_back(positions_->weight);
  std::size_t listed = parts.first.size();
  for (const auto& block : *blocks_) {
    parts.blocks.push_back(block->parameters());
    listed += parts.blocks.back().size();
  }
  // The last norm is registered after the blocks.
  const std::vector<at::Tensor> all = parameters();
  parts.last.assign(all.begin() + static_cast<std::ptrdiff_t>(listed), all.end());
  return parts;
}

namespace {

// A runner returns one tensor, so the router's logits, which cover the whole sequence, are appended
// to the stream's elements. The runner is called inside the block's run(), so that recomputation
// finds the parameters gathered.
Stream run_whole(const std::shared_ptr<DecoderBlock>& block, const Stream& x, const Pass& pass,
                 const BlockRunner& runner) {
  const nn::Block::Body whole = [block, pass](const std::vector<at::Tensor>& in) {
    Stream part{.sum = in.at(0)};
    block->forward(part, pass);
    const at::Tensor sum = part.total();
    return pass.router_logits ? torch::cat({sum.flatten(), part.router_logits.flatten()}) : sum;
  };
  const nn::Block::Body again = [&](const std::vector<at::Tensor>& in) {
    return runner(whole, in);
  };
  const at::Tensor y = block->run(runner ? again : whole, {x.total()});
  if (!pass.router_logits) return {.sum = y};
  const auto parts = y.split_with_sizes({x.sum.numel(), y.numel() - x.sum.numel()});
  const std::int64_t time = pass.sequence > 0 ? pass.sequence : x.sum.size(1);
  return {.sum = parts[0].view(x.sum.sizes()),
          .router_logits = parts[1].view({x.sum.size(0), time, -1})};
}

}  // namespace

Stream Decoder::through_blocks(Stream x, Pass pass, const Run& run,
                               const nn::Staged::Stage& stage) {
  static const BlockRunner none;
  const bool whole = run.runner != nullptr && !run.parts.any();
  const BlockRunner& runner = whole ? *run.runner : none;
  if (run.runner != nullptr && at::GradMode::is_enabled()) pass.again = run.parts;
  if (pass.again.mlp) pass.again.swiglu = false;  // which is in it
  pass.segment = run.runner;
  for (std::size_t i = stage.begin; i < stage.end_of(blocks_->size()); ++i) {
    const auto block = std::dynamic_pointer_cast<DecoderBlock>(blocks_->ptr(i));
    if (block->copy_input_to) {
      x.sum = copied(x.sum, *block->copy_input_to);
      std::vector<at::Tensor*> shared{&pass.cos, &pass.sin};
      for (auto& [window, sight] : pass.sights) shared.push_back(&sight.mask);
      for (at::Tensor* one : shared)
        if (one->defined()) *one = one->to(*block->copy_input_to);
    }
    pass.owns_memory = !block->has_runner() && !pass.tensor;
    if (runner || block->has_runner())
      x = run_whole(block, x, pass, runner);
    else
      block->forward(x, pass);
    if (run.router_logits != nullptr) run.router_logits->push_back(x.router_logits);
    if (block->copy_output_to) x.sum = copied(x.sum, *block->copy_output_to);
  }
  return x;
}

}  // namespace lockstep::models::detail
