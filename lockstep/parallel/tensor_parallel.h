// TensorParallel: every rank holds a slice of each large weight, and ranks compute each layer
// together. As Megatron-LM: linear layers in pairs, an embedding and a loss over slices of the
// vocabulary.
//
//   const Mesh mesh(world, {{"data", -1}, {"tensor", 2}});      // neighbours share a model
//   const auto model = std::make_shared<TensorParallel>(*net, mesh);   // net is an nn::Sliced
//   const optim::AdamWOptions adamw{.lr = 3e-4};
//   const auto optimizer = model->make_optimizer({{net->parameters(), adamw}});
//   for (auto& batch : loader.epoch(epoch)) {                          // of mesh.batch()
//     model->before_forward();
//     model->backward(net->loss(batch.data, batch.target), /*last=*/true);
//     optimizer->step({.max_grad_norm = 1.0});
//     optimizer->zero_grad();
//   }
//
// Parameters keep their tensors and their names, with the shape of a slice; the model says how each
// is cut (lockstep/nn/tensor_group.h; the bundled language models are such). Ranks along "tensor"
// see the same samples and must draw the same random numbers: a mask of dropout is part of what is
// the same on all of them. Ranks along "data" hold copies of the slices, and DataParallel averages
// their gradients while backward computes.
//
// A model that is larger than one memory is cut while it is made (fully_shard.h):
//
//   const ShardedConstruction cut(mesh);
//   const auto net = models::load_pretrained("Llama-3.2-1B");
//
// Refers to the module, which must outlive it. All functions are collectives unless stated
// otherwise. One thread.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/options.h"
#include "lockstep/parallel/parallelism.h"

namespace lockstep {

namespace parallel {
class TensorParallelImpl;
}

class TensorParallel final : public Parallelism {
 public:
  // Rank 0's parameters and buffers go to the others, and each keeps its slices. UsageError on
  // every rank for a module that is no nn::Sliced or does not divide by the ranks along "tensor", a
  // mesh with axes other than "data" and "tensor", and modules that differ over ranks.
  TensorParallel(torch::nn::Module& module, Mesh mesh, DdpOptions options = {});
  ~TensorParallel() override;

  const Mesh& mesh() const override;
  std::string text() const override;
  // Each rank steps its slices: UsageError for a rule that needs whole matrices.
  std::unique_ptr<optim::Optimizer> make_optimizer(std::vector<optim::ParamGroup> groups) override;
  // Parameters are slices from here on. Where gathered() is held and nothing is to be trained
  // (torch::NoGradGuard), they stay whole. No collective.
  void before_forward() override;
  at::Tensor watch(at::Tensor output) override;
  void backward(const at::Tensor& loss, bool last) override;
  // The next training forward ends it, even while it is held: tensors taken from parameters
  // meanwhile stay whole.
  std::shared_ptr<void> gathered() override;
  bool divided() const override;
  void verify_parameters() override;
  void verify_buffers() override;
  std::string unavailable_for_capture() const override;

 private:
  std::shared_ptr<parallel::TensorParallelImpl> impl_;
};

}  // namespace lockstep
