// Optimizer: what a training loop needs from an optimizer, whether its state is replicated or
// sharded.
//
//   ReplicatedOptimizer optimizer{model, AdamWOptions{.lr = 3e-4}};   // or ShardedOptimizer
//   loss.backward();
//   const StepResult result = optimizer.step({.max_grad_norm = 1.0, .scaler = &scaler});
//   optimizer.zero_grad();
//
// Clipping, loss scaling and skipping are options of the step, because ShardedOptimizer averages
// the gradients inside its step (lockstep/parallel/sharded_optimizer.h); ReplicatedOptimizer does
// the same to .grad, which backward has averaged. A loop works with both, and so do checkpoints:
// state is named after parameters ("h.0.attn.weight.exp_avg") and independent of the number of
// ranks. A loop of your own may also use AdamW, Adam and SGD directly, as torch::optim::Optimizer.
//
// step, state_dict, load_state_dict and sync_from_model may communicate: call them on all ranks at
// the same point. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/adamw.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/optim/rule.h"
#include "lockstep/optim/rule_optimizer.h"
#include "lockstep/optim/sgd.h"

namespace lockstep::optim {

class AdamWPass;

using TensorDict = std::map<std::string, at::Tensor>;

// Parameters that are updated by one rule with the same options. Groups may have different rules.
struct ParamGroup {
  std::vector<at::Tensor> params;
  Rule options;
};

struct StepOptions {
  double max_grad_norm = 0;      // above zero: clip to this norm over all parameters
  bool want_grad_norm = false;   // compute the norm even where nothing is clipped
  GradScaler* scaler = nullptr;  // the loss was scaled by it; step() also calls its update()
  bool skip_non_finite = false;  // skip, on all ranks, a step with an inf or nan gradient
};

// Tensors of one element, on the CPU or on the parameters' device, undefined where the options do
// not ask for them. The member functions read them, which waits for the device.
struct StepResult {
  at::Tensor grad_norm;  // before clipping
  at::Tensor skipped;    // 1 or 0

  double norm() const { return grad_norm.defined() ? grad_norm.item<double>() : -1; }
  bool was_skipped() const { return skipped.defined() && skipped.item<double>() != 0; }
};

struct StateDictOptions {
  bool wanted = true;  // false: this rank takes part, and gets nothing
  bool copy = true;    // false: tensors may be the optimizer's own, valid until the next step()
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  virtual StepResult step(const StepOptions& options = {}) = 0;
  virtual void zero_grad() = 0;

  // The rule of a group with its options, to read or to change between steps, identically on every
  // rank: optimizer.options().as<AdamWOptions>().weight_decay = 0.
  std::size_t groups() const { return groups_.size(); }
  Rule& options(std::size_t group = 0);
  double lr(std::size_t group = 0) const;
  void set_lr(double lr);                     // for all groups
  void set_lr(std::size_t group, double lr);  // for one group

  // Everything but the parameters. load_state_dict copies; a missing, unknown or misshapen tensor
  // is a UsageError with its name, before anything is changed.
  virtual TensorDict state_dict(const StateDictOptions& options = {}) = 0;
  virtual void load_state_dict(const TensorDict& state) = 0;

  // Call it after writing or loading the model's parameters, with the same values on every rank. A
  // sharded optimizer takes them over; a replicated one reads them in each step anyway.
  virtual void sync_from_model() {}

  // For steps in a CUDA graph (lockstep/train/captured_step.h): why step() cannot be captured,
  // empty where it can; and writes the options that replays read to the device.
  virtual std::string unavailable_for_capture(const StepOptions&) {
    return "this optimizer cannot be captured";
  }
  virtual void publish_options(const StepOptions&) {}

 protected:
  explicit Optimizer(const std::vector<ParamGroup>& groups);

  std::vector<Rule> groups_;
};

namespace detail {
// Throws UsageError for a max_grad_norm that is not a bound.
void check(const StepOptions& options);
}  // namespace detail

// Every rank holds the whole state and takes the same step with averaged gradients. AdamW over
// float parameters on a GPU is one pass (adamw_pass.h), in float; elsewhere it has the bits of
// PyTorch's fused optimizers.
class ReplicatedOptimizer final : public Optimizer {
 public:
  // For a DistributedDataParallel model; without groups all trainable parameters form one.
  template <typename Model>
    requires requires(Model& model) { *model.module(), model.world(); }
  ReplicatedOptimizer(Model& model, Rule options)
      : ReplicatedOptimizer(model.module()->named_parameters().pairs(), std::move(options),
                            model.world()) {}
  template <typename Model>
    requires requires(Model& model) { *model.module(), model.world(); }
  ReplicatedOptimizer(Model& model, std::vector<ParamGroup> groups)
      : ReplicatedOptimizer(model.module()->named_parameters().pairs(), std::move(groups),
                            model.world()) {}
  // Parameters with their names, in the model's order. The ranks of `world` agree on skipped steps.
  ReplicatedOptimizer(NamedParameters names, Rule options, World world = {});
  ReplicatedOptimizer(NamedParameters names, std::vector<ParamGroup> groups, World world = {});
  ~ReplicatedOptimizer() override;

  StepResult step(const StepOptions& options = {}) override;
  void zero_grad() override;
  TensorDict state_dict(const StateDictOptions& options = {}) override;
  void load_state_dict(const TensorDict& state) override;
  std::string unavailable_for_capture(const StepOptions& options) override;
  void publish_options(const StepOptions& options) override;

 private:
  void apply_options();
  bool has_pass();
  StepResult step_in_one_pass(const StepOptions& options, GradScaler* scaler);
  at::Tensor any_rank_not_finite(const at::Tensor& norm);

  NamedParameters names_;
  World world_;
  std::vector<at::Tensor> params_;  // each once, in the order of the names
  std::map<std::string, std::size_t> group_of_;
  std::vector<std::unique_ptr<RuleOptimizer>> parts_;  // one for each group
  std::unique_ptr<AdamWPass> pass_;                    // over the state of parts_
  std::string no_pass_;                                // why there is none
};

// Two groups as Hugging Face's Trainer makes them: the second, without weight decay, has the
// parameters of LayerNorm and those named as a bias or a norm. A group without parameters and
// frozen parameters are skipped.
std::vector<ParamGroup> decay_groups(const torch::nn::Module& module, const Rule& options);

}  // namespace lockstep::optim
