// Calls the CUDA kernels with tensors, where they support them.
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

#include <cstdint>
#include <initializer_list>
#include <memory>

#include "lockstep/kernels/cuda/table.h"

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

}  // namespace lockstep::nn::detail
