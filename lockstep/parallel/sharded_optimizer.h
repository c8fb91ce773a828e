// ShardedOptimizer: average the gradients and take the optimizer's step in one pass.
//
//   lockstep::DistributedDataParallel model{net, world};
//   lockstep::ShardedOptimizer optimizer{model, lockstep::optim::AdamWOptions{.lr = 3e-4}};
//   loss.backward();                          // gradients stay local
//   optimizer.step({.max_grad_norm = 1.0});   // sum, clip, update, publish
//   optimizer.zero_grad();
//
// Each rank owns a share of the elements (of whole parameters where a rule asks for it, as Muon
// does). It sums their gradients over ranks in rank order and updates them right there, so the
// optimizer's state exists once (ZeRO stage 1) and its arithmetic is divided by the number of
// ranks. On one host (backend shm) the parameters of all ranks are the same memory: what the owner
// writes, everybody has. Elsewhere gradients travel to their owner and parameters back. The result
// is bit for bit that of an all-reduce and a ReplicatedOptimizer (gloo and nccl: with two ranks).
//
// It takes the gradients over from the model's reducer: until step(), .grad is this rank's own.
// Clipping and loss scaling are options of step(), and reduce_now() shows averaged gradients.
//
// Construct, step, load and save on all ranks at the same point (they communicate). What one rank
// cannot construct, or constructs differently, is a UsageError on all. One thread at a time. It
// shares the model's reducer; on shm the parameters stay shared for as long as they live, and
// nobody else may write them between steps: UsageError at the next one, in verify_replicas(), and
// in the backward of a loop that writes them and never steps. After loading weights into the model
// on every rank, call sync_from_model(). Inside model.join() step() may be called on some ranks
// more often than on others; what else communicates belongs outside.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/reducer.h"

namespace lockstep {

namespace parallel {
class ShardedImpl;
}

class ShardedOptimizer final : public optim::Optimizer {
 public:
  // A DistributedDataParallel model.
  template <typename Model>
    requires requires(Model& model) { model.reducer_ptr(), model.parameters(); }
  ShardedOptimizer(Model& model, optim::Rule options)
      : ShardedOptimizer(model.reducer_ptr(), {{model.parameters(), std::move(options)}}) {}
  // Together the groups hold all trainable parameters of the model.
  template <typename Model>
    requires requires(Model& model) { model.reducer_ptr(), model.parameters(); }
  ShardedOptimizer(Model& model, const std::vector<optim::ParamGroup>& groups)
      : ShardedOptimizer(model.reducer_ptr(), groups) {}
  ShardedOptimizer(std::shared_ptr<Reducer> reducer, const std::vector<optim::ParamGroup>& groups);
  ~ShardedOptimizer() override;

  using Optimizer::step;
  // Parameters that no rank has a gradient for are left as they are, with their state. Throws
  // UsageError on all ranks, before anything is changed, when options differ over ranks.
  optim::StepResult step(const optim::StepOptions& options = {}) override;
  void zero_grad() override;
  // Averages the gradients now, on every rank, for code that must read them; the next step() does
  // not sum them again.
  void reduce_now();

  optim::TensorDict state_dict(const optim::StateDictOptions& options = {}) override;
  // UsageError on all ranks names the ranks whose state differs and the first such tensor, or a
  // fault that a rank finds in its state.
  void load_state_dict(const optim::TensorDict& state) override;
  // UsageError on all ranks where the parameters differ.
  void sync_from_model() override;

  std::int64_t state_bytes() const override;

 private:
  std::unique_ptr<parallel::ShardedImpl> impl_;
};

}  // namespace lockstep
