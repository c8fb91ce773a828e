// The options of AdamW, Adam and SGD, as plain values with PyTorch's names and defaults.
//
//   AdamWOptions options{.lr = 3e-4, .weight_decay = 0.1};
//   AdamW optimizer{model.parameters(), options};   // UsageError names an option out of range
//
// Other rules have theirs in a header of their own: lion.h, muon.h, adafactor.h.
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include "lockstep/optim/option.h"

namespace lockstep::optim {

class UpdateRule;

struct AdamWOptions {
  static constexpr std::string_view kName = "AdamW";
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;

  void each(const OptionVisitor& option) {
    option("lr", lr);
    option("beta1", betas.first, {.below = 1});
    option("beta2", betas.second, {.below = 1});
    option("eps", eps);
    option("weight_decay", weight_decay);
  }
};

struct AdamOptions {
  static constexpr std::string_view kName = "Adam";
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;

  void each(const OptionVisitor& option) {
    option("lr", lr);
    option("beta1", betas.first, {.below = 1});
    option("beta2", betas.second, {.below = 1});
    option("eps", eps);
    option("weight_decay", weight_decay);
  }
};

struct SGDOptions {
  static constexpr std::string_view kName = "SGD";
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;

  void each(const OptionVisitor& option) {
    constexpr double kAny = std::numeric_limits<double>::infinity();
    option("lr", lr);
    option("momentum", momentum);
    option("dampening", dampening, {.least = -kAny});
    option("weight_decay", weight_decay);
    option("nesterov", nesterov);
  }
  void check() const;  // what ranges cannot express
};

std::unique_ptr<UpdateRule> make_rule(const AdamWOptions& options);
std::unique_ptr<UpdateRule> make_rule(const AdamOptions& options);
std::unique_ptr<UpdateRule> make_rule(const SGDOptions& options);

}  // namespace lockstep::optim
