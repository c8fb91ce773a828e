// AdamW over many float parameters in one pass over memory: unscaling, clipping by the norm of all
// gradients, the update, and a bfloat16 copy of each parameter that wants one.
//
//   AdamWPass pass{items, {AdamWOptions{.lr = 3e-4}}};
//   pass.set_max_norm(1.0);
//   pass.step();                        // or step(scaler's scale, on the device)
//   const double norm = pass.norm().item<double>();
//
// On CUDA, everything that changes from step to step (learning rate, loss scale, bound, step
// number) is on the device, so a captured CUDA graph may hold step(): set_options() and
// set_max_norm() write there, between replays. A step whose norm is not finite changes nothing.
// The arithmetic is AdamW's in float, not the bits of ATen's fused kernel, which computes in
// double.
//
// Shares the tensors of its items and keeps them alive. One thread at a time. Not for programs yet.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "lockstep/optim/options.h"

namespace lockstep::optim {

struct AdamWItem {
  at::Tensor param;       // float
  at::Tensor grad;        // float, of its shape; undefined: param.grad() at each step
  at::Tensor exp_avg;     // float
  at::Tensor exp_avg_sq;  // float
  at::Tensor step;        // one float on param's device: how many steps were taken
  at::Tensor shadow{};    // bfloat16: written with the parameter; optional
  std::size_t group = 0;
};

class AdamWPass {
 public:
  // All on one device and contiguous; UsageError otherwise.
  AdamWPass(std::vector<AdamWItem> items, std::vector<AdamWOptions> groups);

  void set_options(std::size_t group, const AdamWOptions& options);
  void set_max_norm(double max_norm);  // 0: no clipping

  // `grad_scale`, one float on the device: gradients are divided by it.
  void step(const at::Tensor& grad_scale = {});

  // Of the last step, one float each on the device: the norm before clipping, and 1 when it was not
  // finite.
  const at::Tensor& norm() const { return norm_; }
  const at::Tensor& found_inf() const { return found_inf_; }

 private:
  void step_with_aten(const at::Tensor& grad_scale);
  bool step_with_kernels(const at::Tensor& grad_scale);
  void build_tables();

  std::vector<AdamWItem> items_;
  std::vector<AdamWOptions> groups_;
  at::Tensor group_values_;  // [groups, 5]
  at::Tensor max_norm_, norm_, found_inf_, clip_;
  // The kernels' tables, and the gradients they were built for.
  at::Tensor tensors_, chunks_, partials_, factors_;
  std::vector<const void*> built_for_;
};

}  // namespace lockstep::optim
