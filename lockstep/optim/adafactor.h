// Adafactor (Shazeer and Stern, 2018) as transformers.Adafactor has it: only the means of the
// second moments over rows and over columns are stored, so a matrix has almost no state.
//
//   lockstep::optim::Adafactor optimizer{model.parameters(), {.lr = 1e-3}};
//
// As in Hugging Face's Trainer, with an explicit learning rate: relative steps and scaling by the
// parameter are off unless asked for. Half types are computed in float.
#pragma once

#include <limits>
#include <memory>
#include <string_view>
#include <utility>

#include "lockstep/optim/rule_optimizer.h"

namespace lockstep::optim {

struct AdafactorOptions {
  static constexpr std::string_view kName = "Adafactor";
  double lr = 1e-3;                            // without effect where relative_step is on
  std::pair<double, double> eps{1e-30, 1e-3};  // for squared gradients; for the parameter's scale
  double clip_threshold = 1;                   // for the root mean square of an update
  double decay_rate = -0.8;                    // second moments: 1 - step^decay_rate
  double beta1 = 0;                            // above zero: also a first moment
  double weight_decay = 0;
  bool scale_parameter = false;
  bool relative_step = false;
  bool warmup_init = false;

  void each(const OptionVisitor& option) {
    option("lr", lr);
    option("eps1", eps.first);
    option("eps2", eps.second);
    option("clip_threshold", clip_threshold);
    option("decay_rate", decay_rate,
           {.least = -std::numeric_limits<double>::infinity(), .below = 0});
    option("beta1", beta1, {.below = 1});
    option("weight_decay", weight_decay);
    option("scale_parameter", scale_parameter);
    option("relative_step", relative_step);
    option("warmup_init", warmup_init);
  }
  void check() const;  // what ranges cannot express
};

std::unique_ptr<UpdateRule> make_rule(const AdafactorOptions& options);

using Adafactor = OptimizerOf<AdafactorOptions>;

}  // namespace lockstep::optim
