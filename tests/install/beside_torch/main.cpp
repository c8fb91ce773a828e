// Few and narrow headers: the point is that two descriptions of one LibTorch link into one program.
#include <ATen/ops/full.h>
#include <lockstep/monitor/gpu_sampler.h>
#include <lockstep/run.h>
#include <lockstep/version.h>

#include <chrono>
#include <cstdio>

#if LOCKSTEP_VERSION_MAJOR == 0 && LOCKSTEP_VERSION_MINOR < 1
#error "lockstep/version.h is of another release"
#endif

// Without a driver it says why there is nothing to read.
bool sampler_works() {
  const lockstep::monitor::GpuSampler sampler;
  sampler.wait_for_samples(1, std::chrono::seconds(20));
  const lockstep::monitor::GpuSnapshot seen = sampler.snapshot();
  return seen.newest != nullptr || !seen.problem.empty();
}

// With an argument it starts itself on two ranks.
int main(int argc, char**) {
  if (!sampler_works()) return 1;
  const auto body = [](lockstep::World& world) {
    auto x = at::full({4}, world.rank() + 1.0);
    world.all_reduce(x).wait();
    std::printf("rank %d of %d: sum %g\n", world.rank(), world.size(), x[0].item<double>());
  };
  return argc > 1 ? lockstep::spawn(body, 2) : lockstep::run(body);
}
