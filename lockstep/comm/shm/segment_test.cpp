#include "lockstep/comm/shm/segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

#include "lockstep/comm/shm/peers.h"
#include "lockstep/comm/shm/worlds_for_test.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/core/host.h"

namespace lockstep::shm {
namespace {

using namespace for_test;
using testing::HasSubstr;

int open_descriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

TEST(SymmetricBlocks, FindsWhatIsHeldAndNothingElse) {
  SymmetricBlocks blocks;
  const auto make = [&] {
    return std::make_shared<SymmetricBlock>(
        blocks.next_id(), 0, 8192, std::vector<std::shared_ptr<Segment>>{Segment::make(8192)});
  };
  auto block = make();
  blocks.add(block);
  const void* const address = block->data();
  EXPECT_EQ(blocks.find(address, 8192).block, block);
  EXPECT_EQ(blocks.find(address, 8193).block, nullptr);
  block.reset();
  EXPECT_EQ(blocks.find(address, 8).block, nullptr) << "a freed block is private memory";
}

TEST(Segment, IsZeroSealedAndReallyThere) {
  const auto segment = Segment::make(10'000);
  EXPECT_GE(segment->bytes(), 10'000u);
  for (std::size_t i = 0; i < segment->bytes(); ++i) ASSERT_EQ(segment->data()[i], std::byte{0});
  EXPECT_NE(::ftruncate(segment->fd(), 0), 0);
  EXPECT_NE(::ftruncate(segment->fd(), 1 << 20), 0);
  struct stat status {};
  ASSERT_EQ(::fstat(segment->fd(), &status), 0);
  EXPECT_GE(static_cast<std::size_t>(status.st_blocks) * 512, segment->bytes());
}

// Bytes of the mapping at this address that lie in huge pages (ShmemPmdMapped).
std::size_t in_huge_pages(const void* data) {
  std::ifstream maps("/proc/self/smaps");
  const std::string begin = fmt::format("{:x}-", reinterpret_cast<std::uintptr_t>(data));
  bool found = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.rfind(begin, 0) == 0) found = true;
    if (found && line.rfind("ShmemPmdMapped:", 0) == 0)
      return std::strtoull(line.c_str() + sizeof "ShmemPmdMapped:", nullptr, 10) << 10;
  }
  return 0;
}

// Best effort: it fails on kernels without MADV_COLLAPSE or without contiguous free memory.
TEST(Segment, LiesInHugePages) {
  constexpr std::size_t kHuge = 2u << 20;
  const auto mine = Segment::make(3 * kHuge + 4096);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mine->data()) % kHuge, 0u);
  for (std::size_t i = 0; i < mine->bytes(); ++i) ASSERT_EQ(mine->data()[i], std::byte{0});
  if (in_huge_pages(mine->data()) == 0) GTEST_SKIP() << "this kernel gives no huge pages";
  mine->data()[kHuge + 5] = std::byte{7};
  // A peer's mapping, in a process of its own.
  const pid_t peer = ::fork();
  if (peer == 0) {
    void* const theirs = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, mine->fd(), kHuge);
    ::_exit(static_cast<const std::byte*>(theirs)[5] == std::byte{7} ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(peer, &status, 0), peer);
  EXPECT_EQ(status, 0);
}

TEST(Segment, OneMappingPerProcess) {
  const int before = open_descriptors();
  {
    const auto mine = Segment::make(4096);
    const Fd received(::dup(mine->fd()));
    const auto theirs = Segment::open(received.get(), 4096);
    EXPECT_EQ(mine.get(), theirs.get());
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Segment, WhatIsNotASegmentIsRefused) {
  const Fd open_file(::memfd_create("not sealed", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(open_file.get(), 4096), 0);
  EXPECT_THROW((void)Segment::open(open_file.get(), 4096), CommError);
  const auto small = Segment::make(4096);
  EXPECT_THROW((void)Segment::open(small->fd(), 1 << 20), CommError);
  EXPECT_THROW((void)Segment::open(-1, 4096), SystemError);
}

// ---------------------------------------------------------------- limits

// A /proc and a /sys of the test's own.
class FakeRoot {
 public:
  FakeRoot() {
    write("/proc/meminfo", "MemTotal: 100 kB\nMemAvailable:    8192 kB\n");
    write("/proc/self/statm", "100 10 10 1 0 10 0\n");
    const std::string groups = folder_ / "sys/fs/cgroup";
    write("/proc/self/mountinfo", "31 23 0:28 / " + groups + " rw - cgroup2 cgroup2 rw\n" +
                                      "32 31 0:29 / " + groups +
                                      "/memory rw - cgroup cgroup rw,memory\n");
  }
  void write(const std::string& name, const std::string& text) const { folder_.write(name, text); }
  // `groups`: those of all ranks, this one included.
  std::string lack(std::size_t mib, const std::vector<std::string>& groups = {}) const {
    return lacking_memory({.own_bytes = mib << 20, .host_bytes = mib << 20, .groups = groups},
                          {.proc = folder_ / "proc", .sys = folder_ / "sys"});
  }

 private:
  TemporaryDirectory folder_;
};

TEST(MemoryLimits, AvailableMemoryOfTheHost) {
  const FakeRoot root;
  EXPECT_EQ(root.lack(8), "");
  EXPECT_EQ(root.lack(9),
            "9.0 MiB of shared memory are needed for all ranks of this host, which "
            "has 8.0 MiB");
}

TEST(MemoryLimits, ControlGroupsOfVersion2WithAllAbove) {
  const FakeRoot root;
  root.write("/proc/self/cgroup", "0::/a/b\n");
  root.write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  root.write("/sys/fs/cgroup/a/b/memory.current", "0\n");
  EXPECT_EQ(root.lack(4), "");
  root.write("/sys/fs/cgroup/a/memory.max", "5242880\n");
  root.write("/sys/fs/cgroup/a/memory.current", "4194304\n");
  EXPECT_EQ(root.lack(1), "");
  EXPECT_EQ(root.lack(4),
            "4.0 MiB of shared memory are needed, but the control group's limit of "
            "5.0 MiB leaves 1.0 MiB");
  // The page cache gives way.
  root.write("/sys/fs/cgroup/a/memory.stat",
             "anon 1\ninactive_file 2097152\nactive_file 1048576\n");
  EXPECT_EQ(root.lack(4), "");
}

TEST(MemoryLimits, ControlGroupsOfVersion1) {
  const FakeRoot root;
  root.write("/proc/self/cgroup", "5:cpu,memory:/job\n4:pids:/\n0::/\n");
  root.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  root.write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "4194304\n");
  EXPECT_EQ(root.lack(4), "");
  root.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "6291456\n");
  EXPECT_THAT(root.lack(4), HasSubstr("limit of 6.0 MiB leaves 2.0 MiB"));
}

// A limit counts for all ranks below it together, wherever it is set and wherever they are.
TEST(MemoryLimits, ControlGroupsHoldWhatAllTheirRanksNeed) {
  const FakeRoot root;
  const std::string own = "5:cpu,memory:/job/task_0\n0::/\n";
  root.write("/proc/self/cgroup", own);
  root.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "6291456\n");
  root.write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1048576\n");
  EXPECT_EQ(root.lack(3, {own}), "");
  EXPECT_EQ(root.lack(3, {own, own}),
            "6.0 MiB of shared memory are needed for 2 ranks, but the control group's limit of "
            "6.0 MiB leaves 5.0 MiB");
  EXPECT_THAT(root.lack(3, {own, "9:memory:/job/task_1\n"}), HasSubstr("needed for 2 ranks"));
  EXPECT_THAT(root.lack(2, {own, own, "9:memory:/job\n"}), HasSubstr("needed for 3 ranks"));
  EXPECT_EQ(root.lack(3, {own, "9:memory:/job2/task_0\n"}), "");
  EXPECT_EQ(root.lack(3, {own, "0::/job/task_0\n"}), "");
}

// ---------------------------------------------------------------- rendezvous

// Changes what one rank writes, as if it were elsewhere.
class LyingStore final : public KeyValueStore {
 public:
  LyingStore(KeyValueStore& kv, std::string from, std::string to)
      : kv_(kv), from_(std::move(from)), to_(std::move(to)) {}
  void set(const std::string& key, const std::string& value) override {
    std::string changed = value;
    const std::size_t at = changed.find(from_);
    if (key == "shm/info/1" && at != std::string::npos) changed.replace(at, from_.size(), to_);
    kv_.set(key, changed);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    return kv_.get(key, deadline);
  }

 private:
  KeyValueStore& kv_;
  const std::string from_, to_;
};

// The three ranks' reasons not to share memory.
std::vector<std::string> reasons(const std::string& from, const std::string& to) {
  MapStore kv;
  std::vector<std::string> reasons(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      LyingStore liar(kv, from, to);
      EngineResult made = Engine::make(liar, {rank, 3}, {}, soon());
      reasons[static_cast<std::size_t>(rank)] = made.engine ? "an engine" : made.unavailable_reason;
    });
  }
  for (auto& thread : threads) thread.join();
  return reasons;
}

TEST(Rendezvous, RanksElsewhereAreNoReasonToFail) {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  std::getline(file, boot_id);
  const std::string uid = "\n" + std::to_string(::geteuid()) + "\n";
  for (const auto& reason : reasons(boot_id, "another"))
    EXPECT_EQ(reason, "rank 1 runs on another host than rank 0");
  for (const auto& reason : reasons("net:[", "net:[9"))
    EXPECT_THAT(reason, HasSubstr("rank 1 has another network namespace than rank 0"));
  for (const auto& reason : reasons(uid, "\n31337\n"))
    EXPECT_THAT(reason, HasSubstr("rank 1 has another user than rank 0"));
  // A socket that is not there: found in the handshake, reported to all.
  for (const auto& reason : reasons("lockstep-", "nowhere-"))
    EXPECT_THAT(reason, HasSubstr("cannot connect to a peer's socket"));
}

// What two ranks report when each makes its segment in this way.
std::vector<std::string> reasons_with(
    MapStore& kv, std::size_t bytes,
    const std::function<std::shared_ptr<Segment>(int rank)>& make_segment) {
  std::vector<std::string> reported(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const ControlSegment control{bytes, [&, rank] { return make_segment(rank); }};
      reported[static_cast<std::size_t>(rank)] =
          connect_peers(kv, {rank, 2}, control, soon()).unavailable_reason;
    });
  }
  for (auto& thread : threads) thread.join();
  return reported;
}

TEST(Rendezvous, ARankWithoutMemoryIsNoReasonToFail) {
  const int before = open_descriptors();
  MapStore kv;
  for (const auto& why : reasons_with(kv, 4096, [](int rank) {
         if (rank == 1) throw UsageError("shm", "no room at all");
         return Segment::make(4096);
       }))
    EXPECT_EQ(why, "rank 1: [shm] no room at all");
  EXPECT_EQ(open_descriptors(), before);
}

// A rank that looks for room after another has taken some sees too little, or too much.
TEST(Rendezvous, NobodyAllocatesBeforeAllHaveLookedForRoom) {
  MapStore kv;
  std::atomic<int> made{0};
  for (const auto& why : reasons_with(kv, 4096, [&](int) {
         for (const char* key : {"shm/connected/0", "shm/connected/1"})
           EXPECT_EQ(kv.get(key, Deadline::after({})), "ok");
         ++made;
         return Segment::make(4096);
       }))
    EXPECT_EQ(why, "");
  EXPECT_EQ(made, 2);
  MapStore another;
  for (const auto& why : reasons_with(another, std::size_t{1} << 50, [&](int) {
         ++made;
         return Segment::make(4096);
       }))
    EXPECT_THAT(why, HasSubstr("2147483648.0 MiB"));
  EXPECT_EQ(made, 2);
}

}  // namespace
}  // namespace lockstep::shm
