// AdamW over many parameters in one pass over memory: clipping by the norm of all gradients,
// and the update.
//
//   AdamWPass pass{items, {AdamWOptions{.lr = 3e-4}}};
//   pass.set_max_norm(1.0);
//   pass.step();
//   const double norm = pass.norm().item<double>();
//
// step() is measure() and update(found_inf()): a step whose norm is not finite changes nothing. A
// caller with another criterion (ranks that must agree) calls them itself.
//
// On CUDA, all values that change between steps (learning rate, bound, step number) are on the
// device, so a captured CUDA graph may contain step(): set_options() and set_max_norm() write them
// between replays.
// The arithmetic is AdamW's in float, with the same bits on a CPU and on a GPU for one norm
// (lockstep/kernels/adamw_element.h). They differ from those of ATen's fused kernel, which computes
// in double.
//
// Shares the tensors of its items and keeps them alive. One thread at a time. Not public yet.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <list>
#include <vector>

#include "lockstep/kernels/cuda/arguments.h"
#include "lockstep/optim/options.h"
#include "lockstep/optim/rule.h"

namespace lockstep::optim {

struct AdamWItem {
  at::Tensor param;       // float or bfloat16
  at::Tensor grad;        // of its type and shape; undefined: param.grad() at each step
  at::Tensor exp_avg;     // float or bfloat16
  at::Tensor exp_avg_sq;  // of the same type
  at::Tensor step;        // one float on param's device: how many steps were taken
  std::size_t group = 0;
  Origin origin{};
};

class AdamWPass {
 public:
  // All on one device and contiguous; UsageError otherwise.
  AdamWPass(std::vector<AdamWItem> items, std::vector<AdamWOptions> groups);

  void set_options(std::size_t group, const AdamWOptions& options);
  void set_max_norm(double max_norm);  // 0: no clipping

  // Call it before a capture that contains a step: allocates the memory that replays read. Memory
  // allocated during the capture belongs to the graph, which may first use it for something else.
  void prepare_capture();

  void step();
  void measure();
  // `skip` is one float on the device: the step is skipped where it is not 0.
  void update(const at::Tensor& skip = {});

  // Norm of the last measure(), before clipping, and 1 where it was not finite; one float each on
  // the device.
  const at::Tensor& norm() const { return norm_; }
  const at::Tensor& found_inf() const { return found_inf_; }

 private:
  // Device tables about the tensors for the kernels, and the addresses that they were made for.
  struct Tables {
    at::Tensor tensors, chunks, partials, factors;
    std::vector<const void*> made_for;
  };
  void measure_with_aten();
  void update_on_cpu(const at::Tensor& skip);
  std::vector<const void*> addresses() const;
  Tables make_tables(std::vector<const void*> made_for) const;
  Tables& current_tables();
  kernels::cuda::AdamStep arguments(const Tables& tables) const;
  void check_status(int status) const;

  std::vector<AdamWItem> items_;
  std::vector<AdamWOptions> groups_;
  at::Tensor group_values_;  // [groups, 5]
  double bound_ = 0;         // upper bound of the norm
  at::Tensor max_norm_, norm_, found_inf_, clip_;
  Tables tables_;
  std::list<Tables> captured_;  // read by the replays of graphs
  Tables spare_;                // for the next captured graph
  Tables* measured_ = nullptr;  // set by the last measure()
};

}  // namespace lockstep::optim
