// What the adaptor adds to the engine: the c10d store behind it, and how long tensors live.
#include "lockstep/comm/shm/shm.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/core/error.h"

namespace lockstep::detail::shm {
namespace {

using ::testing::HasSubstr;

TEST(ShmBackend, ARankThatDoesNotComeIsATimeoutThatNamesItsKey) {
  for (const int rank : {0, 1}) {
    try {
      (void)make({.store = c10::make_intrusive<c10d::HashStore>(),
                  .rank = rank,
                  .size = 2,
                  .startup_timeout = std::chrono::milliseconds(300)});
      FAIL() << "nobody else was there";
    } catch (const TimeoutError& error) {
      const char* missing = rank == 0 ? "'shm/info/1'" : "'shm/info/outcome'";
      EXPECT_THAT(error.what(), HasSubstr(missing));
      EXPECT_THAT(error.what(),
                  HasSubstr("was not reported within 300 ms. A rank has probably ended"));
    }
  }
}

// The engine has a tensor's address; its owner may drop the tensor, or give it other memory,
// before the other rank has come.
TEST(ShmBackend, MemoryLivesUntilTheEnd) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto failure_state = std::make_shared<FailureState>(0);
  const auto start = [&](Backend& backend, const at::Tensor& tensor) {
    auto state = std::make_shared<WorkState>(
        OperationInfo{"all_reduce"}, Deadline::after(std::chrono::seconds(60)), failure_state);
    backend.all_reduce(state, tensor, ReduceOp::kSum);
    return state;
  };
  std::unique_ptr<Backend> backends[2];
  std::thread other([&] { backends[1] = make({.store = store, .rank = 1, .size = 2}).backend; });
  backends[0] = make({.store = store, .rank = 0, .size = 2}).backend;
  other.join();
  ASSERT_TRUE(backends[0] && backends[1]);

  at::Tensor first = at::ones({300'000});
  const at::Tensor second = at::ones({300'000});
  const c10::Storage memory = first.storage();
  auto forgotten = start(*backends[0], first);
  first.set_data(at::zeros({1}));
  EXPECT_GT(memory.use_count(), 1u);
  forgotten.reset();
  auto awaited = start(*backends[1], second);
  awaited->wait_host(std::nullopt);
  EXPECT_TRUE(second.eq(2).all().item<bool>());
  EXPECT_EQ(first.item<float>(), 0);
  // Later operations release what earlier ones held, once those have ended on this rank too.
  const Deadline limit = Deadline::after(std::chrono::seconds(30));
  while (memory.use_count() > 1 && !limit.expired()) {
    auto next = start(*backends[0], at::ones({1}));
    start(*backends[1], at::ones({1}))->wait_host(std::nullopt);
    next->wait_host(std::nullopt);
  }
  EXPECT_EQ(memory.use_count(), 1u);
  EXPECT_EQ(static_cast<const float*>(memory.data())[299'999], 2);
}

}  // namespace
}  // namespace lockstep::detail::shm
