// What a reducer remembers of each parameter and of each bucket. Internal: include reducer.h.
//
//   ParameterState& p = parameters_[i];     // p.slot is its gradient's place in buckets_[p.bucket]
//
// Plain data of ReducerImpl, which alone touches it; its header says which thread may when.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/reducer.h"

namespace lockstep::parallel {

using Clock = std::chrono::steady_clock;
inline constexpr std::size_t kNoBucket = static_cast<std::size_t>(-1);

// What the buckets were planned for.
struct ParameterForm {
  bool requires_grad = false;
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::kCPU;
  std::vector<std::int64_t> sizes;
  bool operator==(const ParameterForm&) const = default;
};

struct ParameterState {
  std::string name;
  at::Tensor tensor;
  bool sparse = false;
  ParameterForm form;
  std::shared_ptr<torch::autograd::Node> accumulator;  // keeps the hook alive
  std::uintptr_t hook_key = 0;
  std::size_t bucket = kNoBucket;
  at::Tensor slot;  // the gradient's place in its bucket, in the parameter's shape

  // This pass.
  int fired = 0;
  bool counted = false;  // no longer waited for
  bool used = false;     // by this rank, since the last synchronised pass
  at::Tensor previous;   // what .grad held, for a parameter that no rank used
  int place = -1;        // in the order in which gradients came
  int expected = 1;      // gradients in one pass, as static_graph has learned
};

struct BufferState {
  std::string name;
  at::Tensor tensor;
  std::int64_t version = 0;  // after the last broadcast
};

struct BucketState {
  at::Tensor wire;  // flat and, behind it in the first bucket, one element for the change flag
  at::Tensor flat;  // the gradients
  std::vector<at::Tensor> parts;  // every rank's flat, in memory that all of them map
  std::vector<std::size_t> members;
  std::vector<std::int64_t> offsets;  // of the members' gradients in flat
  std::atomic<int> pending{0};
  Reduction reduction;
  Clock::time_point ready, launched;
};

}  // namespace lockstep::parallel
