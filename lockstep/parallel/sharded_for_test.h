// What the tests of FullyShard with Shard::kState share: a small model whose optimizer's state is
// divided, its batches, and the worlds they run in.
//
//   class StateSharded : public OverWorlds {};
//   INSTANTIATE_TEST_SUITE_P(Worlds, StateSharded, all_worlds(), show);
//   TEST_P(StateSharded, Steps) { run([](World& world) { Sharded sharded(world, rule); }); }
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fully_shard.h"
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

// A model whose optimizer's state ranks divide.
struct Sharded {
  Sharded(World& world, const optim::Rule& rule, Net the_net = make_net())
      : Sharded(world, {{the_net->parameters(), rule}}, the_net) {}
  Sharded(World& world, const std::vector<optim::ParamGroup>& groups, Net the_net)
      : net(std::move(the_net)),
        model(*net, Mesh(world, {{"shard", -1}}), {.shard = Shard::kState}),
        optimizer(model.make_optimizer(groups)) {}
  void backward(const at::Tensor& loss, bool last = true) {
    model.before_forward();
    model.backward(loss, last);
  }
  // On this rank's batch of that number.
  void step(int number, const optim::StepOptions& options = {}) {
    optimizer->zero_grad();
    backward(net->forward(batch_of(model.mesh().world().rank(), number), true).sum());
    optimizer->step(options);
  }
  std::string refusal_of_step() {
    return testing::message_of<UsageError>([this] { step(0); });
  }
  Net net;
  FullyShard model;
  std::unique_ptr<optim::Optimizer> optimizer;
};

inline void expect_equal_weights(const Net& net, const Net& other) {
  const auto mine = net->parameters(), theirs = other->parameters();
  for (std::size_t i = 0; i < mine.size(); ++i)
    EXPECT_TENSOR_EQ(mine[i].detach(), theirs[i].detach());
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
// Those where sums have one order: gloo has an order of its own from three ranks on.
inline auto all_worlds() {
  return ::testing::Values(WorldCase{"shm", 1}, WorldCase{"shm", 2}, WorldCase{"shm", 3},
                           WorldCase{"shm", 4}, WorldCase{"shm", 7}, WorldCase{"gloo", 2});
}

}  // namespace lockstep::sharded_for_test
