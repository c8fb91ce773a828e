// A training step of `lockstep bench gpt|lora|resnet`: the model, its wrapper and its optimizer, as
// lockstep::Trainer uses them.
//
//   ModelStep model(settings, world);
//   const at::Tensor loss = model.step(make_batch(settings, 0));   // on the device, not waited for
//
// One thread. Shares nothing with the caller but the world.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "bench/models.h"
#include "lockstep/comm/world.h"
#include "lockstep/models/lora_config.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/train/captured_step.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/task.h"

namespace lockstep::bench {

struct ModelBatch {
  at::Tensor data;    // token ids [batch, time], or images
  at::Tensor target;  // the ids that follow, or classes
};

// What step `step` trains on, on the settings' device; the same numbers as in peers/peer_loop.py.
// Tokens: low ids are frequent, and every second one follows from its predecessor, so there is
// something to learn. Images and classes: hashes of their positions.
ModelBatch make_batch(const ModelSettings& settings, std::int64_t step);

// Draws the initial weights and writes them to settings.start: model/ and, for lora, adapter/.
void write_start(const ModelSettings& settings);

class ModelStep {
 public:
  enum class Phase { kForward, kBackward, kOptimizer };
  struct Net {
    std::shared_ptr<torch::nn::Module> module;
    std::function<at::Tensor(const ModelBatch&)> loss;
    std::optional<models::LoraConfig> lora;
  };

  ModelStep(const ModelSettings& settings, World world);
  ModelStep(const ModelStep&) = delete;
  ModelStep& operator=(const ModelStep&) = delete;

  // Forward, backward, clipping and AdamW. Returns the loss.
  at::Tensor step(const ModelBatch& batch);

  // Called after each part of an eager step was launched.
  void on_phase(std::function<void(Phase)> called) { on_phase_ = std::move(called); }
  // Called before parameters and optimizer state change; in a captured step before the whole step.
  void before_update(std::function<void()> called) { before_update_ = std::move(called); }

  // The contents of its checkpoint, as the Trainer saves it; tensors are the model's own.
  train::CheckpointContents contents(std::int64_t step);

  double parameters() const;
  double trainable() const;
  // Floating-point operations of a step with settings.batch_size samples, forward and backward:
  //   gpt      6 N + 12 L T C for a token (N parameters, L layers, T tokens, C channels)
  //   lora     4 N + 6 n + 12 L T C (N frozen, n trained: a frozen weight has no gradient)
  //   resnet   6 for each multiplication of a forward's convolutions and last layer
  double flops() const;

 private:
  at::Tensor eager_step(const ModelBatch& batch);

  ModelSettings settings_;
  c10::Device device_;
  Net net_;
  std::optional<DistributedDataParallel<std::shared_ptr<torch::nn::Module>>> wrapped_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<CapturedStep> captured_;
  std::function<void(Phase)> on_phase_;
  std::function<void()> before_update_;
};

}  // namespace lockstep::bench
