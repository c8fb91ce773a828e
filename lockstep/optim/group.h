// What the optimizers of this folder share: options as plain structs, and parameters made ready for
// fused kernels, ours or ATen's.
//
//   GroupOptions<AdamWOptions>    carries a plain struct where torch::optim wants its own class
//   FusedBase                     a step that the device may leave out; state by parameter name
//   FusedOptimizer<AdamWOptions>  everything about an optimizer but its arithmetic
//   gather(who, params, seen)     the parameters that have a gradient, per device and dtype
//
// For optimizers and those who drive them; a user reads adamw.h, adam.h or sgd.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
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
#include "lockstep/optim/options.h"

namespace lockstep::optim {

// As module->named_parameters().pairs() gives them. The first name of a tensor counts.
using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

namespace detail {

// Throws UsageError naming an option out of range.
void check(const AdamWOptions& options);
void check(const AdamOptions& options);
void check(const SGDOptions& options);

void read(torch::serialize::InputArchive& archive, AdamWOptions& options);
void read(torch::serialize::InputArchive& archive, AdamOptions& options);
void read(torch::serialize::InputArchive& archive, SGDOptions& options);
void write(torch::serialize::OutputArchive& archive, const AdamWOptions& options);
void write(torch::serialize::OutputArchive& archive, const AdamOptions& options);
void write(torch::serialize::OutputArchive& archive, const SGDOptions& options);

// An aggregate (so that {.lr = 3e-4} works) inside the class that schedulers and archives expect.
template <typename Options>
class GroupOptions final : public torch::optim::OptimizerCloneableOptions<GroupOptions<Options>> {
 public:
  explicit GroupOptions(const Options& options) : values(options) {}
  explicit GroupOptions(int) {}  // torch's archive reader makes one this way and then fills it

  double get_lr() const override { return values.lr; }
  void set_lr(const double lr) override { values.lr = lr; }
  void serialize(torch::serialize::InputArchive& archive) override { read(archive, values); }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    write(archive, values);
  }

  Options values;
};

// Tensors of one device and dtype, which a fused kernel steps in one call.
struct Batch {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;  // laid out in memory as their parameters
  at::Tensor found_inf{};         // defined: the kernel does nothing where it is not zero
};
using Seen = std::unordered_set<at::TensorImpl*>;

// The parameters with a gradient; one without is skipped, as in Python. One listed twice in a group
// (tied weights: C++ modules list them under both names) is stepped once; one in two groups, a
// sparse gradient, a parameter that is a strided slice and one whose gradient is not averaged yet
// (see local_gradients.h) throw UsageError. `seen` is shared by the groups of one step.
std::vector<Batch> gather(std::string_view who, const std::vector<at::Tensor>& params, Seen& seen);

// Throws UsageError when the group was added with another optimizer's options.
template <typename Options>
Options& values_of(std::string_view who, torch::optim::OptimizerParamGroup& group) {
  auto* options = dynamic_cast<GroupOptions<Options>*>(&group.options());
  if (options == nullptr) {
    throw UsageError(who,
                     "a parameter group has options of another optimizer. It was probably added "
                     "with torch::optim's own options. Make the group with {}::group().",
                     who);
  }
  return options->values;
}

// Throws UsageError naming the option when `ok` is false.
void check_option(bool ok, std::string_view who, std::string_view option, double value);

// Throws UsageError when there is no group of this number.
void check_group(std::string_view who, std::size_t group, std::size_t count);

// What the archive held for a parameter must have that parameter's shape.
void check_loaded(std::string_view who, const at::Tensor& param, const at::Tensor& loaded);

class FusedBase : public torch::optim::Optimizer {
 public:
  using Optimizer::Optimizer;

  // As step(), but where `found_inf` (a float of one element, on the device) is not zero, nothing
  // is changed: the kernels read it there, and the host does not wait.
  void step_unless(const at::Tensor& found_inf);

  // The learning rate of a group, to read or to set between steps. UsageError where there is none.
  double lr(std::size_t group = 0) const;
  void set_lr(double lr);  // of all groups
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

 protected:
  // One parameter's state. `step` counts its steps; of SGD it is 1 once there is momentum.
  struct State {
    at::Tensor step;                                          // a double without dimensions
    std::vector<std::pair<std::string, at::Tensor>> tensors;  // names depend on the group alone
  };
  virtual std::string_view who() const = 0;
  virtual State state_of(const at::Tensor& param, torch::optim::OptimizerParamGroup& group) = 0;
  virtual void set_state(const at::Tensor& param, State state) = 0;
  virtual void step_groups(const at::Tensor& found_inf) = 0;  // undefined: step in any case

 private:
  std::vector<std::pair<at::Tensor, State>> read_state(
      const NamedParameters& names, const std::map<std::string, at::Tensor>& state);
};

template <typename Options>
class FusedOptimizer : public FusedBase {
 public:
  explicit FusedOptimizer(std::vector<at::Tensor> params, const Options& options = {})
      : FusedOptimizer(std::vector{torch::optim::OptimizerParamGroup(std::move(params))}, options) {
  }
  // Groups with their own options: AdamW optimizer{{AdamW::group(a, {.lr = 1}), ...}};
  explicit FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                          const Options& options = {})
      : FusedBase(groups, checked(options)) {}
  static torch::optim::OptimizerParamGroup group(std::vector<at::Tensor> params,
                                                 const Options& options) {
    return {std::move(params), checked(options)};
  }

  // A group's options, to read or to change between steps.
  Options& options(std::size_t group = 0) {
    return values_of<Options>(Options::kName, param_groups_.at(group));
  }

  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode with_grad(true);
      loss = closure();
    }
    step_groups(at::Tensor());
    return loss;
  }

 protected:
  virtual void step_batch(const Batch& batch, const Options& options) = 0;

  std::string_view who() const override { return Options::kName; }
  void step_groups(const at::Tensor& found_inf) override {
    const torch::NoGradGuard no_grad;
    Seen seen;
    for (auto& group : param_groups_) {
      const auto& options = values_of<Options>(Options::kName, group);
      for (auto& batch : gather(Options::kName, group.params(), seen)) {
        if (found_inf.defined()) batch.found_inf = found_inf.to(batch.params[0].device());
        step_batch(batch, options);
      }
    }
  }

 private:
  static std::unique_ptr<torch::optim::OptimizerOptions> checked(const Options& options) {
    check(options);
    return std::make_unique<GroupOptions<Options>>(options);
  }
};

}  // namespace detail
}  // namespace lockstep::optim
