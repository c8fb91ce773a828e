// Mixed precision, as torch.amp has it: Autocast computes a forward in fp16 or bf16, and GradScaler
// keeps fp16 gradients from vanishing.
//
//   {
//     const lockstep::optim::Autocast autocast{world.device(), at::kBFloat16};
//     loss = torch::cross_entropy_loss(model(batch.data), batch.target);
//   }
//   loss.backward();   // outside: each gradient takes the type its forward had
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::optim {

// While this guard lives, operations that may lose precision run in fp16 or bf16. Converted weights
// are cached until the outermost guard ends: the next step has others.
//
// Guards nest; one with kFloat inside switches autocasting off for a part that needs precision.
// Thread-local, as torch's own: make and destroy it on the thread that computes.
class Autocast {
 public:
  // kHalf or kBFloat16 on the CPU and on CUDA; kFloat is off. Throws UsageError for another.
  Autocast(c10::Device device, c10::ScalarType dtype, bool cache_enabled = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType type_;
  bool was_enabled_;
  c10::ScalarType was_dtype_;
  bool was_cached_;
};

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  bool enabled = true;  // off: only step() does anything
};

// PyTorch's state_dict, with its names (there the last one is _growth_tracker).
struct GradScalerState {
  double scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  std::int64_t growth_tracker = 0;
};

// Keeps small fp16 gradients from vanishing, with PyTorch's constants, states and rules.
//
//   lockstep::optim::GradScaler scaler{world};
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                   // only to see or clip true gradients
//   lockstep::optim::clip_grad_norm_(model.parameters(), 1.0);
//   scaler.step(optimizer);                       // skipped when a gradient is inf or nan
//   scaler.update();
//
// Whether a step is skipped is a number on the device, the maximum over all ranks, which the fused
// kernels read there: the host never waits for it, except with optimizers of torch::optim.
//
// bf16 has the range of float32 and needs no scaler. One scaler per run, even with several
// optimizers; update() once per step, after all of them. unscale_ and step communicate: call them
// on all ranks identically. One thread at a time.
class GradScaler {
 public:
  // Throws UsageError for factors that do not grow or shrink.
  explicit GradScaler(World world = {}, const GradScalerOptions& options = {});

  at::Tensor scale(const at::Tensor& loss);

  // Divides the gradients of the optimizer's parameters by the scale, once between two updates.
  void unscale_(torch::optim::Optimizer& optimizer);
  void unscale_(const void* optimizer, const std::vector<at::Tensor>& params);
  // Steps unless a gradient is not finite; unscales first unless that was already done. Defined in
  // optimizer.cpp.
  void step(torch::optim::Optimizer& optimizer);
  // After all steps: halves the scale when one was skipped, doubles it after growth_interval
  // updates in a row without one. A new scale may be given instead.
  void update(std::optional<double> new_scale = std::nullopt);

  // 1 where the step of this optimizer is (or was, since the last update) skipped, otherwise 0: a
  // float of one element on the device. Undefined before unscale_ or step.
  at::Tensor found_inf(const void* optimizer) const;

  // For an optimizer that divides by the scale and finds non-finite gradients in its own step, as
  // one with a divided state: records what it found. Counts as unscale_ and step of `optimizer`.
  void record_step(const void* optimizer, bool skipped);

  bool enabled() const { return options_.enabled; }
  double get_scale() const;  // waits for the device

  GradScalerState state_dict() const;  // waits for the device
  void load_state_dict(const GradScalerState& state);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct PerOptimizer {
    Stage stage = Stage::kReady;
    at::Tensor found_inf;
  };
  void require_scale(const char* call) const;
  void make_scale(const c10::Device& device);
  at::Tensor check_and_unscale(const std::vector<at::Tensor>& params);

  World world_;
  GradScalerOptions options_;
  at::Tensor scale_;           // float, one element, on the first loss's device
  at::Tensor growth_tracker_;  // int, one element
  std::int64_t initial_tracker_ = 0;
  std::map<const void*, PerOptimizer> optimizers_;  // since the last update
};

}  // namespace lockstep::optim
