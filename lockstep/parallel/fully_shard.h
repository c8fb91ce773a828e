// FullyShard: every rank holds a part of each parameter, of its gradient and of the optimizer's
// state, and the whole of a block only while it computes. PyTorch's fully_shard (FSDP2).
//
//   const Mesh mesh(world, {{"shard", -1}});
//   FullyShard model(*net, mesh);
//   const optim::AdamWOptions adamw{.lr = 3e-4};
//   const auto optimizer = model.make_optimizer({{net->parameters(), adamw}});
//   for (auto& batch : loader.epoch(epoch)) {
//     model.before_forward();
//     model.backward(loss_of(net->forward(batch.data)));     // instead of loss.backward()
//     optimizer->step({.max_grad_norm = 1.0});
//     optimizer->zero_grad();
//   }
//
// A unit is what is gathered at once: each nn::Block (lockstep/nn/block.h; the blocks of the
// bundled language models are such), and the root with the rest. A parameter is divided by rows
// along the mesh's axis "shard", as FSDP2 does: rank r of n has rows r * ceil(rows / n) and on,
// which may be none. Between uses its storage has no bytes. A block is gathered when it is called,
// while the one before it computes, freed after it, gathered again for its backward, and its
// gradients are averaged for their owners at the end of that. The root is whole from
// before_forward() to the end of backward(). Along "data" ranks hold copies: a mesh of data x shard
// divides the model inside a host and copies it between hosts. Along "tensor" they compute with
// slices of each layer (tensor_parallel.h), and slices are what is divided.
//
// A model that is larger than a device's or a host's memory is divided while it is made:
//
//   const Mesh mesh(world, {{"shard", -1}});
//   const ShardedConstruction divided(mesh);
//   const auto net = models::load_pretrained("Llama-3.2-1B");
//   FullyShard model(*net, mesh);
//
// Checkpoints are written and read in parts as well (lockstep/train/save_resume.h).
//
// CPU ranks of one host have their rows in memory that all of them map, where whole parameters
// stand: gathering a block means pointing at it (unless param_dtype is set).
//
// FullyShardOptions::shard leaves parameters, or gradients too, whole: what follows is of kAll.
//
// Parameters keep their tensors and their names. Between backwards `.grad` has this rank's rows.
// Using a divided parameter throws an error with its name: its block was not called through run(),
// or before_forward() was not called.
//
// Holds the parameters and the blocks; with ranks along "tensor" the module outlives it. All
// functions are collectives unless stated otherwise. One thread.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/nn/block.h"
#include "lockstep/parallel/options.h"
#include "lockstep/parallel/parallelism.h"

namespace lockstep {

namespace parallel {
class FullyShardImpl;
}

class FullyShard final : public Parallelism {
 public:
  // Rank 0's parameters and buffers go to the others. UsageError on every rank for a mesh without
  // an axis "shard" or with ranks along "pipeline", for modules that differ over ranks, and with
  // ranks along "tensor" for one that is no nn::Sliced or does not divide by them.
  FullyShard(torch::nn::Module& module, Mesh mesh, FullyShardOptions options = {});
  ~FullyShard() override;

  const Mesh& mesh() const override;
  std::string text() const override;
  // A rule that takes whole tensors (Muon, Adafactor) has each parameter of it stepped by one rank.
  std::unique_ptr<optim::Optimizer> make_optimizer(std::vector<optim::ParamGroup> groups) override;
  void before_forward() override;
  void backward(const at::Tensor& loss, bool last = true) override;
  // Release it on every rank before the same forward, which frees what was gathered. The
  // optimizer's step frees it in any case. Hold it beyond the end of FullyShard if the module is
  // used afterwards.
  std::shared_ptr<void> gathered() override;
  bool divided() const override;
  void verify_parameters() override;
  void verify_buffers() override;
  std::string unavailable_for_capture() const override;

  // The units in the order of the module, "" for the root; no collective.
  std::vector<std::string> units() const;

 private:
  std::shared_ptr<parallel::FullyShardImpl> impl_;
};

// While it exists, each block that this thread makes (nn::made) is cut into slices along "tensor",
// moved to the world's device, divided along "shard" and freed, so that one block stands whole at a
// time. The parameters outside of blocks stay whole until FullyShard, or TensorParallel where the
// mesh has no "shard". Every rank draws or reads the same values: seed generators alike
// (optim::WithSeed). FullyShard compares what was drawn, and is made before the model is used. No
// communication. A block that is no nn::Sliced stays whole where "tensor" has several ranks; one
// rank along both: nothing is divided. `cpu_offload`: rows go to the host's memory at once.
class ShardedConstruction {
 public:
  explicit ShardedConstruction(Mesh mesh, bool cpu_offload = false);
  ~ShardedConstruction();
  ShardedConstruction(const ShardedConstruction&) = delete;
  ShardedConstruction& operator=(const ShardedConstruction&) = delete;

 private:
  nn::BlockObserver before_;
};

}  // namespace lockstep
