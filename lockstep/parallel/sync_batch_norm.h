// BatchNorm whose statistics are those of the whole batch over all ranks.
//
//   lockstep::nn::SyncBatchNorm2d norm{world, 64};
//   lockstep::nn::convert_sync_batchnorm(*net, world);   // every BatchNorm in a Sequential
//
// Same parameters, buffers and names as torch::nn::BatchNorm2d; equal, up to rounding, to plain
// BatchNorm on the concatenated batch, forward and gradients. Forward and backward communicate in
// training mode, so every rank must run them. An empty batch on a rank is fine. Gradients can be
// differentiated again (create_graph), on all ranks or on none.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <utility>

#include "lockstep/comm/world.h"

namespace lockstep::nn {

// `Base` is torch::nn::BatchNorm{1,2,3}dImpl, of which this keeps options, parameters and checks.
template <typename Base>
class SyncBatchNormImpl : public Base {
 public:
  SyncBatchNormImpl(World world, const torch::nn::BatchNormOptions& options)
      : Base(options), world_(std::move(world)) {}
  // With the parameters (the same tensors), buffers, options and mode of another.
  SyncBatchNormImpl(World world, const Base& other);
  at::Tensor forward(const at::Tensor& input);

 private:
  World world_;
};

using SyncBatchNorm1dImpl = SyncBatchNormImpl<torch::nn::BatchNorm1dImpl>;
using SyncBatchNorm2dImpl = SyncBatchNormImpl<torch::nn::BatchNorm2dImpl>;
using SyncBatchNorm3dImpl = SyncBatchNormImpl<torch::nn::BatchNorm3dImpl>;
TORCH_MODULE(SyncBatchNorm1d);
TORCH_MODULE(SyncBatchNorm2d);
TORCH_MODULE(SyncBatchNorm3d);

// torch.nn.SyncBatchNorm.convert_sync_batchnorm: replaces BatchNorm{1,2,3}d by SyncBatchNorm, in
// place, in every Sequential of `module` at any depth. Call it before wrapping. Parameters stay the
// same tensors, so an optimizer may have been made before; names stay, too.
//
// Only a Sequential calls its modules through a type that can be exchanged. A BatchNorm that is a
// member of another module, in a ModuleList or in a ModuleDict, is called by its type, and LibTorch
// declares its forward non-virtual: UsageError with the full names of all such, before anything is
// changed.
void convert_sync_batchnorm(torch::nn::Module& module, const World& world);

}  // namespace lockstep::nn
