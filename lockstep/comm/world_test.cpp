#include "lockstep/comm/world.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using testing::run_threads;

TEST(World, AloneIsTheIdentity) {
  World world;
  at::Tensor x = at::ones({3});
  world.all_reduce(x).wait();
  EXPECT_TRUE(at::equal(x, at::ones({3})));
  EXPECT_EQ(world.sum(2.5), 2.5);
  EXPECT_EQ(world.backend(), "single");
}

TEST(World, ThreadsReduce) {
  for (int n : {2, 3, 4}) {
    run_threads(n, [n](World& world) {
      at::Tensor x = at::full({5}, world.rank() + 1.0);
      world.all_reduce(x).wait();
      EXPECT_TRUE(at::equal(x, at::full({5}, n * (n + 1) / 2.0)));
      EXPECT_EQ(world.mean(world.rank()), (n - 1) / 2.0);
      EXPECT_EQ(world.broadcast(std::to_string(world.rank()), 1), "1");
      world.barrier();
    });
  }
}

}  // namespace
}  // namespace lockstep
