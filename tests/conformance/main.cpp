// The conformance suite as a program.
//
//   conformance                        worlds of 1, 2, 3, 4 and 7 threads, the whole table
//   conformance --world-from-env       one rank of a world that a launcher started, any backend
//   conformance --quick                a part of the table
//
// LOCKSTEP_CONFORMANCE_BACKEND names the backend to insist on (otherwise gloo for threads, and what
// the device decides for ranks).
// On a machine with one GPU, two NCCL ranks share it:
//   export LOCKSTEP_SHARE_DEVICE=1
//   lockstep run --nproc-per-node=2 build/bin/tests/conformance --world-from-env
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <mutex>
#include <string_view>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/testing/worlds.h"
#include "suite.h"

namespace lockstep::conformance {
namespace {

struct Outcome {
  int worlds = 0;
  int failures = 0;
};

void print(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

// One rank's report: the count of cases is part of the outcome.
void judge(const Report& report, const World& world, const SuiteOptions& options,
           Outcome& outcome) {
  const int due = cases_due(options);
  if (report.ran < due) {
    print(fmt::format("FAILED rank {}: only {} of {} cases of the support table ran", world.rank(),
                      report.ran, due));
    ++outcome.failures;
  }
  for (const auto& failure : report.failures) print("FAILED " + failure);
  outcome.failures += static_cast<int>(report.failures.size());
  if (world.is_leader()) {
    print(fmt::format("{} on {}, world of {}: {} of {} cases, {} skipped, {} refusals, {} others",
                      world.backend(), world.device().str(), world.size(), report.ran, due,
                      due - report.ran, report.refused, report.extra));
    ++outcome.worlds;
  }
}

int run_threads_mode(const SuiteOptions& options) {
  Outcome outcome;
  std::mutex mutex;
  for (const int size : {1, 2, 3, 4, 7}) {
    const auto begin = std::chrono::steady_clock::now();
    const auto body = [&](World& world) {
      const Report report = run_suite(world, world.device(), options);
      const std::lock_guard lock(mutex);
      judge(report, world, options, outcome);
    };
    testing::ThreadOptions threads;
    threads.world.backend = env::get("LOCKSTEP_CONFORMANCE_BACKEND").value_or("gloo");
    testing::run_threads(size, body, threads);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    print(fmt::format("  {:.1f} s", seconds.count()));
  }
  if (outcome.worlds != 5) ++outcome.failures;
  print(outcome.failures == 0 ? "conformance: passed" : "conformance: FAILED");
  return outcome.failures == 0 ? 0 : 1;
}

int run_environment_mode(SuiteOptions options) {
  WorldOptions world_options;
  if (const auto backend = env::get("LOCKSTEP_CONFORMANCE_BACKEND"))
    world_options.backend = *backend;
  World world = World::from_env(world_options);
  Outcome outcome;
  judge(run_suite(world, world.device(), options), world, options, outcome);
  if (!world.device().is_cpu()) {
    // Tensors of the host travel in the same world, by another backend.
    options.every_case = false;
    const Report report = run_suite(world, c10::Device(c10::kCPU), options);
    judge(report, world, options, outcome);
  }
  const double failures = all_reduce(world, outcome.failures);
  world.finish();
  if (world.is_leader()) print(failures == 0 ? "conformance: passed" : "conformance: FAILED");
  return outcome.failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lockstep::conformance

int main(int argc, char** argv) {
  using namespace lockstep::conformance;
  at::set_num_threads(1);  // ranks share the cores; helper threads would only get in their way
  SuiteOptions options;
  bool from_env = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg == "--world-from-env") {
      from_env = true;
    } else if (arg == "--quick") {
      options.every_case = false;
    } else {
      std::fprintf(stderr, "usage: conformance [--world-from-env] [--quick]\n");
      return 2;
    }
  }
  try {
    return from_env ? run_environment_mode(options) : run_threads_mode(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
