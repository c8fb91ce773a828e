#include "lockstep/nn/grouped_linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/nn/on_cuda.h"
#include "lockstep/nn/products.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

// All groups in one product. Backward makes the copy of the weights again: all experts of a model
// would be there twice until then, and FullyShard could not free them.
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
    ctx->saved_data["type"] = static_cast<std::int64_t>(weights.front().scalar_type());
    return one_product ? OneProduct::forward(ctx, x, ends, weights)
                       : ManyProducts::forward(ctx, x, ends, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const auto groups = static_cast<std::size_t>(ctx->saved_data["groups"].toInt());
    const auto type = static_cast<at::ScalarType>(ctx->saved_data["type"].toInt());
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
