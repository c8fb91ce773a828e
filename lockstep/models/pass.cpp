#include "lockstep/models/pass.h"

#include <torch/torch.h>

namespace lockstep::models::detail {

at::Tensor activate(Activation activation, const at::Tensor& x) {
  switch (activation) {
    case Activation::kGeluTanh:
      return torch::gelu(x, "tanh");
    case Activation::kGelu:
      return torch::gelu(x);
    case Activation::kRelu:
      return torch::relu(x);
    case Activation::kSilu:
      break;
  }
  return torch::silu(x);
}

Linear make_linear(const Projection& projection, const ParameterOptions& parameters,
                   bool adaptable) {
  LinearOptions options(projection.in, projection.out());
  options.bias(projection.bias).layout(projection.layout).deviation(projection.deviation);
  options.adaptable(adaptable);
  if (!parameters.draw)
    options.deviation(0).tensors(
        at::TensorOptions().dtype(parameters.dtype).device(parameters.device));
  return Linear(options);
}

void draw(at::Tensor weight, double deviation) {
  const torch::NoGradGuard no_grad;
  weight.normal_(0, deviation);
}

}  // namespace lockstep::models::detail
