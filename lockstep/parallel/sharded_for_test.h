// What the tests of ShardedOptimizer share: a small model, its batches, and the worlds they run in.
//
//   class Sharded : public OverWorlds {};
//   INSTANTIATE_TEST_SUITE_P(Worlds, Sharded, all_worlds(), show);
//   TEST_P(Sharded, Steps) { run([](World& world) { ... }); }
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <mutex>
#include <string>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/sharded_optimizer.h"
#include "lockstep/testing/worlds.h"

namespace lockstep::sharded_for_test {

inline void run_threads(int size, const std::function<void(World&)>& body,
                        const std::string& backend = "shm") {
  testing::ThreadOptions options;
  options.world.backend = backend;
  testing::run_threads(size, body, options);
}

struct NetImpl : torch::nn::Module {
  NetImpl() : a(40, 130), b(130, 70), spare(3, 3) {
    register_module("a", a);
    register_module("b", b);
    register_module("spare", spare);
  }
  at::Tensor forward(const at::Tensor& x, bool with_spare = false) {
    at::Tensor y = b(torch::tanh(a(x)));
    if (with_spare) y = y + spare(x.narrow(1, 0, 3)).sum();
    return y;
  }
  torch::nn::Linear a, b, spare;
};
TORCH_MODULE(Net);

// For steps that do not call `spare`.
inline const DdpOptions kSpareUnused{.find_unused_parameters = true};

// torch's module construction draws from one global generator: build nets one at a time.
inline Net make_net() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(3);
  return Net();
}

inline at::Tensor batch_of(int rank, int step) {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(500 + 31 * rank + step));
  return at::randn({6, 40}, generator);
}

// What step() says of the gradients of a rank's first batch.
inline std::string refusal_of_step(DistributedDataParallel<Net>& model,
                                   ShardedOptimizer& optimizer) {
  optimizer.zero_grad();
  model(batch_of(model.world().rank(), 0)).sum().backward();
  return testing::message_of<UsageError>([&] { optimizer.step(); });
}

struct Case {
  std::string name;
  optim::Rule options;
  double clip = 0;
  int accumulate = 1;
  double loss_scale = 1;
  at::ScalarType dtype = at::kFloat;
};

// A scaler with the case's scale, off where that is 1.
inline optim::GradScaler scaler_of(World& world, const Case& what) {
  return optim::GradScaler(world, {.init_scale = what.loss_scale, .enabled = what.loss_scale != 1});
}

struct WorldCase {
  std::string backend;
  int size;
};
class OverWorlds : public ::testing::TestWithParam<WorldCase> {
 protected:
  void run(const std::function<void(World&)>& body) {
    run_threads(GetParam().size, body, GetParam().backend);
  }
};
inline std::string show(const ::testing::TestParamInfo<WorldCase>& info) {
  return info.param.backend + std::to_string(info.param.size);
}
inline auto all_worlds() {
  return ::testing::Values(WorldCase{"shm", 1}, WorldCase{"shm", 2}, WorldCase{"shm", 3},
                           WorldCase{"shm", 4}, WorldCase{"shm", 7}, WorldCase{"gloo", 2},
                           WorldCase{"gloo", 3}, WorldCase{"gloo", 4});
}

}  // namespace lockstep::sharded_for_test
