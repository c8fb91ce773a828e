// TensorSlices: this rank's slices of a model's weights, in place of the whole ones. Internal to
// TensorParallel; knows of one axis alone, so that other axes can be around it.
//
//   TensorSlices slices(module, mesh["tensor"]);   // the model computes with slices from here on
//   slices.gather();                               // whole again, on every rank: evaluate, save
//   slices.cut();                                  // slices again, of what the parameters hold now
//
// A parameter stays the tensor that it was, with another shape. One thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/nn/tensor_group.h"
#include "lockstep/parallel/model_tensors.h"

namespace lockstep::parallel {

inline constexpr const char* kTensorParallel = "tensor_parallel";  // in errors

struct SlicedParameter {
  std::string name;
  at::Tensor tensor;
  std::vector<std::int64_t> sizes;       // of the whole
  std::optional<nn::Sliced::Cut> cut{};  // none: every rank has the whole
  at::Tensor slice{};                    // where there is a cut
  at::Tensor whole{};                    // for the parameter to become
};

class TensorSlices {
 public:
  // Rank 0's parameters and buffers go to the others of `all`. UsageError on every rank where the
  // module cannot be divided, or differs over ranks. Collective of both.
  TensorSlices(torch::nn::Module& module, World all, World line);
  ~TensorSlices();  // the parameters stay what they are
  TensorSlices(const TensorSlices&) = delete;
  TensorSlices& operator=(const TensorSlices&) = delete;

  World& line() { return line_; }
  const ModelTensors& model() const { return model_; }
  const std::vector<SlicedParameter>& parameters() const { return parameters_; }

  bool whole() const { return whole_; }
  void gather();  // collective
  void cut();     // no collective

  // The same of a tensor of a parameter's state. whole_of() is a collective.
  at::Tensor slice_of(const SlicedParameter& p, const at::Tensor& whole) const;
  at::Tensor whole_of(const SlicedParameter& p, const at::Tensor& slice);

  // While it lives, parameters have the shape of their slices, wherever they were before.
  class AsSlices {
   public:
    explicit AsSlices(TensorSlices& slices) : slices_(slices) { slices_.show(false); }
    ~AsSlices() { slices_.show(slices_.whole_); }
    AsSlices(const AsSlices&) = delete;
    AsSlices& operator=(const AsSlices&) = delete;

   private:
    TensorSlices& slices_;
  };

 private:
  void check(torch::nn::Module& module);
  std::string describe() const;
  void show(bool whole);

  World line_;
  nn::Sliced* sliced_;
  nn::TensorGroupPtr group_;  // null in a line of one
  ModelTensors model_;
  std::vector<SlicedParameter> parameters_;  // in the module's order, each once
  bool whole_ = true;
};

}  // namespace lockstep::parallel
