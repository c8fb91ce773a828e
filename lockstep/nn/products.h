// Matrix products with features that ATen's lack: accumulation in float into an existing tensor,
// activations beside the product, and products of fp8 matrices. Private to lockstep/nn.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/nn/fp8.h"

namespace lockstep::nn::detail {

constexpr std::int64_t kWorkspaceBytes = std::int64_t{32} << 20;  // for cuBLASLt

// into += a b, or into = a b with add = false. `into` is contiguous, float or double.
void sum_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& into, bool add);

// The largest magnitude of a gradient, passed from the backward that makes it to its consumer.
struct GradientAmax : torch::CustomClassHolder {
  at::Tensor value;  // undefined: nobody has computed it
};
using GradientAmaxPtr = c10::intrusive_ptr<GradientAmax>;  // null: it is not handed over
void save_gradient_amax(torch::autograd::AutogradContext* ctx, const GradientAmaxPtr& amax);
GradientAmaxPtr gradient_amax(torch::autograd::AutogradContext* ctx);

// The dtype of a tensor for backward; float for an undefined one.
inline void save_type(torch::autograd::AutogradContext* ctx, const char* name,
                      const at::Tensor& tensor) {
  ctx->saved_data[name] =
      static_cast<std::int64_t>(tensor.defined() ? tensor.scalar_type() : at::kFloat);
}
inline at::ScalarType saved_type(torch::autograd::AutogradContext* ctx, const char* name) {
  return static_cast<at::ScalarType>(ctx->saved_data[name].toInt());
}

// nn::swiglu(), whose backward leaves the largest magnitude of its result in `to`, if there is one.
at::Tensor swiglu(const at::Tensor& gate_up, at::Tensor* amax, const GradientAmaxPtr& to);

// The weight of a linear layer in the dtype of x, with rows of zeros below it up to `rows`.
at::Tensor weight_for(const char* who, const at::Tensor& x, const at::Tensor& weight,
                      std::int64_t rows = 0);

// The gradient dy^T x of a weight [out, in]; undefined when it was added to `accumulated`.
at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight_used,
                           at::ScalarType wanted, const at::Tensor& accumulated);

// Adds the gradients of the second and later micro-batches of a window inside the matrix product,
// where autograd would compute a product of its own and add that. Forward remembers the leaf that
// `weight` is, or is the transpose of. Backward gets the leaf's .grad in the layout of `weight`, if
// autograd would add to it in place now and nothing else waits for the gradient; otherwise an
// undefined tensor.
void remember_leaf(torch::autograd::AutogradContext* ctx, const std::string& name,
                   const at::Tensor& weight);
at::Tensor accumulation_target(torch::autograd::AutogradContext* ctx, const std::string& name);
// A name for one of several leaves.
inline std::string leaf_name(std::size_t i) {
  return "leaf" + std::to_string(i);
}

struct Fp8Extras {
  bool add = false;   // to what is in `to`
  bool fast = false;  // sums in fewer bits, for a forward
  at::Tensor bias{};  // in the dtype of `to`; not with `add`
};

// to = a b^T [+ to or bias] for a [m, k] and b [n, k]; `to` is contiguous.
void fp8_product(const Fp8Matrix& a, const Fp8Matrix& b, at::Tensor to, const Fp8Extras& extras);

// UsageError where the device has no fp8; one line in the log where it is a CPU.
void check_fp8_device(const char* who, const at::Tensor& x);

}  // namespace lockstep::nn::detail
