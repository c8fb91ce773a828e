#include "lockstep/parallel/ddp.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>

#include <optional>
#include <vector>

#include "lockstep/optim/local_gradients.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/reduce_strategy.h"
#include "lockstep/parallel/sharded_optimizer.h"

namespace lockstep {
namespace {

// Adds the weights of sparse embeddings.
DdpOptions complete(DdpOptions options, const torch::nn::Module& module) {
  const auto look = [&](const std::string& prefix, const torch::nn::Module& part) {
    const auto* const embedding = part.as<torch::nn::EmbeddingImpl>();
    const auto* const bag = part.as<torch::nn::EmbeddingBagImpl>();
    if (!(embedding != nullptr && embedding->options.sparse()) &&
        !(bag != nullptr && bag->options.sparse()))
      return;
    for (const auto& item : part.named_parameters(/*recurse=*/false))
      options.sparse_parameters.push_back(prefix.empty() ? item.key() : prefix + "." + item.key());
  };
  look("", module);  // named_modules() lists it only where a shared pointer holds it
  for (const auto& item : module.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    look(item.key(), *item.value());
  return options;
}

}  // namespace

DataParallel::DataParallel(const torch::nn::Module& module, Mesh mesh, DdpOptions options)
    : DataParallel(
          std::make_shared<Reducer>(parallel::parameters_of(module), parallel::buffers_of(module),
                                    mesh.batch(), complete(std::move(options), module)),
          module.named_parameters().pairs(), mesh) {
  reducer_->follow(module);
}

std::string DataParallel::text() const {
  return reducer_->reduces_in_backward() ? "replicated" : "sharded";
}

std::unique_ptr<optim::Optimizer> DataParallel::make_optimizer(
    std::vector<optim::ParamGroup> groups, bool sharded) {
  if (sharded) return std::make_unique<ShardedOptimizer>(reducer_, std::move(groups));
  return std::make_unique<optim::ReplicatedOptimizer>(names_, std::move(groups), mesh_.world());
}

void DataParallel::check_shardable() const {
  reducer_->gradients().check_hand_over();
}

void DataParallel::backward(const at::Tensor& loss, bool last) {
  std::optional<NoSync> local;
  if (!last) local.emplace(reducer_);
  loss.backward();
  std::vector<at::Tensor> parameters;
  for (const auto& [name, parameter] : names_) parameters.push_back(parameter);
  optim::mark_pass(parameters, last);
  // A reducer of one rank has no buckets, unless it is sharded, and sees no gradients.
  if (mesh_.batch().size() == 1 && reducer_->bucket_count() == 0) count_passes(1, last);
}

std::shared_ptr<void> DataParallel::recording() {
  return std::make_shared<RecordedPasses>(*reducer_);
}

}  // namespace lockstep

namespace lockstep::hooks {
namespace {

// Divide before the sum, as PyTorch does: a sum of halves could overflow where their mean does not.
CommHook compress(at::ScalarType wire) {
  return [wire](World& world, const Bucket& bucket) -> Reduction {
    at::Tensor small = bucket.data.to(wire).div_(world.size());
    Work work = world.all_reduce(small);
    return {work, [small, data = bucket.data]() mutable { data.copy_(small); }};
  };
}

}  // namespace

CommHook all_reduce() {
  return [](World& world, const Bucket& bucket) -> Reduction {
    return {world.all_reduce(bucket.data, ReduceOp::kAvg), nullptr};
  };
}

CommHook fp16_compress() {
  return compress(at::kHalf);
}
CommHook bf16_compress() {
  return compress(at::kBFloat16);
}

}  // namespace lockstep::hooks
