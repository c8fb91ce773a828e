// What the optimizers of this folder share: options as plain structs, and parameters made ready for
// ATen's fused kernels.
//
//   GroupOptions<AdamWOptions>    carries a plain struct where torch::optim wants its own class
//   FusedOptimizer<AdamWOptions>  everything about an optimizer but its rule
//   gather(who, params, seen)     the parameters that have a gradient, per device and dtype
//
// For optimizers only; a user reads adamw.h or sgd.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>
#include <torch/utils.h>

#include <cstddef>
#include <memory>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"

namespace lockstep::optim {

// An aggregate (so that {.lr = 3e-4} works) inside the class that schedulers and archives expect.
// Each options struct provides read() and write() for its fields, check(), which throws UsageError
// for a value out of range, and kName, the optimizer's name in messages.
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

namespace detail {

// Tensors of one device and dtype, which a fused kernel steps in one call.
struct Batch {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;  // laid out in memory as their parameters
};
using Seen = std::unordered_set<at::TensorImpl*>;

// The parameters with a gradient; one without is skipped, as in Python. One listed twice in a group
// (tied weights: C++ modules list them under both names) is stepped once; one in two groups, a
// sparse gradient, a parameter that is a strided slice and one whose gradient is not averaged yet
// (see deferred_gradients.h) throw UsageError. `seen` is kept over the groups of one step.
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

// What the archive held for a parameter must have that parameter's shape.
void check_loaded(std::string_view who, const at::Tensor& param, const at::Tensor& loaded);

}  // namespace detail

template <typename Options>
class FusedOptimizer : public torch::optim::Optimizer {
 public:
  explicit FusedOptimizer(std::vector<at::Tensor> params, const Options& options = {})
      : FusedOptimizer(std::vector{torch::optim::OptimizerParamGroup(std::move(params))}, options) {
  }
  // Groups with their own options: AdamW optimizer{{AdamW::group(a, {.lr = 1}), ...}};
  explicit FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                          const Options& options = {})
      : Optimizer(groups, checked(options)) {}
  static torch::optim::OptimizerParamGroup group(std::vector<at::Tensor> params,
                                                 const Options& options) {
    return {std::move(params), checked(options)};
  }

  // A group's options, to read or to change between steps.
  Options& options(std::size_t group = 0) {
    return detail::values_of<Options>(Options::kName, param_groups_.at(group));
  }

  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode with_grad(true);
      loss = closure();
    }
    const torch::NoGradGuard no_grad;
    detail::Seen seen;
    for (auto& group : param_groups_) {
      const auto& options = detail::values_of<Options>(Options::kName, group);
      for (const auto& batch : detail::gather(Options::kName, group.params(), seen))
        step_batch(batch, options);
    }
    return loss;
  }

 protected:
  virtual void step_batch(const detail::Batch& batch, const Options& options) = 0;

 private:
  static std::unique_ptr<torch::optim::OptimizerOptions> checked(const Options& options) {
    check(options);
    return std::make_unique<GroupOptions<Options>>(options);
  }
};

}  // namespace lockstep::optim
