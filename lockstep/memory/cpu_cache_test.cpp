#include "lockstep/memory/cpu_cache.h"

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using testing::run_threads;

constexpr std::int64_t kMb = 1 << 20;
constexpr const char* kOwnProcess = "LOCKSTEP_TEST_OWN_PROCESS";

at::Tensor bytes(std::int64_t count) {
  return at::empty({count}, at::kByte);
}

std::optional<at::Tensor> older;  // from before anything was cached

// For all tests of this program: caching cannot be switched off again.
struct CacheFromTheStart : ::testing::Environment {
  void SetUp() override {
    if (env::get(kOwnProcess) || is_cpu_memory_cached()) return;
    older = bytes(2 * kMb);
    cache_cpu_memory();
  }
};
const auto* const environment = ::testing::AddGlobalTestEnvironment(new CacheFromTheStart);

constexpr int kPassed = 42;  // gtest returns 0 even where no test was found

// Runs the test of that name in a process in which nothing is cached yet.
int in_own_process(const std::string& test, const std::string& variables) {
  const std::string command =
      "exec env -u GTEST_OUTPUT -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX " + variables + " " +
      kOwnProcess + "=1 '" + std::filesystem::read_symlink("/proc/self/exe").string() +
      "' --gtest_filter=CpuCacheOfItsOwn.DISABLED_" + test +
      " --gtest_also_run_disabled_tests >/dev/null";
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct CpuCacheOfItsOwn : ::testing::Test {
  void TearDown() override {
    if (!HasFailure()) std::_Exit(kPassed);
  }
};

// A training step in a world of one, without run() or a test world, which switch caching on.
void wrap_something() {
  World world;
  torch::nn::Linear net(64, 64);
  DistributedDataParallel<torch::nn::Linear> model{net, world, {.force_reducer = true}};
  model(at::randn({8, 64})).sum().backward();
}

long faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

TEST(CpuCache, LargeTensorsLieWhereTheLastOnesLay) {
  ASSERT_TRUE(is_cpu_memory_cached());
  const auto used = cpu_cache_stats().used;
  at::Tensor first = bytes(5 * kMb);
  const void* const place = first.const_data_ptr();
  const at::Tensor part = first.narrow(0, 7, 100);
  first.reset();
  EXPECT_NE(bytes(5 * kMb).const_data_ptr(), place) << "a view still lies there";
  const_cast<at::Tensor&>(part).reset();
  EXPECT_EQ(bytes(5 * kMb).const_data_ptr(), place);

  at::Tensor grown = bytes(3 * kMb).fill_(9);
  grown.resize_({11 * kMb});
  EXPECT_TRUE(grown.narrow(0, 0, 3 * kMb).eq(9).all().item<bool>());
  std::thread([tensor = std::move(grown)]() mutable { tensor.reset(); }).join();

  const auto before = cpu_cache_stats();
  EXPECT_EQ(before.used, used);
  EXPECT_GT(before.idle, 0U);
  empty_cpu_cache();
  EXPECT_EQ(cpu_cache_stats().idle, 0U);
}

TEST(CpuCache, SmallTensorsAndOlderOnesAreMallocs) {
  const auto before = cpu_cache_stats();
  bytes(kMb - 1).fill_(1);
  older.reset();
  EXPECT_EQ(cpu_cache_stats().mapped, before.mapped);
  EXPECT_EQ(cpu_cache_stats().idle, before.idle);
}

TEST(CpuCache, RawMemoryOfBothOriginsIsFreed) {
  const auto used = cpu_cache_stats().used;
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  for (const std::size_t size : {std::size_t{100}, std::size_t{3 * kMb}}) {
    void* const data = allocator->raw_allocate(size);
    std::memset(data, 1, size);
    allocator->raw_deallocate(data);
  }
  EXPECT_EQ(cpu_cache_stats().used, used);
}

// Without it the four tensors around these logits are fetched and cleared in every step: 40 000
// pages.
TEST(CpuCache, StepsOfTrainingFetchNoPages) {
  run_threads(1, [](World& world) {
    torch::nn::Linear net(16, 10000);
    DistributedDataParallel<torch::nn::Linear> model{net, world, {.force_reducer = true}};
    const at::Tensor input = at::randn({1024, 16});
    const at::Tensor targets = at::randint(10000, {1024});
    const auto step = [&] {
      torch::cross_entropy_loss(model(input), targets).backward();
      for (auto& p : net->parameters()) p.mutable_grad().reset();
    };
    for (int i = 0; i < 2; ++i) step();
    const auto counts = cpu_cache_stats();
    const long before = faults();
    for (int i = 0; i < 3; ++i) step();
    EXPECT_LT(faults() - before, 3 * 2000);
    EXPECT_EQ(cpu_cache_stats().mapped, counts.mapped);
  });
}

TEST(CpuCache, AChildFindsNoCallHalfDone) {
  std::atomic<bool> done{false};
  std::thread busy([&] {
    while (!done) bytes(2 * kMb);
  });
  for (int i = 0; i < 200; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);                                                 // ends a child that hangs
      std::memset(bytes(2 * kMb).mutable_data_ptr(), 1, 2 * kMb);  // fill_() asks for threads
      ::_exit(0);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    if (status != 0) break;
  }
  done = true;
  busy.join();
}

TEST_F(CpuCacheOfItsOwn, DISABLED_WrappingAModelChangesNothingInTheProcess) {
  const c10::Allocator* const before = c10::GetCPUAllocator();
  wrap_something();
  EXPECT_EQ(c10::GetCPUAllocator(), before);
  EXPECT_FALSE(is_cpu_memory_cached());
  EXPECT_FALSE(detail::InplaceGradients::is_enabled());
}

TEST_F(CpuCacheOfItsOwn, DISABLED_IsSwitchedOnOnce) {
  EXPECT_TRUE(cache_cpu_memory());
  EXPECT_TRUE(is_cpu_memory_cached());
  EXPECT_TRUE(detail::InplaceGradients::is_enabled());
  EXPECT_TRUE(cache_cpu_memory()) << "more than once is once";
}

TEST_F(CpuCacheOfItsOwn, DISABLED_IsOff) {
  EXPECT_FALSE(cache_cpu_memory());
  EXPECT_FALSE(is_cpu_memory_cached());
  bytes(2 * kMb).fill_(1);
  EXPECT_EQ(cpu_cache_stats().mapped, 0U);
  empty_cpu_cache();
}

TEST_F(CpuCacheOfItsOwn, DISABLED_OwnAllocatorStays) {
  struct Own final : c10::Allocator {
    c10::DataPtr allocate(std::size_t size) override {
      return c10::GetDefaultCPUAllocator()->allocate(size);
    }
    void copy_data(void* to, const void* from, std::size_t size) const override {
      default_copy_data(to, from, size);
    }
  };
  c10::SetCPUAllocator(new Own);
  EXPECT_FALSE(cache_cpu_memory());
  wrap_something();
}

TEST_F(CpuCacheOfItsOwn, DISABLED_WrongValueIsRefused) {
  try {
    cache_cpu_memory();
    FAIL() << "accepted it";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("LOCKSTEP_CPU_CACHE_MAX_BYTES"), std::string::npos)
        << error.what();
  }
}

// Addresses are what a limit counts, and idle blocks have some.
TEST_F(CpuCacheOfItsOwn, DISABLED_SmallTensorsGetWhatLargeOnesLeft) {
  cache_cpu_memory();
  bytes(400 * kMb);
  ASSERT_GT(cpu_cache_stats().idle, 0U);
  std::FILE* const pages = std::fopen("/proc/self/statm", "r");
  unsigned long now = 0;
  ASSERT_TRUE(pages != nullptr && std::fscanf(pages, "%lu", &now) == 1);
  const rlim_t most = now * page_bytes() + 4 * kMb;
  const rlimit limit{most, most};
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
  std::vector<at::Tensor> small;
  for (int i = 0; i < 100; ++i) small.push_back(bytes(kMb - 1));
  EXPECT_EQ(cpu_cache_stats().idle, 0U);
}

TEST(CpuCache, HoldsInProcessesOfTheirOwn) {
  constexpr const char* kUnset = "-u LOCKSTEP_CPU_CACHE_MAX_BYTES";
  EXPECT_EQ(in_own_process("WrappingAModelChangesNothingInTheProcess", kUnset), kPassed);
  EXPECT_EQ(in_own_process("IsSwitchedOnOnce", kUnset), kPassed);
  EXPECT_EQ(in_own_process("OwnAllocatorStays", kUnset), kPassed);
#if !defined(__SANITIZE_ADDRESS__)  // which needs all the address space
  EXPECT_EQ(in_own_process("SmallTensorsGetWhatLargeOnesLeft", kUnset), kPassed);
#endif
  EXPECT_EQ(in_own_process("IsOff", "LOCKSTEP_CPU_CACHE_MAX_BYTES=0"), kPassed);
  EXPECT_EQ(in_own_process("WrongValueIsRefused", "LOCKSTEP_CPU_CACHE_MAX_BYTES=plenty"), kPassed);
  EXPECT_EQ(in_own_process("WrongValueIsRefused", "LOCKSTEP_CPU_CACHE_MAX_BYTES=-1"), kPassed);
}

}  // namespace
}  // namespace lockstep
