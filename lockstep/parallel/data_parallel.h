// DataParallel: the whole model on every rank; gradients are averaged by a Reducer in backward, or
// by a ShardedOptimizer in its step. DistributedDataParallel makes one for its module.
//
// They are averaged over the mesh's batch axis. Ranks along its other axes must compute the same
// gradients: those of a module that divides its work among them by itself.
//
//   DataParallel parallelism(*net, world, {.bucket_cap_mb = 25});
//
// Shares the parameters; the reducer's hooks do not hold the module.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/options.h"
#include "lockstep/parallel/parallelism.h"
#include "lockstep/parallel/reducer.h"

namespace lockstep {

class DataParallel final : public Parallelism {
 public:
  using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

  // Collective, as Reducer's constructor.
  DataParallel(const torch::nn::Module& module, Mesh mesh, DdpOptions options = {});
  // For a list of parameters; the names are those of its optimizer's state.
  DataParallel(std::shared_ptr<Reducer> reducer, NamedParameters names)
      : DataParallel(reducer, std::move(names), reducer->world()) {}

  const std::shared_ptr<Reducer>& reducer() const { return reducer_; }

  const Mesh& mesh() const override { return mesh_; }
  std::string text() const override;
  std::unique_ptr<optim::Optimizer> make_optimizer(std::vector<optim::ParamGroup> groups,
                                                   bool sharded) override;
  void check_shardable() const override;
  at::Tensor watch(at::Tensor output) override { return reducer_->watch(std::move(output)); }
  void backward(const at::Tensor& loss, bool last) override;
  bool scale_averages(double factor) override { return reducer_->scale_averages(factor); }
  void verify_parameters() override { reducer_->verify_parameters(); }
  void verify_buffers() override { reducer_->verify_buffers(); }
  std::uint64_t layout() const override { return reducer_->layout(); }
  bool settled() const override { return reducer_->settled(); }
  std::shared_ptr<void> recording() override;
  // A reducer of one rank has no buckets, unless it is sharded, and sees no gradients.
  bool counts_passes() const override {
    return mesh_.batch().size() > 1 || reducer_->bucket_count() > 0;
  }
  void count_replayed(bool synchronised) override { reducer_->count_replayed(synchronised); }

 private:
  DataParallel(std::shared_ptr<Reducer> reducer, NamedParameters names, Mesh mesh)
      : names_(std::move(names)), reducer_(std::move(reducer)), mesh_(std::move(mesh)) {}

  NamedParameters names_;
  std::shared_ptr<Reducer> reducer_;
  Mesh mesh_;
};

}  // namespace lockstep
