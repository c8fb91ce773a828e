// The state of a parameter and the rule of a group, in the classes that torch's archives and
// schedulers expect. Internal to the optimizers; tests look at the state of a parameter:
//
//   const RuleState* state = find_state(optimizer, param);   // null before its first step
//   state->step, (*state)["exp_avg"]
//
// Keys in archives and in checkpoints are the names of UpdateRule::state(), and "step".
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/optim/rule.h"

namespace lockstep::optim {

// Made at the parameter's first step.
struct RuleState : torch::optim::OptimizerCloneableParamState<RuleState> {
  at::Tensor step;  // float, on the parameter's device: fused kernels read it there. Undefined
                    // where the rule counts no steps.
  StateTensors tensors;
  std::vector<std::string> names;

  const at::Tensor& operator[](std::string_view name) const;  // undefined: there is none
  void add(std::string name, at::Tensor tensor);
  // Copies the other's tensors in place, and adopts those that are missing here.
  void assign(const RuleState& other);
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

class GroupRule final : public torch::optim::OptimizerOptions {
 public:
  explicit GroupRule(const Rule& values) : rule(values), made_with(values->name()) {}
  std::unique_ptr<OptimizerOptions> clone() const override {
    return std::make_unique<GroupRule>(*this);
  }
  double get_lr() const override { return rule.get("lr"); }
  void set_lr(const double lr) override { rule.set("lr", lr); }
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;

  Rule rule;
  std::string made_with;  // the state is this rule's
};

const RuleState* find_state(const torch::optim::Optimizer& optimizer, const at::Tensor& param);
// Creates the state if needed; loading keeps the object. Empty for a rule without state.
const RuleState& ensure_state(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                              const UpdateRule& rule);

namespace detail {

std::string shape_of(const at::Tensor& tensor);  // "[2, 3]"

// Throws UsageError where the group was added with options of torch::optim.
Rule& rule_of(std::string_view who, torch::optim::OptimizerParamGroup& group);
// rule_of() for every group; also refuses another rule than it was made with, or wrong options.
void check_groups(std::string_view who, std::vector<torch::optim::OptimizerParamGroup>& groups);
// Throws UsageError when there is no group with this number.
void check_group(std::string_view who, std::size_t group, std::size_t count);

// A tensor of state for a parameter, filled with zeros.
at::Tensor make_state(const StateSpec& spec, const at::Tensor& param);

// Reads a state by names, before anything is changed: UsageError for a missing or misshapen tensor,
// and in finish() for one that was not read.
class StateReader {
 public:
  StateReader(std::string_view who, const std::map<std::string, at::Tensor>& state)
      : who_(who), state_(state) {}
  const at::Tensor& tensor(const std::string& name, at::IntArrayRef sizes);
  const at::Tensor& number(const std::string& name);  // with one element
  void finish() const;

 private:
  const at::Tensor& find(const std::string& name);
  std::string_view who_;
  const std::map<std::string, at::Tensor>& state_;
  std::set<std::string> known_;
};

}  // namespace detail

}  // namespace lockstep::optim
