// A rank of `lockstep bench allreduce`: every backend on the same sizes, by turns, each time on a
// freshly written tensor. Rank 0 writes "contender TAB bytes TAB microseconds" lines.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <chrono>
#include <functional>

#include "bench/allreduce.h"
#include "bench/bench.h"
#include "lockstep/comm/shm/ceiling.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/run.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Contender {
  std::string name;
  World world;
  at::Tensor tensor = {};
};

double since_us(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

void fill(const at::Tensor& tensor, int rank) {
  float* data = tensor.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) data[i] = static_cast<float>(i % 5 + rank);
}

void verify(const Contender& contender) {
  const int n = contender.world.size();
  const float ranks = static_cast<float>(n * (n - 1)) / 2;
  const float* data = contender.tensor.const_data_ptr<float>();
  for (std::int64_t i = 0; i < contender.tensor.numel(); ++i) {
    const float right = static_cast<float>(i % 5) * static_cast<float>(n) + ranks;
    if (data[i] != right)
      throw Error("bench", fmt::format("{}: element {} of {} is {}, not {}", contender.name, i,
                                       contender.tensor.numel(), data[i], right));
  }
}

double measure(Contender& contender, World& meeting, std::int64_t bytes) {
  fill(contender.tensor, meeting.rank());
  if (bytes >= kMeetFirstBytes) meeting.barrier();
  const auto start = Clock::now();
  contender.world.all_reduce(contender.tensor).wait();
  return since_us(start);
}

std::vector<Contender> contenders_of(const std::vector<std::string>& backends, World& own) {
  std::vector<Contender> contenders;
  for (const auto& backend : backends) {
    if (backend == "mpi") continue;  // a job of its own
    World world = own.backend() == backend ? own : World::from_env({.backend = backend});
    if (backend == "shm") contenders.push_back({"shm symmetric", world});
    contenders.push_back({backend == "shm" ? "shm private" : backend, world});
  }
  return contenders;
}

void measure_size(std::vector<Contender>& contenders, World& own, std::int64_t bytes,
                  Samples& samples) {
  for (auto& contender : contenders) {
    contender.tensor = contender.name == "shm symmetric"
                           ? contender.world.symmetric_empty({bytes / 4})
                           : at::empty({bytes / 4});
    measure(contender, own, bytes);
    verify(contender);
  }
  const int count = repetitions(bytes);
  // Small operations are timed in runs of the same contender: a switch would cost more than they.
  const int run = bytes < kMeetFirstBytes ? 50 : 1;
  constexpr int kProbes = 3;  // of the memory's own limit; each takes some tenths of a second
  for (int done = 0; done < count; done += run) {
    for (auto& contender : contenders) {
      measure(contender, own, bytes);
      for (int i = 0; i < run; ++i)
        samples[contender.name][bytes].push_back(measure(contender, own, bytes));
    }
    if (bytes < (1 << 20) || done % std::max(1, count / kProbes) != 0) continue;
    own.barrier();
    if (own.is_leader())
      samples[kCeiling][bytes].push_back(
          1e6 * static_cast<double>(bytes) /
          shm::reduce_ceiling_bytes_per_s(own.size(), static_cast<std::size_t>(bytes)));
    own.barrier();
  }
  for (auto& contender : contenders) contender.tensor = at::Tensor();
}

std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> out;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    out.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

}  // namespace

// _allreduce-rank BACKENDS SIZES OUTPUT
int allreduce_rank_main(int argc, char** argv) {
  LOCKSTEP_ASSERT(argc == 4);
  const auto backends = words(argv[1]);
  const auto sizes = parse_sizes(argv[2]);
  const std::string output = argv[3];
  const auto body = [&](World& own) {
    Samples samples;
    auto contenders = contenders_of(backends, own);
    for (const std::int64_t bytes : sizes) {
      if (own.is_leader()) fmt::print(stderr, "{} ...\n", show_size(static_cast<double>(bytes)));
      measure_size(contenders, own, bytes, samples);
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
