// Products of fp8 matrices. Private to lockstep/nn.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/nn/fp8.h"

namespace lockstep::nn::detail {

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
