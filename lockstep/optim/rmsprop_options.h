// The options of RMSprop, with PyTorch's names and defaults, and its state. Without torch, so that
// `lockstep plan` can count the state of a training file with `optim: rmsprop`.
//
//   RMSpropOptions options{.lr = 1e-3, .alpha = 0.9, .momentum = 0.9};
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "lockstep/optim/option.h"

namespace lockstep::optim {

class UpdateRule;

struct RMSpropOptions {
  static constexpr std::string_view kName = "RMSprop";
  double lr = 1e-2;
  double alpha = 0.99;  // of the average of squared gradients
  double eps = 1e-8;
  double weight_decay = 0;  // added to the gradient
  double momentum = 0;

  void each(const OptionVisitor& option) {
    option("lr", lr);
    option("alpha", alpha);  // PyTorch sets no upper bound either
    option("eps", eps);
    option("weight_decay", weight_decay);
    option("momentum", momentum);
  }
  std::vector<StateSpec> state(Sizes sizes) const {
    std::vector<StateSpec> specs{{"square_avg", copy_of(sizes)}};
    if (momentum > 0) specs.push_back({"momentum_buffer", copy_of(sizes)});
    return specs;
  }
};

std::unique_ptr<UpdateRule> make_rule(const RMSpropOptions& options);

}  // namespace lockstep::optim
