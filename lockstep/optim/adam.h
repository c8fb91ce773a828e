// Options of Adam: weight decay is added to the gradient (AdamW shrinks the parameter instead).
#pragma once

#include <utility>

namespace lockstep::optim {

struct AdamOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
};

}  // namespace lockstep::optim
