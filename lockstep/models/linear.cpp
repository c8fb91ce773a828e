#include "lockstep/models/linear.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "lockstep/nn/functional.h"
#include "lockstep/nn/nf4.h"
#include "lockstep/nn/tensor_group.h"

namespace lockstep::models {
namespace {

// bitsandbytes' blocks go along [out, in], whatever the layout is.
at::Tensor encoded(const LinearOptions& o, const at::Tensor& weight) {
  return nn::to_nf4(o.layout() == WeightLayout::kInOut ? weight.t() : weight);
}

at::Tensor initial_weight(const LinearOptions& o) {
  if (o.in_features() < 1 || o.out_features() < 1)
    throw UsageError("linear", "a layer of {} inputs and {} outputs. Both must be positive.",
                     o.in_features(), o.out_features());
  if (o.nf4() && o.deviation() == 0)
    return torch::zeros(nn::nf4_sizes(o.out_features(), o.in_features()),
                        o.tensors().dtype(at::kByte));
  const bool in_first = o.layout() == WeightLayout::kInOut;
  const auto weight = in_first ? torch::empty({o.in_features(), o.out_features()}, o.tensors())
                               : torch::empty({o.out_features(), o.in_features()}, o.tensors());
  if (o.deviation() == 0) return weight.zero_();
  weight.normal_(0, o.deviation());
  return o.nf4() ? encoded(o, weight) : weight;
}

bool autocasts(const at::Tensor& x) {
  return at::autocast::is_autocast_enabled(x.device().type());
}

// The type in which an adapter is trained.
at::ScalarType adapter_type(const at::Tensor& weight) {
  return weight.itemsize() < 4 ? at::kFloat : weight.scalar_type();
}

}  // namespace

LinearImpl::LinearImpl(const LinearOptions& given)
    : options(given),
      weight(register_parameter("weight", initial_weight(given), /*requires_grad=*/!given.nf4())) {
  if (options.bias())
    bias = register_parameter("bias", torch::zeros({options.out_features()}, options.tensors()));
}

bool LinearImpl::cut_by_inputs() const {
  return lora_A->weight.size(1) < options.in_features();
}

// Marks the factor that every rank has whole: it is used with slices of x or of the result, so each
// rank computes a part of its gradient.
LinearImpl::Factors LinearImpl::factors(const nn::TensorGroupPtr& group) const {
  const at::Tensor &a = lora_A->weight, &b = lora_B->weight;
  if (!group) return {a, b};
  return cut_by_inputs() ? Factors{a, nn::enter_weight(b, group)}
                         : Factors{nn::enter_weight(a, group), b};
}

at::Tensor LinearImpl::dropped(const at::Tensor& x, const nn::TensorGroupPtr& group) const {
  if (lora_.dropout == 0 || !is_training()) return x;
  return nn::sliced_dropout(x, lora_.dropout, -1, options.in_features(),
                            cut_by_inputs() ? group : nullptr);
}

at::Tensor LinearImpl::forward(const at::Tensor& x, bool with_bias,
                               const nn::TensorGroupPtr& group) {
  const at::Tensor y = base_forward(x, with_bias);
  if (!has_lora() || merged()) return y;
  const bool autocast = autocasts(x);
  const at::ScalarType type = lora_A->weight.scalar_type();
  const auto [a, b] = factors(group);
  const at::Tensor in = dropped(autocast ? x : x.to(type), group);
  // Scaling the r columns in the middle costs less than scaling the output.
  const at::Tensor middle = torch::linear(in, a) * lora_.scaling;
  if (!autocast && y.scalar_type() != type)
    return (y + torch::linear(middle, b)).to(y.scalar_type());
  const at::Tensor rows = y.reshape({-1, y.size(-1)});
  return torch::addmm(rows, middle.reshape({-1, lora_.r}), b.t()).view(y.sizes());
}

// The sizes are the weight's own, which may be a slice of the options' (nn::Sliced).
at::Tensor LinearImpl::base_forward(at::Tensor x, bool with_bias) {
  at::Tensor own_bias = with_bias ? bias : at::Tensor();
  const at::Tensor own = usable_weight();
  if (options.nf4()) {
    if (autocasts(x)) x = x.to(at::autocast::get_autocast_dtype(x.device().type()));
    return nn::linear(x, own, own_bias);
  }
  if (!autocasts(x)) {
    x = x.to(own.scalar_type());
    if (own_bias.defined()) own_bias = own_bias.to(own.scalar_type());
  }
  if (options.layout() == WeightLayout::kOutIn) return torch::linear(x, own, own_bias);
  auto shape = x.sizes().vec();
  shape.back() = own.size(1);
  const auto rows = x.reshape({-1, own.size(0)});
  const auto y = own_bias.defined() ? torch::addmm(own_bias, rows, own) : torch::mm(rows, own);
  return y.view(shape);
}

at::Tensor LinearImpl::forward_fused(const at::Tensor& x, bool with_bias,
                                     const nn::TensorGroupPtr& group) {
  const at::Tensor own_bias = with_bias ? bias : at::Tensor();
  if (!has_lora() || merged()) return nn::linear(x, out_in(), own_bias);
  const auto [a, b] = factors(group);
  // The fused operation takes a frozen base only, and no dropout mask of a slice of the inputs.
  const bool drops_slice = group && cut_by_inputs() && lora_.dropout > 0 && is_training();
  if (weight.requires_grad() || drops_slice) {
    const at::Tensor y = nn::linear(x, weight.requires_grad() ? out_in() : frozen_for(x), own_bias);
    const at::Tensor low = nn::linear(dropped(x, group), a, {}) * lora_.scaling;
    return y + nn::linear(low, b, {});
  }
  return nn::lora_linear(x, frozen_for(x), own_bias, a, b,
                         {.scaling = lora_.scaling, .dropout = is_training() ? lora_.dropout : 0});
}

at::Tensor LinearImpl::forward_fp8(const nn::Fp8Input& x, nn::Fp8Recipe recipe, bool with_bias) {
  const at::Tensor own_bias = with_bias ? bias : at::Tensor();
  const bool adapted = has_lora() && !merged();
  if (!adapted && !stored_fp8()) return nn::fp8_linear(x, {out_in()}, own_bias, recipe);
  if (!adapted || !nn::fp8_covers({weight})) return forward_fused(x.values, with_bias);
  if (weight.requires_grad()) {
    const at::Tensor in = torch::dropout(x.values, lora_.dropout, is_training());
    const at::Tensor low = nn::linear(in, lora_A->weight, {}) * lora_.scaling;
    return nn::fp8_linear(x, {out_in()}, own_bias, recipe) + nn::linear(low, lora_B->weight, {});
  }
  const nn::Fp8Pair base =
      stored_fp8() ? stored() : nn::to_fp8({out_in()}, at::kFloat8_e4m3fn, recipe);
  return nn::fp8_lora_linear(
      x, base, own_bias, lora_A->weight, lora_B->weight,
      {.scaling = lora_.scaling, .dropout = is_training() ? lora_.dropout : 0});
}

const nn::Fp8Pair& LinearImpl::stored() const {
  if (stored_.matrix.values.const_data_ptr() != weight.const_data_ptr())
    throw UsageError("linear",
                     "a weight that is stored in fp8 was moved or replaced, and its scale was not. "
                     "Move the module and load its weights before store_frozen_fp8().");
  return stored_;
}

at::Tensor LinearImpl::usable_weight() const {
  if (!stored_fp8()) return weight;
  const at::Tensor own = nn::from_fp8(stored().matrix).to(at::kBFloat16);
  return options.layout() == WeightLayout::kInOut ? own.t() : own;
}

at::Tensor LinearImpl::out_in() const {
  const at::Tensor own = usable_weight();
  return options.layout() == WeightLayout::kInOut && !options.nf4() ? own.t() : own;
}

at::Tensor LinearImpl::frozen_for(const at::Tensor& x) const {
  return options.nf4() ? weight : out_in().to(x.scalar_type());
}

void LinearImpl::assign_nf4(const at::Tensor& values) {
  weight.copy_(encoded(options, values));
}

void LinearImpl::to(c10::Device device, c10::ScalarType dtype, bool non_blocking) {
  if (!options.nf4()) return Module::to(device, dtype, non_blocking);
  const at::Tensor bytes = weight.detach();
  weight.set_data(bytes.slice(0, 0, 0));  // for which a conversion costs nothing
  Module::to(device, dtype, non_blocking);
  weight.set_data(bytes.to(device, non_blocking));
}

void LinearImpl::to(c10::ScalarType dtype, bool non_blocking) {
  if (!options.nf4()) return Module::to(dtype, non_blocking);
  to(weight.device(), dtype, non_blocking);
}

void LinearImpl::store_fp8(nn::Fp8Recipe recipe) {
  if (weight.requires_grad())
    throw UsageError("linear",
                     "a weight that is trained cannot be stored in fp8: a step would be lost in "
                     "its rounding. Freeze it first.");
  if (stored_fp8() || merged() || !nn::fp8_covers({weight})) return;
  stored_ = nn::to_fp8({out_in()}, at::kFloat8_e4m3fn, recipe);
  const at::Tensor& values = stored_.matrix.values;
  weight.set_data(options.layout() == WeightLayout::kInOut ? values.t() : values);
}

void LinearImpl::attach_lora(const LoraShape& shape) {
  if (has_lora())
    throw UsageError("lora",
                     "the layer has an adapter already. Merge it or remove it before another one "
                     "is attached.");
  if (shape.r < 1)
    throw UsageError("lora", "an adapter of rank {}. The rank is 1 or more.", shape.r);
  const auto part = [&](std::int64_t in, std::int64_t out) {
    torch::nn::Linear linear(torch::nn::LinearOptions(in, out).bias(false));
    linear->to(weight.device(), options.nf4() ? at::kFloat : adapter_type(weight));
    linear->train(is_training());
    return linear;
  };
  lora_ = shape;
  lora_A = register_module("lora_A", part(options.in_features(), shape.r));
  lora_B = register_module("lora_B", part(shape.r, options.out_features()));
}

void LinearImpl::merge_lora() {
  if (!has_lora() || merged()) return;
  if (options.nf4())
    throw UsageError("lora",
                     "an adapter is not merged into a weight in 4 bits, which would lose most of "
                     "it. Save the adapter, and merge it into the base model's own weights: "
                     "lockstep checkpoint merge.");
  const torch::NoGradGuard no_grad;
  at::Tensor sum = torch::mm(lora_B->weight, lora_A->weight) * lora_.scaling;
  if (options.layout() == WeightLayout::kInOut) sum = sum.t();
  if (stored_fp8()) {
    weight.set_data(usable_weight().contiguous());
    stored_ = {};
  }
  unmerged_ = weight.detach().clone();
  weight.copy_(weight + sum);  // in the wider type of the two, then rounded once
}

void LinearImpl::unmerge_lora() {
  if (!merged()) return;
  const torch::NoGradGuard no_grad;
  weight.copy_(unmerged_);
  unmerged_.reset();
}

void LinearImpl::remove_lora() {
  if (!has_lora()) return;
  unregister_module("lora_A");
  unregister_module("lora_B");
  lora_A = nullptr;
  lora_B = nullptr;
  unmerged_.reset();
}

}  // namespace lockstep::models
