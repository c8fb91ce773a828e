#include "lockstep/comm/shm/ceiling.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "lockstep/comm/shm/layout.h"
#include "lockstep/comm/shm/reduce.h"
#include "lockstep/comm/shm/segment.h"
#include "lockstep/core/error.h"

namespace lockstep::shm {
namespace {

using Clock = std::chrono::steady_clock;

struct Slice {
  std::size_t begin;
  std::size_t end;
};

// Adds up one slice of all arrays, `times` times. Averages, so that the numbers stay finite.
void run_slice(const std::vector<std::shared_ptr<Segment>>& arrays, Slice slice, int times) {
  const int n = static_cast<int>(arrays.size());
  std::vector<std::byte*> outputs;
  for (const auto& array : arrays) outputs.push_back(array->data() + slice.begin);
  const std::vector<const std::byte*> inputs(outputs.begin(), outputs.end());
  for (int i = 0; i < times; ++i)
    combine(DType::kF32, Op::kAvg,
            {inputs.data(), n, outputs.data(), n, (slice.end - slice.begin) / 4});
}

// All threads start together; the time until the last has ended.
double seconds_of(const std::vector<std::shared_ptr<Segment>>& arrays, std::size_t bytes,
                  int times) {
  const std::size_t ranks = arrays.size();
  std::atomic<std::size_t> ready{0};
  std::atomic<bool> go{false};
  std::vector<Clock::time_point> ends(ranks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const std::size_t lines = bytes / kLine;
      const Slice slice{lines * rank / ranks * kLine, lines * (rank + 1) / ranks * kLine};
      ready.fetch_add(1);
      while (!go.load()) std::this_thread::yield();
      run_slice(arrays, slice, times);
      ends[rank] = Clock::now();
    });
  }
  while (ready.load() < ranks) std::this_thread::yield();
  const auto start = Clock::now();
  go.store(true);
  for (auto& thread : threads) thread.join();
  return std::chrono::duration<double>(*std::max_element(ends.begin(), ends.end()) - start).count();
}

}  // namespace

double reduce_ceiling_bytes_per_s(int ranks, std::size_t bytes) {
  if (ranks < 1 || ranks > kMaxRanks || bytes < kLine * static_cast<std::size_t>(ranks))
    throw UsageError("shm",
                     "no ceiling for {} ranks and {} bytes: 1 to {} ranks, a cache line for "
                     "each.",
                     ranks, bytes, kMaxRanks);
  std::vector<std::shared_ptr<Segment>> arrays;
  for (int rank = 0; rank < ranks; ++rank) arrays.push_back(Segment::make(bytes, ranks - rank));
  // Long enough for the clock and the threads' start, short enough for a caller who waits.
  const double once = seconds_of(arrays, bytes, 1);
  const int times = std::clamp(static_cast<int>(0.02 / std::max(once, 1e-7)), 1, 1000);
  double best = once;
  for (int run = 0; run < 5; ++run) best = std::min(best, seconds_of(arrays, bytes, times) / times);
  return static_cast<double>(bytes) / best;
}

}  // namespace lockstep::shm
