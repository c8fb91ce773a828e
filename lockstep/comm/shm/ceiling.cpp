#include "lockstep/comm/shm/ceiling.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
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

// Nobody leaves before all have come; for threads that have a core each, and are about to be timed.
class Gate {
 public:
  explicit Gate(std::size_t threads) : threads_(threads) {}
  void pass() {
    const std::size_t turn = come_.fetch_add(1) / threads_;
    while (come_.load() < (turn + 1) * threads_) std::this_thread::yield();
  }

 private:
  const std::size_t threads_;
  std::atomic<std::size_t> come_{0};
};

// Averages one rank's slice of all arrays in place, as it is done for a symmetric tensor.
void reduce_slice(const std::vector<std::shared_ptr<Segment>>& arrays, std::size_t bytes,
                  std::size_t rank) {
  const std::size_t ranks = arrays.size();
  const std::size_t lines = bytes / kLine;
  const std::size_t begin = lines * rank / ranks * kLine;
  const std::size_t end = lines * (rank + 1) / ranks * kLine;
  std::vector<std::byte*> outputs;
  for (const auto& array : arrays) outputs.push_back(array->data() + begin);
  const std::vector<const std::byte*> inputs(outputs.begin(), outputs.end());
  const int n = static_cast<int>(ranks);
  combine(DType::kF32, Op::kAvg, {inputs.data(), n, outputs.data(), n, (end - begin) / 4});
}

// The shortest of several passes, from when all threads stand ready until the last has ended. An
// array that is reduced has just been written by its rank, so parts of it lie in that core's cache:
// each thread writes its own anew before every pass.
double shortest_pass_s(const std::vector<std::shared_ptr<Segment>>& arrays, std::size_t bytes,
                       int passes) {
  const std::size_t ranks = arrays.size();
  Gate gate(ranks);
  std::vector<std::vector<Clock::time_point>> starts(ranks), ends(ranks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      auto* const values = reinterpret_cast<float*>(arrays[rank]->data());
      for (int pass = 0; pass < passes; ++pass) {
        std::fill_n(values, bytes / sizeof(float), static_cast<float>(pass));
        gate.pass();
        starts[rank].push_back(Clock::now());
        reduce_slice(arrays, bytes, rank);
        ends[rank].push_back(Clock::now());
        gate.pass();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  double shortest = std::numeric_limits<double>::infinity();
  for (std::size_t pass = 0; pass < static_cast<std::size_t>(passes); ++pass) {
    auto start = starts[0][pass], end = ends[0][pass];
    for (std::size_t rank = 1; rank < ranks; ++rank) {
      start = std::min(start, starts[rank][pass]);
      end = std::max(end, ends[rank][pass]);
    }
    shortest = std::min(shortest, std::chrono::duration<double>(end - start).count());
  }
  return shortest;
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
  // Enough passes for one without a disturbance, few enough for a caller who waits.
  const double once = shortest_pass_s(arrays, bytes, 1);
  const int passes = std::clamp(static_cast<int>(0.1 / std::max(once, 1e-7)), 5, 200);
  const double best = std::min(once, shortest_pass_s(arrays, bytes, passes));
  return static_cast<double>(bytes) / best;
}

}  // namespace lockstep::shm
