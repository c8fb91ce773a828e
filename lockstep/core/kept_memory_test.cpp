#include "lockstep/core/kept_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"

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

TEST(KeptMemory, SizesThatDifferByLessThanAnEighthShareBlocks) {
  KeptMemory memory;
  void* const block = memory.take(33 * kMb);
  memory.give_back(block);
  EXPECT_EQ(memory.take(35 * kMb), block);
  memory.give_back(block);
  EXPECT_NE(memory.take(40 * kMb), block) << "too small";
  EXPECT_NE(memory.take(16 * kMb), block) << "twice of what is needed";
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
    ASSERT_LE(counts.peak, most_asked + most_asked / 8);
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

// MADV_PAGEOUT is what the kernel does by itself when memory runs short.
TEST(KeptMemory, TheKernelMayTakeWhatIsIdleButNotWhatIsUsed) {
  constexpr std::size_t kBytes = 8 * kMb;
  KeptMemory memory;
  const auto present_after_shortage = [&](void* block) {
    ::madvise(block, kBytes, MADV_PAGEOUT);
    std::vector<unsigned char> pages(kBytes / 4096);
    EXPECT_EQ(::mincore(block, kBytes, pages.data()), 0);
    return std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1; });
  };
  char* const block = static_cast<char*>(memory.take(kBytes));
  std::memset(block, 7, kBytes);
  memory.give_back(block);
  const auto idle = present_after_shortage(block);
  if (idle == kBytes / 4096) GTEST_SKIP() << "this kernel has no huge pages or took none";
  EXPECT_EQ(idle, 0);
  ASSERT_EQ(memory.take(kBytes), block);
  std::memset(block, 8, kBytes);
  present_after_shortage(block);
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
    const rlim_t most = now * 4096 + 200 * kMb;
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
