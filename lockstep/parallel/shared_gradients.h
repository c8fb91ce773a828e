// SharedGradients: gradients in memory that all ranks map, where a step reads those of every rank
// in place (Shard::kState on the CPU).
//
//   const auto gradients = std::make_shared<SharedGradients>(model, world, check);
//   if (gradients->install()) ...
//   loss.backward();              // .grad of each parameter lies in this rank's part
//   gradients->place(flags);      // on each rank; then an exchange of the flags
//   gradients->parts(i, begin, count)
//
// The memory is that of a Reducer's buckets. The model outlives this. Hooks run on backward's
// threads; everything else belongs to the thread that trains.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/parallel/backward_hooks.h"
#include "lockstep/parallel/bucket_set.h"
#include "lockstep/parallel/model_tensors.h"

namespace lockstep::parallel {

class SharedGradients final : public BackwardListener,
                              public std::enable_shared_from_this<SharedGradients> {
 public:
  // `check` is called with a parameter's name when its gradient comes, and may throw.
  SharedGradients(const ModelTensors& model, World& world,
                  std::function<void(const std::string&)> check);

  // False: the ranks cannot share so much memory, and there are no hooks. Collective.
  bool install();
  // This rank's gradients lie in its part from here on, or zeros; flags says, by a byte for each
  // parameter of the model, for which it has one. When all ranks have done it they read them, and
  // nobody may write them before all have. No collective.
  void place(const at::Tensor& flags);
  // Makes room for parameters that are trained since; then all ranks have placed theirs again.
  // Collective.
  void make_room(const at::Tensor& flags);
  // A step has used multiples of this rank's gradient: those that remain are these, and multiplied
  // when they are next used, if they are.
  void scale(std::size_t parameter, double factor);
  void apply_scales();
  void forget_scales() { scales_.assign(model_.size(), {}); }
  // Each rank's gradient of these elements, flat.
  std::vector<at::Tensor> parts(std::size_t parameter, std::int64_t begin,
                                std::int64_t count) const;

  void on_gradient(std::size_t parameter, const at::Tensor& arrived) override;
  at::Tensor free_slot(std::size_t parameter) override;
  bool gradients_are_local() const override { return true; }
  void on_watched_backward() override {}
  void on_backward_end() override {}
  void on_backward_abandoned() override {}
  void on_outer_backward() override {}

 private:
  bool lay_out();

  const ModelTensors& model_;
  World& world_;
  std::function<void(const std::string&)> check_;
  BucketSet buckets_{world_, model_, /*views=*/true};
  HookSet hooks_{model_, /*in_place=*/true};
  std::mutex mutex_;
  // Where a parameter's gradient lies; kNoBucket: nowhere, because it was frozen.
  struct Place {
    std::size_t bucket = kNoBucket;
    std::int64_t offset = 0;
  };
  std::vector<Place> places_;
  struct Scale {
    double factor = 1;
    const at::TensorImpl* gradient = nullptr;  // which it is of, as it was then
    std::uint32_t version = 0;
    bool is_of(const at::Tensor& grad) const {
      return grad.unsafeGetTensorImpl() == gradient && grad._version() == version;
    }
  };
  std::vector<Scale> scales_;
};

}  // namespace lockstep::parallel
