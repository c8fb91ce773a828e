// A rank of `lockstep bench allreduce`: every backend on the same sizes, in turn, each time on a
// freshly written tensor. Rank 0 writes "contender TAB bytes TAB microseconds" lines.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>
#include <vector>

#include "bench/allreduce.h"
#include "bench/bench.h"
#include "bench/limits.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/run.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Contender {
  std::string name;
  World world;
  void (*limit)(const Slices&) = nullptr;  // instead of an all-reduce
  bool wrong = false;                      // on purpose
  at::Tensor tensor = {};
  std::vector<at::Tensor> parts = {};  // every rank's where they share memory, otherwise its own
};

double since_us(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// Element i becomes i % 5 + rank; copied from a pattern, because a division for each would take
// longer than everything that is measured.
void fill(const at::Tensor& tensor, int rank) {
  constexpr std::int64_t kPattern = 5 * 1024;
  static const std::vector<float> pattern = [rank] {
    std::vector<float> values(kPattern);
    for (std::int64_t i = 0; i < kPattern; ++i)
      values[static_cast<std::size_t>(i)] = static_cast<float>(i % 5 + rank);
    return values;
  }();
  float* data = tensor.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); i += kPattern)
    std::copy_n(pattern.data(), std::min(kPattern, tensor.numel() - i), data + i);
}

void verify(const Contender& contender) {
  const int n = contender.world.size(), rank = contender.world.rank();
  const bool copies = contender.limit == &copy_slices;
  const int summed = copies ? 1 : n;
  const int ranks = copies ? (rank == n - 1 ? 1 : rank + 1) : n * (n - 1) / 2;
  const float* data = contender.tensor.const_data_ptr<float>();
  for (std::int64_t i = 0; i < contender.tensor.numel(); ++i) {
    const auto right = static_cast<float>(i % 5 * summed + ranks);
    if (data[i] != right)
      throw Error("bench", fmt::format("{}: element {} of {} is {}, not {}", contender.name, i,
                                       contender.tensor.numel(), data[i], right));
  }
}

// A contender among the others, so that it finds the caches as they do. It waits for no other rank,
// so the slowest rank's time counts.
double measure_limit(Contender& contender, World& barrier_world) {
  std::vector<float*> arrays;
  for (const auto& part : contender.parts) arrays.push_back(part.mutable_data_ptr<float>());
  const std::int64_t n = barrier_world.size(), own = barrier_world.rank(),
                     all = contender.tensor.numel();
  const Slices slices{arrays.data(), barrier_world.size(), all * own / n, all * (own + 1) / n};
  barrier_world.barrier();
  const auto start = Clock::now();
  contender.limit(slices);
  const double own_us = since_us(start);
  return barrier_world.max(own_us);
}

double measure(Contender& contender, World& barrier_world, std::int64_t bytes) {
  fill(contender.tensor, barrier_world.rank());
  if (contender.limit != nullptr) return measure_limit(contender, barrier_world);
  if (bytes >= kBarrierFirstBytes) barrier_world.barrier();
  const auto start = Clock::now();
  contender.world.all_reduce(contender.tensor).wait();
  return since_us(start);
}

std::vector<Contender> contenders_of(const std::vector<std::string>& backends, World& own) {
  std::vector<Contender> contenders;
  for (const auto& backend : backends) {
    if (backend == "mpi") continue;  // a job of its own
    World world = own.backend() == backend ? own : World::from_env({.backend = backend});
    if (backend == "shm") {
      contenders.push_back({kLimits[0], world, &sum_slices});
      contenders.push_back({kLimits[1], world, &copy_slices});
      contenders.push_back({"shm symmetric", world});
    }
    contenders.push_back({backend == "shm" ? "shm private" : backend, world});
  }
  return contenders;
}

// How many more turns fit into the time, judged by the first; the same on all ranks.
int turns_left(World& own, double turn_s, double left_s, int max_turns, int min_turns) {
  const double fitting = std::clamp(left_s / std::max(turn_s, 1e-6), 0.0, 1e6);
  return static_cast<int>(own.min(std::clamp(static_cast<int>(fitting), min_turns, max_turns)));
}

void measure_size(std::vector<Contender>& contenders, World& own, std::int64_t bytes,
                  double budget_s, Samples& samples) {
  const auto start = Clock::now();
  for (auto& contender : contenders) {
    const bool shared = contender.limit != nullptr || contender.name == "shm symmetric";
    if (shared) contender.parts = contender.world.symmetric({bytes / 4}, at::kFloat);
    if (contender.parts.empty()) contender.parts = {at::empty({bytes / 4})};  // its own alone
    contender.tensor = contender.parts[shared ? static_cast<std::size_t>(own.rank()) : 0];
    measure(contender, own, bytes);
    if (contender.wrong) contender.tensor[-1].add_(1);
    verify(contender);
  }
  // Small operations are timed in runs of the same contender, like those of a peer in a job of its
  // own: the after-effects of a switch (gloo's threads are still awake) would cost more than they
  // do.
  const int run = bytes < kBarrierFirstBytes ? 50 : bytes <= kRunsUpToBytes ? 20 : 1;
  const auto turn = [&] {
    const auto began = Clock::now();
    for (auto& contender : contenders) {
      if (run > 1) measure(contender, own, bytes);
      for (int i = 0; i < run; ++i)
        samples[contender.name][bytes].push_back(measure(contender, own, bytes));
    }
    return since_us(began) / 1e6;
  };
  const double turn_s = turn();
  const double left_s = budget_s - since_us(start) / 1e6;
  const int turns =
      turns_left(own, turn_s, left_s, repetitions(bytes) / run - 1, (kMinRepetitions - 1) / run);
  std::mt19937 order(1);
  for (int done = 1; done <= turns; ++done) {
    // Shuffled, so that no contender always follows the same one, which leaves it the caches. The
    // order is the same on all ranks.
    std::shuffle(contenders.begin(), contenders.end(), order);
    turn();
  }
  if (own.is_leader())
    fmt::print(stderr, "{:>8}: {} repetitions, {:.1f} s\n", show_size(static_cast<double>(bytes)),
               (turns + 1) * run, since_us(start) / 1e6);
  for (auto& contender : contenders) {
    contender.tensor = at::Tensor();
    contender.parts.clear();
  }
}

std::vector<std::string> parts(const std::string& text) {
  std::vector<std::string> out;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    out.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

}  // namespace

// _allreduce-rank BACKENDS SIZES OUTPUT SECONDS CORRUPT
int allreduce_rank_main(int argc, char** argv) {
  LOCKSTEP_ASSERT(argc == 6);
  const auto backends = parts(argv[1]);
  const auto sizes = parse_sizes(argv[2]);
  const std::string output = argv[3];
  const double budget_s = std::stod(argv[4]) / static_cast<double>(sizes.size());
  const auto body = [&](World& own) {
    Samples samples;
    auto contenders = contenders_of(backends, own);
    for (auto& contender : contenders) contender.wrong = contender.name == argv[5];
    for (const std::int64_t bytes : sizes) {
      auto chosen = contenders;
      // What fits into the cores' own caches says nothing about memory.
      if (bytes < kLimitFromBytes)
        std::erase_if(chosen, [](const Contender& each) { return each.limit != nullptr; });
      measure_size(chosen, own, bytes, budget_s, samples);
    }
    if (!own.is_leader()) return;
    std::string text;
    for (const auto& [name, by_size] : samples)
      for (const auto& [bytes, times] : by_size)
        for (const double us : times) text += fmt::format("{}\t{}\t{:.3f}\n", name, bytes, us);
    write_file_atomically(output, text);
  };
  return run(body);
}

}  // namespace lockstep::bench
