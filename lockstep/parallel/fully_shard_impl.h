// FullyShardImpl: the units of a FullyShard, and the times to gather, free and reduce them.
//
// A Pipeline has one for the parameters that its rank holds: `Holders` lists each parameter's ranks
// along "pipeline"; on the others it is `absent`. Its passes are those of one stage each. A single
// rank along "shard" has all rows: then this only averages and keeps states.
//
// With ranks along "tensor" the parameters are slices (TensorSlices) before they are divided, and
// everything here applies to slices. They are whole only in gathered(), which joins rows, stages
// and then slices, and in the names and shapes of saved state.
//
// Blocks hold it weakly through their runner, and so do the nodes that it puts into a graph. One
// thread at a time: the training thread, or that of its backward while it waits.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/nn/block.h"
#include "lockstep/optim/local_gradients.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/kept_rows.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/shard_unit.h"
#include "lockstep/parallel/shared_gradients.h"
#include "lockstep/parallel/tensor_slices.h"

namespace lockstep::parallel {

// The ranks along "pipeline" that hold a parameter, in order.
using Holders = std::unordered_map<at::TensorImpl*, std::vector<int>>;

class FullyShardImpl : public std::enable_shared_from_this<FullyShardImpl> {
 public:
  FullyShardImpl(torch::nn::Module& module, Mesh mesh, FullyShardOptions options);
  // For a pipeline, which has already compared the ranks' modules, sent rank 0's values and cut
  // them into slices, if there are any.
  struct OfPipeline {
    Holders holders;
    std::unique_ptr<TensorSlices> slices;
  };
  FullyShardImpl(const torch::nn::Module& module, Mesh mesh, FullyShardOptions options,
                 OfPipeline pipeline);
  // Call it after the constructor, when a shared_ptr holds this.
  void install();
  void uninstall() {
    for (const Used& used : blocks_) used.block->run_with(nullptr);
  }

  const Mesh& mesh() const { return mesh_; }
  World& shard() const { return shard_; }
  World& line() const { return line_; }  // the ranks along "pipeline"
  World& tensor() const { return mesh_["tensor"]; }
  TensorSlices* slices() const { return slices_.get(); }           // null: one rank along "tensor"
  bool divides() const { return shard_.size() > 1 || offloads_; }  // steps rows
  // Parameters are whole between uses; gradients are reduced by the step alone.
  bool keeps() const { return kept_.has_value(); }
  bool defers() const { return options_.shard == Shard::kState && !alone_; }
  Shard shards() const { return options_.shard; }
  bool offloads() const { return offloads_; }
  const char* component() const { return of_pipeline_ ? kPipeline : kFullyShard; }  // in errors
  std::vector<std::string> unit_names() const;
  // Visits this rank's parameters, unit by unit; below, the module's in the module's order.
  void each_parameter(const std::function<void(ShardedParameter&)>& visit);
  const std::vector<ShardedParameter*>& parameters() const { return all_; }

  // A stage is what the passes of a pipeline compute; FullyShard has the one stage 0 with all
  // units. The root is whole in a window, and with reshard_after_forward = false blocks are, too.
  void add_stage(int stage, const std::vector<at::Tensor>& parameters);
  void begin_window();
  void end_window();

  void before_forward(int stage = 0);
  // `walk` runs the backward, or nothing.
  void backward(const std::function<void()>& walk, bool last, int stage = 0);
  std::shared_ptr<void> gathered();
  void free_all();
  // Whether this rank holds unreduced gradients, which the last backward will reduce, or the step
  // that follows it.
  bool unreduced() const { return local_ && !alone_ && !(defers() && last_); }
  // Of those the step must reduce, on every rank where one has any.
  bool deferred() const { return defers() && local_; }
  void reduce_deferred();
  void send_buffers(int root) {
    if (options_.broadcast_buffers) model_.broadcast_buffers(mesh_.world(), root);
  }
  // Those that the step reads in every rank's memory instead, where it can. Parameters have the
  // numbers of parameters().
  SharedGradients* shared_gradients() const { return shared_gradients_.get(); }
  void check_kept() const {
    if (kept_) kept_->check();
    if (deferred())
      for (const ShardUnit& unit : units_) unit.check_gradients();
  }
  // Whether a backward failed since gradients were last forgotten.
  bool failed() const { return failed_; }
  void forget_gradients();
  optim::GradientWatch& watch() { return watch_; }
  void watch_gradients();  // a pipeline does, when its window has ended
  void take_whole();       // the model's parameters were written while they were whole
  // Barriers around writes to shared rows.
  void before_rows_change();
  void after_rows_change() {
    if (kept_) kept_->publish();
    wait_for_ranks();
    if (kept_) kept_->remember();
  }
  void verify_parameters();
  void verify_buffers();

  // Runs a block's forward, with nodes that report from its backward.
  at::Tensor run_block(std::size_t unit, const nn::Block::Body& body,
                       std::vector<at::Tensor> inputs);
  void before_unit_backward(std::size_t unit, const ProductType& computed);
  void after_unit_backward(std::size_t unit);
  void check_backward(const std::string& parameter) const;

 private:
  // A block of the model, both as a module and as an nn::Block.
  struct Used {
    std::shared_ptr<torch::nn::Module> module;
    nn::Block* block = nullptr;
  };
  struct Stage {
    std::vector<bool> units;         // that it has
    std::vector<std::size_t> order;  // of blocks in its last forward
  };
  void make_units(const torch::nn::Module& module, const Holders& holders);
  ShardedParameter make_absent(const ModelParameter& p) const;
  void list_parameters(const Holders& holders);
  void gather_absent();
  void free_absent();
  void free_pass();
  void verify_shared();
  std::string describe(const torch::nn::Module& module) const;
  void wait_for_ranks();
  bool held() const { return !held_.expired(); }
  bool marks_rows() const { return line_.size() > 1 || slices_ != nullptr; }
  ProductType computed_here() const;
  void exchange_amax(const ProductType& computed);
  void forget_amax();
  void prefetch(std::size_t unit, const ProductType& computed);
  void prefetch_before(std::size_t unit, const ProductType& computed);
  bool reduces() const { return !alone_ && !defers() && (last_ || options_.reduce_every_backward); }
  void reduce(std::size_t unit);
  void begin_reduce(std::size_t unit);
  void end_pending_reduce();
  void begin_pass();
  void hide_averages();
  void end_pass();
  void abandon_pass();
  void check_late_gradients();
  void show_gradients();

  Mesh mesh_;
  World& shard_;
  World& data_;
  World& line_;
  bool of_pipeline_;
  FullyShardOptions options_;
  bool offloads_;
  bool shares_ = false;  // rows lie in memory that all ranks along "shard" map
  ModelTensors model_;
  std::unique_ptr<TensorSlices> slices_;
  std::vector<ShardUnit> units_;  // the root is the last
  std::optional<KeptRows> kept_;
  std::shared_ptr<SharedGradients> shared_gradients_;
  std::vector<Used> blocks_;  // of the units before it
  std::vector<ShardedParameter> absent_;
  std::vector<ShardedParameter*> all_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  std::map<int, Stage> stages_;
  Stage* stage_ = nullptr;              // that of the pass
  std::vector<bool> reduced_;           // in this backward
  std::optional<std::size_t> pending_;  // the unit whose gradients are under way
  std::weak_ptr<void> held_;
  optim::GradientWatch watch_;
  bool alone_;  // nobody else has gradients
  bool local_;  // .grad has whole gradients of this rank alone
  bool in_window_ = false;
  bool has_amax_ = false;  // of this forward, or of this window
  bool in_backward_ = false;
  bool absent_here_ = true;  // what other stages hold
  bool failed_ = false;
  bool last_ = true;
};

std::unique_ptr<optim::Optimizer> make_fully_shard_optimizer(std::shared_ptr<FullyShardImpl> model,
                                                             std::vector<optim::ParamGroup> groups);

}  // namespace lockstep::parallel
