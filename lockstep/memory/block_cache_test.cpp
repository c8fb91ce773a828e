#include "lockstep/memory/block_cache.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/host.h"

namespace lockstep {
namespace {

constexpr std::size_t kMb = 1 << 20;

long faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

struct Piece {
  char* data = nullptr;
  std::size_t bytes = 0;
  char mark = 0;

  // Writes both ends and something in every page.
  void write() const {
    for (std::size_t at = 0; at < bytes; at += 4096) data[at] = mark;
    data[bytes - 1] = mark;
  }
  bool is_as_written() const {
    for (std::size_t at = 0; at < bytes; at += 4096)
      if (data[at] != mark) return false;
    return data[bytes - 1] == mark;
  }
};

TEST(BlockCache, ReturnsTheSameBlockWithItsPages) {
  BlockCache cache;
  void* const block = cache.allocate(33 * kMb);
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % 4096, 0U);
  std::memset(block, 1, 33 * kMb);
  for (int step = 0; step < 3; ++step) {
    cache.deallocate(block);
    const long before = faults();
    ASSERT_EQ(cache.allocate(33 * kMb), block);
    std::memset(block, 2, 33 * kMb);
    EXPECT_LT(faults() - before, 100) << "of 8448 pages";
  }
  EXPECT_EQ(cache.stats().mapped, 1U);
}

TEST(BlockCache, FitsBlocksThatAreAtMostAQuarterTooLarge) {
  BlockCache cache;
  void* const block = cache.allocate(33 * kMb);
  void* const larger = cache.allocate(37 * kMb);
  cache.deallocate(block);
  cache.deallocate(larger);
  EXPECT_EQ(cache.allocate(35 * kMb), block) << "rounded up it is the same";
  EXPECT_EQ(cache.allocate(34 * kMb), larger) << "the next best";
  cache.deallocate(block);
  cache.deallocate(larger);
  EXPECT_EQ(cache.allocate(30 * kMb), block);
  cache.deallocate(block);
  void* const small = cache.allocate(16 * kMb);
  EXPECT_NE(small, block) << "twice of what is needed";
  EXPECT_NE(small, larger);
  EXPECT_EQ(cache.stats().mapped, 3U);
}

// Batches of any length between half and all of the longest.
TEST(BlockCache, ChangingLengthsHitMostOfTheTime) {
  BlockCache cache;
  std::mt19937 random(1);
  const auto step = [&] {
    const std::size_t length = 64 + random() % 65;
    std::vector<void*> blocks;
    for (int i = 0; i < 10; ++i) blocks.push_back(cache.allocate(length * (64 << 10)));
    for (void* block : blocks) cache.deallocate(block);
  };
  for (int i = 0; i < 20; ++i) step();
  const auto before = cache.stats();
  for (int i = 0; i < 100; ++i) step();
  const auto after = cache.stats();
  EXPECT_LT(after.mapped - before.mapped, 500U) << "of 1000";
}

TEST(BlockCache, PrefersTheLastUsed) {
  BlockCache cache;
  void* const first = cache.allocate(kMb);
  void* const second = cache.allocate(kMb);
  cache.deallocate(second);
  cache.deallocate(first);
  EXPECT_EQ(cache.allocate(kMb), first);
  EXPECT_EQ(cache.allocate(kMb), second);
}

TEST(BlockCache, HoldsAtMostAQuarterAboveThePeak) {
  BlockCache cache;
  std::vector<Piece> used;
  std::mt19937 random(1);
  std::size_t max_asked = 0, asked = 0;
  for (int turn = 0; turn < 4000; ++turn) {
    if (used.size() < 12 && random() % 2 == 0) {
      Piece piece{nullptr, kMb + random() % (8 * kMb), static_cast<char>(random())};
      piece.data = static_cast<char*>(cache.allocate(piece.bytes));
      ASSERT_NE(piece.data, nullptr);
      ASSERT_TRUE(cache.owns(piece.data));
      piece.write();
      used.push_back(piece);
      asked += piece.bytes;
      max_asked = std::max(max_asked, asked);
    } else if (!used.empty()) {
      const std::size_t which = random() % used.size();
      ASSERT_TRUE(used[which].is_as_written()) << "somebody else has written there";
      cache.deallocate(used[which].data);
      asked -= used[which].bytes;
      used.erase(used.begin() + static_cast<std::ptrdiff_t>(which));
    }
    const auto stats = cache.stats();
    ASSERT_LE(stats.used + stats.idle, stats.peak + stats.peak / 4);
    ASSERT_LE(stats.peak, max_asked * 9 / 8 * 5 / 4);  // rounded up, in blocks a quarter larger
  }
  EXPECT_GT(cache.stats().mapped, 100U) << "nothing had to go back: this shows nothing";
}

TEST(BlockCache, EvictsTheOldestAboveMaxIdleBytes) {
  BlockCache cache({.max_idle_bytes = 20 * kMb});
  std::vector<void*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(cache.allocate(8 * kMb));
  for (void* block : blocks) cache.deallocate(block);
  EXPECT_EQ(cache.stats().idle, 16 * kMb);
  EXPECT_FALSE(cache.owns(blocks[0]));
  EXPECT_FALSE(cache.owns(blocks[1]));
  EXPECT_TRUE(cache.owns(blocks[3]));
  EXPECT_EQ(cache.allocate(8 * kMb), blocks[3]);
  cache.release_idle();
  EXPECT_EQ(cache.stats().idle, 0U);
  EXPECT_FALSE(cache.owns(blocks[2]));
  EXPECT_TRUE(cache.owns(blocks[3])) << "is in use";
  EXPECT_EQ(cache.stats().peak, 8 * kMb) << "a spike is forgotten";
}

TEST(BlockCache, ABlockAboveMaxIdleBytesEvictsNothing) {
  BlockCache cache({.max_idle_bytes = 20 * kMb});
  void* const small = cache.allocate(8 * kMb);
  void* const large = cache.allocate(33 * kMb);
  cache.deallocate(small);
  cache.deallocate(large);
  EXPECT_TRUE(cache.owns(small));
  EXPECT_FALSE(cache.owns(large));
}

TEST(BlockCache, RejectsForeignBlocksAndDoubleFrees) {
  BlockCache cache;
  int other = 0;
  EXPECT_FALSE(cache.owns(&other));
  EXPECT_THROW(cache.deallocate(&other), InternalError);
  void* const block = cache.allocate(kMb);
  cache.deallocate(block);
  EXPECT_THROW(cache.deallocate(block), InternalError);
}

// A line of the mapping's entry in smaps, in KB; -1: there is none.
long smaps_kb(const void* address, const std::string& name) {
  std::ifstream file("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    std::uintptr_t from = 0, to = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2)
      inside = from <= wanted && wanted < to;
    if (inside && line.rfind(name + ":", 0) == 0) return std::stol(line.substr(name.size() + 1));
  }
  return -1;
}

TEST(BlockCache, TheKernelMayReclaimIdleBlocksOnly) {
  constexpr std::size_t kBytes = 8 * kMb;
  BlockCache cache;
  char* const block = static_cast<char*>(cache.allocate(kBytes));
  std::memset(block, 7, kBytes);
  const long huge = smaps_kb(block, "AnonHugePages");
  if (huge <= 0) GTEST_SKIP() << "no huge pages to be had here";
  EXPECT_EQ(smaps_kb(block, "LazyFree"), 0);
  cache.deallocate(block);
  EXPECT_GE(smaps_kb(block, "LazyFree"), huge);
  ASSERT_EQ(cache.allocate(kBytes), block);
  std::memset(block, 8, kBytes);
  EXPECT_EQ(smaps_kb(block, "LazyFree"), 0);
  ::madvise(block, kBytes, MADV_PAGEOUT);  // as if memory ran short
  EXPECT_TRUE((Piece{block, kBytes, 8}.is_as_written()));
}

// Runs in a process of its own; the result is its exit code.
int allocate_with_little_address_space() {
  BlockCache cache;
  void* const first = cache.allocate(400 * kMb);
  cache.deallocate(first);
  std::FILE* const pages = std::fopen("/proc/self/statm", "r");
  unsigned long now = 0;
  if (pages == nullptr || std::fscanf(pages, "%lu", &now) != 1) return 2;
  const rlim_t most = now * page_bytes() + 200 * kMb;
  const rlimit limit{most, most};
  if (::setrlimit(RLIMIT_AS, &limit) != 0) return 3;
  if (cache.allocate(500 * kMb) == nullptr) return 4;
  if (cache.stats().idle != 0) return 5;
  if (cache.allocate(2000 * kMb) != nullptr) return 6;
  if (cache.allocate(SIZE_MAX - 5) != nullptr) return 7;
  return 0;
}

TEST(BlockCache, ReleasesIdleBlocksBeforeItFails) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(allocate_with_little_address_space());
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << WEXITSTATUS(status);
}

TEST(BlockCache, ThreadsNeverShareABlock) {
  BlockCache cache;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<Piece> used;
      for (int turn = 0; turn < 500; ++turn) {
        if (used.size() < 4) {
          Piece piece{nullptr, kMb + random() % kMb, static_cast<char>(16 * t + turn % 16)};
          piece.data = static_cast<char*>(cache.allocate(piece.bytes));
          piece.write();
          used.push_back(piece);
        } else {
          if (!used.front().is_as_written()) ++wrong;
          cache.deallocate(used.front().data);
          used.erase(used.begin());
        }
      }
      for (const Piece& piece : used) cache.deallocate(piece.data);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(cache.stats().used, 0U);
}

// Waits until nothing is idle; false when that takes too long.
bool drains(const BlockCache& cache) {
  for (int i = 0; i < 2000 && cache.stats().idle > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return cache.stats().idle == 0;
}

TEST(BlockCache, UnmapsWhatHasBeenIdleTooLongWithoutBeingCalled) {
  BlockCache cache({.max_idle_time = std::chrono::milliseconds(50)});
  for (int spike = 0; spike < 3; ++spike) {
    void* const used = cache.allocate(kMb);
    char* const block = static_cast<char*>(cache.allocate(64 * kMb));
    std::memset(block, 1, 64 * kMb);
    cache.deallocate(block);
    ASSERT_TRUE(drains(cache));
    EXPECT_FALSE(cache.owns(block));
    // Unmapping follows the accounting.
    for (int i = 0; i < 2000 && smaps_kb(block, "Rss") != -1; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_EQ(smaps_kb(block, "Rss"), -1) << "is still mapped";
    EXPECT_TRUE(cache.owns(used));
    EXPECT_EQ(cache.stats().peak, kMb) << "a spike is forgotten";
    cache.deallocate(used);
    ASSERT_TRUE(drains(cache));
  }
}

TEST(BlockCache, ReusedBlocksDoNotAge) {
  BlockCache cache({.max_idle_time = std::chrono::seconds(2)});
  void* const block = cache.allocate(kMb);
  cache.deallocate(block);
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(2500);
  while (std::chrono::steady_clock::now() < end) {
    ASSERT_EQ(cache.allocate(kMb), block);
    cache.deallocate(block);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(cache.stats().mapped, 1U);
}

TEST(BlockCache, AForkedChildTrimsItsOwn) {
  BlockCache cache({.max_idle_time = std::chrono::milliseconds(200)});
  cache.deallocate(cache.allocate(2 * kMb));  // its thread runs now
  cache.before_fork();
  const pid_t child = ::fork();
  if (child == 0) {
    cache.after_fork_in_child();
    ::alarm(20);
    cache.deallocate(cache.allocate(8 * kMb));
    ::_exit(drains(cache) ? 0 : 1);
  }
  cache.after_fork_in_parent();
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(drains(cache));
}

}  // namespace
}  // namespace lockstep

#if defined(__SANITIZE_THREAD__)
// AForkedChildTrimsItsOwn: a child of a process with threads that starts one, which the thread
// sanitizer refuses by default.
extern "C" const char* __tsan_default_options() {
  return "die_after_fork=0";
}
#endif
