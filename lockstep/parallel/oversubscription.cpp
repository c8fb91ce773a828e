#include "lockstep/parallel/oversubscription.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/host.h"

namespace lockstep::parallel {

int cores_of_ranks(World& world) {
  const std::vector<int> own = allowed_cpus();
  const auto end = static_cast<std::int64_t>(all_reduce(world, own.back() + 1, ReduceOp::kMax));
  at::Tensor cores = at::zeros({end}, at::kByte);
  for (const int core : own) cores[core] = 1;
  world.all_reduce(cores, ReduceOp::kMax).wait();
  const double quota =
      all_reduce(world, cgroup_quota_cores().value_or(std::numeric_limits<double>::infinity()),
                 ReduceOp::kMax);
  const auto count = cores.sum().item<double>();
  return std::max(1, static_cast<int>(std::min(count, quota)));
}

}  // namespace lockstep::parallel
