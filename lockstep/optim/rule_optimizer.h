// OptimizerOf: any update rule as a torch::optim::Optimizer, for a loop of your own.
//
//   OptimizerOf<LionOptions> optimizer{model.parameters(), {.lr = 1e-4}};   // or AdamW, Adam, SGD
//   loss.backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// Parameter groups, schedulers, torch::save and torch::load work as with the stock optimizers. On
// the CPU a rule with kernels takes its step in one pass over memory; elsewhere, and for other
// rules, the step runs as ATen operations. Owns its state; shares the parameters. One thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>
#include <torch/utils.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/optim/rule.h"

namespace lockstep::optim {

// As module->named_parameters().pairs() gives them. The first name of a tensor counts.
using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

// State of one parameter, made at its first step.
struct RuleState : torch::optim::OptimizerCloneableParamState<RuleState> {
  at::Tensor step;  // float, on the parameter's device: fused kernels read it there. Undefined
                    // where the rule counts no steps.
  StateTensors tensors;
  std::vector<std::string> names;

  const at::Tensor& operator[](std::string_view name) const;  // undefined: there is none
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

namespace detail {

// A rule inside the class that torch's schedulers and archives expect.
class GroupRule : public torch::optim::OptimizerOptions {
 public:
  explicit GroupRule(const Rule& values) : rule(values) {}
  std::unique_ptr<OptimizerOptions> clone() const override {
    return std::make_unique<GroupRule>(rule);
  }
  double get_lr() const override { return rule.get("lr"); }
  void set_lr(const double lr) override { rule.set("lr", lr); }
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;

  Rule rule;
};

// torch's archive reader makes one from a number and then fills it.
template <typename Options>
class GroupOptions final : public GroupRule {
 public:
  explicit GroupOptions(int) : GroupRule(Options{}) {}
  explicit GroupOptions(const Rule& values) : GroupRule(values) {}
  std::unique_ptr<OptimizerOptions> clone() const override {
    return std::make_unique<GroupOptions>(rule);
  }
};

// Throws UsageError where the group was added with options of another rule, or of torch::optim.
Rule& rule_of(std::string_view who, torch::optim::OptimizerParamGroup& group);

// Tensors of one device and dtype, which a fused kernel steps in one call.
struct Batch {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;  // with the memory layout of their parameters
};
using Seen = std::unordered_set<at::TensorImpl*>;

// The parameters with a gradient; one without is skipped, as in Python. One listed twice in a group
// (tied weights: C++ modules list them under both names) is stepped once; one in two groups, a
// sparse gradient, a parameter that is a strided slice and one whose gradient is not averaged yet
// (see local_gradients.h) throw UsageError. `seen` is shared by the groups of one step.
std::vector<Batch> gather(std::string_view who, const std::vector<at::Tensor>& params, Seen& seen);

// Throws UsageError when there is no group with this number.
void check_group(std::string_view who, std::size_t group, std::size_t count);

// A tensor of state for a parameter, filled with zeros.
at::Tensor make_state(const StateSpec& spec, const at::Tensor& param);

}  // namespace detail

// One rule, not known at compile time: what OptimizerOf and ReplicatedOptimizer are made of.
class RuleOptimizer : public torch::optim::Optimizer {
 public:
  // UsageError for a parameter that the rule cannot step.
  RuleOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, const Rule& rule)
      : RuleOptimizer(groups, std::make_unique<detail::GroupRule>(rule)) {}

  at::Tensor step(LossClosure closure = nullptr) override;
  // Like step(), but where `found_inf` (a float of one element, on the device) is not zero, nothing
  // is changed: fused kernels read it there, and the host does not wait.
  void step_unless(const at::Tensor& found_inf);

  // The learning rate of a group, to read or to set between steps. UsageError where there is none.
  double lr(std::size_t group = 0) const;
  void set_lr(double lr);  // for all groups
  void set_lr(std::size_t group, double lr);

  // The state by parameter name ("h.0.weight.exp_avg", "h.0.weight.step"), on the CPU, the same
  // names and shapes as ShardedOptimizer's, so either loads what the other wrote. Zeros and step 0
  // for a parameter that was never stepped. Without a copy, tensors may be the optimizer's own, on
  // their device, until the next step. Loading throws UsageError for missing, unknown and misshapen
  // tensors, and for a parameter without a name, before anything is changed; check_state_dict does
  // only that.
  std::map<std::string, at::Tensor> state_dict(const NamedParameters& names, bool copy = true);
  void load_state_dict(const NamedParameters& names,
                       const std::map<std::string, at::Tensor>& state);
  void check_state_dict(const NamedParameters& names,
                        const std::map<std::string, at::Tensor>& state);

  // The state of a parameter, made where there is none; it stays where it is when one is loaded.
  const RuleState& ensure_state(const at::Tensor& param, const UpdateRule& rule);

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<RuleState, detail::GroupRule>(archive, *this);
  }
  // UsageError: only OptimizerOf knows which options an archive holds.
  void load(torch::serialize::InputArchive& archive) override;
  // Null before its first step.
  const RuleState* find_state(const at::Tensor& param) const;

 protected:
  RuleOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                std::unique_ptr<detail::GroupRule> defaults);
  std::string_view who() const { return name_; }
  void check_loaded();  // after an archive was read: UsageError if it is another model's

 private:
  // One parameter's state, for a dictionary. `step` counts; see UpdateRule::counts_steps().
  struct Named {
    at::Tensor step{};  // a double without dimensions
    std::vector<std::pair<std::string, at::Tensor>> tensors{};
  };
  void step_groups(const at::Tensor& found_inf);  // undefined: step in any case
  void step_batch(const detail::Batch& batch, const UpdateRule& rule, const at::Tensor& skip);
  Named named_state(const at::Tensor& param, const UpdateRule& rule) const;
  void set_state(const at::Tensor& param, const UpdateRule& rule, const Named& state);
  struct Loaded {
    at::Tensor param;
    const UpdateRule* rule;
    Named state;
  };
  std::vector<Loaded> read_state(const NamedParameters& names,
                                 const std::map<std::string, at::Tensor>& state);

  std::string name_;
};

template <typename Options>
class OptimizerOf : public RuleOptimizer {
 public:
  explicit OptimizerOf(std::vector<at::Tensor> params, const Options& options = {})
      : OptimizerOf(std::vector{torch::optim::OptimizerParamGroup(std::move(params))}, options) {}
  // Groups with their own options: AdamW optimizer{{AdamW::group(a, {.lr = 1}), ...}};
  explicit OptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                       const Options& options = {})
      : RuleOptimizer(groups, std::make_unique<detail::GroupOptions<Options>>(options)) {}
  static torch::optim::OptimizerParamGroup group(std::vector<at::Tensor> params,
                                                 const Options& options) {
    const Rule rule(options);
    rule->check();
    return {std::move(params), std::make_unique<detail::GroupOptions<Options>>(rule)};
  }

  // A group's options, to read or to change between steps.
  Options& options(std::size_t group = 0) {
    return detail::rule_of(who(), param_groups_.at(group)).template as<Options>();
  }

  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<RuleState, detail::GroupOptions<Options>>(archive, *this);
    check_loaded();
  }
};

}  // namespace lockstep::optim
