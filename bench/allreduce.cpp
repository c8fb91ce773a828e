// lockstep bench allreduce: shared memory beside gloo and Open MPI. A job of ranks measures every
// backend on the same sizes, each time on a freshly written tensor. And lockstep bench launch: from
// the command line to the end of a program with one all-reduce.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>

#include "bench/harness.h"
#include "bench/limits.h"
#include "bench/processes.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/run.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;
using Clock = Deadline::Clock;

// Microseconds per contender ("shm symmetric", "gloo", ...) and size in bytes.
using Samples = std::map<std::string, std::map<std::int64_t, std::vector<double>>>;

// From this size on a barrier precedes each operation; smaller operations need none.
constexpr std::int64_t kBarrierFirstBytes = 65536;
// Up to this size a contender is measured several times before the next one's turn.
constexpr std::int64_t kRunsUpToBytes = 1 << 20;
constexpr int kMinRepetitions = 5;
// Memory-bound loops with the same traffic (limits.h): the faster of these is the limit.
constexpr const char* kLimits[] = {"limit: plain loop", "limit: memcpy"};
constexpr std::int64_t kLimitFromBytes = 1 << 20;

struct Job {
  std::vector<std::string> backends;
  std::vector<std::int64_t> sizes;
  double budget_s = 60;
  std::string corrupt{};  // the contender that is to get a wrong sum
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Job, backends, sizes, budget_s, corrupt)

// "4K,64K,1M,25M" -> bytes; UsageError names the part that is not a size.
std::vector<std::int64_t> parse_sizes(const std::string& text) {
  std::vector<std::int64_t> sizes;
  for (const std::string& part : split(text, ',')) {
    const bool b = part.ends_with("B") || part.ends_with("b");
    const double number = parse_scaled(part.substr(0, part.size() - (b ? 1 : 0)), 1024);
    const std::int64_t bytes = number > 0 ? static_cast<std::int64_t>(number) / 4 * 4 : 0;
    if (bytes <= 0)
      throw UsageError("bench", "'{}' is not a size. Write bytes, or 4K, 25M, 1G.", part);
    sizes.push_back(bytes);
  }
  return sizes;
}

std::string show_size(double bytes) {
  const char* units[] = {"B", "KB", "MB", "GB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 3) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.4g} {}", bytes, units[unit]);
}

// How often a size is measured in one job at most. A size that takes more than its share of the
// job's time is measured less often.
int repetitions(std::int64_t bytes) {
  if (bytes < kBarrierFirstBytes) return 2000;
  if (bytes <= kRunsUpToBytes) return 600;
  return static_cast<int>(std::clamp<std::int64_t>((1LL << 30) / bytes, 10, 300));
}

// ---------------------------------------------------------------- a rank

struct AllreduceSide {
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

void verify(const AllreduceSide& contender) {
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
double measure_limit(AllreduceSide& contender, World& barrier_world) {
  std::vector<float*> arrays;
  for (const auto& part : contender.parts) arrays.push_back(part.mutable_data_ptr<float>());
  const std::int64_t n = barrier_world.size(), own = barrier_world.rank(),
                     all = contender.tensor.numel();
  const Slices slices{arrays.data(), barrier_world.size(), all * own / n, all * (own + 1) / n};
  barrier_world.barrier();
  const auto start = Clock::now();
  contender.limit(slices);
  const double own_us = since_us(start);
  return all_reduce(barrier_world, own_us, ReduceOp::kMax);
}

double measure(AllreduceSide& contender, World& barrier_world, std::int64_t bytes) {
  fill(contender.tensor, barrier_world.rank());
  if (contender.limit != nullptr) return measure_limit(contender, barrier_world);
  if (bytes >= kBarrierFirstBytes) barrier_world.barrier();
  const auto start = Clock::now();
  contender.world.all_reduce(contender.tensor).wait();
  return since_us(start);
}

std::vector<AllreduceSide> contenders_of(const std::vector<std::string>& backends, World& own) {
  std::vector<AllreduceSide> contenders;
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
  const int turns = std::clamp(static_cast<int>(fitting), min_turns, max_turns);
  return static_cast<int>(all_reduce(own, turns, ReduceOp::kMin));
}

void measure_size(std::vector<AllreduceSide>& contenders, World& own, std::int64_t bytes,
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

}  // namespace

int allreduce_once_main() {
  return run([](World& world) {
    const auto value = at::full({1}, world.rank() + 1.0F, world.device());
    world.all_reduce(value).wait();
    if (!world.is_leader()) return;
    fmt::print("sum {:.0f}\n", value.item<float>());
    std::fflush(stdout);
  });
}

// One order, answered by {"samples"}.
int allreduce_rank(const json& description, const std::string& orders) {
  const auto job = description.get<Job>();
  const auto measure_all = [&](World& own) {
    Samples samples;
    auto contenders = contenders_of(job.backends, own);
    for (auto& contender : contenders) contender.wrong = contender.name == job.corrupt;
    for (const std::int64_t bytes : job.sizes) {
      auto chosen = contenders;
      // Data that fits into the cores' own caches does not measure memory.
      if (bytes < kLimitFromBytes)
        std::erase_if(chosen, [](const AllreduceSide& each) { return each.limit != nullptr; });
      measure_size(chosen, own, bytes, job.budget_s / static_cast<double>(job.sizes.size()),
                   samples);
    }
    return samples;
  };
  return run(
      [&](World& own) {
        serve(orders, own.rank(), [&](const json&) { return json{{"samples", measure_all(own)}}; });
      },
      {.device = c10::Device(c10::kCPU)});
}

namespace {

// ---------------------------------------------------------------- the benchmark

struct AllreduceSettings {
  int ranks = 2;
  int rounds = 3;
  double budget_s = 60;
  std::string backends = "shm,gloo";
  std::string sizes = "4K,64K,1M,25M,100M";
  std::string corrupt;
};

bool among(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void read_mpi(const std::string& path, Samples& samples) {
  std::ifstream file(path);
  std::int64_t bytes = 0;
  double us = 0;
  while (file >> bytes >> us) samples["mpi"][bytes].push_back(us);
}

// Empty when there is no MPI here; the reason is printed.
std::string mpi_command(const AllreduceSettings& settings, const Scratch& scratch) {
  if (!among(split(settings.backends, ','), "mpi")) return "";
  const std::string program = scratch.file("allreduce_mpi");
  const std::string build = fmt::format("mpicc -O2 '{}' -o '{}'", peer("allreduce_mpi.c"), program);
  if (std::system((build + " >/dev/null 2>&1").c_str()) != 0) {
    fmt::print(stderr, "no Open MPI here (mpicc failed); continuing without it\n");
    return "";
  }
  const bool root = ::geteuid() == 0;
  std::string command = fmt::format("mpirun{} --oversubscribe -np {} '{}'",
                                    root ? " --allow-run-as-root" : "", settings.ranks, program);
  const auto sizes = parse_sizes(settings.sizes);
  for (const auto bytes : sizes)
    command += fmt::format(" {}:{}:{:.0f}", bytes, repetitions(bytes),
                           1e6 * settings.budget_s / static_cast<double>(sizes.size()));
  return command + fmt::format(" >'{}'", scratch.file("mpi"));
}

// Small operations of each backend run in processes of their own, as Open MPI's do: gloo's threads
// stay awake between its operations, and where ranks fill the cores they would delay the others.
// Large ones are measured in turn in the same processes, because the memory's speed changes.
std::vector<Job> jobs_of(const AllreduceSettings& settings) {
  std::vector<std::int64_t> small, large;
  for (const std::int64_t bytes : parse_sizes(settings.sizes))
    (bytes <= kRunsUpToBytes ? small : large).push_back(bytes);
  std::vector<std::string> backends = split(settings.backends, ',');
  std::erase(backends, "mpi");  // has a job of its own
  const double each_s = settings.budget_s /
                        static_cast<double>(std::max<std::size_t>(1, small.size() + large.size()));
  const double small_s = each_s * static_cast<double>(small.size());
  std::vector<Job> jobs;
  for (const auto& backend : backends)
    if (!small.empty())
      jobs.push_back(
          {{backend}, small, small_s / static_cast<double>(backends.size()), settings.corrupt});
  if (!large.empty() && !backends.empty())
    jobs.push_back({backends, large, each_s * static_cast<double>(large.size()), settings.corrupt});
  return jobs;
}

void run_command(const std::string& command) {
  if (std::system(command.c_str()) != 0) throw Error("bench", fmt::format("'{}' failed", command));
}

Samples collect(const AllreduceSettings& settings) {
  const Scratch scratch;
  Samples samples;
  const std::string mpi = mpi_command(settings, scratch);
  const std::vector<Job> jobs = jobs_of(settings);
  for (int round = 0; round < settings.rounds; ++round) {
    fmt::print(stderr, "round {}/{}\n", round + 1, settings.rounds);
    for (const Job& job : jobs) {
      RankProcesses ranks({.name = fmt::format("{}", fmt::join(job.backends, ",")),
                           .ranks = settings.ranks,
                           .rank = "allreduce",
                           .settings = job});
      for (const auto& [name, by_size] : ranks.ask({}).at("samples").get<Samples>())
        for (const auto& [bytes, times] : by_size) {
          auto& all = samples[name][bytes];
          all.insert(all.end(), times.begin(), times.end());
        }
      ranks.finish();
    }
    if (mpi.empty()) continue;
    run_command(mpi);
    read_mpi(scratch.file("mpi"), samples);
  }
  return samples;
}

// The contender's median, or nothing where it was not measured.
std::optional<double> median_of(const Samples& samples, const std::string& name,
                                std::int64_t bytes) {
  const auto found = samples.find(name);
  if (found == samples.end()) return std::nullopt;
  const auto times = found->second.find(bytes);
  if (times == found->second.end()) return std::nullopt;
  return median(times->second);
}

// What memory allows, by the faster of the loops that share no code with the engine.
std::optional<double> limit_of(const Samples& samples, std::int64_t bytes) {
  std::optional<double> fastest;
  for (const char* name : kLimits)
    if (const auto us = median_of(samples, name, bytes))
      fastest = std::min(fastest.value_or(*us), *us);
  return fastest;
}

void add_rows(Report& report, const Samples& samples, std::int64_t bytes) {
  for (const auto& [name, by_size] : samples) {
    const auto found = by_size.find(bytes);
    if (found == by_size.end()) continue;
    const double p50 = median(found->second);
    Row& row = report.row(name)
                   .text("size", show_size(static_cast<double>(bytes)))
                   .value("bytes", bytes)
                   .value("samples", found->second.size())
                   .spread("us", found->second, 1)
                   .number("GB/s", static_cast<double>(bytes) / p50 / 1e3, 2, "gb_per_s");
    for (const std::string other : {"gloo", "mpi"}) {
      const auto theirs = median_of(samples, other, bytes);
      row.text(other + " / this", theirs ? fmt::format("{:.1f}x", *theirs / p50) : "");
      if (theirs) row.value("times_" + other, *theirs / p50);
    }
    const auto limit = limit_of(samples, bytes);
    row.text("% of memory", limit ? fmt::format("{:.0f}", 100 * *limit / p50) : "");
    if (limit) row.value("percent_of_memory", 100 * *limit / p50);
  }
}

}  // namespace

int allreduce_main(int argc, char** argv) {
  AllreduceSettings settings;
  Options options("Time and bandwidth of an all-reduce over size, backends by turns");
  options.number("--ranks", settings.ranks, 2, 64, "processes of this host");
  options.text("--backends", settings.backends, "any of shm, gloo and mpi, with commas");
  options.text("--sizes", settings.sizes, "bytes of the tensor, with K, M or G and commas");
  options.number("--rounds", settings.rounds, 1, 100, "jobs; medians go over all");
  options.number("--budget-s", settings.budget_s, 1, 3600,
                 "seconds for the measurements of one job; where they do not suffice, there are "
                 "fewer of them");
  options.text("--corrupt", settings.corrupt,
               "give a contender ('gloo', 'shm private', ...) a wrong sum, to see it refused");
  if (const auto code = options.parse(argc, argv)) return *code;
  const auto sizes = parse_sizes(settings.sizes);
  for (const std::string& part : split(settings.backends, ','))
    if (!among({"shm", "gloo", "mpi"}, part))
      throw UsageError("bench", "--backends: '{}' is none of shm, gloo and mpi.", part);
  const Samples samples = collect(settings);
  Report report("allreduce", fmt::format("all-reduce, {} ranks", settings.ranks),
                {{"ranks", settings.ranks}});
  for (const std::int64_t bytes : sizes) add_rows(report, samples, bytes);
  report.publish(options);
  return 0;
}

// ---------------------------------------------------------------- lockstep bench launch

namespace {

struct LaunchSide {
  std::string name;
  std::string command;
  std::vector<double> seconds{};
};

// Runs a command, checks that rank 0 printed the right sum, and returns its wall time.
double timed(const LaunchSide& contender, int ranks) {
  const auto start = Deadline::Clock::now();
  FILE* pipe = ::popen((contender.command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) throw SystemError("bench", "cannot start a shell", errno);
  std::string output;
  char buffer[4096];
  for (std::size_t n; (n = ::fread(buffer, 1, sizeof buffer, pipe)) > 0;) output.append(buffer, n);
  const int ended = ::pclose(pipe);
  const int code = WIFEXITED(ended) ? WEXITSTATUS(ended) : -1;
  const double seconds = seconds_since(start);
  const std::string expected = fmt::format("sum {}", ranks * (ranks + 1) / 2);
  if (code != 0 || output.find(expected) == std::string::npos)
    throw Error("bench", fmt::format("'{}' failed (exit code {}) or did not print '{}':\n{}",
                                     contender.command, code, expected, output));
  return seconds;
}

std::vector<LaunchSide> contenders_for(int ranks) {
  const std::string script = peer("allreduce_once.py");
  const std::string ours = program_beside("../bin/lockstep");
  const std::string flags = fmt::format("--standalone --nproc-per-node={}", ranks);
  return {{"torchrun + Python",
           fmt::format("'{}' -m torch.distributed.run {} '{}'", python(), flags, script)},
          {"lockstep run + Python",
           fmt::format("PYTHON_EXEC='{}' '{}' run {} '{}'", python(), ours, flags, script)},
          {"lockstep run + C++", fmt::format("'{}' run {} '{}' _allreduce-once", ours, flags,
                                             program_beside("lockstep-bench"))}};
}

}  // namespace

int launch_main(int argc, char** argv) {
  int ranks = 4, rounds = 5;
  Options options("Start-to-end time of a program that does one all-reduce");
  options.number("--ranks", ranks, 1, 64, "processes per job");
  options.number("--rounds", rounds, 1, 1000, "interleaved repetitions");
  if (const auto code = options.parse(argc, argv)) return *code;

  auto contenders = contenders_for(ranks);
  for (auto& contender : contenders) timed(contender, ranks);  // warms the page cache; verifies
  by_turns({.rounds = rounds, .unit = "s"}, contenders, [&](LaunchSide& contender) {
    return contender.seconds.emplace_back(timed(contender, ranks));
  });
  Report report("launch", fmt::format("one all-reduce, {} ranks", ranks), {{"ranks", ranks}});
  const auto& torchrun = contenders.front().seconds;
  for (const auto& contender : contenders)
    report.row(contender.name)
        .spread("s", contender.seconds, 2, "min p50 max")
        .number("torchrun + Python / this", over(torchrun, contender.seconds).p50, 2,
                "torchrun_times_this")
        .value("seconds", contender.seconds);
  report.publish(options);
  return 0;
}

}  // namespace lockstep::bench
