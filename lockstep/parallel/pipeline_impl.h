// PipelineImpl: which rank holds what of a Pipeline's module, and what its windows have agreed on.
// One thread.
#pragma once

#include <c10/core/Storage.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/nn/staged.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/pipeline.h"

namespace lockstep::parallel {

inline constexpr const char* kPipeline = "pipeline";  // in errors

// A parameter, and the ranks along "pipeline" whose stages read it.
struct StagedParameter {
  std::string name;
  at::Tensor tensor;
  std::vector<int> holders{};  // in order; the first one's copy is saved
  bool mine = false;
  c10::Storage freed{};  // of one that is not mine, while it has no memory
};

// What crosses the border after a stage.
struct Border {
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  bool needs_gradient = false;
  bool operator==(const Border&) const = default;
};

class PipelineImpl : public std::enable_shared_from_this<PipelineImpl> {
 public:
  using Pass = Parallelism::Pass;

  PipelineImpl(torch::nn::Module& module, Mesh mesh, PipelineOptions options);
  void install();  // after the constructor, when somebody holds this

  const Mesh& mesh() const { return mesh_; }
  World& line() const { return line_; }  // the ranks along "pipeline"
  const PipelineOptions& options() const { return options_; }
  const std::vector<StagedParameter>& parameters() const { return parameters_; }
  nn::Staged& module() const { return *staged_; }
  int stages() const { return line_.size() * options_.stages_per_rank; }
  nn::Staged::Stage stage(int index, at::Tensor input) const;
  // What stage `index` returns for samples of these sizes; null: not agreed yet.
  const Border* border(int index, const std::vector<std::int64_t>& sizes) const;
  void agree(int index, const std::vector<std::int64_t>& sizes, Border border);

  std::vector<at::Tensor> run_window(const std::vector<Pass>& passes);
  std::shared_ptr<void> gathered();
  void free_others();  // no collective
  void verify_parameters();
  void verify_buffers();

  // While it is held, gradients are what the functions of lockstep/optim may use.
  bool stepping = false;

 private:
  void check(torch::nn::Module& module);
  std::string describe() const;
  void assign_parts(const nn::Staged::Parts& parts);
  void gather_others();
  void add_shared_gradients();
  void average_gradients();

  Mesh mesh_;
  World& line_;
  PipelineOptions options_;
  nn::Staged* staged_;
  ModelTensors model_;
  std::vector<StagedParameter> parameters_;  // in the module's order, each once
  std::vector<int> begins_;                  // split_blocks()
  std::map<std::pair<int, std::vector<std::int64_t>>, Border> borders_;
  std::map<std::size_t, std::vector<PipelineStep>> programs_;         // by micro-batches
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // that have hooks
  std::weak_ptr<void> held_;
  bool whole_ = true;
};

std::unique_ptr<optim::Optimizer> make_pipeline_optimizer(std::shared_ptr<PipelineImpl> model,
                                                          std::vector<optim::ParamGroup> groups);

}  // namespace lockstep::parallel
