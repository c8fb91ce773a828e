// Linear layers, the GELU perceptron, LoRA, and linear layers of groups of rows.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/nn/functional.h"
#include "lockstep/nn/nf4.h"
#include "lockstep/nn/on_cuda.h"

namespace lockstep::nn {
namespace {

using kernels::cuda::Epilogue;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Row-major or its transpose, with rows aligned to 16 bytes.
std::optional<kernels::cuda::GemmMatrix> gemm_matrix(const at::Tensor& m) {
  const std::int64_t unit = 16 / static_cast<std::int64_t>(m.element_size());
  const bool aligned = reinterpret_cast<std::uintptr_t>(m.const_data_ptr()) % 16 == 0;
  const auto fits = [&](std::int64_t stride, std::int64_t width) {
    return stride >= width && stride % unit == 0 && aligned;
  };
  if (m.stride(1) == 1 && fits(m.stride(0), m.size(1)))
    return kernels::cuda::GemmMatrix{m.const_data_ptr(), m.stride(0), false};
  if (m.stride(0) == 1 && fits(m.stride(1), m.size(0)))
    return kernels::cuda::GemmMatrix{m.const_data_ptr(), m.stride(1), true};
  return std::nullopt;
}

struct GemmExtras {
  float beta = 0;
  Epilogue epilogue = Epilogue::kNone;
  at::Tensor bias{}, aux{};
};

// d = a b with extras through cuBLASLt; false where it does not apply, and nothing is written.
bool try_gemm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& d,
              const GemmExtras& extras) {
  const auto type = a.scalar_type();
  if (!(type == at::kBFloat16 || type == at::kHalf) || b.scalar_type() != type || a.numel() == 0 ||
      b.numel() == 0)
    return false;
  const auto cuda = detail::OnCuda::with({d, extras.bias, extras.aux});
  if (!cuda || d.size(1) % 8 != 0 || !a.is_cuda() || !b.is_cuda()) return false;
  const auto left = gemm_matrix(a), right = gemm_matrix(b);
  if (!left || !right) return false;
  const at::Tensor workspace = cuda->bytes(detail::kWorkspaceBytes);
  int status = 0;
  const bool covered =
      cuda->table().gemm({.a = *left,
                          .b = *right,
                          .d = detail::mutable_data(d),
                          .bias = detail::data(extras.bias),
                          .aux = detail::mutable_data(extras.aux),
                          .workspace = detail::mutable_data(workspace),
                          .workspace_bytes = static_cast<std::size_t>(detail::kWorkspaceBytes),
                          .m = a.size(0),
                          .n = b.size(1),
                          .k = a.size(1),
                          .beta = extras.beta,
                          .epilogue = extras.epilogue,
                          .type = detail::type_of(a),
                          .d_type = detail::type_of(d)},
                         cuda->stream(), &status);
  if (covered) cuda->check(status, "a matrix product");
  return covered;
}

}  // namespace

namespace detail {

void sum_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& into, bool add) {
  if (try_gemm(a, b, into, {.beta = add ? 1.0f : 0.0f})) return;
  const auto type = into.scalar_type();
  at::Tensor to = into;
  if (add) {
    to.addmm_(a.to(type), b.to(type));
  } else {
    at::mm_out(to, a.to(type), b.to(type));
  }
}

at::Tensor weight_for(const char* who, const at::Tensor& x, const at::Tensor& weight,
                      std::int64_t rows) {
  require(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == at::kFloat, who,
          "a weight must have the input's dtype or be float", x, weight);
  const std::int64_t own = weight.size(0);
  if (rows <= own) return weight.detach().to(x.scalar_type());
  const at::Tensor padded = at::empty({rows, weight.size(1)}, x.options());
  padded.narrow(0, 0, own).copy_(weight.detach());
  padded.narrow(0, own, rows - own).zero_();
  return padded;
}

void remember_leaf(AutogradContext* ctx, const std::string& name, const at::Tensor& weight) {
  at::Tensor leaf;
  if (weight.is_cuda() && weight.requires_grad() && weight.is_leaf()) {
    leaf = weight;
  } else if (weight.is_cuda() && weight.grad_fn() && weight.grad_fn()->name() == "TBackward0") {
    const auto next = weight.grad_fn()->next_edge(0).function;
    if (const auto* end = dynamic_cast<torch::autograd::AccumulateGrad*>(next.get()))
      leaf = end->variable;
  }
  ctx->saved_data[name] = leaf;
  ctx->saved_data[name + "_is_transposed"] = !weight.is_leaf();
}

at::Tensor accumulation_target(AutogradContext* ctx, const std::string& name) {
  namespace impl = torch::autograd::impl;
  const at::Tensor leaf = ctx->saved_data[name].toTensor();
  if (!leaf.defined() || at::GradMode::is_enabled()) return {};
  const at::Tensor grad = leaf.grad();
  if (!grad.defined() || grad.scalar_type() != at::kFloat || !grad.is_contiguous() ||
      grad.sizes() != leaf.sizes() || grad.device() != leaf.device() || grad.requires_grad())
    return {};
  // autograd::grad() and backward(inputs) ask for chosen gradients.
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || !chosen->empty()) return {};
  // Hooks, a reducer's among them, get the gradient from autograd.
  const auto end = impl::try_get_grad_accumulator(leaf);
  if (!end || !end->post_hooks().empty() || !end->pre_hooks().empty() ||
      !impl::hooks(leaf).empty() || impl::post_acc_grad_hooks(leaf) != nullptr)
    return {};
  grad.unsafeGetTensorImpl()->bump_version();
  return ctx->saved_data[name + "_is_transposed"].toBool() ? grad.t() : grad;
}

// A weight that is stored transposed gets a transposed gradient.
at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight_used,
                           at::ScalarType wanted, const at::Tensor& accumulated) {
  const at::Tensor& pattern = accumulated.defined() ? accumulated : weight_used;
  const bool transposed = !pattern.is_contiguous() && pattern.t().is_contiguous();
  const at::Tensor a = transposed ? x.t() : dy.t(), b = transposed ? dy : x;
  const auto placed = [&](const at::Tensor& t) { return transposed ? t.t() : t; };
  if (accumulated.defined() && placed(accumulated).is_contiguous()) {
    sum_product(a, b, placed(accumulated), true);
    return {};
  }
  if (accumulated.defined() || wanted != x.scalar_type()) {
    const auto type = accumulated.defined() ? accumulated.scalar_type() : wanted;
    at::Tensor fresh = at::empty({a.size(0), b.size(1)}, x.options().dtype(type));
    sum_product(a, b, fresh, false);
    if (!accumulated.defined()) return placed(fresh);
    at::Tensor to = accumulated;
    to.add_(placed(fresh));
    return {};
  }
  return placed(at::mm(a, b));
}

}  // namespace detail

namespace {

at::Tensor bias_gradient(const at::Tensor& dy, at::ScalarType type) {
  return detail::column_sum(dy).to(type);
}

at::Tensor with_last(const at::Tensor& matrix, const at::Tensor& like) {
  auto shape = like.sizes().vec();
  shape.back() = matrix.size(1);
  return matrix.view(shape);
}

// x w^T + bias of a matrix; the bias in x's dtype.
at::Tensor affine(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return bias.defined() ? at::addmm(bias.to(x.scalar_type()), x, weight.t())
                        : at::mm(x, weight.t());
}

// A weight as it is multiplied with rows of x: one in 4 bits is decoded here, for one product.
at::Tensor decoded(const at::Tensor& weight, const at::Tensor& x) {
  return is_nf4(weight) ? from_nf4(weight, x.size(-1), x.scalar_type()) : weight;
}

// One product for all weights of an input: their outputs are side by side.
class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  // `weight_used` and `bias_used` are those of all weights, one below the other, in x's type.
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, at::TensorList weights,
                            const at::Tensor& bias_or_none, const at::Tensor& weight_used,
                            const at::Tensor& bias_used) {
    const detail::NoAutocast no_autocast;
    ctx->save_for_backward({x, weight_used});
    std::vector<std::int64_t> widths;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      detail::remember_leaf(ctx, detail::leaf_name(i), weights[i]);
      widths.push_back(weights[i].size(0));
    }
    ctx->saved_data["widths"] = widths;
    detail::save_type(ctx, "weight_type", weights.front());
    detail::save_type(ctx, "bias_type", detail::from_none(bias_or_none));
    const at::Tensor rows = detail::flat(x);
    return with_last(affine(rows, decoded(weight_used, rows), detail::from_none(bias_used)), x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    const at::Tensor x = detail::flat(saved[0]), dy = detail::flat(grads[0]).contiguous();
    const auto widths = ctx->saved_data["widths"].toIntVector();
    variable_list result(1);
    if (ctx->needs_input_grad(0))
      result[0] = at::mm(dy, decoded(saved[1], x)).view(saved[0].sizes());
    std::int64_t first = 0;
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const auto part = [&](const at::Tensor& t, int dimension) {
        return widths.size() == 1 ? t : t.narrow(dimension, first, widths[i]);
      };
      at::Tensor dweight;
      if (ctx->needs_input_grad(1 + i))
        dweight = detail::weight_gradient(part(dy, 1), x, part(saved[1], 0),
                                          detail::saved_type(ctx, "weight_type"),
                                          detail::accumulation_target(ctx, detail::leaf_name(i)));
      result.push_back(dweight);
      first += widths[i];
    }
    const bool wants_dbias = ctx->needs_input_grad(1 + widths.size());
    result.push_back(wants_dbias ? bias_gradient(dy, detail::saved_type(ctx, "bias_type"))
                                 : at::Tensor());
    result.insert(result.end(), 2, at::Tensor());
    return result;
  }
};

// ---------------------------------------------------------------- the GELU perceptron

class GeluMlpFunction : public torch::autograd::Function<GeluMlpFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& fc_weight,
                            const at::Tensor& fc_bias, const at::Tensor& out_weight,
                            const at::Tensor& out_bias_or_none, const at::Tensor& fc_used,
                            const at::Tensor& bias, const at::Tensor& out_used) {
    const detail::NoAutocast no_autocast;
    const at::Tensor out_bias = detail::from_none(out_bias_or_none);
    const at::Tensor rows = detail::flat(x).contiguous();
    at::Tensor before = at::empty({rows.size(0), fc_used.size(0)}, x.options());
    at::Tensor hidden = at::empty_like(before);
    if (!try_gemm(rows, fc_used.t(), hidden,
                  {.epilogue = Epilogue::kGeluAuxBias, .bias = bias, .aux = before})) {
      before = at::addmm(bias, rows, fc_used.t());
      hidden = at::gelu(before, "tanh");
    }
    ctx->save_for_backward({x, before, hidden, fc_used, out_used});
    detail::remember_leaf(ctx, "fc_leaf", fc_weight);
    detail::remember_leaf(ctx, "out_leaf", out_weight);
    detail::save_type(ctx, "fc_type", fc_weight);
    detail::save_type(ctx, "fc_bias_type", fc_bias);
    detail::save_type(ctx, "out_type", out_weight);
    detail::save_type(ctx, "out_bias_type", out_bias);
    return with_last(affine(hidden, out_used, out_bias), x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    const at::Tensor x = detail::flat(saved[0]).contiguous();
    const at::Tensor dy = detail::flat(grads[0]).contiguous();
    const at::Tensor &before = saved[1], &hidden = saved[2], &fc = saved[3], &out = saved[4];
    at::Tensor dx, dfc, dfc_bias, dout, dout_bias;
    if (ctx->needs_input_grad(3)) {
      dout = detail::weight_gradient(dy, hidden, out, detail::saved_type(ctx, "out_type"),
                                     detail::accumulation_target(ctx, "out_leaf"));
    }
    if (ctx->needs_input_grad(4))
      dout_bias = bias_gradient(dy, detail::saved_type(ctx, "out_bias_type"));
    if (ctx->needs_input_grad(0) || ctx->needs_input_grad(1) || ctx->needs_input_grad(2)) {
      at::Tensor dbefore = at::empty_like(before);
      // With few rows the library's fused kernel is slower than two kernels.
      constexpr std::int64_t kMinRows = 4096;
      if (dy.size(0) < kMinRows ||
          !try_gemm(dy, out, dbefore, {.epilogue = Epilogue::kDGelu, .aux = before}))
        dbefore = at::gelu_backward(at::mm(dy, out), before, "tanh");
      if (ctx->needs_input_grad(2))
        dfc_bias = bias_gradient(dbefore, detail::saved_type(ctx, "fc_bias_type"));
      if (ctx->needs_input_grad(1)) {
        dfc = detail::weight_gradient(dbefore, x, fc, detail::saved_type(ctx, "fc_type"),
                                      detail::accumulation_target(ctx, "fc_leaf"));
      }
      if (ctx->needs_input_grad(0)) dx = at::mm(dbefore, fc).view(saved[0].sizes());
    }
    return {dx, dfc, dfc_bias, dout, dout_bias, {}, {}, {}};
  }
};

// ---------------------------------------------------------------- LoRA

// Which elements of an adapter's input stay, and what they are multiplied by.
struct Dropout {
  // Undefined: all elements stay unscaled. Bytes: a bit for each element (the kernels'); booleans:
  // one for each element (ATen's).
  at::Tensor mask{};
  double scale = 1;

  bool bits() const { return mask.defined() && mask.scalar_type() == at::kByte; }
};

// (narrow low), with dropout applied.
at::Tensor dropped_product(const at::Tensor& narrow, const at::Tensor& low,
                           const Dropout& dropout) {
  if (!dropout.mask.defined()) return at::mm(narrow, low);
  if (!dropout.bits())
    return at::native_dropout_backward(at::mm(narrow, low), dropout.mask, dropout.scale);
  const auto rank = static_cast<int>(narrow.size(1));
  const auto cuda = detail::OnCuda::with({narrow, low});
  LOCKSTEP_ASSERT(cuda != nullptr);
  const at::Tensor to = at::empty({narrow.size(0), low.size(1)}, narrow.options());
  cuda->check(cuda->table().dropped_product(
                  {.narrow = detail::data(narrow),
                   .low = detail::data(low),
                   .bits = static_cast<const std::uint8_t*>(detail::data(dropout.mask)),
                   .to = detail::mutable_data(to),
                   .rows = narrow.size(0),
                   .columns = static_cast<int>(low.size(1)),
                   .rank = rank,
                   .scale = static_cast<float>(dropout.scale),
                   .type = detail::type_of(narrow)},
                  cuda->stream()),
              "dropped_product");
  return to;
}

// The transpose of `narrow` times x with dropout applied; in sum_type().
at::Tensor dropped_gradient(const at::Tensor& narrow, const at::Tensor& x, const Dropout& dropout) {
  const auto rank = static_cast<int>(narrow.size(1));
  const at::Tensor to =
      at::empty({rank, x.size(1)}, narrow.options().dtype(detail::sum_type(narrow)));
  if (!dropout.bits()) {
    const at::Tensor in =
        dropout.mask.defined() ? at::native_dropout_backward(x, dropout.mask, dropout.scale) : x;
    detail::sum_product(narrow.t(), in, to, false);
    return to;
  }
  const auto cuda = detail::OnCuda::with({narrow, x});
  LOCKSTEP_ASSERT(cuda != nullptr);
  const auto columns = static_cast<int>(x.size(1));
  const at::Tensor partials =
      cuda->floats(cuda->table().dropped_gradient_partials(x.size(0), columns, rank));
  cuda->check(cuda->table().dropped_gradient(
                  {.narrow = detail::data(narrow),
                   .x = detail::data(x),
                   .bits = static_cast<const std::uint8_t*>(detail::data(dropout.mask)),
                   .to = to.mutable_data_ptr<float>(),
                   .partials = partials.mutable_data_ptr<float>(),
                   .rows = x.size(0),
                   .columns = columns,
                   .rank = rank,
                   .scale = static_cast<float>(dropout.scale),
                   .type = detail::type_of(narrow)},
                  cuda->stream()),
              "dropped_gradient");
  return to;
}

struct NarrowInput {
  at::Tensor narrow;  // the input, dropped out, times the transpose of low
  at::Tensor mask;    // as in Dropout
};

// Where the kernels apply, x is read once, and neither a dropped copy nor a full mask is written.
NarrowInput drop_and_narrow(const at::Tensor& x, const at::Tensor& low, double probability) {
  if (probability == 0) return {at::mm(x, low.t()), {}};
  const auto rank = static_cast<int>(low.size(0));
  const auto cuda = detail::OnCuda::with({x, low});
  if (!cuda || !cuda->table().lora_covers(x.size(1), rank, detail::type_of(x))) {
    const auto [dropped, mask] = at::native_dropout(x, probability, true);
    return {at::mm(dropped, low.t()), mask};
  }
  const double keep = 1 - probability;
  const at::Tensor seed = at::empty({1}, x.options().dtype(at::kLong)).random_();
  const NarrowInput out{at::empty({x.size(0), rank}, x.options()),
                        at::empty({x.size(0), x.size(1) / 8}, x.options().dtype(at::kByte))};
  cuda->check(cuda->table().dropped_input(
                  {.x = detail::data(x),
                   .low = detail::data(low),
                   .seed = seed.const_data_ptr<std::int64_t>(),
                   .bits = static_cast<std::uint8_t*>(detail::mutable_data(out.mask)),
                   .narrow = detail::mutable_data(out.narrow),
                   .rows = x.size(0),
                   .columns = static_cast<int>(x.size(1)),
                   .rank = rank,
                   .keep = static_cast<float>(keep),
                   .scale = static_cast<float>(1 / keep),
                   .type = detail::type_of(x)},
                  cuda->stream()),
              "dropped_input");
  return out;
}

// The frozen weight that an adapter belongs to: a tensor, NF4, or fp8.
struct LoraBase {
  at::Tensor weight{};  // [out, in], or to_nf4() of it
  Fp8Pair fp8{};

  // y += rows weight^T
  void add_forward(at::Tensor& y, const at::Tensor& rows, const at::Tensor& amax) const {
    if (weight.defined())
      y.addmm_(rows, decoded(weight, rows).t());
    else
      detail::fp8_product(cast(rows, at::kFloat8_e4m3fn, amax), fp8.matrix, y,
                          {.add = true, .fast = true});
  }
  // dx += dy weight
  void add_backward(at::Tensor& dx, const at::Tensor& dy) const {
    if (weight.defined())
      dx.addmm_(dy, decoded(weight, dx));
    else
      detail::fp8_product(cast(dy, at::kFloat8_e5m2, {}), fp8.transposed, dx, {.add = true});
  }

  // As tensors, in this order.
  variable_list saved() const {
    return {weight, fp8.matrix.values, fp8.matrix.scale, fp8.transposed.values,
            fp8.transposed.scale};
  }
  static LoraBase from(const variable_list& list, std::size_t first) {
    return {list[first], {{list[first + 1], list[first + 2]}, {list[first + 3], list[first + 4]}}};
  }

 private:
  Fp8Matrix cast(const at::Tensor& rows, at::ScalarType type, const at::Tensor& amax) const {
    if (rows.numel() == 0) return {};
    const auto recipe =
        fp8.matrix.scale.numel() == 1 ? Fp8Recipe::kTensorwise : Fp8Recipe::kRowwise;
    return to_fp8({rows}, type, recipe, {.matrix = true, .transposed = false}, amax).matrix;
  }
};

// The narrow product is written first and the wide one adds to it: a wide product reads that sum
// while it computes, whereas a narrow one would wait for memory.
class LoraFunction : public torch::autograd::Function<LoraFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias_or_none, const at::Tensor& a,
                            const at::Tensor& b, const at::Tensor& amax, const Fp8Pair& fp8,
                            const LoraOptions& options) {
    const detail::NoAutocast no_autocast;
    const at::Tensor bias = detail::from_none(bias_or_none);
    const LoraBase base{detail::from_none(weight), fp8};
    const at::Tensor rows = detail::flat(x);
    const at::Tensor low = a.to(x.scalar_type()), high = b.to(x.scalar_type());
    const auto [narrow, mask] = drop_and_narrow(rows, low, options.dropout);
    at::Tensor y;
    if (bias.defined() && base.weight.defined()) {
      y = affine(rows, decoded(base.weight, rows), bias)
              .addmm_(narrow, high.t(), 1, options.scaling);
    } else {
      y = at::empty({rows.size(0), b.size(0)}, rows.options());
      at::addmm_out(y, y, narrow, high.t(), /*beta=*/0, options.scaling);
      base.add_forward(y, rows, detail::from_none(amax));
      if (bias.defined()) y.add_(bias);
    }
    variable_list saved{x, low, high, narrow, mask};
    for (at::Tensor& part : base.saved()) saved.push_back(std::move(part));
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["scaling"] = options.scaling;
    ctx->saved_data["dropout"] = options.dropout;
    detail::save_type(ctx, "bias_type", bias);
    detail::save_type(ctx, "a_type", a);
    detail::save_type(ctx, "b_type", b);
    return with_last(y, x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    const at::Tensor x = detail::flat(saved[0]), dy = detail::flat(grads[0]).contiguous();
    const at::Tensor &low = saved[1], &high = saved[2], &mask = saved[4];
    const double scaling = ctx->saved_data["scaling"].toDouble();
    const Dropout dropout{mask, 1 / (1 - ctx->saved_data["dropout"].toDouble())};
    at::Tensor dx, dweight, dbias, da, db;
    at::Tensor dnarrow = at::empty({dy.size(0), high.size(1)}, dy.options());
    at::addmm_out(dnarrow, dnarrow, dy, high, /*beta=*/0, scaling);
    if (ctx->needs_input_grad(0)) {
      dx = dropped_product(dnarrow, low, dropout);
      LoraBase::from(saved, 5).add_backward(dx, dy);
      dx = dx.view(saved[0].sizes());
    }
    if (ctx->needs_input_grad(1)) dweight = at::mm(dy.t(), x);
    if (ctx->needs_input_grad(2)) dbias = bias_gradient(dy, detail::saved_type(ctx, "bias_type"));
    if (ctx->needs_input_grad(3))
      da = dropped_gradient(dnarrow, x, dropout).to(detail::saved_type(ctx, "a_type"));
    if (ctx->needs_input_grad(4))
      db = dropped_gradient(dy, saved[3], {}).to(detail::saved_type(ctx, "b_type")).mul_(scaling);
    return {dx, dweight, dbias, da, db, {}, {}, {}};
  }
};

void check_linear(const char* who, const at::Tensor& x, std::int64_t in, const at::Tensor& weight,
                  const at::Tensor& bias) {
  detail::require(x.defined() && weight.defined() && x.dim() > 0 && weight.dim() == 2 &&
                      (is_nf4(weight) || in == weight.size(1)),
                  who, "weight must be [out, in], where in is the input's last dimension", x,
                  weight);
  detail::require(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)), who,
                  "bias must be [out] of weight [out, in]", weight, bias);
}

// In the input's dtype.
at::Tensor bias_for(const at::Tensor& x, const at::Tensor& bias) {
  return bias.defined() ? bias.detach().to(x.scalar_type()) : bias;
}

std::int64_t last_of(const at::Tensor& x) {
  return x.defined() && x.dim() > 0 ? x.size(-1) : -1;
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  constexpr const char* kWho = "linear";
  check_linear(kWho, x, last_of(x), weight, bias);
  return LinearFunction::apply(x, at::TensorList(weight), detail::or_none(bias),
                               is_nf4(weight) ? weight : detail::weight_for(kWho, x, weight),
                               detail::or_none(bias_for(x, bias)));
}

at::Tensor linear(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                  const at::Tensor& bias) {
  constexpr const char* kWho = "linear";
  detail::require(!weights.empty(), kWho, "a weight is needed", x);
  if (weights.size() == 1) return linear(x, weights.front(), bias);
  std::int64_t out = 0;
  for (const at::Tensor& weight : weights) {
    check_linear(kWho, x, last_of(x), weight, {});
    detail::require(weight.is_floating_point() && weight.dtype() == weights.front().dtype(), kWho,
                    "all weights must have one floating point dtype", weights.front(), weight);
    out += weight.size(0);
  }
  const at::Tensor used = at::empty({out, weights.front().size(1)}, x.options());
  std::int64_t first = 0;
  for (const at::Tensor& weight : weights) {
    used.narrow(0, first, weight.size(0)).copy_(weight.detach());
    first += weight.size(0);
  }
  check_linear(kWho, x, last_of(x), used, bias);
  return LinearFunction::apply(x, at::TensorList(weights), detail::or_none(bias), used,
                               detail::or_none(bias_for(x, bias)));
}

at::Tensor gelu_mlp(const at::Tensor& x, const at::Tensor& fc_weight, const at::Tensor& fc_bias,
                    const at::Tensor& out_weight, const at::Tensor& out_bias) {
  constexpr const char* kWho = "gelu_mlp";
  check_linear(kWho, x, last_of(x), fc_weight, fc_bias);
  detail::require(fc_bias.defined(), kWho, "fc_bias must be given", fc_weight, fc_bias);
  check_linear(kWho, fc_weight, fc_weight.size(0), out_weight, out_bias);
  return GeluMlpFunction::apply(x, fc_weight, fc_bias, out_weight, detail::or_none(out_bias),
                                detail::weight_for(kWho, x, fc_weight), bias_for(x, fc_bias),
                                detail::weight_for(kWho, x, out_weight));
}

namespace {

void check_lora(const char* who, const at::Tensor& x, std::int64_t out, const at::Tensor& a,
                const at::Tensor& b, const LoraOptions& options) {
  detail::require(a.dim() == 2 && b.dim() == 2 && a.size(1) == last_of(x) && b.size(0) == out &&
                      a.size(0) == b.size(1),
                  who, "a must be [r, in] and b [out, r]", a, b);
  detail::require(options.dropout >= 0 && options.dropout < 1, who,
                  "dropout must be at least 0 and below 1", x);
}

}  // namespace

at::Tensor lora_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                       const at::Tensor& a, const at::Tensor& b, const LoraOptions& options) {
  constexpr const char* kWho = "lora_linear";
  check_linear(kWho, x, last_of(x), weight, bias);
  detail::require(is_nf4(weight) || weight.scalar_type() == x.scalar_type(), kWho,
                  "the base weight must have the input's dtype", x, weight);
  check_lora(kWho, x, weight.size(0), a, b, options);
  return LoraFunction::apply(x, weight, detail::or_none(bias), a, b, detail::or_none({}), Fp8Pair{},
                             options);
}

at::Tensor fp8_lora_linear(const Fp8Input& in, const Fp8Pair& base, const at::Tensor& bias,
                           const at::Tensor& a, const at::Tensor& b, const LoraOptions& options) {
  constexpr const char* kWho = "fp8_lora_linear";
  const at::Tensor& x = in.values;
  check_linear(kWho, x, last_of(x), base.matrix.values, bias);
  detail::require(base.transposed.defined(), kWho,
                  "the base needs its transpose for the gradient: to_fp8 with both",
                  base.matrix.values);
  check_lora(kWho, x, base.matrix.values.size(0), a, b, options);
  detail::check_fp8_device(kWho, x);
  return LoraFunction::apply(x, detail::or_none({}), detail::or_none(bias), a, b,
                             detail::or_none(in.amax), base, options);
}

// ---------------------------------------------------------------- groups of rows

namespace {

// Whether the weights are the matrices of one contiguous tensor.
bool are_together(at::TensorList weights) {
  const at::Tensor& first = weights.front();
  const auto bytes = static_cast<std::int64_t>(first.nbytes());
  const auto* const begin = static_cast<const char*>(first.const_data_ptr());
  std::int64_t offset = 0;
  for (const at::Tensor& one : weights) {
    if (!one.is_contiguous() || one.dtype() != first.dtype() ||
        !one.storage().is_alias_of(first.storage()) || one.const_data_ptr() != begin + offset)
      return false;
    offset += bytes;
  }
  return true;
}

// [groups, out, in], in the type of the input.
at::Tensor stacked(at::TensorList weights, at::ScalarType type) {
  const at::Tensor first = weights.front().detach();
  const auto count = static_cast<std::int64_t>(weights.size());
  const std::int64_t out = first.size(0), in = first.size(1);
  if (first.scalar_type() == type && are_together(weights))
    return first.as_strided({count, out, in}, {out * in, in, 1});
  at::Tensor all = at::empty({count, out, in}, first.options().dtype(type));
  for (std::int64_t i = 0; i < count; ++i)
    all.select(0, i).copy_(weights[static_cast<std::size_t>(i)].detach());
  return all;
}

std::vector<std::int64_t> on_host(const at::Tensor& ends) {
  const at::Tensor host = ends.to(at::kCPU, at::kLong).contiguous();
  const auto* const data = host.const_data_ptr<std::int64_t>();
  return {data, data + host.numel()};
}

// All groups in one product. Backward copies the weights again: a copy that is kept would double
// all experts of a model, and FullyShard could not free them.
struct OneProduct {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& ends,
                            at::TensorList weights) {
    variable_list saved{x, ends};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(std::move(saved));
    return at::_grouped_mm(x, stacked(weights, x.scalar_type()).transpose(1, 2), ends);
  }

  static void backward(AutogradContext* ctx, const at::Tensor& dy, at::ScalarType wanted,
                       variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &ends = saved[1];
    const at::TensorList weights = at::TensorList(saved).slice(2);
    if (ctx->needs_input_grad(0))
      gradients[0] = at::_grouped_mm(dy, stacked(weights, x.scalar_type()), ends);
    const std::size_t groups = weights.size();
    bool any = false;
    for (std::size_t i = 0; i < groups; ++i) any |= ctx->needs_input_grad(i + 2);
    if (!any) return;
    const at::Tensor dweights = at::_grouped_mm(dy.t(), x, ends);
    for (std::size_t i = 0; i < groups; ++i)
      gradients[i + 2] = dweights.select(0, static_cast<std::int64_t>(i)).to(wanted);
  }
};

// One product for each group, written to where its rows are.
struct ManyProducts {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& ends,
                            at::TensorList weights) {
    const std::vector<std::int64_t> until = on_host(ends);
    const at::Tensor y = at::empty({x.size(0), weights.front().size(0)}, x.options());
    variable_list saved{x};
    std::int64_t from = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      saved.push_back(weights[i].detach().to(x.scalar_type()));
      detail::remember_leaf(ctx, detail::leaf_name(i), weights[i]);
      const std::int64_t rows = until[i] - from;
      at::Tensor part = y.narrow(0, from, rows);
      if (rows > 0) at::mm_out(part, x.narrow(0, from, rows), saved.back().t());
      from = until[i];
    }
    ctx->saved_data["ends"] = until;
    ctx->save_for_backward(saved);
    return y;
  }

  static void backward(AutogradContext* ctx, const at::Tensor& dy, at::ScalarType wanted,
                       variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const auto until = ctx->saved_data["ends"].toIntVector();
    const at::Tensor& x = saved[0];
    const bool for_input = ctx->needs_input_grad(0);
    if (for_input) gradients[0] = at::empty(x.sizes(), x.options());
    std::int64_t from = 0;
    for (std::size_t i = 0; i < until.size(); ++i) {
      const std::int64_t rows = until[i] - from;
      const at::Tensor part = dy.narrow(0, from, rows);
      if (for_input && rows > 0) {
        at::Tensor to = gradients[0].narrow(0, from, rows);
        at::mm_out(to, part, saved[i + 1]);
      }
      if (ctx->needs_input_grad(i + 2))
        gradients[i + 2] =
            detail::weight_gradient(part, x.narrow(0, from, rows), saved[i + 1], wanted,
                                    detail::accumulation_target(ctx, detail::leaf_name(i)));
      from = until[i];
    }
  }
};

class GroupedLinearFunction : public torch::autograd::Function<GroupedLinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& ends,
                            at::TensorList weights, bool one_product) {
    const detail::NoAutocast no_autocast;
    ctx->saved_data["one_product"] = one_product;
    ctx->saved_data["groups"] = static_cast<std::int64_t>(weights.size());
    detail::save_type(ctx, "type", weights.front());
    return one_product ? OneProduct::forward(ctx, x, ends, weights)
                       : ManyProducts::forward(ctx, x, ends, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const auto groups = static_cast<std::size_t>(ctx->saved_data["groups"].toInt());
    const auto type = detail::saved_type(ctx, "type");
    variable_list gradients(groups + 3);  // x, ends, weights, one_product
    const at::Tensor dy = grads[0].contiguous();
    if (ctx->saved_data["one_product"].toBool())
      OneProduct::backward(ctx, dy, type, gradients);
    else
      ManyProducts::backward(ctx, dy, type, gradients);
    return gradients;
  }
};

bool takes_one_product(const at::Tensor& x, const at::Tensor& weight) {
  constexpr std::int64_t kUnit = 8;  // 16 bytes of bfloat16
  return x.is_cuda() && x.scalar_type() == at::kBFloat16 && weight.size(0) % kUnit == 0 &&
         weight.size(1) % kUnit == 0;
}

}  // namespace

at::Tensor grouped_linear(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                          const at::Tensor& ends, const GroupedLinearOptions& options) {
  constexpr const char* kWho = "grouped_linear";
  detail::require(!weights.empty() && weights.front().dim() == 2 && x.dim() == 2 &&
                      x.size(1) == weights.front().size(1),
                  kWho, "x must be [rows, in] and each weight [out, in]", x,
                  weights.empty() ? at::Tensor() : weights.front());
  for (const at::Tensor& weight : weights)
    detail::require(
        weight.sizes() == weights.front().sizes() && weight.dtype() == weights.front().dtype(),
        kWho, "all weights must have one shape and dtype", weights.front(), weight);
  detail::require(ends.dim() == 1 && ends.size(0) == static_cast<std::int64_t>(weights.size()) &&
                      ends.scalar_type() == at::kInt,
                  kWho, "ends must be int32, one for each weight", ends, weights.front());
  const bool one =
      x.size(0) > 0 && options.one_product.value_or(takes_one_product(x, weights.front()));
  return GroupedLinearFunction::apply(x.contiguous(), ends, at::TensorList(weights), one);
}

void place_together(const std::vector<at::Tensor>& weights) {
  if (weights.empty() || are_together(weights)) return;
  const c10::NoGradGuard no_grad;
  const at::Tensor all = at::stack(weights);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    LOCKSTEP_ASSERT(!weights[i].requires_grad());
    at::Tensor weight = weights[i];
    weight.set_data(all.select(0, static_cast<std::int64_t>(i)));
  }
}

}  // namespace lockstep::nn
