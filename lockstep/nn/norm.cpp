// Residual addition with LayerNorm and RMSNorm.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/nn/functional.h"
#include "lockstep/nn/on_cuda.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct NormInput {
  at::Tensor residual, delta, delta_bias, weight, bias;
  double eps;
  bool rms;
  at::ScalarType dtype;  // delta's and the norm's: the residual's, or another beside float
  at::Tensor* amax;      // of the norm; or null
};
struct NormOutput {
  at::Tensor x, normed, mean, rstd;  // mean and rstd [rows, 1]
};

// The kernels take parameters of one type: float or the norm's.
bool has_one_weight_type(const NormInput& in) {
  const auto type = in.weight.scalar_type();
  const auto same = [type](const at::Tensor& t) { return !t.defined() || t.scalar_type() == type; };
  return (type == at::kFloat || type == in.dtype) && same(in.bias) && same(in.delta_bias);
}

NormOutput norm_forward_aten(const NormInput& in) {
  const auto type = detail::sum_type(in.residual);
  NormOutput out;
  out.x = in.residual;
  if (in.delta.defined()) {
    at::Tensor delta = in.delta.to(type);
    if (in.delta_bias.defined()) delta = delta + in.delta_bias.to(type);
    out.x = (in.residual.to(type) + delta).to(in.residual.scalar_type());
  }
  at::Tensor centred = out.x.to(type);
  if (!in.rms) {
    out.mean = centred.mean(-1, /*keepdim=*/true);
    centred = centred - out.mean;
  }
  out.rstd = at::rsqrt(centred.square().mean(-1, /*keepdim=*/true) + in.eps);
  at::Tensor normed = centred * out.rstd * in.weight.to(type);
  if (in.bias.defined()) normed = normed + in.bias.to(type);
  out.normed = normed.to(in.dtype);
  if (in.amax != nullptr) *in.amax = detail::amax_of(out.normed);
  return out;
}

NormOutput norm_forward(const NormInput& in) {
  const auto cuda =
      detail::OnCuda::with({in.residual, in.delta, in.delta_bias, in.weight, in.bias});
  const auto columns = static_cast<int>(in.residual.size(-1));
  if (!cuda || !has_one_weight_type(in) || !cuda->table().norm_covers(columns))
    return norm_forward_aten(in);
  const std::int64_t rows = in.residual.size(0);
  NormOutput out;
  out.x = in.delta.defined() ? at::empty_like(in.residual) : in.residual;
  out.normed = at::empty_like(in.residual, in.residual.options().dtype(in.dtype));
  if (!in.rms) out.mean = cuda->floats(rows).view({rows, 1});
  out.rstd = cuda->floats(rows).view({rows, 1});
  cuda->check(
      cuda->table().norm_forward({.residual = detail::data(in.residual),
                                  .delta = detail::data(in.delta),
                                  .delta_bias = detail::data(in.delta_bias),
                                  .weight = detail::data(in.weight),
                                  .bias = detail::data(in.bias),
                                  .x = in.delta.defined() ? detail::mutable_data(out.x) : nullptr,
                                  .normed = detail::mutable_data(out.normed),
                                  .amax = detail::zeroed_amax(in.amax, in.residual),
                                  .mean = static_cast<float*>(detail::mutable_data(out.mean)),
                                  .rstd = out.rstd.mutable_data_ptr<float>(),
                                  .rows = rows,
                                  .columns = columns,
                                  .eps = static_cast<float>(in.eps),
                                  .type = detail::type_of(out.normed),
                                  .residual_type = detail::type_of(in.residual),
                                  .weight_type = detail::type_of(in.weight),
                                  .rms = in.rms},
                                 cuda->stream()),
      "norm");
  return out;
}

struct NormGrads {
  at::Tensor dx, ddelta;                   // ddelta: dx in the norm's dtype; undefined: dx itself
  at::Tensor dweight, dbias, ddelta_bias;  // in float
};

// `dnormed` is defined, `dsum` may be undefined.
NormGrads norm_backward_aten(const at::Tensor& dsum, const at::Tensor& dnormed,
                             const NormOutput& saved, const at::Tensor& weight) {
  const auto type = detail::sum_type(saved.x);
  at::Tensor xhat = saved.x.to(type);
  if (saved.mean.defined()) xhat = xhat - saved.mean;
  xhat = xhat * saved.rstd;
  const at::Tensor dy = dnormed.to(type);
  const at::Tensor g = dy * weight.to(type);
  at::Tensor dx = g - xhat * (g * xhat).mean(-1, /*keepdim=*/true);
  if (saved.mean.defined()) dx = dx - g.mean(-1, /*keepdim=*/true);
  dx = dx * saved.rstd;
  if (dsum.defined()) dx = dx + dsum.to(type);
  return {dx.to(saved.x.scalar_type()), {}, (dy * xhat).sum(0), dy.sum(0), dx.sum(0)};
}

// `has_delta`, `sums_dx`: the gradients of delta and of its bias are wanted.
NormGrads norm_backward(const at::Tensor& dsum, const at::Tensor& dnormed, const NormOutput& saved,
                        const at::Tensor& weight, bool has_delta, bool sums_dx) {
  const auto cuda = detail::OnCuda::with({saved.x, dsum, dnormed, weight, saved.rstd});
  const auto columns = static_cast<int>(saved.x.size(1));
  const auto type = dnormed.scalar_type();
  const bool fits = (weight.scalar_type() == at::kFloat || weight.scalar_type() == type) &&
                    (saved.x.scalar_type() == at::kFloat || saved.x.scalar_type() == type) &&
                    (!dsum.defined() || dsum.scalar_type() == saved.x.scalar_type());
  if (!cuda || !fits || !cuda->table().norm_covers(columns))
    return norm_backward_aten(dsum, dnormed, saved, weight);
  const std::int64_t rows = saved.x.size(0);
  const at::Tensor partials = cuda->floats(cuda->table().norm_partials(rows, columns));
  const bool rms = !saved.mean.defined();
  NormGrads grads{at::empty_like(saved.x), {}, cuda->floats(columns), {}, {}};
  if (has_delta && type != saved.x.scalar_type()) grads.ddelta = at::empty_like(dnormed);
  if (!rms) grads.dbias = cuda->floats(columns);
  if (sums_dx) grads.ddelta_bias = cuda->floats(columns);
  cuda->check(cuda->table().norm_backward(
                  {.dnormed = detail::data(dnormed),
                   .dresidual = detail::data(dsum),
                   .x = detail::data(saved.x),
                   .weight = detail::data(weight),
                   .mean = static_cast<const float*>(detail::data(saved.mean)),
                   .rstd = saved.rstd.const_data_ptr<float>(),
                   .dx = detail::mutable_data(grads.dx),
                   .ddelta = detail::mutable_data(grads.ddelta),
                   .dweight = grads.dweight.mutable_data_ptr<float>(),
                   .dbias = static_cast<float*>(detail::mutable_data(grads.dbias)),
                   .ddelta_bias = static_cast<float*>(detail::mutable_data(grads.ddelta_bias)),
                   .partials = partials.mutable_data_ptr<float>(),
                   .rows = rows,
                   .columns = columns,
                   .type = detail::type_of(dnormed),
                   .residual_type = detail::type_of(saved.x),
                   .weight_type = detail::type_of(weight),
                   .rms = rms},
                  cuda->stream()),
              "norm backward");
  return grads;
}

// Outputs: sum (only with delta) and normed.
class NormFunction : public torch::autograd::Function<NormFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& residual,
                               const at::Tensor& delta_or_none,
                               const at::Tensor& delta_bias_or_none, const at::Tensor& weight,
                               const at::Tensor& bias_or_none, double eps, bool rms,
                               at::ScalarType dtype, at::Tensor* amax) {
    const at::Tensor delta = detail::from_none(delta_or_none);
    const at::Tensor delta_bias = detail::from_none(delta_bias_or_none);
    const at::Tensor bias = detail::from_none(bias_or_none);
    const detail::NoAutocast no_autocast;
    const auto rows_of = [](const at::Tensor& t) {
      return t.defined() ? detail::flat(t).contiguous() : t;
    };
    const NormOutput out = norm_forward(
        {rows_of(residual), rows_of(delta), delta_bias, weight, bias, eps, rms, dtype, amax});
    ctx->set_materialize_grads(false);
    ctx->saved_data["type"] = static_cast<std::int64_t>(dtype);
    ctx->saved_data["bias"] = bias.defined();
    detail::save_type(ctx, "bias_type", bias);
    detail::save_type(ctx, "delta_bias_type", delta_bias);
    const at::Tensor normed = out.normed.view(residual.sizes());
    if (!delta.defined()) {
      ctx->save_for_backward({residual, weight, out.mean, out.rstd});
      return {normed};
    }
    const at::Tensor sum = out.x.view(residual.sizes());
    ctx->save_for_backward({sum, weight, out.mean, out.rstd});
    return {sum, normed};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const auto saved = ctx->get_saved_variables();
    const bool has_delta = grads.size() == 2;
    const at::Tensor dsum = has_delta ? grads[0] : at::Tensor();
    const at::Tensor& dnormed = grads.back();
    const bool sums_dx = has_delta && ctx->needs_input_grad(2);
    NormGrads out;
    if (dnormed.defined()) {
      const auto rows_of = [](const at::Tensor& t) {
        return t.defined() ? detail::flat(t).contiguous() : t;
      };
      out =
          norm_backward(rows_of(dsum), rows_of(dnormed),
                        {rows_of(saved[0]), {}, saved[2], saved[3]}, saved[1], has_delta, sums_dx);
      out.dx = out.dx.view(saved[0].sizes());
    } else if (dsum.defined()) {
      out.dx = dsum;
      if (sums_dx) out.ddelta_bias = detail::column_sum(detail::flat(dsum).contiguous());
    }
    const auto as = [&](const at::Tensor& grad, std::size_t input, const at::Tensor& like) {
      return grad.defined() && ctx->needs_input_grad(input) ? grad.to(like.scalar_type())
                                                            : at::Tensor();
    };
    const auto typed = [&](const at::Tensor& grad, std::size_t input, const char* type) {
      return grad.defined() && ctx->needs_input_grad(input) ? grad.to(detail::saved_type(ctx, type))
                                                            : at::Tensor();
    };
    const bool has_bias = ctx->saved_data["bias"].toBool();
    if (has_delta && out.dx.defined()) {
      const auto type = detail::saved_type(ctx, "type");
      out.ddelta = out.ddelta.defined() ? out.ddelta.view(saved[0].sizes()) : out.dx.to(type);
    }
    return {out.dx,
            out.ddelta,
            sums_dx ? typed(out.ddelta_bias, 2, "delta_bias_type") : at::Tensor(),
            as(out.dweight, 3, saved[1]),
            has_bias ? typed(out.dbias, 4, "bias_type") : at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

void check_norm(const char* who, const at::Tensor& x, const at::Tensor& weight,
                const at::Tensor& bias) {
  detail::require(x.defined() && x.dim() > 0 && x.size(-1) > 0, who,
                  "the input needs a last dimension that is not empty", x);
  detail::require(weight.defined() && weight.dim() == 1 && weight.size(0) == x.size(-1), who,
                  "weight must have the size of the last dimension", x, weight);
  detail::require(!bias.defined() || bias.sizes() == weight.sizes(), who,
                  "a bias must have the size of the last dimension", x, bias);
}

// Beside a float tensor the norm may have another type.
bool may_be(at::ScalarType type, const at::Tensor& x) {
  return type == x.scalar_type() || (x.scalar_type() == at::kFloat && c10::elementSize(type) == 2);
}

NormedSum add_norm(const char* who, const NormInput& in) {
  check_norm(who, in.residual, in.weight, in.bias);
  check_norm(who, in.residual, in.weight, in.delta_bias);
  detail::require(in.delta.defined() && in.delta.sizes() == in.residual.sizes() &&
                      may_be(in.delta.scalar_type(), in.residual),
                  who,
                  "residual and delta must have one shape and one dtype, or the residual is float",
                  in.residual, in.delta);
  using detail::or_none;
  auto out = NormFunction::apply(in.residual, or_none(in.delta), or_none(in.delta_bias), in.weight,
                                 or_none(in.bias), in.eps, in.rms, in.delta.scalar_type(), in.amax);
  return {out[0], out[1]};
}

at::Tensor norm(const char* who, const NormInput& in) {
  check_norm(who, in.residual, in.weight, in.bias);
  detail::require(may_be(in.dtype, in.residual), who,
                  "dtype must be the input's, or of 16 bits beside a float input", in.residual);
  const at::Tensor none = detail::or_none({});
  return NormFunction::apply(in.residual, none, none, in.weight, detail::or_none(in.bias), in.eps,
                             in.rms, in.dtype, in.amax)[0];
}

}  // namespace

NormedSum add_layer_norm(const at::Tensor& residual, const at::Tensor& delta,
                         const at::Tensor& delta_bias, const at::Tensor& weight,
                         const at::Tensor& bias, double eps, at::Tensor* amax) {
  return add_norm("add_layer_norm",
                  {residual, delta, delta_bias, weight, bias, eps, false, {}, amax});
}

NormedSum add_rms_norm(const at::Tensor& residual, const at::Tensor& delta,
                       const at::Tensor& delta_bias, const at::Tensor& weight, double eps,
                       at::Tensor* amax) {
  return add_norm("add_rms_norm", {residual, delta, delta_bias, weight, {}, eps, true, {}, amax});
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps, std::optional<at::ScalarType> dtype, at::Tensor* amax) {
  return norm("layer_norm",
              {x, {}, {}, weight, bias, eps, false, dtype.value_or(x.scalar_type()), amax});
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    std::optional<at::ScalarType> dtype, at::Tensor* amax) {
  return norm("rms_norm",
              {x, {}, {}, weight, {}, eps, true, dtype.value_or(x.scalar_type()), amax});
}

}  // namespace lockstep::nn
