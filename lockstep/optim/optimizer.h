// Optimizer: steps parameters by any update rule, for a loop of your own and for the Trainer.
//
//   optim::AdamW optimizer{model, {.lr = 3e-4}};   // or model.parameters(); Adam, SGD, Lion alike
//   loss.backward();
//   const StepResult result = optimizer.step({.max_grad_norm = 1.0, .scaler = &scaler});
//   optimizer.zero_grad();
//
// AdamW, Adam, SGD, Lion and their like are OptimizerOf<their options>. Optimizer mixes rules:
//
//   optim::Optimizer optimizer{model, {{net->body->parameters(), LionOptions{}},
//                                      {net->head->parameters(), AdamWOptions{}}}};
//
// It is a torch::optim::Optimizer: closures, torch's schedulers, torch::save and torch::load work.
// Every rank holds the whole state and takes the same step with gradients that backward has
// averaged; those that a FullyShard makes (lockstep/parallel/fully_shard.h) divide the state, and
// may average gradients in their step. A loop works with both, and so do checkpoints: state is
// named after parameters ("h.0.attn.weight.exp_avg") and independent of the number of ranks.
//
// Results have the bits of PyTorch's fused optimizers, except AdamW on a GPU for a model with float
// parameters: there it is one pass (adamw_pass.h), which CUDA graphs can contain.
//
// step, state_dict, load_state_dict and sync_from_model may communicate: call them on all ranks at
// the same point. Owns its state and shares the parameters. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/optim/amp.h"
#include "lockstep/optim/rule.h"

namespace lockstep::optim {

class AdamWPass;
struct SplitGradients;  // cpu_step.h
using TensorDict = std::map<std::string, at::Tensor>;
// As module->named_parameters().pairs() gives them. The first name of a tensor counts.
using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

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
  bool wanted = true;    // false: this rank takes part, and gets nothing
  bool copy = true;      // false: tensors may be the optimizer's own, valid until the next step()
  bool divided = false;  // true: where ranks divide it, as they hold it (lockstep/nn/divided.h)
};

class Optimizer : public torch::optim::Optimizer {
 public:
  // For a DistributedDataParallel model; without groups all trainable parameters form one.
  template <typename Model>
    requires requires(Model& model) { *model.module(), model.world(); }
  Optimizer(Model& model, Rule rule)
      : Optimizer(model.module()->named_parameters().pairs(), std::move(rule), model.world()) {}
  template <typename Model>
    requires requires(Model& model) { *model.module(), model.world(); }
  Optimizer(Model& model, std::vector<ParamGroup> groups)
      : Optimizer(model.module()->named_parameters().pairs(), std::move(groups), model.world()) {}
  // Parameters with their names, in the model's order. The ranks of `world` agree on skipped steps.
  // UsageError for a parameter that its rule cannot step.
  Optimizer(NamedParameters names, Rule rule, World world = {});
  Optimizer(NamedParameters names, std::vector<ParamGroup> groups, World world = {});
  ~Optimizer() override;

  virtual StepResult step(const StepOptions& options = {});
  at::Tensor step(LossClosure closure) override;
  // Like step(), unless `found_inf` (one float, on the device) is not zero. The host does not wait.
  void step_unless(const at::Tensor& found_inf);
  void step_split(const SplitGradients& gradients);  // in place of .grad; for a parallelism
  void add_param_group(const torch::optim::OptimizerParamGroup& group);  // divided: UsageError
  void set_begin(const at::Tensor& param, std::int64_t begin);  // of a part; for a parallelism
  virtual void zero_grad();
  void zero_grad(bool set_to_none) { torch::optim::Optimizer::zero_grad(set_to_none); }

  // The rule of a group with its options, to read or to change between steps, identically on every
  // rank: optimizer.options().as<AdamWOptions>().weight_decay = 0.
  std::size_t groups() const { return param_groups_.size(); }
  Rule& options(std::size_t group = 0);
  double lr(std::size_t group = 0) const;
  void set_lr(double lr);                     // for all groups
  void set_lr(std::size_t group, double lr);  // for one group

  // Names the state of parameters without names, from a list or an added group. Called by
  // save_checkpoint() and resume().
  void name_parameters(NamedParameters names);
  // Everything but the parameters. Zeros and step 0 for a parameter that was never stepped.
  // load_state_dict copies; a missing, unknown or misshapen tensor is a UsageError with its name,
  // before anything is changed.
  virtual TensorDict state_dict(const StateDictOptions& options = {});
  virtual void load_state_dict(const TensorDict& state);
  virtual std::int64_t state_bytes() const;  // of the state that this rank holds
  // Call it after writing parameters equally on every rank: a sharded optimizer copies them.
  virtual void sync_from_model() {}

  // For steps in a CUDA graph (lockstep/train/captured_step.h). Why step() cannot be captured:
  virtual std::string unavailable_for_capture(const StepOptions& options);  // empty: it can
  // Writes the options that replays read to the device.
  virtual void publish_options(const StepOptions& options);
  std::uint64_t layout();  // changes with the groups: recorded steps are stale then

  // torch::save, torch::load: UsageError for an archive of another model, before any change.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  // For a class that overrides step(), zero_grad() and the state's functions.
  explicit Optimizer(const std::vector<ParamGroup>& groups);
  Optimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, const Rule& defaults);
  Optimizer(Optimizer&& other) noexcept;

 private:
  std::string_view who() const;
  void list_parameters();
  void step_groups(const at::Tensor& found_inf, const SplitGradients* split = nullptr);
  at::Tensor any_rank_not_finite(const at::Tensor& norm);
  bool has_pass();
  StepResult step_in_one_pass(const StepOptions& options, GradScaler* scaler);

  bool replicated_ = true;  // false: a derived class steps
  bool for_model_ = false;  // made with names
  NamedParameters names_;
  World world_;
  std::vector<at::TensorImpl*> listed_;            // in all groups, when these two were made:
  std::vector<std::vector<at::Tensor>> by_group_;  // each parameter once
  std::vector<at::Tensor> params_;                 // in the order of the names
  std::map<at::TensorImpl*, Origin> origins_;
  std::unique_ptr<AdamWPass> pass_;
  std::string no_pass_;  // why there is none
  std::uint64_t layout_ = 0;
};

using ReplicatedOptimizer = Optimizer;  // unless a derived class divides the state

namespace detail {
void check(const StepOptions& options);  // UsageError: its max_grad_norm is no bound
torch::optim::OptimizerParamGroup make_group(std::vector<at::Tensor> params, const Rule& rule);
}  // namespace detail

// All groups by one rule, whose options have their type.
template <typename Options>
class OptimizerOf : public Optimizer {
 public:
  template <typename Model>
    requires requires(Model& model) { *model.module(), model.world(); }
  explicit OptimizerOf(Model& model, const Options& options = {})
      : Optimizer(model, Rule(options)) {}
  explicit OptimizerOf(std::vector<at::Tensor> params, const Options& options = {})
      : Optimizer(std::vector{torch::optim::OptimizerParamGroup(std::move(params))}, options) {}
  // Groups with their own options: AdamW optimizer{{AdamW::group(a, {.lr = 1}), ...}};
  explicit OptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                       const Options& options = {})
      : Optimizer(groups, options) {}
  static torch::optim::OptimizerParamGroup group(std::vector<at::Tensor> params,
                                                 const Options& options) {
    return detail::make_group(std::move(params), options);
  }

  Options& options(std::size_t group = 0) {
    return Optimizer::options(group).template as<Options>();
  }
};

// Two groups as Hugging Face's Trainer makes them: the second, without weight decay, has the
// parameters of LayerNorm and those named as a bias or a norm. A group without parameters and
// frozen parameters are skipped.
std::vector<ParamGroup> decay_groups(const torch::nn::Module& module, const Rule& options);

}  // namespace lockstep::optim
