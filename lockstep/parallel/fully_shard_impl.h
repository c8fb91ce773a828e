// FullyShardImpl: the units of a FullyShard and when they are gathered, freed and reduced.
//
// Blocks hold it weakly through their runner, and so do the nodes that it puts into a graph. One
// thread at a time: the training thread, or that of its backward while it waits.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/nn/block.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/shard_unit.h"

namespace lockstep::parallel {

class FullyShardImpl : public std::enable_shared_from_this<FullyShardImpl> {
 public:
  FullyShardImpl(const torch::nn::Module& module, Mesh mesh, FullyShardOptions options);
  // After the constructor, when somebody holds this.
  void install();
  void uninstall();

  const Mesh& mesh() const { return mesh_; }
  World& shard() const { return shard_; }
  std::vector<std::string> unit_names() const;
  void each_parameter(const std::function<void(ShardedParameter&)>& visit);

  void before_forward();
  void backward(const at::Tensor& loss, bool last);
  std::shared_ptr<void> gathered();
  void free_all();
  // Whether gradients of this rank alone wait for the last backward.
  bool unreduced() const { return local_ && !alone_; }
  // Whether a backward failed since gradients were last forgotten.
  bool failed() const { return failed_; }
  void forget_gradients();
  void take_whole();  // the model's parameters were written while they were whole
  void verify_parameters();
  void verify_buffers();

  // A block's forward, and what its nodes report from backward.
  at::Tensor run_block(std::size_t unit, const nn::Block::Body& body,
                       std::vector<at::Tensor> inputs);
  void before_unit_backward(std::size_t unit);
  void after_unit_backward(std::size_t unit);
  void check_backward(const std::string& parameter) const;

 private:
  // A module that is a block.
  struct Used {
    std::shared_ptr<torch::nn::Module> module;
    nn::Block* block = nullptr;
  };
  void make_units(const torch::nn::Module& module);
  std::string describe(const torch::nn::Module& module) const;
  bool divides() const { return shard_.size() > 1; }
  bool held() const { return !held_.expired(); }
  void prefetch(std::size_t unit);
  void prefetch_before(std::size_t unit);
  bool reduces() const { return !alone_ && (last_ || options_.reduce_every_backward); }
  void reduce(std::size_t unit);
  void end_pending_reduce();
  void begin_pass();
  void end_pass();
  void check_late_gradients();
  void show_gradients();

  Mesh mesh_;
  World& shard_;
  World& data_;
  FullyShardOptions options_;
  ModelTensors model_;
  std::vector<ShardUnit> units_;  // the root is the last
  std::vector<Used> blocks_;      // of the units before it
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  std::vector<std::size_t> order_;      // of blocks in the last forward
  std::vector<bool> reduced_;           // in this backward
  std::optional<std::size_t> pending_;  // the unit whose gradients are under way
  std::weak_ptr<void> held_;
  bool alone_;  // nobody else has gradients
  bool local_;  // .grad has whole gradients of this rank alone
  bool in_backward_ = false;
  bool failed_ = false;
  bool last_ = true;
};

std::unique_ptr<optim::Optimizer> make_fully_shard_optimizer(std::shared_ptr<FullyShardImpl> model,
                                                             std::vector<optim::ParamGroup> groups);

}  // namespace lockstep::parallel
