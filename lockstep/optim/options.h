// The options of all rules, as plain values with the names and defaults of PyTorch (Adafactor:
// transformers), and the state that each has for a parameter. Without torch.
//
//   AdamWOptions options{.lr = 3e-4, .weight_decay = 0.1};
//   AdamW optimizer{model.parameters(), options};   // UsageError names an option out of range
//
// algorithms.h says what the rules do.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/optim/option.h"

namespace lockstep::optim {

class UpdateRule;

struct AdamWOptions {
  static constexpr std::string_view kName = "AdamW";
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool bf16_state = false;  // of bfloat16; it and such parameters are rounded stochastically

  void each(const OptionVisitor& option) {
    option("lr", lr);
    option("beta1", betas.first, {.below = 1});
    option("beta2", betas.second, {.below = 1});
    option("eps", eps);
    option("weight_decay", weight_decay);
    option("bf16_state", bf16_state);
  }
  std::vector<StateSpec> state(Sizes sizes) const {
    return {{"exp_avg", copy_of(sizes), false, bf16_state},
            {"exp_avg_sq", copy_of(sizes), false, bf16_state}};
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
  std::vector<StateSpec> state(Sizes sizes) const {
    return {{"exp_avg", copy_of(sizes)}, {"exp_avg_sq", copy_of(sizes)}};
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
    option("lr", lr);
    option("momentum", momentum);
    option("dampening", dampening, {.least = kNoLeast});
    option("weight_decay", weight_decay);
    option("nesterov", nesterov);
  }
  std::vector<StateSpec> state(Sizes sizes) const {
    if (momentum == 0) return {};
    return {{"momentum_buffer", copy_of(sizes)}};
  }
  void check() const;  // what ranges cannot express
};

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
  std::vector<StateSpec> state(Sizes sizes) const { return {{"exp_avg", copy_of(sizes)}}; }
};

struct MuonOptions {
  static constexpr std::string_view kName = "Muon";
  double lr = 1e-3;
  double weight_decay = 0.1;
  double momentum = 0.95;
  bool nesterov = true;
  double eps = 1e-7;
  std::int64_t ns_steps = 5;
  std::array<double, 3> ns_coefficients{3.4445, -4.7750, 2.0315};
  // Scales steps so that the learning rate and weight decay of AdamW fit (Moonshot, 2025); false:
  // by the square root of rows over columns where a matrix is tall, as in the original.
  bool match_rms_adamw = false;

  void each(const OptionVisitor& option) {
    option("lr", lr);
    option("weight_decay", weight_decay);
    option("momentum", momentum, {.below = 1});
    option("nesterov", nesterov);
    option("eps", eps);
    option("ns_steps", ns_steps, {.least = 1, .below = 100});
    option("ns_coefficients.0", ns_coefficients[0], {.least = kNoLeast});
    option("ns_coefficients.1", ns_coefficients[1], {.least = kNoLeast});
    option("ns_coefficients.2", ns_coefficients[2], {.least = kNoLeast});
    option("match_rms_adamw", match_rms_adamw);
  }
  std::vector<StateSpec> state(Sizes sizes) const { return {{"momentum_buffer", copy_of(sizes)}}; }
};

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
    option("decay_rate", decay_rate, {.least = kNoLeast, .below = 0});
    option("beta1", beta1, {.below = 1});
    option("weight_decay", weight_decay);
    option("scale_parameter", scale_parameter);
    option("relative_step", relative_step);
    option("warmup_init", warmup_init);
  }
  std::vector<StateSpec> state(Sizes sizes) const {
    std::vector<StateSpec> specs;
    if (sizes.size() >= 2) {
      std::vector<std::int64_t> rows(sizes.begin(), sizes.end() - 1);
      std::vector<std::int64_t> columns(sizes.begin(), sizes.end() - 2);
      columns.push_back(sizes.back());
      specs.push_back({"exp_avg_sq_row", std::move(rows), true});
      specs.push_back({"exp_avg_sq_col", std::move(columns), true});
    } else {
      specs.push_back({"exp_avg_sq", copy_of(sizes), true});
    }
    if (beta1 > 0) specs.push_back({"exp_avg", copy_of(sizes), true});
    return specs;
  }
  void check() const;  // what ranges cannot express
};

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

std::unique_ptr<UpdateRule> make_rule(const AdamWOptions& options);
std::unique_ptr<UpdateRule> make_rule(const AdamOptions& options);
std::unique_ptr<UpdateRule> make_rule(const SGDOptions& options);
std::unique_ptr<UpdateRule> make_rule(const LionOptions& options);
std::unique_ptr<UpdateRule> make_rule(const MuonOptions& options);
std::unique_ptr<UpdateRule> make_rule(const AdafactorOptions& options);
std::unique_ptr<UpdateRule> make_rule(const RMSpropOptions& options);

}  // namespace lockstep::optim
