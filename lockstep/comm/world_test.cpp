// Worlds of threads: what the operations promise beyond the conformance suite, and every refusal.
#include "lockstep/comm/world.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/device.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_threads;
using testing::run_threads_collecting;
using testing::ThreadOptions;
using Clock = std::chrono::steady_clock;

milliseconds since(Clock::time_point begin) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
}

ThreadOptions with_timeout(milliseconds timeout) {
  ThreadOptions options;
  options.world.timeout = timeout;
  return options;
}

// ---------------------------------------------------------------- shared memory

ThreadOptions over(const std::string& backend) {
  ThreadOptions options;
  options.world.backend = backend;
  return options;
}

TEST(Symmetric, EveryRankSeesAllParts) {
  run_threads(
      3,
      [](World& world) {
        const auto parts = world.symmetric({2, 500}, at::kDouble);
        ASSERT_EQ(parts.size(), 3u);
        const auto mine = static_cast<std::size_t>(world.rank());
        EXPECT_TENSOR_EQ(parts[mine], at::zeros({2, 500}, at::kDouble));
        parts[mine].fill_(world.rank() + 1);
        world.barrier();
        for (std::size_t rank = 0; rank < 3; ++rank)
          EXPECT_TENSOR_EQ(parts[rank], at::full({2, 500}, rank + 1.0, at::kDouble));
        world.barrier();
        // Reduced where it lies, in whole and in part.
        world.all_reduce(parts[mine][0]).wait();
        EXPECT_TENSOR_EQ(parts[mine],
                         at::cat({at::full({1, 500}, 6.0, at::kDouble),
                                  at::full({1, 500}, world.rank() + 1.0, at::kDouble)}));
        at::Tensor large = world.symmetric_empty({100'000});
        large.fill_(world.rank());
        world.all_reduce(large, ReduceOp::kAvg).wait();
        EXPECT_TENSOR_EQ(large, at::ones({100'000}));
        EXPECT_TRUE(world.symmetric({0}).empty());
        EXPECT_EQ(world.symmetric_empty({0, 3}).numel(), 0);
      },
      over("shm"));
}

TEST(Symmetric, MemoryOutlivesTheWorld) {
  std::vector<at::Tensor> saved(2);
  run_threads(
      2,
      [&](World& world) {
        at::Tensor x = world.symmetric_empty({1000});
        x.fill_(world.rank());
        world.all_reduce(x).wait();
        saved[static_cast<std::size_t>(world.rank())] = x;
      },
      over("shm"));
  for (const auto& x : saved) EXPECT_TENSOR_EQ(x, at::ones({1000}));
}

// Every rank gets the error, and the world remains usable.
TEST(Symmetric, WithoutTheMemoryItIsRefusedOnAllRanks) {
  run_threads(
      2,
      [](World& world) {
        EXPECT_THAT(message_of([&] { world.symmetric({int64_t{1} << 48}); }),
                    AllOf(HasSubstr("cannot make a symmetric block"), HasSubstr("needed")));
        EXPECT_THAT(message_of([&] { world.symmetric_empty({int64_t{1} << 48}); }),
                    HasSubstr("cannot make a symmetric block"));
        EXPECT_EQ(all_reduce(world, 1), 2);
        EXPECT_EQ(world.symmetric({10}).size(), 2u);
      },
      over("shm"));
}

// Where ranks share no memory, the tensor is an ordinary one.
TEST(Symmetric, ElsewhereItIsPrivateMemory) {
  run_threads(
      2,
      [](World& world) {
        EXPECT_TRUE(world.symmetric({10}).empty());
        at::Tensor x = world.symmetric_empty({3, 5}, at::kInt);
        EXPECT_EQ(x.sizes(), (std::vector<int64_t>{3, 5}));
        x.fill_(world.rank() + 1);
        world.all_reduce(x).wait();
        EXPECT_TENSOR_EQ(x, at::full({3, 5}, 3, at::kInt));
      },
      over("gloo"));
  World alone;
  EXPECT_TRUE(alone.symmetric({10}).empty());
  EXPECT_EQ(alone.symmetric_empty({10}, at::kHalf).scalar_type(), at::kHalf);
}

// ---------------------------------------------------------------- who

TEST(World, AloneIsTheIdentity) {
  World world;
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.backend(), "single");
  EXPECT_TRUE(world.is_leader());
  at::Tensor x = at::ones({3});
  Work work = world.all_reduce(x, ReduceOp::kAvg);
  EXPECT_TRUE(work.done());
  work.wait();
  EXPECT_TENSOR_EQ(x, at::ones({3}));
  at::Tensor out = at::zeros({1, 3});
  world.all_gather(out, x).wait();
  EXPECT_TENSOR_EQ(out, at::ones({1, 3}));
  // A message to oneself waits until it is received.
  world.send(at::full({2}, 7.0), 0).wait();
  at::Tensor got = at::zeros({2});
  world.recv(got, 0).wait();
  EXPECT_TENSOR_EQ(got, at::full({2}, 7.0));
  world.barrier(milliseconds(1));
  world.finish();
}

TEST(World, KnowsItsPlace) {
  ThreadOptions options;
  options.adjust = [](Identity& identity, WorldOptions&) {
    identity.node = identity.rank / 2;
    identity.local_rank = identity.rank % 2;
    identity.local_size = 2;
  };
  run_threads(
      4,
      [](World& world) {
        EXPECT_EQ(world.node_rank(), world.rank() / 2);
        EXPECT_EQ(world.local_rank(), world.rank() % 2);
        EXPECT_EQ(world.local_size(), 2);
        EXPECT_EQ(world.size(), 4);
        EXPECT_EQ(world.backend(), env::get("LOCKSTEP_BACKEND").value_or("shm"));
        EXPECT_EQ(world.device(), c10::Device(c10::kCPU));
        EXPECT_EQ(world.timeout(), seconds(60));
      },
      options);
}

TEST(World, SeveralLiveSideBySide) {
  std::thread other(
      [] { run_threads(2, [](World& world) { EXPECT_EQ(all_reduce(world, 10), 20); }); });
  run_threads(3, [](World& world) { EXPECT_EQ(all_reduce(world, 1), 3); });
  other.join();
}

TEST(World, GoneWithoutThreadsOrDescriptors) {
  const auto count = [](const char* what) {
    const std::filesystem::directory_iterator entries(what);
    return std::distance(begin(entries), end(entries));
  };
  const auto round = [] {
    run_threads(3, [](World& world) {
      all_reduce(world, 1);
      auto pair = world.split(world.rank() == 0 ? 0 : 1);
      if (pair) all_reduce(*pair, 1);
      world.barrier();
    });
  };
  round();  // whatever is made once per process
  const auto threads = count("/proc/self/task");
  const auto descriptors = count("/proc/self/fd");
  for (int i = 0; i < 5; ++i) round();
  // Threads that were asked to end may need a moment, and hold what they use until then.
  const auto begin = Clock::now();
  while (since(begin) < seconds(20) &&
         (count("/proc/self/task") > threads || count("/proc/self/fd") > descriptors))
    std::this_thread::sleep_for(milliseconds(10));
  EXPECT_LE(count("/proc/self/task"), threads);
  EXPECT_LE(count("/proc/self/fd"), descriptors);
}

TEST(World, NoCudaLibraryOnAMachineWithoutGpu) {
  if (::access("/dev/nvidiactl", F_OK) == 0) GTEST_SKIP() << "this machine has a GPU";
  run_threads(2, [](World& world) { all_reduce(world, 1); });
  EXPECT_THAT(read_file("/proc/self/maps"), ::testing::Not(HasSubstr("libtorch_cuda")));
}

// setenv() beside a thread that reads the environment is a race, and nobody knows the user's
// threads.
TEST(World, MakingOneLeavesTheEnvironmentAlone) {
  const auto snapshot = [] {
    std::vector<std::string> all;
    for (char** variable = environ; *variable != nullptr; ++variable) all.emplace_back(*variable);
    return all;
  };
  const std::vector<std::string> before = snapshot();
  for (const char* backend : {"shm", "gloo"})
    run_threads(2, [](World& world) { EXPECT_EQ(all_reduce(world, 1), 2); }, over(backend));
  EXPECT_EQ(snapshot(), before);
}

// ---------------------------------------------------------------- operations

TEST(World, ManyOperationsUnderWayAtOnce) {
  run_threads(3, [](World& world) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 50; ++i) {
      tensors.push_back(at::full({100 + i}, world.rank() + i, at::kDouble));
      works.push_back(world.all_reduce(tensors.back()));
    }
    for (auto& work : works) work.wait();
    for (int i = 0; i < 50; ++i)
      EXPECT_TENSOR_EQ(tensors[static_cast<std::size_t>(i)],
                       at::full({100 + i}, 3.0 + 3 * i, at::kDouble));
  });
}

// Ranks start the same in two worlds, and each waits for them in an order of its own. The engine's
// alone_test has every operation; here are a plain, a staged and an integer one.
TEST(World, TwoWorldsAreWaitedForInAnyOrder) {
  run_threads(3, [](World& world) {
    World other = *world.split(0);
    for (const std::int64_t count : {100, 700'000}) {
      for (unsigned orders = 0; orders < 8; ++orders) {
        const auto start = [count](World& in) {
          std::vector<std::pair<Work, at::Tensor>> started;
          for (const at::Tensor& x :
               {at::ones({count}), at::ones({count, 2}).select(1, 0), at::ones({count}, at::kInt)})
            started.emplace_back(in.all_reduce(x), x);
          return started;
        };
        auto one = start(world), two = start(other);
        if (((orders >> world.rank()) & 1u) != 0) std::swap(one, two);
        for (auto* each : {&one, &two}) {
          for (auto& [work, x] : *each) {
            work.wait();
            EXPECT_TRUE(x.eq(3).all().item<bool>());
          }
        }
      }
    }
  });
}

TEST(World, LeavesAreReducedInPlace) {
  run_threads(2, [](World& world) {
    at::Tensor weight = at::ones({4}).requires_grad_(true);
    world.all_reduce(weight).wait();
    EXPECT_TENSOR_EQ(weight.detach(), at::full({4}, 2.0f));
    EXPECT_TRUE(weight.requires_grad());
  });
}

TEST(World, DroppedHandlesDoNotCancel) {
  run_threads(2, [](World& world) {
    at::Tensor x = at::ones({1000});
    auto done = std::make_shared<std::promise<void>>();
    // The handle is gone before the operation can end; only the callback shows when it did.
    world.all_reduce(x).on_completion([done] { done->set_value(); });
    ASSERT_EQ(done->get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
    EXPECT_TENSOR_EQ(x, at::full({1000}, 2.0f));
  });
}

TEST(Work, CompletionIsReportedOnce) {
  run_threads(2, [](World& world) {
    std::atomic<int> calls{0};
    at::Tensor x = at::ones({10});
    Work work = world.all_reduce(x);
    work.on_completion([&] { ++calls; });
    work.synchronize();
    // The callback runs beside the wait that it releases.
    const auto begin = Clock::now();
    while (calls == 0 && since(begin) < seconds(30)) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(work.done());
    work.on_completion([&] { ++calls; });
    EXPECT_EQ(calls, 2);
    work.wait();
    Work().on_completion([&] { ++calls; });
    EXPECT_EQ(calls, 3);
  });
}

TEST(World, MessagesMayCross) {
  run_threads(2, [](World& world) {
    const int other = 1 - world.rank();
    at::Tensor in = at::zeros({1});
    // Receiving first on both sides must not keep the sends from going out.
    Work receiving = world.recv(in, other);
    world.send(at::full({1}, world.rank() + 1.0f), other).wait();
    receiving.wait();
    EXPECT_TENSOR_EQ(in, at::full({1}, other + 1.0f));
  });
}

TEST(World, SubWorldsOfSubWorlds) {
  run_threads(4, [](World& world) {
    auto half = world.split(world.rank() / 2);
    ASSERT_TRUE(half);
    auto one = half->split(half->rank());
    ASSERT_TRUE(one);
    EXPECT_EQ(one->size(), 1);
    EXPECT_EQ(all_reduce(*half, world.rank()), world.rank() < 2 ? 1 : 5);
    EXPECT_EQ(all_reduce(*one, 3), 3);
    EXPECT_EQ(all_reduce(world, 1), 4);
  });
}

// ---------------------------------------------------------------- failures

TEST(World, AnExceptionInOneRankFreesTheOthers) {
  const auto begin = Clock::now();
  EXPECT_THAT(message_of<std::runtime_error>([] {
                run_threads(3, [](World& world) {
                  if (world.rank() == 1) throw std::runtime_error("out of cheese");
                  at::Tensor x = at::ones({3});
                  world.all_reduce(x).wait();
                });
              }),
              HasSubstr("out of cheese"));
  EXPECT_LT(since(begin), seconds(20));
}

TEST(World, TimeoutNamesTheOperation) {
  const auto begin = Clock::now();
  std::atomic<bool> checked{false}, through{false}, gloo{false};
  const auto errors = run_threads_collecting(
      2,
      [&](World& world) {
        gloo = world.backend() == "gloo";
        world.barrier(seconds(60));
        if (world.rank() == 1) {
          through = true;
          while (!checked) std::this_thread::sleep_for(milliseconds(5));
          return;
        }
        // The short deadline counts from here; the failure must not hit the other rank in the
        // barrier.
        while (!through) std::this_thread::sleep_for(milliseconds(1));
        at::Tensor x = at::ones({3, 4});
        Work work = world.all_reduce(x);
        try {
          work.synchronize();
        } catch (const TimeoutError& e) {
          EXPECT_EQ(e.context().operation, "all_reduce");
          EXPECT_EQ(e.context().sequence, 2u);
          EXPECT_EQ(e.context().rank, 0);
          EXPECT_GE(e.context().elapsed, milliseconds(300));
          checked = true;
          EXPECT_THAT(message_of<CommError>([&] { all_reduce(world, 1); }),
                      AllOf(HasSubstr("all_reduce cannot start, because this world has failed"),
                            HasSubstr("all_reduce #2")));
          throw;
        }
      },
      with_timeout(milliseconds(300)));
  checked = true;
  EXPECT_THAT(
      errors[0],
      AllOf(HasSubstr("[world] rank 0: all_reduce #2 (Float, 12 elements) was not finished"),
            HasSubstr("LOCKSTEP_DEBUG=1"),
            HasSubstr(gloo ? "check firewall and interface" : "rank 1 did not arrive")));
  EXPECT_EQ(errors[1], "");
  EXPECT_LT(since(begin), seconds(20));
}

// What four ranks throw when ranks 1 and 3 do not come to the second barrier.
std::vector<std::string> barrier_of_two_of_four() {
  std::atomic<bool> done{false};
  std::atomic<bool> waiting{false};
  std::atomic<int> through{0};  // the first barrier, where a failure must not hit them
  return run_threads_collecting(4, [&](World& world) {
    const auto until = [](const std::atomic<bool>& flag) {
      while (!flag) std::this_thread::sleep_for(milliseconds(5));
    };
    world.barrier();
    ++through;
    if (world.rank() == 1 || world.rank() == 3) return until(done);
    if (world.rank() == 2) {
      waiting = true;
      // Rank 0 gives up first, which releases it.
      EXPECT_NE(message_of<CommError>([&] { world.barrier(seconds(60)); }), "(nothing thrown)");
      return;
    }
    until(waiting);
    while (through < 4) std::this_thread::sleep_for(milliseconds(5));
    try {
      world.barrier(milliseconds(1500));
    } catch (...) {
      done = true;
      throw;
    }
  });
}

TEST(World, BarrierNamesWhoIsMissing) {
  auto errors = barrier_of_two_of_four();
  // Rank 2 is missing too, and rightly named, where the machine holds it up on its way in.
  for (int attempt = 1; attempt < 5 && errors[0].find("ranks 1, 3") == std::string::npos; ++attempt)
    errors = barrier_of_two_of_four();
  EXPECT_THAT(errors[0], AllOf(HasSubstr("[world] rank 0: barrier #2"),
                               HasSubstr("ranks 1, 3 did not arrive")));
  EXPECT_EQ(errors[1], "");
}

TEST(World, AbortEndsWhatIsUnderWay) {
  const auto errors = run_threads_collecting(2, [](World& world) {
    if (world.rank() == 1) {
      world.recv(at::zeros({1}), 0).wait();
      return;
    }
    Work receiving = world.recv(at::zeros({1}), 1);
    std::thread killer([copy = world]() mutable {
      std::this_thread::sleep_for(milliseconds(50));
      copy.abort("the user pressed a button");
    });
    const auto begin = Clock::now();
    std::string text = message_of<CommError>([&] { receiving.wait(); });
    killer.join();
    EXPECT_THAT(text, AllOf(HasSubstr("recv #1 (Float, 1 element, peer 1) failed after"),
                            HasSubstr("the user pressed a button.")));
    EXPECT_LT(since(begin), seconds(10));
    throw std::runtime_error(text);
  });
  EXPECT_NE(errors[1], "") << "the peer must hear of it";
}

TEST(World, AbortReachesSubWorlds) {
  run_threads_collecting(2, [](World& world) {
    auto pair = world.split(0);
    world.barrier();
    world.abort("enough");
    EXPECT_THAT(message_of<CommError>([&] { all_reduce(*pair, 1); }), HasSubstr("enough"));
  });
}

// ---------------------------------------------------------------- refusals

TEST(WorldRefuses, WhatHasNoMeaning) {
  World world;
  at::Tensor x = at::ones({4});
  EXPECT_THAT(message_of([&] { world.all_reduce(at::Tensor()).wait(); }),
              HasSubstr("[world] all_reduce: the tensor is undefined"));
  EXPECT_THAT(message_of([&] { world.broadcast(x.to_sparse(), 0).wait(); }),
              HasSubstr("broadcast: the tensor is sparse"));
  EXPECT_THAT(message_of([&] { world.broadcast(x, 1).wait(); }),
              HasSubstr("broadcast: rank 1 does not exist in a world of 1"));
  EXPECT_THAT(message_of([&] { world.send(x, -1).wait(); }),
              HasSubstr("send: rank -1 does not exist"));
  EXPECT_THAT(message_of([&] { world.all_gather(at::zeros({3}), x).wait(); }),
              HasSubstr("all_gather: 3 elements of Float do not fit 1 times 4 elements of Float"));
  EXPECT_THAT(message_of([&] { world.gather({at::zeros({4}, at::kLong)}, x).wait(); }),
              HasSubstr("gather: 4 elements of Long do not fit"));
  EXPECT_THAT(message_of([&] { world.gather({}, x).wait(); }),
              HasSubstr("gather: the list has 0 tensors, but the world has 1 ranks"));
  EXPECT_THAT(message_of([&] { world.all_to_all({x, x}, {x}).wait(); }),
              HasSubstr("all_to_all: 2 outputs and 1 inputs in a world of 1"));
  EXPECT_THAT(message_of([&] { world.all_reduce(x, ReduceOp::kXor).wait(); }),
              HasSubstr("all_reduce: 'xor' of Float tensors has no meaning"));
  EXPECT_THAT(message_of([&] { world.recv(x, 0).wait(); }),
              HasSubstr("recv: rank 0 receives from itself, but has sent nothing"));
  EXPECT_THAT(message_of([&] { world.all_gather_v(at::scalar_tensor(1)); }),
              HasSubstr("all_gather_v: the tensor needs a first dimension"));
  // A refusal leaves the world usable.
  EXPECT_EQ(all_reduce(world, 1), 1);
}

TEST(WorldRefuses, ListsWhereTheyDoNotBelong) {
  run_threads(2, [](World& world) {
    at::Tensor x = at::ones({4});
    if (world.rank() == 1) {
      EXPECT_THAT(message_of([&] { world.gather({x, x}, x, 0).wait(); }),
                  HasSubstr("gather: rank 1 gave 2 outputs, but only root 0 receives"));
      EXPECT_THAT(message_of([&] { world.scatter(x, {x, x}, 0).wait(); }),
                  HasSubstr("scatter: rank 1 gave 2 inputs, but only root 0 sends"));
    }
    EXPECT_EQ(all_reduce(world, 1), 2);
  });
}

TEST(WorldRefuses, TensorsThatAreElsewhere) {
  run_threads(2, [](World& world) {
    const at::Tensor nowhere = at::ones({4}, at::device(at::kMeta));
    EXPECT_THAT(message_of([&] { world.all_reduce(nowhere).wait(); }),
                HasSubstr(fmt::format("[world] rank {}: the tensor is on meta, but this rank's "
                                      "device is cpu. Move it there",
                                      world.rank())));
    EXPECT_EQ(all_reduce(world, 1), 2) << "a refusal leaves the world usable";
  });
}

TEST(WorldRefuses, DevicesAndBackendsThatDoNotExist) {
  const auto connect_with = [](const WorldOptions& options) {
    return message_of([&] { connect({}, {.rank = 0, .size = 1}, options); });
  };
  EXPECT_THAT(connect_with({.backend = "mpi"}), HasSubstr("there is no backend 'mpi'"));
  EXPECT_THAT(connect_with({.backend = "nccl", .device = c10::Device(c10::kCPU)}),
              HasSubstr("backend nccl needs a CUDA device"));
  EXPECT_THAT(connect_with({.device = c10::Device(c10::kCUDA, 99)}),
              HasSubstr("local rank 0 wants cuda:99, but"));
  EXPECT_THAT(message_of([] { connect({}, {.rank = 3, .size = 2}); }),
              HasSubstr("rank 3 does not exist in a world of 2"));
  ::setenv("LOCKSTEP_DEVICE", "tpu", 1);
  EXPECT_THAT(connect_with({}), HasSubstr("LOCKSTEP_DEVICE='tpu' is not a device"));
  ::unsetenv("LOCKSTEP_DEVICE");
}

// ---------------------------------------------------------------- start-up checks

std::vector<std::string> start(int size, std::function<void(Identity&, WorldOptions&)> adjust) {
  ThreadOptions options;
  options.adjust = std::move(adjust);
  options.world.startup_timeout = seconds(30);
  return run_threads_collecting(size, [](World&) {}, options);
}

TEST(StartUp, AllThatDifferAreNamedOnEveryRank) {
  const auto differs = [](const Identity& identity) {
    return identity.rank == 1 || identity.rank == identity.size - 1;
  };
  for (const int size : {3, 4}) {
    const std::string who = fmt::format("ranks 1, {} have", size - 1);
    for (const auto& error : start(size, [&](Identity& identity, WorldOptions&) {
           identity.program = differs(identity) ? "another" : "this";
         }))
      EXPECT_THAT(error, HasSubstr(who + " program another, but rank 0 has this."));
    for (const auto& error : start(size, [&](Identity& identity, WorldOptions& options) {
           if (differs(identity)) options.options_hash = "x";
         }))
      EXPECT_THAT(error, HasSubstr(who + " options x, but rank 0 has (none)."));
    for (const auto& error : start(size, [&](Identity& identity, WorldOptions&) {
           if (differs(identity)) identity.size = 9;
         }))
      EXPECT_THAT(error, HasSubstr(fmt::format("{} world size 9, but rank 0 has {}.", who, size)));
  }
}

TEST(StartUp, PlacesThatNobodySaidAreCounted) {
  ::setenv("GLOO_SOCKET_IFNAME", "lo", 1);  // the hosts are only names
  ThreadOptions options;
  options.adjust = [](Identity& identity, WorldOptions&) {
    identity.host = identity.rank % 2 == 0 ? "n0" : "n1";
    identity.local_rank = identity.node = -1;
    identity.local_size = 0;
  };
  run_threads(
      3,
      [](World& world) {
        EXPECT_EQ(world.node_rank(), world.rank() % 2);
        EXPECT_EQ(world.local_rank(), world.rank() / 2);
        EXPECT_EQ(world.local_size(), world.rank() == 1 ? 1 : 2);
      },
      options);
  ::unsetenv("GLOO_SOCKET_IFNAME");
}

TEST(StartUp, LocalRanksThatDoNotExist) {
  EXPECT_THAT(
      message_of([] { connect({}, {.rank = 1, .size = 2, .local_rank = 3, .local_size = 2}); }),
      HasSubstr("rank 1: local rank 3 does not exist among 2 local ranks"));
  for (const auto& error : start(3, [](Identity& identity, WorldOptions&) {
         identity.local_size = 0;
         if (identity.rank > 0) identity.local_rank = 3;
       }))
    EXPECT_THAT(error, HasSubstr("ranks 1, 2 have local rank 3 on "));
}

TEST(StartUp, ASecondProcessWithARankThatIsAtWork) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const WorldOptions options{.device = c10::Device(c10::kCPU), .startup_timeout = seconds(30)};
  auto other = std::async(std::launch::async, [&] {
    return connect(store, {.rank = 1, .size = 2, .local_size = 2}, options);
  });
  World world = connect(store, {.rank = 0, .size = 2, .local_size = 2}, options);
  World peer = other.get();
  EXPECT_THAT(message_of([&] { connect(store, {.rank = 1, .size = 2, .local_size = 2}, options); }),
              HasSubstr("two processes say they are rank 1"));
}

TEST(StartUp, OneGpuForTwoRanks) {
  const auto same_gpu = [](Identity& identity, WorldOptions&) { identity.gpu = "GPU-1234"; };
  for (const auto& error : start(2, same_gpu)) {
    EXPECT_THAT(error, AllOf(HasSubstr("ranks 0, 1 on "), HasSubstr("use the same GPU (GPU-1234)"),
                             HasSubstr("LOCKSTEP_SHARE_DEVICE=1")));
  }
  for (const auto& error : start(2, [&](Identity& identity, WorldOptions& options) {
         same_gpu(identity, options);
         options.share_device = true;
       }))
    EXPECT_EQ(error, "");
  for (const auto& error : start(2, [&](Identity& identity, WorldOptions&) {
         identity.gpu = "GPU-" + std::to_string(identity.rank);
       }))
    EXPECT_EQ(error, "");
}

TEST(StartUp, LoopbackBetweenHosts) {
  auto errors = start(2, [](Identity& identity, WorldOptions&) {
    identity.host = identity.rank == 0 ? "n0" : "n1";
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("rank 0 on n0 would listen on 127.0.0.1"),
                             HasSubstr("GLOO_SOCKET_IFNAME")));
  }
}

TEST(StartUp, MissingRanksAreNamed) {
  ThreadOptions options;
  options.world.startup_timeout = milliseconds(2500);
  options.adjust = [](Identity& identity, WorldOptions&) { identity.size = 4; };
  const auto as_it_should = [](const std::vector<std::string>& errors) {
    return std::all_of(errors.begin(), errors.end(), [](const std::string& error) {
      return error.find("ranks 2, 3 of 4") != std::string::npos;
    });
  };
  auto errors = run_threads_collecting(2, [](World&) {}, options);
  // A rank that a busy machine makes two seconds late is missing as well.
  for (int attempt = 1; attempt < 5 && !as_it_should(errors); ++attempt)
    errors = run_threads_collecting(2, [](World&) {}, options);
  EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 0: ranks 2, 3 of 4 did not come within 2.5 s"),
                               HasSubstr("LOCKSTEP_STARTUP_TIMEOUT_S")));
  // Those that came hear of it from the leader.
  EXPECT_THAT(errors[1], HasSubstr("rank 1: ranks 2, 3 of 4 did not come within 2.5 s"));
}

TEST(StartUp, MissingLeaderIsNamed) {
  ThreadOptions options;
  options.world.startup_timeout = milliseconds(300);
  options.adjust = [](Identity& identity, WorldOptions&) {
    identity.size = 3;
    ++identity.rank;
  };
  for (const auto& error : run_threads_collecting(2, [](World&) {}, options))
    EXPECT_THAT(error, HasSubstr("rank 0 of 3 did not come within"));
}

// The others may still be connecting, and would see its end as a broken connection.
TEST(World, MayBeDroppedAsSoonAsItIsMade) {
  testing::ThreadOptions options;
  options.world.backend = "gloo";
  testing::run_threads(
      4,
      [](World& world) {
        for (int i = 0; i < 25; ++i) EXPECT_EQ(world.split(0)->size(), 4);
      },
      options);
}

// ---------------------------------------------------------------- what one rank throws

TEST(Agree, LeaderFirst) {
  std::atomic<bool> leader_done{false};
  run_threads(3, [&](World& world) {
    leader_first(world, [&] {
      if (world.is_leader()) {
        std::this_thread::sleep_for(milliseconds(50));
        leader_done = true;
      } else {
        EXPECT_TRUE(leader_done);
      }
    });
  });
  std::atomic<int> others{0};
  run_threads(3, [&](World& world) {
    const auto fail = [&] {
      leader_first(world, [&] {
        if (world.is_leader()) throw std::runtime_error("disk full");
        ++others;
      });
    };
    if (world.is_leader()) {
      EXPECT_EQ(message_of<std::runtime_error>(fail), "disk full");
    } else {
      EXPECT_EQ(message_of<Error>(fail), "[world] rank 0: disk full");
    }
    EXPECT_EQ(all_reduce(world, 1), 3) << "the world itself is well";
  });
  EXPECT_EQ(others, 0);
}

TEST(Agree, AgreeFailsOnAllRanksWhenOneFails) {
  run_threads(3, [](World& world) {
    const auto names = agree(world, [&] { return std::to_string(world.rank()); });
    EXPECT_EQ(names, (std::vector<std::string>{"0", "1", "2"}));
    const auto fail = [&] {
      agree(world, [&] {
        if (world.rank() == 1) throw std::runtime_error("disk full");
      });
    };
    if (world.rank() == 1) {
      EXPECT_EQ(message_of<std::runtime_error>(fail), "disk full");
    } else {
      EXPECT_EQ(message_of<Error>(fail), "[world] rank 1: disk full");
    }
    EXPECT_EQ(all_reduce(world, 1), 3) << "the world itself still works";
  });
  World alone;
  EXPECT_EQ(agree(alone, [] { return std::string("x"); }), std::vector<std::string>{"x"});
}

// So that all ranks catch the same, and a report knows whose error it was.
template <typename Kind>
void expect_same_kind(const Kind& error) {
  run_threads(3, [&](World& world) {
    for (const int who : {0, 1}) {
      const auto body = [&] {
        if (world.rank() == who) throw error;
      };
      try {
        who == 0 ? leader_first(world, body) : agree(world, body);
        ADD_FAILURE() << "rank " << world.rank() << " did not throw";
      } catch (const Kind& caught) {
        const auto* of_peer = dynamic_cast<const detail::FromPeer*>(&caught);
        ASSERT_EQ(of_peer == nullptr ? world.rank() : of_peer->rank(), who);
        const std::string want = fmt::format("[world] rank {}: {}", who, error.what());
        EXPECT_EQ(caught.what(), of_peer == nullptr ? error.what() : want);
      }
    }
  });
}

TEST(Agree, AnErrorOfOneRankHasItsKindOnAllRanks) {
  expect_same_kind(UsageError("test", "wrong."));
  expect_same_kind(SystemError("test", "cannot write", ENOSPC));
  expect_same_kind(CommError("test", "gone."));
  expect_same_kind(TimeoutError("test", "late."));
  expect_same_kind(InternalError("test", "a bug."));
}

}  // namespace
}  // namespace lockstep
