// The engine's parts by themselves: the segments that ranks map, their limits, how ranks find each
// other, symmetric memory, and the reductions beside an independent arithmetic.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "lockstep/comm/shm/peers.h"
#include "lockstep/comm/shm/reduce.h"
#include "lockstep/comm/shm/segment.h"
#include "lockstep/comm/shm/worlds_for_test.h"
#include "lockstep/core/error.h"
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

// Replaces text in the values that one rank publishes, to simulate another host or user.
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

// ---------------------------------------------------------------- an independent arithmetic

// A 16-bit floating type by its definition, slow and obvious.
struct SmallFloat {
  int exponent_bits;
  int mantissa_bits;

  double decode(std::uint16_t bits) const {
    const int top = (1 << exponent_bits) - 1;
    const int exponent = (bits >> mantissa_bits) & top;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1 : 1;
    if (exponent == top) return mantissa != 0 ? std::nan("") : sign * HUGE_VAL;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  // The nearest number of the type; of two equally near ones the even one.
  std::uint16_t encode(double value) const {
    const std::uint16_t infinity =
        static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity | 1);
    const double magnitude = std::fabs(value);
    // Bit patterns of positive numbers are ordered like the numbers.
    int low = 0, high = infinity;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (decode(static_cast<std::uint16_t>(middle)) <= magnitude ? low : high) = middle;
    }
    const double below = decode(static_cast<std::uint16_t>(low));
    // Past the largest number: as if the type continued.
    const double above = high == infinity ? 2 * decode(static_cast<std::uint16_t>(infinity - 1)) -
                                                decode(static_cast<std::uint16_t>(infinity - 2))
                                          : decode(static_cast<std::uint16_t>(high));
    if (magnitude == HUGE_VAL) return static_cast<std::uint16_t>(sign | infinity);
    const double down = magnitude - below, up = above - magnitude;
    const bool take_low = down < up || (down == up && low % 2 == 0);
    return static_cast<std::uint16_t>(sign | (take_low ? low : high));
  }
};
constexpr SmallFloat kHalf{5, 10};
constexpr SmallFloat kBfloat{8, 7};

template <typename T>
T combine_two(Op op, T a, T b) {
  switch (op) {
    case Op::kSum:
    case Op::kAvg:
      return static_cast<T>(a + b);
    case Op::kMin:
      return a != a ? a : b != b ? b : std::min(a, b);
    case Op::kMax:
      return a != a ? a : b != b ? b : std::max(a, b);
    case Op::kProduct:
      return static_cast<T>(a * b);
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == Op::kAnd) return static_cast<T>(a & b);
    if (op == Op::kOr) return static_cast<T>(a | b);
    if (op == Op::kXor) return static_cast<T>(a ^ b);
  }
  return a;
}

template <typename T>
T fold(Op op, const std::vector<T>& values) {
  T result = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) result = combine_two(op, result, values[i]);
  if (op == Op::kAvg) result = static_cast<T>(result / static_cast<T>(values.size()));
  return result;
}

template <typename T>
void expect_element(Op op, const std::vector<const std::byte*>& inputs, std::size_t at,
                    const std::byte* got) {
  std::vector<T> values;
  for (const std::byte* input : inputs) {
    T value;
    std::memcpy(&value, input + at * sizeof(T), sizeof value);
    values.push_back(value);
  }
  const T want = fold(op, values);
  T have;
  std::memcpy(&have, got + at * sizeof(T), sizeof have);
  if (want != want)
    EXPECT_NE(have, have) << name(op) << " at " << at;
  else
    EXPECT_EQ(have, want) << name(op) << " at " << at;
}

void expect_small(const SmallFloat& type, Op op, const std::vector<const std::byte*>& inputs,
                  std::size_t at, const std::byte* got) {
  std::vector<float> values;
  for (const std::byte* input : inputs) {
    std::uint16_t bits;
    std::memcpy(&bits, input + at * 2, 2);
    values.push_back(static_cast<float>(type.decode(bits)));
  }
  const float want = fold(op, values);
  std::uint16_t have;
  std::memcpy(&have, got + at * 2, 2);
  if (std::isnan(want))
    EXPECT_TRUE(std::isnan(type.decode(have))) << name(op) << " at " << at;
  else
    EXPECT_EQ(have, type.encode(want)) << name(op) << " at " << at << " of " << want;
}

void expect_bool(Op op, const std::vector<const std::byte*>& inputs, std::size_t at,
                 const std::byte* got) {
  bool result = inputs[0][at] != std::byte{0};
  for (std::size_t i = 1; i < inputs.size(); ++i) {
    const bool next = inputs[i][at] != std::byte{0};
    if (op == Op::kXor)
      result = result != next;
    else if (op == Op::kSum || op == Op::kMax || op == Op::kOr)
      result = result || next;
    else
      result = result && next;
  }
  EXPECT_EQ(got[at], std::byte{result}) << name(op) << " at " << at;
}

void expect_at(DType dtype, Op op, const std::vector<const std::byte*>& inputs, std::size_t at,
               const std::byte* got) {
  switch (dtype) {
    case DType::kF32:
      return expect_element<float>(op, inputs, at, got);
    case DType::kF64:
      return expect_element<double>(op, inputs, at, got);
    case DType::kF16:
      return expect_small(kHalf, op, inputs, at, got);
    case DType::kBf16:
      return expect_small(kBfloat, op, inputs, at, got);
    case DType::kI8:
      return expect_element<std::int8_t>(op, inputs, at, got);
    case DType::kI16:
      return expect_element<std::int16_t>(op, inputs, at, got);
    case DType::kI32:
      return expect_element<std::int32_t>(op, inputs, at, got);
    case DType::kI64:
      return expect_element<std::int64_t>(op, inputs, at, got);
    case DType::kU8:
      return expect_element<std::uint8_t>(op, inputs, at, got);
    case DType::kBool:
      return expect_bool(op, inputs, at, got);
  }
}

// ---------------------------------------------------------------- data

// Random numbers of every size; `wild` ones have any bit pattern, also NaN and infinity. Integers
// stay small where their products would overflow, which the reference does not model.
std::vector<std::byte> random_array(DType dtype, std::size_t count, unsigned seed, bool wild) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count * size_of(dtype));
  const auto put = [&](std::size_t at, auto value) {
    std::memcpy(bytes.data() + at * sizeof value, &value, sizeof value);
  };
  std::normal_distribution<double> normal(0, 3);
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = random();
    const int small = static_cast<int>(bits % 5) - 2;
    switch (dtype) {
      case DType::kF32:
        put(i, wild ? std::bit_cast<float>(static_cast<std::uint32_t>(bits))
                    : static_cast<float>(normal(random)));
        break;
      case DType::kF64:
        put(i, wild ? std::bit_cast<double>(bits) : normal(random));
        break;
      case DType::kF16:
        put(i, wild ? static_cast<std::uint16_t>(bits) : kHalf.encode(normal(random)));
        break;
      case DType::kBf16:
        put(i, wild ? static_cast<std::uint16_t>(bits) : kBfloat.encode(normal(random)));
        break;
      case DType::kI8:
        put(i, static_cast<std::int8_t>(small));
        break;
      case DType::kI16:
        put(i, static_cast<std::int16_t>(small));
        break;
      case DType::kI32:
        put(i, small);
        break;
      case DType::kI64:
        put(i, static_cast<std::int64_t>(small));
        break;
      case DType::kU8:
        put(i, static_cast<std::uint8_t>(bits % 4));
        break;
      case DType::kBool:
        put(i, static_cast<std::uint8_t>(bits % 4));  // true is not only 1
        break;
    }
  }
  return bytes;
}

struct Reduced {
  std::vector<std::vector<std::byte>> arrays;
  std::vector<const std::byte*> inputs;
  std::vector<std::byte> result;
};

// `shift` puts all arrays at unaligned addresses.
Reduced reduce_random(DType dtype, Op op, int n, std::size_t count, bool wild, std::size_t shift) {
  Reduced reduced;
  for (int r = 0; r < n; ++r) {
    auto array = random_array(dtype, count, static_cast<unsigned>(r * 7919 + count), wild);
    array.insert(array.begin(), shift, std::byte{0});
    reduced.arrays.push_back(std::move(array));
  }
  for (const auto& array : reduced.arrays) reduced.inputs.push_back(array.data() + shift);
  std::vector<std::byte> first(count * size_of(dtype) + shift), second(first);
  std::byte* outputs[] = {first.data() + shift, second.data() + shift};
  combine(dtype, op, {reduced.inputs.data(), n, outputs, 2, count});
  EXPECT_EQ(first, second);
  reduced.result.assign(first.begin() + static_cast<std::ptrdiff_t>(shift), first.end());
  return reduced;
}

bool pair_exists(int dtype, int op) {
  return supports(static_cast<DType>(dtype), static_cast<Op>(op));
}

TEST(Reduce, EveryTypeAndOperationAgreesWithTheDefinition) {
  int pairs = 0;
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kOps; ++o) {
      if (!pair_exists(d, o)) continue;
      ++pairs;
      for (const int n : {1, 2, 3, 5}) {
        for (const std::size_t count : {0, 1, 17, 257}) {
          const auto dtype = static_cast<DType>(d);
          const auto op = static_cast<Op>(o);
          const Reduced got = reduce_random(dtype, op, n, count, count == 257, count % 2);
          for (std::size_t i = 0; i < count; ++i)
            expect_at(dtype, op, got.inputs, i, got.result.data());
          ASSERT_FALSE(HasFailure()) << name(dtype) << " " << name(op) << " of " << n << " x "
                                     << count << " with " << sum_kernels().name;
        }
      }
    }
  }
  EXPECT_EQ(pairs, 4 * 5 + 5 * 8 + 7);
}

// Every finite half and bfloat survives a sum with zero, and every kernel of this processor gives
// the same bits as the plain loop.
TEST(Reduce, EveryKernelGivesTheSameBits) {
  const SumKernels* sets[kMaxKernelSets];
  const int count = all_sum_kernels(sets);
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const int n : {2, 3, 4, 7}) {
      for (const Op op : {Op::kSum, Op::kAvg}) {
        const std::size_t elements = 1021;
        std::vector<std::vector<std::byte>> arrays;
        std::vector<const std::byte*> inputs;
        for (int r = 0; r < n; ++r)
          arrays.push_back(random_array(dtype, elements, static_cast<unsigned>(r), false));
        for (const auto& array : arrays) inputs.push_back(array.data());
        std::vector<std::byte> want(arrays[0].size()), have(want);
        std::byte* outputs[] = {want.data()};
        combine_plain(dtype, op, {inputs.data(), n, outputs, 1, elements});
        for (int s = 0; s < count; ++s) {
          const SumKernel kernel = dtype == DType::kF32    ? sets[s]->f32
                                   : dtype == DType::kBf16 ? sets[s]->bf16
                                                           : sets[s]->f16;
          if (kernel == nullptr) continue;
          outputs[0] = have.data();
          const Scale scale = op == Op::kSum ? Scale::kNone : Scale::kDivide;
          kernel({{inputs.data(), n, outputs, 1, elements}, scale, static_cast<float>(n)});
          EXPECT_EQ(want, have) << sets[s]->name << " " << name(dtype) << " " << name(op) << n;
        }
      }
    }
  }
}

TEST(Reduce, EveryHalfSurvivesASumWithZero) {
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    const SmallFloat& type = dtype == DType::kF16 ? kHalf : kBfloat;
    std::vector<std::uint16_t> all(65536), zero(65536, 0x8000), sum(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    const std::byte* inputs[] = {reinterpret_cast<const std::byte*>(all.data()),
                                 reinterpret_cast<const std::byte*>(zero.data())};
    std::byte* outputs[] = {reinterpret_cast<std::byte*>(sum.data())};
    for (const bool plain : {false, true}) {
      const Arrays arrays{inputs, 2, outputs, 1, all.size()};
      plain ? combine_plain(dtype, Op::kSum, arrays) : combine(dtype, Op::kSum, arrays);
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (std::isnan(type.decode(all[i])))
          ASSERT_TRUE(std::isnan(type.decode(sum[i]))) << name(dtype) << " " << i;
        else
          ASSERT_EQ(sum[i], all[i]) << name(dtype) << " plain " << plain;
      }
    }
  }
}

// The same element must get the same bits wherever its array is cut.
TEST(Reduce, CutsDoNotChangeBits) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBf16, DType::kF64}) {
    const std::size_t count = 211;
    const Reduced whole = reduce_random(dtype, Op::kAvg, 3, count, false, 0);
    for (const std::size_t cut : {1, 2, 3, 7, 63, 64, 65, 100, 209, 210}) {
      std::vector<std::byte> pieces(whole.result.size());
      for (const auto& [begin, end] : {std::pair<std::size_t, std::size_t>{0, cut}, {cut, count}}) {
        std::vector<const std::byte*> inputs;
        for (const std::byte* input : whole.inputs)
          inputs.push_back(input + begin * size_of(dtype));
        std::byte* outputs[] = {pieces.data() + begin * size_of(dtype)};
        combine(dtype, Op::kAvg, {inputs.data(), 3, outputs, 1, end - begin});
      }
      EXPECT_EQ(pieces, whole.result) << name(dtype) << " cut at " << cut;
    }
  }
}

// What is copied along the way arrives, and neither that nor a last output that leaves the cache
// changes the sum, even where an output is not aligned for it.
TEST(Reduce, MovesByTheWay) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16, DType::kI32}) {
    for (const std::size_t count : {0, 1, 63, 64, 128, 1021}) {
      for (const std::size_t shift : {0, 4}) {
        const std::size_t bytes = count * size_of(dtype);
        std::vector<std::byte> first = random_array(dtype, count, 1, false);
        const std::vector<std::byte> second = random_array(dtype, count, 2, false);
        const std::byte* inputs[] = {first.data(), second.data()};
        std::vector<std::byte> want(bytes), memory(bytes + 128);
        std::byte* outputs[] = {want.data(), nullptr};
        combine(dtype, Op::kSum, {inputs, 2, outputs, 1, count});

        auto* const line =
            memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
        outputs[0] = first.data();
        outputs[1] = line + shift;
        std::vector<std::byte> from[2], to[2];
        Move moves[2];
        for (int i = 0; i < 2; ++i) {
          from[i] = random_array(dtype, count, static_cast<unsigned>(3 + i), false);
          to[i].resize(bytes + 1, std::byte{42});
          moves[i] = {to[i].data(), from[i].data()};
        }
        combine(dtype, Op::kSum, {inputs, 2, outputs, 2, count, moves, 2, true});
        EXPECT_EQ(first, want) << name(dtype) << " x " << count;
        EXPECT_TRUE(std::equal(want.begin(), want.end(), line + shift)) << name(dtype);
        for (int i = 0; i < 2; ++i) {
          EXPECT_TRUE(std::equal(from[i].begin(), from[i].end(), to[i].begin())) << name(dtype);
          EXPECT_EQ(to[i].back(), std::byte{42}) << "written past the end";
        }
      }
    }
  }
}

TEST(Reduce, WorksInPlace) {
  std::vector<float> a(1000, 1.5f), b(1000, 2.0f);
  std::byte* outputs[] = {reinterpret_cast<std::byte*>(a.data()),
                          reinterpret_cast<std::byte*>(b.data())};
  const std::byte* inputs[] = {outputs[0], outputs[1]};
  combine(DType::kF32, Op::kSum, {inputs, 2, outputs, 2, a.size()});
  EXPECT_EQ(a, std::vector<float>(1000, 3.5f));
  EXPECT_EQ(b, a);
}

TEST(Reduce, IntegersWrapAround) {
  const std::int16_t a = 30000, b = 30000;
  std::int16_t sum = 0;
  const std::byte* inputs[] = {reinterpret_cast<const std::byte*>(&a),
                               reinterpret_cast<const std::byte*>(&b)};
  std::byte* outputs[] = {reinterpret_cast<std::byte*>(&sum)};
  combine(DType::kI16, Op::kSum, {inputs, 2, outputs, 1, 1});
  EXPECT_EQ(sum, static_cast<std::int16_t>(60000));
  combine(DType::kI16, Op::kProduct, {inputs, 2, outputs, 1, 1});
  EXPECT_EQ(sum, static_cast<std::int16_t>(900000000));
}

// Towards zero, as NCCL divides; but the sum of narrow integers does not overflow.
TEST(Reduce, AveragesOfIntegersAreRoundedTowardsZero) {
  const auto average = [](DType dtype, auto... values) {
    using T = std::common_type_t<decltype(values)...>;
    const T array[] = {values...};
    std::vector<const std::byte*> inputs;
    for (const T& value : array) inputs.push_back(reinterpret_cast<const std::byte*>(&value));
    T result{};
    std::byte* outputs[] = {reinterpret_cast<std::byte*>(&result)};
    combine(dtype, Op::kAvg, {inputs.data(), static_cast<int>(inputs.size()), outputs, 1, 1});
    return static_cast<std::int64_t>(result);
  };
  EXPECT_EQ(average(DType::kI32, 3, 4), 3);
  EXPECT_EQ(average(DType::kI32, -3, -4), -3);
  EXPECT_EQ(average(DType::kI32, -2, 0, 0), 0);
  EXPECT_EQ(average(DType::kI64, std::int64_t{-7}, std::int64_t{2}), -2);
  EXPECT_EQ(average(DType::kI8, std::int8_t{127}, std::int8_t{127}, std::int8_t{125}), 126);
  EXPECT_EQ(average(DType::kI8, std::int8_t{-128}, std::int8_t{-128}), -128);
  EXPECT_EQ(average(DType::kU8, std::uint8_t{255}, std::uint8_t{254}), 254);
  EXPECT_EQ(average(DType::kI16, std::int16_t{30000}, std::int16_t{30001}), 30000);
  EXPECT_EQ(average(DType::kI32, std::numeric_limits<int>::max(), 5), 1073741826);
}

TEST(Reduce, PairsWithoutMeaningAreRefused) {
  EXPECT_FALSE(supports(DType::kF32, Op::kAnd));
  EXPECT_FALSE(supports(DType::kBool, Op::kAvg));
  EXPECT_THROW(combine(DType::kF32, Op::kXor, {nullptr, 1, nullptr, 1, 0}), InternalError);
}

}  // namespace
}  // namespace lockstep::shm
