// The operations as c10d's process groups want them: lists of one tensor and a struct of options.
// For the backends that stand on c10d; what differs between them stays in their own files.
//
//   follow(state, c10d_calls::all_reduce(*group, std::move(tensor), op));
//
// Free functions; they start the operation and return without waiting.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/types.h"
#include "lockstep/core/error.h"

namespace lockstep::detail::c10d_calls {

using C10dWork = c10::intrusive_ptr<c10d::Work>;

inline c10d::ReduceOp::RedOpType translate(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::kAnd:
      return c10d::ReduceOp::BAND;
    case ReduceOp::kOr:
      return c10d::ReduceOp::BOR;
    case ReduceOp::kXor:
      return c10d::ReduceOp::BXOR;
  }
  LOCKSTEP_ASSERT(false);
  return c10d::ReduceOp::UNUSED;
}

inline C10dWork all_reduce(c10d::Backend& group, at::Tensor tensor, ReduceOp op) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = translate(op);
  return group.allreduce(tensors, options);
}

inline C10dWork reduce(c10d::Backend& group, at::Tensor tensor, int root, ReduceOp op) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::ReduceOptions options;
  options.reduceOp = translate(op);
  options.rootRank = root;
  return group.reduce(tensors, options);
}

inline C10dWork broadcast(c10d::Backend& group, at::Tensor tensor, int root) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return group.broadcast(tensors, options);
}

// The lists are given on root only.
inline C10dWork gather(c10d::Backend& group, std::vector<at::Tensor> outputs, at::Tensor input,
                       int root) {
  std::vector<std::vector<at::Tensor>> lists;
  if (!outputs.empty()) lists.push_back(std::move(outputs));
  std::vector<at::Tensor> inputs{std::move(input)};
  c10d::GatherOptions options;
  options.rootRank = root;
  return group.gather(lists, inputs, options);
}

inline C10dWork scatter(c10d::Backend& group, at::Tensor output, std::vector<at::Tensor> inputs,
                        int root) {
  std::vector<std::vector<at::Tensor>> lists;
  if (!inputs.empty()) lists.push_back(std::move(inputs));
  std::vector<at::Tensor> outputs{std::move(output)};
  c10d::ScatterOptions options;
  options.rootRank = root;
  return group.scatter(outputs, lists, options);
}

}  // namespace lockstep::detail::c10d_calls
