// Parallelism: the interface of all ways to train one model on several ranks, for the Trainer,
// CapturedStep, checkpoints and loops of your own; docs/extending.md adds an implementation.
//
//   const auto optimizer = parallelism.make_optimizer(groups);
//   parallelism.before_forward();
//   at::Tensor loss = parallelism.watch(loss_of(micro));   // a micro-batch of a data::Window
//   parallelism.backward(loss * micro.weight, micro.last);
//   optimizer->step();
//
// parallelize() (parallelize.h) makes the one that a mesh asks for. DataParallel (ddp.h), behind
// DistributedDataParallel, has the whole model on every rank. Callers ask what a parallelism can
// do, and not which one it is. Unless stated otherwise everything is a collective, called on all
// ranks identically. One thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/mesh.h"
#include "lockstep/core/ledger.h"
#include "lockstep/optim/amp.h"

namespace lockstep {

namespace optim {
class Optimizer;
struct ParamGroup;
}  // namespace optim

class Parallelism {
 public:
  virtual ~Parallelism() = default;

  // The ranks, by axes: mesh().batch() divides the samples, mesh().world() is all of them. No
  // collective.
  virtual const Mesh& mesh() const = 0;
  // The layout of the optimizer's state in a word, for logs: "replicated". No collective.
  virtual std::string text() const = 0;

  // Makes an optimizer for all trained parameters.
  virtual std::unique_ptr<optim::Optimizer> make_optimizer(
      std::vector<optim::ParamGroup> groups) = 0;

  // Parameters are whole from here to the end of the backward that follows.
  virtual void before_forward() {}
  // Passes the loss, or another output, through hooks for its backward. No collective.
  virtual at::Tensor watch(at::Tensor output) { return output; }
  // `last`: the last pass before a step, after which every gradient is ready for the step.
  virtual void backward(const at::Tensor& loss, bool last) = 0;

  // A pass that is run later, when the parallelism reaches it.
  struct Pass {
    std::function<at::Tensor()> forward;  // its loss; of one stage of the model, what that returns
    // The root of backward: the weighted and scaled loss.
    std::function<at::Tensor(const at::Tensor& loss)> weigh;
    std::vector<std::int64_t> sizes{};  // of its samples, where they are not always the same
  };
  // True: a step's passes run together, in run_window(), because stages of the model compute
  // different ones at a time (Pipeline). backward() throws UsageError then. No collective.
  virtual bool takes_windows() const { return false; }
  // Runs all passes before a step, after which every gradient is ready for the step. Returns their
  // losses, without gradients, on every rank. In no-grad mode (evaluation) there is no backward,
  // and `weigh` is not called.
  virtual std::vector<at::Tensor> run_window(const std::vector<Pass>& passes) {
    std::vector<at::Tensor> losses;
    for (const Pass& pass : passes) {
      before_forward();
      const at::Tensor loss = watch(pass.forward());
      losses.push_back(loss.detach());
      if (c10::GradMode::is_enabled()) backward(pass.weigh(loss), losses.size() == passes.size());
    }
    return losses;
  }

  // Parameters are whole while it is held: evaluation, saving, export. Releasing it is local, on
  // every rank before the same forward.
  virtual std::shared_ptr<void> gathered() { return nullptr; }
  // Where gathered() is not held, parameters are divided tensors (lockstep/nn/divided.h), which are
  // saved and loaded in parts, and a forward runs on all ranks or on none. No collective.
  virtual bool divided() const { return false; }
  // Throws CommError with tensor and rank where replicas differ.
  virtual void verify_parameters() {}
  virtual void verify_buffers() {}

  // For steps in a CUDA graph; no collectives. Why passes cannot be recorded; empty: they can.
  virtual std::string unavailable_for_capture() const {
    return "the parallelism does not say that its passes may be recorded";
  }
  // layout() changes when gradients move in memory, and the next backward may move them until
  // settled(). Backward may be recorded while recording() is held.
  virtual std::uint64_t layout() const { return 0; }
  virtual bool settled() const { return true; }
  virtual std::shared_ptr<void> recording() { return nullptr; }

 protected:
  // Counts passes in the ledger, and with `last` a step. An implementation whose gradients no
  // reducer sees calls it in backward().
  static void count_passes(std::size_t passes, bool last) {
    ledger::add(ledger::Counter::kMicroBatches, passes);
    if (last) ledger::count_step();
  }
};

// The passes of a window (data::Window), which must outlive them. forward(micro) returns the loss
// of a micro-batch, or what a stage of the model returns; all passes call the same one.
//
//   parallelism.run_window(passes_of(window, [&](const data::Batch& b) { return loss_of(b); }));
template <typename Window, typename Forward>
std::vector<Parallelism::Pass> passes_of(const Window& window, Forward forward,
                                         optim::GradScaler* scaler = nullptr) {
  const auto shared = std::make_shared<Forward>(std::move(forward));  // it may change itself
  std::vector<Parallelism::Pass> passes;
  for (const auto& micro : window) {
    passes.push_back({.forward = [shared, &micro] { return (*shared)(micro); },
                      .weigh =
                          [scaler, weight = micro.weight](const at::Tensor& loss) {
                            const at::Tensor weighed = loss * weight;
                            return scaler != nullptr ? scaler->scale(weighed) : weighed;
                          },
                      .sizes = micro.data.sizes().vec()});
    // A rank that computes no loss needs the scale for its step all the same.
    if (scaler != nullptr) scaler->scale(micro.weight);
  }
  return passes;
}

}  // namespace lockstep
