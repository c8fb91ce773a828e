// How long an operation holds its tensors, and what happens when its handle is dropped early.
#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/work_state.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using testing::run_threads;

// ---------------------------------------------------------------- a device without hardware

// Its memory is the host's, but only copies reach it: operations on such a tensor are staged, like
// those on a GPU's tensor in a CPU world.
constexpr c10::DeviceType kFakeType = c10::DeviceType::PrivateUse1;
using FakeGuard = c10::impl::NoOpDeviceGuardImpl<kFakeType>;
C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard)

at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       at::dtype(tensor.scalar_type()));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", TORCH_FN(copy_from));
}

at::Tensor on_device(const at::Tensor& values) {
  void* memory = std::malloc(values.nbytes());
  std::memcpy(memory, values.const_data_ptr(), values.nbytes());
  c10::DataPtr pointer(memory, memory, [](void* p) { std::free(p); }, c10::Device(kFakeType, 0));
  c10::Storage storage(c10::Storage::use_byte_size_t{}, values.nbytes(), std::move(pointer));
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), values.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(values.sizes());
  return tensor;
}

at::Tensor device_full(double value) {
  return on_device(at::full({1000}, value));
}

bool becomes(const std::function<bool()>& condition) {
  const Deadline limit = Deadline::after(std::chrono::seconds(30));
  while (!condition() && !limit.expired())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return condition();
}

// ---------------------------------------------------------------- an outcome that does not come

TEST(WorkState, AnOutcomeThatIsNotReportedIsAFailure) {
  const char* soak = std::getenv("LOCKSTEP_SOAK");
  if (soak == nullptr || std::string(soak) != "1") GTEST_SKIP() << "30 s; with LOCKSTEP_SOAK=1";
  const auto failure_state = std::make_shared<detail::FailureState>(0);
  const auto state =
      std::make_shared<detail::WorkState>(detail::OperationInfo{"all_reduce", 1},
                                          Deadline::after(std::chrono::seconds(1)), failure_state);
  std::promise<void> release;
  std::promise<void> begun;
  state->finish_with(
      [&] {
        begun.set_value();
        release.get_future().wait();
      },
      std::nullopt);
  std::thread ending([&] { state->complete(); });
  begun.get_future().wait();
  EXPECT_THROW(state->wait_host(std::chrono::milliseconds(10)), CommError);
  release.set_value();
  ending.join();
  state->wait_host(std::nullopt);
}

// ---------------------------------------------------------------- dropped handles

void expect_stored(const char* operation, const at::Tensor& tensor, double value) {
  EXPECT_TRUE(becomes([&] { return on_host(tensor).eq(value).all().item<bool>(); })) << operation;
}

TEST(DroppedWork, StoresTheResultOfAReductionOnADevice) {
  run_threads(2, [](World& world) {
    const at::Tensor sum = device_full(1), average = on_device(at::full({9}, 3, at::kInt));
    const at::Tensor reduced = device_full(world.rank()), share = device_full(0);
    (void)world.all_reduce(sum);
    (void)world.all_reduce(average, ReduceOp::kAvg);
    (void)world.reduce(reduced, 1);
    (void)world.reduce_scatter(share, on_device(at::ones({2, 1000})));
    expect_stored("all_reduce", sum, 2);
    expect_stored("average of integers", average, 3);
    if (world.rank() == 1) expect_stored("reduce", reduced, 1);
    expect_stored("reduce_scatter", share, 2);
    world.barrier();
  });
}

TEST(DroppedWork, StoresWhatWasMovedToADevice) {
  run_threads(2, [](World& world) {
    const bool root = world.rank() == 0;
    const at::Tensor sent = device_full(world.rank() + 1), got = device_full(0);
    const at::Tensor all = on_device(at::zeros({2, 1000})), share = device_full(0);
    const std::vector<at::Tensor> gathered{device_full(0), device_full(0)};
    const std::vector<at::Tensor> exchanged{device_full(0), device_full(0)};
    const at::Tensor message = device_full(0);
    (void)world.broadcast(root ? sent : got, 0);
    (void)world.all_gather(all, device_full(7));
    (void)world.gather(root ? gathered : std::vector<at::Tensor>{}, device_full(5), 0);
    (void)world.scatter(share,
                        root ? std::vector<at::Tensor>{sent, sent} : std::vector<at::Tensor>{});
    (void)world.all_to_all(exchanged, {sent, sent});
    (void)world.batch_isend_irecv({{P2p::Kind::kSend, sent, 1 - world.rank()},
                                   {P2p::Kind::kRecv, message, 1 - world.rank()}});
    if (!root) expect_stored("broadcast", got, 1);
    expect_stored("all_gather", all, 7);
    if (root) expect_stored("gather", gathered[1], 5);
    expect_stored("scatter", share, 1);
    expect_stored("all_to_all", exchanged[0], 1);
    expect_stored("recv", message, world.rank() == 0 ? 2 : 1);
    world.barrier();
  });
}

// A waiter still takes the last step itself, exactly once.
TEST(DroppedWork, AWaiterTakesTheLastStep) {
  int steps = 0;
  std::thread::id taken_by;
  {
    auto state = std::make_shared<detail::WorkState>(detail::OperationInfo{"all_reduce"},
                                                     Deadline::after(std::chrono::seconds(60)),
                                                     std::make_shared<detail::FailureState>(0));
    state->finish_with(
        [&] {
          ++steps;
          taken_by = std::this_thread::get_id();
        },
        FakeGuard().getStream(c10::Device(kFakeType, 0)));
    std::thread([&] { state->complete(); }).join();
    EXPECT_EQ(steps, 0);
    state->wait_host(std::nullopt);
  }
  EXPECT_EQ(steps, 1);
  EXPECT_EQ(taken_by, std::this_thread::get_id());
}

TEST(DroppedWork, StoresNothingAfterAFailure) {
  int steps = 0;
  auto state = std::make_shared<detail::WorkState>(detail::OperationInfo{"all_reduce"},
                                                   Deadline::after(std::chrono::seconds(60)),
                                                   std::make_shared<detail::FailureState>(0));
  state->finish_with([&] { ++steps; }, FakeGuard().getStream(c10::Device(kFakeType, 0)));
  state->fail("a peer is gone", {});
  state.reset();
  EXPECT_EQ(steps, 0);
}

// ---------------------------------------------------------------- memory

// Every operation in turn; nothing follows the last one.
void drop_after_wait(World& world, int which) {
  const int other = 1 - world.rank();
  const std::int64_t n = 200'000;
  std::vector<at::Tensor> tensors;
  const auto fresh = [&](std::int64_t count) { return tensors.emplace_back(at::ones({count})); };
  const auto start = [&]() -> Work {
    switch (which) {
      case 0:
        return world.all_reduce(fresh(n));
      case 1:
        return world.all_gather(fresh(2 * n), fresh(n));
      case 2:
        return world.reduce_scatter(fresh(n), fresh(2 * n));
      case 3:
        return world.all_to_all({fresh(n), fresh(n)}, {fresh(n), fresh(n)});
      case 4:
        return world.batch_isend_irecv(
            {{P2p::Kind::kSend, fresh(n), other}, {P2p::Kind::kRecv, fresh(n), other}});
      case 5:
        return world.all_reduce(fresh(2 * n).view({n, 2}).select(1, 0));
      default:
        return world.broadcast(fresh(4), 0);
    }
  };
  start().wait();
  for (const auto& tensor : tensors)
    EXPECT_TRUE(becomes([&] { return tensor.storage().use_count() == 1; }))
        << "operation " << which;
}

TEST(WorkMemory, IsFreeAfterTheWait) {
  for (int which = 0; which < 7; ++which)
    run_threads(2, [which](World& world) { drop_after_wait(world, which); });
}

// Nobody waits, and nothing follows: the operation ends by itself and then frees its tensors.
TEST(WorkMemory, IsFreeAfterTheEndOfADroppedOperation) {
  run_threads(2, [](World& world) {
    for (const std::int64_t count : {4, 200'000}) {
      const at::Tensor tensor = at::ones({count}), moved = at::ones({count});
      (void)world.all_reduce(tensor);
      EXPECT_TRUE(becomes([&] { return tensor.storage().use_count() == 1; })) << count;
      EXPECT_TRUE(tensor.eq(2).all().item<bool>());
      (void)world.broadcast(moved, 0);
      EXPECT_TRUE(becomes([&] { return moved.storage().use_count() == 1; })) << count;
    }
    world.barrier();
  });
}

// Like an in-place operation of ATen: autograd notices it where the tensor was saved.
TEST(World, WhatAnOperationWritesHasAnotherVersion) {
  run_threads(2, [](World& world) {
    const auto changes = [&](const char* name, const std::function<void(at::Tensor)>& operation,
                             bool writes = true) {
      const at::Tensor tensor = at::ones({2});
      const auto before = tensor._version();
      operation(tensor);
      EXPECT_EQ(tensor._version() != before, writes) << name << " on rank " << world.rank();
    };
    const bool first = world.rank() == 0;
    const at::Tensor one = at::ones({1});
    changes("all_reduce", [&](at::Tensor t) { world.all_reduce(t).wait(); });
    changes("broadcast", [&](at::Tensor t) { world.broadcast(t, 0).wait(); }, !first);
    changes("reduce", [&](at::Tensor t) { world.reduce(t, 0).wait(); }, first);
    changes("all_gather", [&](at::Tensor t) { world.all_gather(t, one).wait(); });
    changes(
        "reduce_scatter input", [&](at::Tensor t) { world.reduce_scatter(one.clone(), t).wait(); },
        false);
    changes("scatter", [&](at::Tensor t) {
      std::vector<at::Tensor> parts;
      if (first) parts = {at::ones({2}), at::ones({2})};
      world.scatter(t, parts, 0).wait();
    });
    changes(
        "send and recv",
        [&](at::Tensor t) { (first ? world.send(t, 1) : world.recv(t, 0)).wait(); }, !first);
    const at::Tensor leaf = at::ones({2}).set_requires_grad(true), saved = leaf.exp();
    world.all_reduce(saved.detach()).wait();
    EXPECT_THROW(saved.sum().backward(), c10::Error);
  });
}

}  // namespace
}  // namespace lockstep

// ---------------------------------------------------------------- the adaptor of shm
//
// What it adds to the engine: the c10d store behind it, and how long tensors live.
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
