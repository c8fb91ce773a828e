#include "lockstep/parallel/parallelize.h"

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/kept_rows.h"
#include "lockstep/parallel/pipeline.h"
#include "lockstep/parallel/tensor_parallel.h"

namespace lockstep {

namespace {

std::shared_ptr<Parallelism> divide_state(torch::nn::Module& module, const Mesh& mesh,
                                          const DdpOptions& data) {
  if (mesh.batch().size() != mesh.world().size())
    throw UsageError(parallel::kFullyShard,
                     "shard_optimizer divides the optimizer's state over ranks that hold the whole "
                     "model, and those of the mesh ({}) hold parts of it, with their state. Leave "
                     "shard_optimizer out.",
                     mesh.text());
  if (!data.ignored_parameters.empty())
    throw UsageError(parallel::kFullyShard,
                     "shard_optimizer divides the state of all parameters, and ignored_parameters "
                     "names '{}'. Leave one of them out.",
                     data.ignored_parameters.front());
  return std::make_shared<FullyShard>(
      module, Mesh(mesh.world(), {{"shard", -1}}),
      FullyShardOptions{.shard = Shard::kState, .broadcast_buffers = data.broadcast_buffers});
}

}  // namespace

// From the outside in: stages have rows, and rows are of slices. Pipeline and FullyShard cut the
// slices themselves, before they divide what is left of a parameter.
std::shared_ptr<Parallelism> parallelize(torch::nn::Module& module, const Mesh& mesh,
                                         const ParallelOptions& options) {
  const bool shards =
      std::ranges::any_of(mesh.axes(), [](const MeshAxis& axis) { return axis.name == "shard"; });
  if (options.shard_optimizer && !shards && mesh.world().size() > 1)
    return divide_state(module, mesh, options.data);
  if (mesh.size("pipeline") > 1)
    return std::make_shared<Pipeline>(
        module, mesh, PipelineOptions{.schedule = options.schedule, .shard = options.shard});
  if (shards) return std::make_shared<FullyShard>(module, mesh, options.shard);
  if (mesh.size("tensor") > 1) return std::make_shared<TensorParallel>(module, mesh, options.data);
  return std::make_shared<DataParallel>(module, mesh, options.data);
}

void check_shardable(const torch::nn::Module& module) {
  parallel::check_shardable(module);
}

}  // namespace lockstep
