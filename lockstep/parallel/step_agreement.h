// StepAgreement: what the ranks of a divided optimizer agree on before a step changes anything. If
// one rank refuses the step, all throw. Options that differ between ranks are refused as well: each
// rank steps its share with its own options, and every rank receives the result, so that parameters
// would be equal everywhere and wrong.
//
//   StepAgreement agreement(world, optimizer, "fully_shard");
//   agreement.settings = StepSettings::of(options);
//   at::Tensor used = ...;     // kByte
//   used = agreement.exchange({.component = ..., .what = "this step", .refusal = mine}, used, {});
//
// Internal. For the thread that trains; the optimizer outlives this.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/replicas.h"

namespace lockstep::parallel {

// The settings of one step, equal on all ranks.
struct StepSettings {
  double max_grad_norm = 0;
  double loss_scale = 1;  // gradients are divided by it
  bool want_grad_norm = false;
  bool skip_non_finite = false;

  static StepSettings of(const optim::StepOptions& options);
  double gradient_scale() const { return 1 / loss_scale; }
  bool two_passes() const { return max_grad_norm > 0 || want_grad_norm || skip_non_finite; }
};

class StepAgreement {
 public:
  // Options are those of the optimizer's groups.
  StepAgreement(World world, optim::Optimizer& optimizer, std::string component)
      : world_(std::move(world)), optimizer_(optimizer), component_(std::move(component)) {}

  StepSettings settings;

  // For the making of the optimizer, with a line for each parameter. UsageError on every rank where
  // one refuses, or where they differ. Collective.
  void agree_on_making(const std::exception_ptr& refusal, const std::string& parameters);
  // What else must be equal: its fingerprint, and a line for each part of it.
  struct Details {
    std::uint64_t print = 0;
    std::function<std::string()> text;
  };
  // For a step: the maximum of each flag over ranks, by one all-reduce where all ranks agree.
  // UsageError on every rank where they do not. Collective.
  at::Tensor exchange(const Check& check, const at::Tensor& flags, const Details& details);

 private:
  using Visit = std::function<void(std::string_view name, int group, double& number)>;
  void each_setting(const Visit& visit);
  // Every setting, of the step and of each group's options, in one order on all ranks, and after
  // them the kinds of options.
  std::vector<double> numbers();
  std::string show();
  void refuse_difference(const Check& check, const std::string& text);

  World world_;
  optim::Optimizer& optimizer_;
  std::string component_;
};

}  // namespace lockstep::parallel
