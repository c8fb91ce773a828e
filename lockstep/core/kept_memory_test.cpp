#include "lockstep/core/kept_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/pages.h"

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

  // Both ends and something in every page.
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

TEST(KeptMemory, GivesTheSameBlockAgainAndItsPagesWithIt) {
  KeptMemory memory;
  void* const block = memory.take(33 * kMb);
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % 4096, 0U);
  std::memset(block, 1, 33 * kMb);
  for (int step = 0; step < 3; ++step) {
    memory.give_back(block);
    const long before = faults();
    ASSERT_EQ(memory.take(33 * kMb), block);
    std::memset(block, 2, 33 * kMb);
    EXPECT_LT(faults() - before, 100) << "of 8448 pages";
  }
  EXPECT_EQ(memory.counts().fetched, 1U);
}

TEST(KeptMemory, TakesTheBestThatIsAQuarterTooLargeAtMost) {
  KeptMemory memory;
  void* const block = memory.take(33 * kMb);
  void* const larger = memory.take(37 * kMb);
  memory.give_back(block);
  memory.give_back(larger);
  EXPECT_EQ(memory.take(35 * kMb), block) << "rounded up it is the same";
  EXPECT_EQ(memory.take(34 * kMb), larger) << "the next best";
  memory.give_back(block);
  memory.give_back(larger);
  EXPECT_EQ(memory.take(30 * kMb), block);
  memory.give_back(block);
  void* const small = memory.take(16 * kMb);
  EXPECT_NE(small, block) << "twice of what is needed";
  EXPECT_NE(small, larger);
  EXPECT_EQ(memory.counts().fetched, 3U);
}

// Batches of any length between half and the whole of the longest.
TEST(KeptMemory, LengthsThatChangeFindBlocksMostOfTheTime) {
  KeptMemory memory;
  std::mt19937 random(1);
  const auto step = [&] {
    const std::size_t length = 64 + random() % 65;
    std::vector<void*> blocks;
    for (int i = 0; i < 10; ++i) blocks.push_back(memory.take(length * (64 << 10)));
    for (void* block : blocks) memory.give_back(block);
  };
  for (int i = 0; i < 20; ++i) step();
  const auto before = memory.counts();
  for (int i = 0; i < 100; ++i) step();
  const auto after = memory.counts();
  EXPECT_LT(after.fetched - before.fetched, 500U) << "of 1000";
}

TEST(KeptMemory, TakesTheLastUsedFirst) {
  KeptMemory memory;
  void* const first = memory.take(kMb);
  void* const second = memory.take(kMb);
  memory.give_back(second);
  memory.give_back(first);
  EXPECT_EQ(memory.take(kMb), first);
  EXPECT_EQ(memory.take(kMb), second);
}

TEST(KeptMemory, HoldsAQuarterMoreThanWasEverUsedAtMost) {
  KeptMemory memory;
  std::vector<Piece> used;
  std::mt19937 random(1);
  std::size_t most_asked = 0, asked = 0;
  for (int turn = 0; turn < 4000; ++turn) {
    if (used.size() < 12 && random() % 2 == 0) {
      Piece piece{nullptr, kMb + random() % (8 * kMb), static_cast<char>(random())};
      piece.data = static_cast<char*>(memory.take(piece.bytes));
      ASSERT_NE(piece.data, nullptr);
      ASSERT_TRUE(memory.holds(piece.data));
      piece.write();
      used.push_back(piece);
      asked += piece.bytes;
      most_asked = std::max(most_asked, asked);
    } else if (!used.empty()) {
      const std::size_t which = random() % used.size();
      ASSERT_TRUE(used[which].is_as_written()) << "somebody else has written there";
      memory.give_back(used[which].data);
      asked -= used[which].bytes;
      used.erase(used.begin() + static_cast<std::ptrdiff_t>(which));
    }
    const auto counts = memory.counts();
    ASSERT_LE(counts.used + counts.idle, counts.peak + counts.peak / 4);
    ASSERT_LE(counts.peak, most_asked * 9 / 8 * 5 / 4);  // rounded up, in blocks a quarter larger
  }
  EXPECT_GT(memory.counts().fetched, 100U) << "nothing had to go back: this shows nothing";
}

TEST(KeptMemory, KeepsNoMoreIdleThanItMayAndForgetsTheOldest) {
  KeptMemory memory(20 * kMb);
  std::vector<void*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(memory.take(8 * kMb));
  for (void* block : blocks) memory.give_back(block);
  EXPECT_EQ(memory.counts().idle, 16 * kMb);
  EXPECT_FALSE(memory.holds(blocks[0]));
  EXPECT_FALSE(memory.holds(blocks[1]));
  EXPECT_TRUE(memory.holds(blocks[3]));
  EXPECT_EQ(memory.take(8 * kMb), blocks[3]);
  memory.release_idle();
  EXPECT_EQ(memory.counts().idle, 0U);
  EXPECT_FALSE(memory.holds(blocks[2]));
  EXPECT_TRUE(memory.holds(blocks[3])) << "is in use";
  EXPECT_EQ(memory.counts().peak, 8 * kMb) << "a spike is forgotten";
}

TEST(KeptMemory, WhatMayNotBeKeptDrivesNothingOut) {
  KeptMemory memory(20 * kMb);
  void* const small = memory.take(8 * kMb);
  void* const large = memory.take(33 * kMb);
  memory.give_back(small);
  memory.give_back(large);
  EXPECT_TRUE(memory.holds(small));
  EXPECT_FALSE(memory.holds(large));
}

TEST(KeptMemory, RefusesWhatItDoesNotHoldAndWhatWasGivenBackBefore) {
  KeptMemory memory;
  int other = 0;
  EXPECT_FALSE(memory.holds(&other));
  EXPECT_THROW(memory.give_back(&other), InternalError);
  void* const block = memory.take(kMb);
  memory.give_back(block);
  EXPECT_THROW(memory.give_back(block), InternalError);
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

TEST(KeptMemory, TheKernelMayTakeWhatIsIdleButNotWhatIsUsed) {
  constexpr std::size_t kBytes = 8 * kMb;
  KeptMemory memory;
  char* const block = static_cast<char*>(memory.take(kBytes));
  std::memset(block, 7, kBytes);
  const long huge = smaps_kb(block, "AnonHugePages");
  if (huge <= 0) GTEST_SKIP() << "no huge pages to be had here";
  EXPECT_EQ(smaps_kb(block, "LazyFree"), 0);
  memory.give_back(block);
  EXPECT_GE(smaps_kb(block, "LazyFree"), huge);
  ASSERT_EQ(memory.take(kBytes), block);
  std::memset(block, 8, kBytes);
  EXPECT_EQ(smaps_kb(block, "LazyFree"), 0);
  ::madvise(block, kBytes, MADV_PAGEOUT);  // as if memory ran short
  EXPECT_TRUE((Piece{block, kBytes, 8}.is_as_written()));
}

TEST(KeptMemory, GivesUpWhatIsIdleBeforeItSaysThatThereIsNoMore) {
  const pid_t child = ::fork();
  if (child == 0) {
    KeptMemory memory;
    void* const first = memory.take(400 * kMb);
    memory.give_back(first);
    std::FILE* const pages = std::fopen("/proc/self/statm", "r");
    unsigned long now = 0;
    if (pages == nullptr || std::fscanf(pages, "%lu", &now) != 1) ::_exit(2);
    const rlim_t most = now * page_bytes() + 200 * kMb;
    const rlimit limit{most, most};
    if (::setrlimit(RLIMIT_AS, &limit) != 0) ::_exit(3);
    if (memory.take(500 * kMb) == nullptr) ::_exit(4);
    if (memory.counts().idle != 0) ::_exit(5);
    if (memory.take(2000 * kMb) != nullptr) ::_exit(6);
    if (memory.take(SIZE_MAX - 5) != nullptr) ::_exit(7);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << WEXITSTATUS(status);
}

TEST(KeptMemory, ThreadsNeverShareABlock) {
  KeptMemory memory;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<Piece> used;
      for (int turn = 0; turn < 500; ++turn) {
        if (used.size() < 4) {
          Piece piece{nullptr, kMb + random() % kMb, static_cast<char>(16 * t + turn % 16)};
          piece.data = static_cast<char*>(memory.take(piece.bytes));
          piece.write();
          used.push_back(piece);
        } else {
          if (!used.front().is_as_written()) ++wrong;
          memory.give_back(used.front().data);
          used.erase(used.begin());
        }
      }
      for (const Piece& piece : used) memory.give_back(piece.data);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(memory.counts().used, 0U);
}

}  // namespace
}  // namespace lockstep
