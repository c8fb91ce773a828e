// Tensors as the engine's arrays: checks, and translations of types and reductions.
//
//   const Reduction how = reduction_of("allreduce", data, opts.reduceOp);
//   engine.all_reduce(data.mutable_data_ptr(), count_of(data), how.dtype, how.op);
//
// For the backend's one source file: everything is inline.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/view_as_real.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "lockstep/comm/shm/engine.h"
#include "lockstep/comm/shm/tensor_types.h"

namespace lockstep::python {

using c10d::ReduceOp;
using shm::ConstPart;
using shm::DType;
using shm::Op;
using shm::Part;
using Tensors = std::vector<at::Tensor>;

inline std::optional<Op> translate(const ReduceOp& op) {
  switch (static_cast<ReduceOp::RedOpType>(op)) {
    case ReduceOp::SUM:
      return Op::kSum;
    case ReduceOp::AVG:
      return Op::kAvg;
    case ReduceOp::PRODUCT:
      return Op::kProduct;
    case ReduceOp::MIN:
      return Op::kMin;
    case ReduceOp::MAX:
      return Op::kMax;
    case ReduceOp::BAND:
      return Op::kAnd;
    case ReduceOp::BOR:
      return Op::kOr;
    case ReduceOp::BXOR:
      return Op::kXor;
    default:
      return std::nullopt;
  }
}

inline void check(const char* what, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "[lockstep_torch] ", what, ": an undefined tensor.");
  TORCH_CHECK(tensor.device().is_cpu(), "[lockstep_torch] ", what, ": a tensor on ",
              tensor.device(), ". This backend is for the CPU; use nccl for CUDA tensors, e.g. ",
              "backend=\"cpu:lockstep,cuda:nccl\".");
  TORCH_CHECK(tensor.layout() == at::kStrided, "[lockstep_torch] ", what, ": a ", tensor.layout(),
              " tensor. all_reduce alone takes sparse tensors (COO); make it dense.");
}

inline void check(const char* what, const Tensors& tensors) {
  TORCH_CHECK(!tensors.empty(), "[lockstep_torch] ", what, ": an empty list of tensors.");
  for (const auto& tensor : tensors) check(what, tensor);
}

inline void check_single(const char* what, const Tensors& tensors) {
  check(what, tensors);
  TORCH_CHECK(tensors.size() == 1, "[lockstep_torch] ", what, ": ", tensors.size(),
              " tensors where one is expected.");
}

inline void check_same_kind(const char* what, const Tensors& tensors, const at::Tensor& model) {
  for (const auto& tensor : tensors) {
    check(what, tensor);
    TORCH_CHECK(tensor.scalar_type() == model.scalar_type() && tensor.numel() == model.numel(),
                "[lockstep_torch] ", what, ": tensors of different size or type (",
                tensor.toString(), " of ", tensor.numel(), " elements beside ", model.toString(),
                " of ", model.numel(), ").");
  }
}

// Complex numbers add and average as pairs of reals.
inline at::Tensor as_reals(const char* what, const at::Tensor& tensor, const ReduceOp& op) {
  if (!tensor.is_complex()) return tensor;
  TORCH_CHECK(op == ReduceOp::SUM || op == ReduceOp::AVG, "[lockstep_torch] ", what,
              ": complex tensors can be summed and averaged only.");
  return at::view_as_real(tensor);
}

struct Reduction {
  DType dtype;
  Op op;
};

inline Reduction reduction_of(const char* what, const at::Tensor& tensor, const ReduceOp& op) {
  const auto dtype = shm::dtype_of(tensor.scalar_type());
  const auto how = translate(op);
  TORCH_CHECK(how.has_value(), "[lockstep_torch] ", what,
              ": this reduction is nccl's own (PREMUL_SUM). Scale the tensor and use SUM.");
  TORCH_CHECK(dtype && shm::supports(*dtype, *how), "[lockstep_torch] ", what, ": there is no ",
              shm::name(*how), " of ", tensor.scalar_type(),
              ". Convert the tensor, or choose another reduction.");
  return {*dtype, *how};
}

inline std::size_t count_of(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel());
}
inline Part part_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.nbytes()};
}
inline ConstPart const_part_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.nbytes()};
}

// gloo reduces several tensors of one rank like those of several ranks.
inline at::Tensor combine(const at::Tensor& a, const at::Tensor& b, const ReduceOp& op) {
  switch (static_cast<ReduceOp::RedOpType>(op)) {
    case ReduceOp::SUM:
      return a + b;
    case ReduceOp::PRODUCT:
      return a * b;
    case ReduceOp::MIN:
      return at::minimum(a, b);
    case ReduceOp::MAX:
      return at::maximum(a, b);
    case ReduceOp::BAND:
      return at::bitwise_and(a, b);
    case ReduceOp::BOR:
      return at::bitwise_or(a, b);
    case ReduceOp::BXOR:
      return at::bitwise_xor(a, b);
    default:
      TORCH_CHECK(false, "[lockstep_torch] allreduce: only one tensor can be averaged at a time.");
  }
}

}  // namespace lockstep::python
