#include "lockstep/models/linear.h"

#include <torch/torch.h>

#include "lockstep/core/error.h"

namespace lockstep::models {
namespace {

at::Tensor initial_weight(const LinearOptions& o) {
  if (o.in_features() < 1 || o.out_features() < 1)
    throw UsageError("linear", "a layer of {} inputs and {} outputs. Both must be positive.",
                     o.in_features(), o.out_features());
  const bool in_first = o.layout() == WeightLayout::kInOut;
  const auto weight = in_first ? torch::empty({o.in_features(), o.out_features()})
                               : torch::empty({o.out_features(), o.in_features()});
  return o.deviation() == 0 ? weight.zero_() : weight.normal_(0, o.deviation());
}

}  // namespace

LinearImpl::LinearImpl(const LinearOptions& given)
    : options(given), weight(register_parameter("weight", initial_weight(given))) {
  bias = register_parameter("bias",
                            options.bias() ? torch::zeros({options.out_features()}) : at::Tensor());
}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  if (options.layout() == WeightLayout::kOutIn) return torch::linear(x, weight, bias);
  auto shape = x.sizes().vec();
  shape.back() = options.out_features();
  const auto rows = x.reshape({-1, options.in_features()});
  const auto y = bias.defined() ? torch::addmm(bias, rows, weight) : torch::mm(rows, weight);
  return y.view(shape);
}

}  // namespace lockstep::models
