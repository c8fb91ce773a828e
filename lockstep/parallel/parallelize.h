// parallelize(): trains a model on the ranks of a mesh, in the way that the mesh's axes say.
//
//   const Mesh mesh(world, {{"pipeline", 2}, {"shard", -1}});
//   const auto model = parallelize(*net, mesh, {.schedule = PipelineSchedule::kInterleaved1F1B});
//   const auto optimizer = model->make_optimizer({{net->parameters(), adamw}});
//
// Several ranks along "pipeline" hold stages, with rows and slices inside of them: Pipeline. Ranks
// along "shard", also a single one, hold rows, with slices inside of them: FullyShard. Several
// ranks along "tensor" alone hold slices of layers: TensorParallel. Ranks along "data" hold copies
// of what the others hold, and where there are no others, of the whole model: DataParallel, or with
// `shard_optimizer` a FullyShard that divides the optimizer's state alone.
//
// The Trainer makes its parallelism here too, with options from the training file.
#pragma once

#include <memory>

#include "lockstep/comm/mesh.h"
#include "lockstep/parallel/options.h"
#include "lockstep/parallel/parallelism.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

// Each is read where the mesh makes use of it.
struct ParallelOptions {
  DdpOptions data{};          // of ranks that hold copies of a whole model, or of its slices
  FullyShardOptions shard{};  // of ranks along "shard", also in the stages of a pipeline
  // Ranks along "data" divide the optimizer's state: FullyShard with Shard::kState and the
  // broadcast_buffers of `data`, whose other options have no effect. UsageError for
  // ignored_parameters, and for ranks along "pipeline" or "tensor". No effect on ranks along
  // "shard", which divide it already, and on one rank.
  bool shard_optimizer = false;
  PipelineSchedule schedule = PipelineSchedule::k1F1B;  // of stages
};

// The module outlives it. UsageError on every rank for a module that cannot be divided so: it must
// be an nn::Staged for several stages, and an nn::Sliced for slices. Collective.
std::shared_ptr<Parallelism> parallelize(torch::nn::Module& module, const Mesh& mesh,
                                         const ParallelOptions& options = {});

// UsageError for a module whose optimizer's state `shard_optimizer` cannot divide: parameters lie
// in the same memory, or an embedding has sparse gradients. No collective.
void check_shardable(const torch::nn::Module& module);

}  // namespace lockstep
