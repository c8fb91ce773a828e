#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdio>

#include "bench/bench.h"
#include "lockstep/run.h"

namespace lockstep::bench {

int allreduce_once_main() {
  return run([](World& world) {
    const auto value = torch::full({1}, world.rank() + 1.0f, world.device());
    world.all_reduce(value).wait();
    if (world.is_leader()) {
      fmt::print("sum {:.0f}\n", value.item<float>());
      std::fflush(stdout);
    }
  });
}

}  // namespace lockstep::bench
