// A linear layer that stores its weight in its checkpoint's layout, [out, in] as torch.nn.Linear or
// [in, out] as GPT-2's "Conv1D", and that can have a LoRA adapter.
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
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "lockstep/models/spec.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/nn/tensor_group.h"

namespace lockstep::models {

struct LinearOptions {
  LinearOptions(std::int64_t in, std::int64_t out) : in_features_(in), out_features_(out) {}

  TORCH_ARG(std::int64_t, in_features);
  TORCH_ARG(std::int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  TORCH_ARG(WeightLayout, layout) = WeightLayout::kOutIn;
  // Standard deviation of the initial weights. 0 draws nothing and gives zeros, for weights that
  // will be loaded.
  TORCH_ARG(double, deviation) = 0.02;
  // Type and device of both tensors.
  TORCH_ARG(at::TensorOptions, tensors);
  // Stores the weight in 4 bits (nn/nf4.h), which cannot be trained.
  TORCH_ARG(bool, nf4) = false;
  // Whether add_lora() may attach an adapter to this layer.
  TORCH_ARG(bool, adaptable) = true;
};

struct LoraShape {
  std::int64_t r = 8;
  double scaling = 1;
  double dropout = 0;
};

class LinearImpl : public torch::nn::Module {
 public:
  // Throws UsageError for sizes below 1.
  explicit LinearImpl(const LinearOptions& options);

  // x: [..., in_features], with any leading dimensions. Returns [..., out_features]. A weight of
  // another type than x (a frozen one in bf16) decides the type of the result. `with_bias` false
  // leaves the bias to the caller. `group`: the weight is a slice (nn::Sliced) whose side the
  // adapter's lora_B (cut by outputs) or lora_A (by inputs) has too; x has been through
  // nn::enter(), or the result goes through nn::leave().
  at::Tensor forward(const at::Tensor& x, bool with_bias = true,
                     const nn::TensorGroupPtr& group = {});
  // Uses lockstep::nn's kernels, in x's type and without autocasting: converts a float weight.
  at::Tensor forward_fused(const at::Tensor& x, bool with_bias = true,
                           const nn::TensorGroupPtr& group = {});
  // Multiplies with the weight in fp8; an adapter's products are in x's type.
  at::Tensor forward_fp8(const nn::Fp8Input& x, nn::Fp8Recipe recipe, bool with_bias = true);
  // The weight as [out, in]; a weight stored in fp8 is returned in bfloat16, one in 4 bits as the
  // bytes that nn::linear() takes.
  at::Tensor out_in() const;
  // Encodes a weight in the layer's layout, for a layer that stores it in 4 bits.
  void assign_nf4(const at::Tensor& values);
  // Stores a frozen weight as fp8 and its transpose: as much memory as in 16 bits, and nothing is
  // cast in a step. Sizes that fp8 does not cover stay as they are.
  void store_fp8(nn::Fp8Recipe recipe);
  bool stored_fp8() const { return stored_.matrix.defined(); }

  // A weight in 4 bits keeps its type.
  using torch::nn::Module::to;
  void to(c10::Device device, c10::ScalarType dtype, bool non_blocking = false) override;
  void to(c10::ScalarType dtype, bool non_blocking = false) override;

  // With an adapter forward adds scaling * lora_B(lora_A(dropout(x))); lora.h attaches them to a
  // whole model. The adapter is float32 beside a weight in 16 bits, where x is converted for it.
  void attach_lora(const LoraShape& shape);
  // The weight becomes W + scaling * B A and forward uses it alone. unmerge_lora() restores W to
  // the bit, from a copy that it holds until then.
  void merge_lora();
  void unmerge_lora();
  // Without the adapter from here on; a weight that is merged stays as it is.
  void remove_lora();
  bool has_lora() const { return !lora_A.is_empty(); }
  bool merged() const { return unmerged_.defined(); }

  const LinearOptions options;
  at::Tensor weight;
  at::Tensor bias;                    // undefined without one
  torch::nn::Linear lora_A{nullptr};  // [r, in_features]
  torch::nn::Linear lora_B{nullptr};  // [out_features, r]

 private:
  struct Factors {
    at::Tensor a, b;
  };
  at::Tensor base_forward(at::Tensor x, bool with_bias);
  Factors factors(const nn::TensorGroupPtr& group) const;
  bool cut_by_inputs() const;
  at::Tensor dropped(const at::Tensor& x, const nn::TensorGroupPtr& group) const;
  // A frozen weight as lora_linear() takes it.
  at::Tensor frozen_for(const at::Tensor& x) const;
  // The weight in its layout, converted to a type that can be multiplied.
  at::Tensor usable_weight() const;
  const nn::Fp8Pair& stored() const;

  LoraShape lora_{};
  nn::Fp8Pair stored_;  // of [out, in]; its matrix is where `weight` is
  at::Tensor unmerged_;
};
TORCH_MODULE(Linear);

}  // namespace lockstep::models
