// Parallelism: how several ranks train one model. The Trainer, Accumulation, CapturedStep and
// checkpoints know this much of it and no more; docs/extending.md adds one.
//
//   const auto optimizer = parallelism.make_optimizer(groups, /*sharded=*/false);
//   parallelism.before_forward();
//   at::Tensor loss = parallelism.watch(loss_of(batch));
//   parallelism.backward(loss, /*last=*/true);
//   optimizer->step();
//
// DataParallel (data_parallel.h), behind DistributedDataParallel, has the whole model on every
// rank. Unless stated otherwise everything is a collective, called on all ranks identically. One
// thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/mesh.h"

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
  // Where the optimizer's state is, in a word for logs and records: "replicated". No collective.
  virtual std::string text() const = 0;

  // One for all parameters that are trained. `sharded`: its state is divided over ranks, where both
  // are possible; check_shardable() throws UsageError where the model or this class rules it out.
  virtual std::unique_ptr<optim::Optimizer> make_optimizer(std::vector<optim::ParamGroup> groups,
                                                           bool sharded) = 0;
  virtual void check_shardable() const = 0;  // no collective

  // Parameters are whole from here to the end of the backward that follows.
  virtual void before_forward() {}
  // The loss, or another output, on its way to backward. No collective.
  virtual at::Tensor watch(at::Tensor output) { return output; }
  // `last`: of the passes before a step, after which every gradient is what the step needs.
  virtual void backward(const at::Tensor& loss, bool last) = 0;

  // The ranks that compute every pass together, and communicate in it: their windows have equally
  // many micro-batches. No collective.
  virtual World& pass_ranks() const { return mesh()["tensor"]; }

  // A pass that runs when the parallelism comes to it.
  struct Pass {
    std::function<at::Tensor()> forward;  // its loss; of one stage of the model, what that returns
    // What backward begins with: the loss, weighed and scaled. Undefined: it adds nothing.
    std::function<at::Tensor(const at::Tensor& loss)> weigh;
    std::vector<std::int64_t> sizes{};  // of its samples, where they are not always the same
  };
  // True: a step's passes run together, in run_window(), because stages of the model compute
  // different ones at a time (Pipeline). backward() throws UsageError then. No collective.
  virtual bool takes_windows() const { return false; }
  // All passes before a step, after which every gradient is what the step needs. Returns their
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

  // The step that follows multiplies the averaged gradients by it. False: the caller scales .grad,
  // which holds averages. No collective.
  virtual bool scale_averages(double) { return false; }

  // Parameters are whole while it is held: evaluation, saving, export. Letting go of it is local,
  // on every rank before the same forward.
  virtual std::shared_ptr<void> gathered() { return nullptr; }
  // Where gathered() is not held, parameters are divided tensors (lockstep/nn/divided.h), which are
  // saved and loaded in parts, and a forward runs on all ranks or on none. No collective.
  virtual bool divided() const { return false; }
  // Throw CommError with tensor and rank where ranks differ in what must be equal.
  virtual void verify_parameters() {}
  virtual void verify_buffers() {}

  // For steps in a CUDA graph; no collectives. Another layout() means that gradients lie elsewhere,
  // and until settled() the next backward moves them. Backward may be recorded while recording()
  // is held. count_replayed(): the ledger counts a pass as if it had run.
  virtual std::uint64_t layout() const { return 0; }
  virtual bool settled() const { return false; }
  virtual std::shared_ptr<void> recording() { return nullptr; }
  virtual void count_replayed(bool) {}
  // Whether it counts passes and steps in the ledger. False: Accumulation does.
  virtual bool counts_passes() const { return false; }
};

}  // namespace lockstep
