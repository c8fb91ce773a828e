// ShardedOptimizer: average the gradients and take the optimizer's step in one pass.
//
//   lockstep::DistributedDataParallel model{net, world};
//   lockstep::ShardedOptimizer optimizer{model, lockstep::optim::AdamWOptions{.lr = 3e-4}};
//   loss.backward();          // gradients stay local
//   optimizer.step();         // sum, update, publish: every rank has the new parameters
//   optimizer.zero_grad();
//
// Each rank owns a share of the elements. It sums their gradients over ranks in
// rank order and updates them right there, so the optimizer's state exists once (ZeRO stage 1) and
// its arithmetic is divided by the number of ranks. On one host (backend shm) the parameters of all
// ranks are the same memory: what the owner writes, everybody has. Elsewhere gradients travel to
// their owner and parameters back. The result is bit for bit that of an all-reduce and a replicated
// lockstep::optim optimizer (on gloo and nccl: with two ranks).
//
// Constructing it puts the model's DDP into deferred mode: until step(), .grad is this rank's own.
// So clipping and loss scaling are asked of this class, and reduce_now() shows averaged gradients.
//
// Construct, step, load and save on all ranks at the same point (they communicate). What one rank
// cannot construct, or constructs differently, is a UsageError on all. One thread at a time. It
// shares the model's reducer; on shm the parameters stay shared for as long as they live, and
// nobody else may write them between steps: UsageError at the next one, in verify_replicas(), and
// in the backward of a loop that writes them and never steps. After loading weights into the model
// on every rank, call sync_from_model(). Inside model.join() step() may be called on some ranks
// more often than on others; what else communicates belongs outside.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/optim/adam.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/ddp.h"

namespace lockstep {

using OptimizerRule = std::variant<optim::AdamWOptions, optim::AdamOptions, optim::SGDOptions>;

// Parameters of the wrapped model that are stepped by one rule. Together the groups hold all that
// are trainable.
struct ShardedGroup {
  std::vector<at::Tensor> params;
  OptimizerRule rule;
};

// What a step is asked for beside the update; may be changed between steps.
struct ShardedOptions {
  double max_grad_norm = 0;      // above zero: clip to this norm over all parameters
  bool skip_non_finite = false;  // leave out, on all ranks, a step with an inf or nan gradient
  double loss_scale = 1;         // gradients are divided by it first
};

struct StepOutcome {
  bool skipped = false;
  double grad_norm = -1;  // before clipping; -1 when it was not asked for
};

namespace parallel {
class ShardedImpl;
}

class ShardedOptimizer {
 public:
  template <typename Module>
  ShardedOptimizer(DistributedDataParallel<Module>& model, OptimizerRule rule,
                   ShardedOptions options = {})
      : ShardedOptimizer(model.reducer_ptr(), {{model.parameters(), std::move(rule)}}, options) {}
  template <typename Module>
  ShardedOptimizer(DistributedDataParallel<Module>& model, std::vector<ShardedGroup> groups,
                   ShardedOptions options = {})
      : ShardedOptimizer(model.reducer_ptr(), std::move(groups), options) {}
  ShardedOptimizer(std::shared_ptr<Reducer> reducer, std::vector<ShardedGroup> groups,
                   ShardedOptions options = {});
  ~ShardedOptimizer();
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  // Parameters that no rank has a gradient for are left as they are, with their state. Throws
  // UsageError on all ranks, before anything is changed, when options or rules differ over ranks.
  StepOutcome step();
  void zero_grad();
  // Averages the gradients now, on every rank, for someone who must see them; the next step() does
  // not sum them again.
  void reduce_now();

  ShardedOptions& options();
  OptimizerRule& rule(std::size_t group = 0);
  std::size_t groups() const;
  double lr(std::size_t group = 0) const;
  void set_lr(double lr);                     // of all groups
  void set_lr(std::size_t group, double lr);  // of one

  // The whole state by parameter name ("h.0.attn.weight.exp_avg"), the same on every rank and
  // independent of their number. Collective.
  std::map<std::string, at::Tensor> state_dict();
  // The same state on every rank: UsageError on all, before anything is changed, names the ranks
  // where it differs and the first tensor that does, or what a rank finds wrong with it.
  // Collective.
  void load_state_dict(const std::map<std::string, at::Tensor>& state);
  // The model's parameters were written, or loaded, on purpose: the same values on every rank, or
  // UsageError on all as above. Collective.
  void sync_from_model();

  // Bytes of optimizer state on this rank.
  std::int64_t state_bytes() const;

 private:
  std::unique_ptr<parallel::ShardedImpl> impl_;
};

}  // namespace lockstep
