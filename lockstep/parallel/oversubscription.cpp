#include "lockstep/parallel/oversubscription.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "lockstep/core/cores.h"

namespace lockstep::parallel {

int cores_of_ranks(World& world) {
  const std::vector<int> own = allowed_cpus();
  const auto end = static_cast<std::int64_t>(world.max(own.back() + 1));
  at::Tensor cores = at::zeros({end}, at::kByte);
  for (const int core : own) cores[core] = 1;
  world.all_reduce(cores, ReduceOp::kMax).wait();
  const double quota =
      world.max(cgroup_quota_cores().value_or(std::numeric_limits<double>::infinity()));
  const auto count = cores.sum().item<double>();
  return std::max(1, static_cast<int>(std::min(count, quota)));
}

}  // namespace lockstep::parallel
