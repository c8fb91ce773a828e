// Matrix products with features that ATen's lack: accumulation in float into an existing tensor,
// and GELU inside the product. Private to lockstep/nn.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep::nn::detail {

// into += a b, or into = a b with add = false. `into` is contiguous, float or double.
void sum_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& into, bool add);

// The weight of a linear layer in the dtype of x, with rows of zeros below it up to `rows`.
at::Tensor weight_for(const char* who, const at::Tensor& x, const at::Tensor& weight,
                      std::int64_t rows = 0);

// The gradient dy^T x of a weight [out, in]; undefined when it was added to `accumulated`.
at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight_used,
                           at::ScalarType wanted, const at::Tensor& accumulated);

// Throws UsageError unless `accumulated` is undefined or a float tensor shaped like the weight.
void check_accumulated(const char* who, const at::Tensor& weight, const at::Tensor& accumulated);

}  // namespace lockstep::nn::detail
