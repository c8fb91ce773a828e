// PipelineImpl: which rank holds what of a Pipeline's module, and what its windows have agreed on.
// What a rank holds, its gradients and its optimizer are FullyShardImpl's, with one rank along
// "shard" or several. One thread.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/nn/staged.h"
#include "lockstep/parallel/fully_shard_impl.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/pipeline.h"

namespace lockstep::parallel {

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

  const Mesh& mesh() const { return mesh_; }
  World& line() const { return line_; }  // the ranks along "pipeline"
  const PipelineOptions& options() const { return options_; }
  const std::shared_ptr<FullyShardImpl>& shards() const { return shards_; }
  nn::Staged& module() const { return *staged_; }
  int stages() const { return line_.size() * options_.stages_per_rank; }
  nn::Staged::Stage stage(int index, at::Tensor input) const;
  // What stage `index` returns for samples of these sizes; null: not agreed yet. With and without
  // gradients it may be something else.
  const Border* border(int index, const std::vector<std::int64_t>& sizes) const;
  void agree(int index, const std::vector<std::int64_t>& sizes, Border border);

  std::vector<at::Tensor> run_window(const std::vector<Pass>& passes);
  void verify_buffers();

 private:
  void check(torch::nn::Module& module);
  std::string describe(const torch::nn::Module& module) const;
  Holders assign_parts(const nn::Staged::Parts& parts);
  const std::vector<PipelineStep>& program(std::size_t micro_batches);
  void add_shared_gradients();
  void sync_buffers();

  Mesh mesh_;
  World& line_;
  PipelineOptions options_;
  nn::Staged* staged_;
  ModelTensors model_;
  std::vector<int> begins_;                               // split_blocks()
  std::map<int, std::vector<at::Tensor>> stage_tensors_;  // of this rank's stages
  Holders holders_;
  std::unique_ptr<TensorSlices> slices_;  // until `shards_` has them
  std::shared_ptr<FullyShardImpl> shards_;
  std::vector<NamedTensor> buffers_;
  std::vector<std::uint64_t> buffers_agreed_;  // their fingerprints
  std::map<std::tuple<int, bool, std::vector<std::int64_t>>, Border> borders_;
  std::map<std::pair<std::size_t, bool>, std::vector<PipelineStep>> programs_;
};

}  // namespace lockstep::parallel
