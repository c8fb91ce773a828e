// TensorSlices: replaces a model's weights by this rank's slices. Internal. It handles one axis, so
// that it can be combined: TensorParallel copies slices along "data", FullyShard divides them by
// rows along "shard", and Pipeline has those of its stages.
//
//   TensorSlices slices(module, mesh["tensor"]);   // whole, but for blocks that were made cut
//   slices.cut();      // the model computes with slices of what the parameters hold now
//   slices.gather();   // whole again, on every rank: evaluate, save
//
// A parameter stays the same tensor, with another shape. While it is whole, its slice is kept here,
// in its former memory; a FullyShard around this refers to that memory too, and leaves it in place.
// One thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/mesh.h"
#include "lockstep/nn/divided.h"
#include "lockstep/nn/tensor_group.h"
#include "lockstep/optim/rule.h"
#include "lockstep/parallel/model_tensors.h"

namespace lockstep::parallel {

inline constexpr const char* kTensorParallel = "tensor_parallel";  // in errors

struct SlicedParameter {
  std::string name;
  at::Tensor tensor;
  std::vector<std::int64_t> sizes;          // of the whole
  std::optional<nn::Sliced::Cut> cut{};     // none: every rank has the whole
  std::shared_ptr<const nn::Slice> mine{};  // what this rank has, where there is a cut
  at::Tensor slice{};                       // while the parameter is whole
};

// The slice that rank `rank` of `ranks` has of a parameter with the sizes `whole`.
nn::Slice slice_for(const nn::Sliced::Cut& cut, at::IntArrayRef whole, int rank, int ranks);

class TensorSlices {
 public:
  // The parameters are whole, or slices with the Rows of them (prepared_block.h). UsageError where
  // the module cannot be divided. No collective.
  TensorSlices(torch::nn::Module& module, World line);
  ~TensorSlices();  // the parameters stay what they are
  TensorSlices(const TensorSlices&) = delete;
  TensorSlices& operator=(const TensorSlices&) = delete;

  // A line for each parameter, with its cut, and for each buffer.
  std::string describe() const;
  World& line() { return line_; }
  ModelTensors& model() { return model_; }
  const std::vector<SlicedParameter>& parameters() const { return parameters_; }
  const SlicedParameter* find(const at::Tensor& tensor) const;  // null: it is not cut

  bool whole() const { return whole_; }
  void gather();  // collective
  // Cuts the parameters again, from their present values: a checkpoint may have been loaded while
  // they were whole. take() copies the values too, but leaves them whole.
  void cut();
  void take();

  // The same of a tensor of a parameter's state. whole_of() is a collective.
  at::Tensor slice_of(const SlicedParameter& p, const at::Tensor& whole) const;
  at::Tensor whole_of(const SlicedParameter& p, const at::Tensor& slice);

  // Call it at the end of the last backward before a step: averages the gradients of parameters
  // that every rank has and uses with slices (nn::enter_weight()), in one message for each type.
  // Skipped if none are new since the last call. Collective.
  void average_gradients();

  // UsageError for a backward of whole parameters, and for a rule that steps whole matrices.
  void check_backward() const;
  static void check_rule(const optim::Rule& rule, const std::string& parameter);

  // While it lives, parameters have the shape of their slices, even if they were whole. Null for a
  // model without slices.
  class AsSlices {
   public:
    explicit AsSlices(TensorSlices* slices);
    ~AsSlices();
    AsSlices(const AsSlices&) = delete;
    AsSlices& operator=(const AsSlices&) = delete;

   private:
    TensorSlices* slices_;  // null: nothing to do
    std::vector<at::Tensor> wholes_;
  };

 private:
  void add_cuts();
  void take(SlicedParameter& p);

  World line_;
  nn::Sliced* sliced_;
  nn::TensorGroupPtr group_;  // null in a line of one
  ModelTensors model_;
  std::vector<SlicedParameter> parameters_;  // in the module's order, each once
  bool whole_ = true;
};

// ", in slices on 2 tensor parallel ranks", or nothing for a mesh without them.
std::string slices_text(const Mesh& mesh);

}  // namespace lockstep::parallel
