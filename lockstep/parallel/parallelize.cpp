#include "lockstep/parallel/parallelize.h"

#include <algorithm>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fully_shard.h"
#include "lockstep/parallel/pipeline.h"
#include "lockstep/parallel/tensor_parallel.h"

namespace lockstep {

// From the outside in: stages have rows, and rows are of slices. Pipeline and FullyShard cut the
// slices themselves, before they divide what is left of a parameter.
std::shared_ptr<Parallelism> parallelize(torch::nn::Module& module, const Mesh& mesh,
                                         const ParallelOptions& options) {
  if (mesh.size("pipeline") > 1)
    return std::make_shared<Pipeline>(
        module, mesh, PipelineOptions{.schedule = options.schedule, .shard = options.shard});
  const bool shards =
      std::ranges::any_of(mesh.axes(), [](const MeshAxis& axis) { return axis.name == "shard"; });
  if (shards) return std::make_shared<FullyShard>(module, mesh, options.shard);
  if (mesh.size("tensor") > 1) return std::make_shared<TensorParallel>(module, mesh, options.data);
  return std::make_shared<DataParallel>(module, mesh, options.data);
}

}  // namespace lockstep
