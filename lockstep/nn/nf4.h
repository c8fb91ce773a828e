// A frozen weight of a linear layer in 4 bits (lockstep/kernels/nf4.h), which nn::linear() and
// nn::lora_linear() take in place of a tensor of floats.
//
//   const at::Tensor bytes = nn::to_nf4(weight);      // [out, in] -> uint8 [out, width]
//   const at::Tensor y = nn::linear(x, bytes, bias);  // in the type of x
//
// It is decoded to x's type right before each product, in forward and in backward, and the decoded
// weight is freed after it. Functions on tensors; one thread at a time per tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace lockstep::nn {

// The sizes of what to_nf4() returns.
std::vector<std::int64_t> nf4_sizes(std::int64_t out, std::int64_t in);
// Encodes on the CPU, and returns the bytes there. UsageError for values that are not finite.
at::Tensor to_nf4(const at::Tensor& weight);
inline bool is_nf4(const at::Tensor& weight) {
  return weight.scalar_type() == at::kByte;
}
// About how many values the bytes of a large weight hold, for figures that are shown.
inline std::int64_t nf4_values(const at::Tensor& bytes) {
  return bytes.numel() * 64 / 33;
}
// [out, in]: the same bits on every device. UsageError on a GPU without our kernels.
at::Tensor from_nf4(const at::Tensor& bytes, std::int64_t in, at::ScalarType type);

}  // namespace lockstep::nn
