// A linear layer that stores its weight as the checkpoint it belongs to does: [out, in] as
// torch.nn.Linear, or [in, out] as GPT-2's "Conv1D".
//
//   lockstep::models::Linear project{
//       lockstep::models::LinearOptions(768, 2304).layout(WeightLayout::kInOut)};
//   auto y = project(x);                                   // [..., 768] -> [..., 2304]
//
// The weight is drawn from a normal distribution by LibTorch's default generator, the bias is zero.
// One thread at a time.
#pragma once

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace lockstep::models {

enum class WeightLayout { kOutIn, kInOut };

struct LinearOptions {
  LinearOptions(std::int64_t in, std::int64_t out) : in_features_(in), out_features_(out) {}

  TORCH_ARG(std::int64_t, in_features);
  TORCH_ARG(std::int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  TORCH_ARG(WeightLayout, layout) = WeightLayout::kOutIn;
  // Of the initial weights. 0 draws nothing and gives zeros, for weights that are loaded.
  TORCH_ARG(double, deviation) = 0.02;
};

class LinearImpl : public torch::nn::Module {
 public:
  // Throws UsageError for sizes below 1.
  explicit LinearImpl(const LinearOptions& options);

  // x: [..., in_features], with any leading dimensions. Returns [..., out_features].
  at::Tensor forward(const at::Tensor& x);

  const LinearOptions options;
  at::Tensor weight;
  at::Tensor bias;  // undefined without one
};
TORCH_MODULE(Linear);

}  // namespace lockstep::models
