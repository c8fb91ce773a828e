// Stepper: what a training loop asks of an optimizer, whichever it is.
//
//   auto stepper = replicated(std::make_shared<AdamW>(net->parameters(), options), named(*net));
//   stepper->set_lr(0, 3e-4 * schedule.factor(step));
//   StepResult result = stepper->step({.max_grad_norm = 1.0, .scaler = &scaler});
//   stepper->zero_grad();
//
// Clipping, loss scaling and leaving out a bad step belong to the request,
// because an optimizer that averages gradients in its own step (ShardedOptimizer, see
// lockstep/parallel/sharded_stepper.h) must do them between its two passes, while a replicated one
// does them on .grad before. The loop is the same for both, and so is the state on disk: by
// parameter name ("h.0.attn.weight.exp_avg"), independent of the number of ranks.
//
// Owns its optimizer. step, state_dict and load_state_dict may communicate: call them on all ranks
// identically. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/optim/group.h"

namespace lockstep::optim {

using TensorDict = std::map<std::string, at::Tensor>;

struct StepRequest {
  double max_grad_norm = 0;      // above zero: clip to this norm over all parameters
  bool want_grad_norm = false;   // compute the norm also where nothing is clipped
  GradScaler* scaler = nullptr;  // the loss was scaled by it; step() also calls its update()
  bool skip_non_finite = false;  // leave out, on all ranks, a step with an inf or nan gradient
};

// Tensors of one element on the parameters' device (reading them waits for it), undefined where
// nothing was asked for.
struct StepResult {
  at::Tensor grad_norm;  // before clipping
  at::Tensor skipped;    // 1 or 0
};

class Stepper {
 public:
  virtual ~Stepper() = default;

  virtual StepResult step(const StepRequest& request = {}) = 0;
  virtual void zero_grad() = 0;

  virtual std::size_t groups() const = 0;
  virtual double lr(std::size_t group) const = 0;
  virtual void set_lr(std::size_t group, double lr) = 0;

  // Everything but the parameters. Tensors of load_state_dict are copied; missing, unknown and
  // misshapen ones throw UsageError with the name, before anything is changed.
  virtual TensorDict state_dict() = 0;
  virtual void load_state_dict(const TensorDict& state) = 0;

  // The parameters were written on purpose (weights were loaded), the same on every rank.
  virtual void sync_from_model() {}
};

// AdamW, Adam or SGD of this folder, the same on every rank, stepping averaged gradients. `world`
// is asked whether any rank has a non-finite gradient (skip_non_finite without a scaler).
std::unique_ptr<Stepper> replicated(std::shared_ptr<FusedBase> optimizer, NamedParameters names,
                                    World world = {});

NamedParameters named(const torch::nn::Module& module);

// Two groups as Hugging Face's Trainer makes them: no weight decay for the parameters of LayerNorm
// and for those named as a bias or a norm. Frozen parameters are in neither.
struct DecayGroups {
  std::vector<at::Tensor> decayed;
  std::vector<at::Tensor> not_decayed;
};
DecayGroups decay_groups(const torch::nn::Module& module);

}  // namespace lockstep::optim
