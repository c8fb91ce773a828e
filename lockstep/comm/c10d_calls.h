// Code shared by the backends that wrap c10d's process groups, gloo and nccl.
//
//   class GlooBackend : public C10dBackend { ... };
//
// The free functions call an operation as c10d wants it, with lists of one tensor and a struct of
// options; they start it and return without waiting.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/backend.h"
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

namespace lockstep::detail {

class C10dBackend : public Backend {
 public:
  bool reduces(at::ScalarType dtype, ReduceOp op) const override {
    switch (dtype) {
      case at::kByte:
      case at::kChar:
      case at::kInt:
      case at::kLong:
        return op != ReduceOp::kAvg;
      case at::kHalf:
      case at::kBFloat16:
      case at::kFloat:
      case at::kDouble:
        return !is_bitwise(op);
      default:
        return false;
    }
  }
  void all_reduce(const State& state, at::Tensor tensor, ReduceOp op) override {
    follow(state, c10d_calls::all_reduce(group(), std::move(tensor), op));
  }
  void reduce(const State& state, at::Tensor tensor, int root, ReduceOp op) override {
    follow(state, c10d_calls::reduce(group(), std::move(tensor), root, op));
  }
  void broadcast(const State& state, at::Tensor tensor, int root) override {
    follow(state, c10d_calls::broadcast(group(), std::move(tensor), root));
  }
  void all_gather(const State& state, at::Tensor output, at::Tensor input) override {
    follow(state, group()._allgather_base(output, input));
  }
  void gather(const State& state, std::vector<at::Tensor> outputs, at::Tensor input,
              int root) override {
    follow(state, c10d_calls::gather(group(), std::move(outputs), std::move(input), root));
  }
  void scatter(const State& state, at::Tensor output, std::vector<at::Tensor> inputs,
               int root) override {
    follow(state, c10d_calls::scatter(group(), std::move(output), std::move(inputs), root));
  }

 protected:
  virtual c10d::Backend& group() = 0;
  // Completes the state when the work is complete.
  virtual void follow(const State& state, c10d_calls::C10dWork work) = 0;
};

}  // namespace lockstep::detail
