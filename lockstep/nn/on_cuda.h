// What the operations of this folder share: calls of the CUDA kernels with tensors, where they
// support them, and matrix products.
//
//   if (const auto cuda = OnCuda::with({x, weight})) {
//     cuda->check(cuda->table().swiglu_forward(args, cuda->stream()), "swiglu");
//   } else { ... the same with ATen's operations ... }
//
// Private to lockstep/nn.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include "lockstep/kernels/cuda/table.h"

namespace lockstep::nn {
struct Fp8Matrix;  // fp8.h
}  // namespace lockstep::nn

namespace lockstep::nn::detail {

using kernels::cuda::Type;

class OnCuda {
 public:
  // Null where the kernels do not apply: a device other than CUDA, a type other than float,
  // bfloat16 and float16, a tensor that is empty, not contiguous or not aligned to 16 bytes, or no
  // kernels in this process. Undefined tensors are skipped. Makes the device current.
  static std::unique_ptr<const OnCuda> with(std::initializer_list<at::Tensor> tensors);

  const kernels::cuda::Table& table() const { return *table_; }
  void* stream() const { return stream_; }
  at::Tensor floats(std::int64_t count) const;  // scratch
  at::Tensor bytes(std::int64_t count) const;
  // Throws Error naming `what` when a kernel could not be started; counts started kernels.
  void check(int status, const char* what) const;
  static std::int64_t kernels_started();  // in this process, for tests

 private:
  OnCuda(const kernels::cuda::Table* table, c10::Device device);

  const kernels::cuda::Table* table_;
  c10::Device device_;
  c10::DeviceGuard guard_;
  void* stream_;
};

Type type_of(const at::Tensor& tensor);  // for one that with() has accepted

inline kernels::cuda::Fp8 fp8_kind(at::ScalarType type) {
  return type == at::kFloat8_e4m3fn ? kernels::cuda::Fp8::kE4m3 : kernels::cuda::Fp8::kE5m2;
}

// The largest magnitude of a tensor, float [1]: 0 where it is empty, nan where there is one.
at::Tensor amax_of(const at::Tensor& tensor);
// Zeroed memory in which a kernel raises the magnitude. Null where `amax` is.
std::uint32_t* zeroed_amax(at::Tensor* amax, const at::Tensor& like);

// Null for an undefined tensor.
const void* data(const at::Tensor& tensor);
void* mutable_data(const at::Tensor& tensor);

// The type that sums are computed in: double for double, otherwise float.
at::ScalarType sum_type(const at::Tensor& tensor);

// Disables autocasting inside an operation, so that tensors keep their dtype.
struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// torch::autograd::Function takes no undefined tensors: or_none() passes a placeholder instead, and
// from_none() converts it back.
at::Tensor or_none(const at::Tensor& tensor);
at::Tensor from_none(const at::Tensor& tensor);

// The tensor as a matrix [rows, last dimension].
at::Tensor flat(const at::Tensor& tensor);
// Throws UsageError unless `ok`.
void require(bool ok, const char* who, const char* what, const at::Tensor& a,
             const at::Tensor& b = {});

// x summed over the rows of a matrix, in sum_type().
at::Tensor column_sum(const at::Tensor& x);
// tensor *= factor, a tensor of one element; reads and writes nothing where that is 1.
void scale_(const at::Tensor& tensor, const at::Tensor& factor);

// ---------------------------------------------------------------- matrix products
//
// With features that ATen's lack: accumulation in float into an existing tensor, activations beside
// the product, and products of fp8 matrices.

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
