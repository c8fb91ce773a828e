// What AdamW, Adam and SGD are made with, as plain values with PyTorch's names and defaults.
//
//   AdamWOptions options{.lr = 3e-4, .weight_decay = 0.1};
//   AdamW optimizer{model.parameters(), options};   // UsageError names an option out of range
#pragma once

#include <string_view>
#include <utility>

namespace lockstep::optim {

struct AdamWOptions {
  static constexpr std::string_view kName = "AdamW";
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

struct AdamOptions {
  static constexpr std::string_view kName = "Adam";
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
};

struct SGDOptions {
  static constexpr std::string_view kName = "SGD";
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

}  // namespace lockstep::optim
