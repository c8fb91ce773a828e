// Lion (Chen et al., 2023) moves every weight by lr, against the sign of an average of gradients.
// One tensor of state for each parameter, half of AdamW's. The usual learning rate is a third to a
// tenth of AdamW's, and weight decay is larger by the same factor.
//
//   lockstep::optim::Lion optimizer{model.parameters(), {.lr = 1e-4, .weight_decay = 0.1}};
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include "lockstep/optim/rule_optimizer.h"

namespace lockstep::optim {

struct LionOptions {
  static constexpr std::string_view kName = "Lion";
  double lr = 1e-4;
  std::pair<double, double> betas{0.9, 0.99};
  double weight_decay = 0;

  void each(const OptionVisitor& option) {
    option("lr", lr);
    option("beta1", betas.first, {.below = 1});
    option("beta2", betas.second, {.below = 1});
    option("weight_decay", weight_decay);
  }
};

std::unique_ptr<UpdateRule> make_rule(const LionOptions& options);

using Lion = OptimizerOf<LionOptions>;

}  // namespace lockstep::optim
