// lockstep bench launch: from the command line to the end of a program with one all-reduce.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <functional>

#include "bench/bench.h"
#include "bench/stats.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

namespace lockstep::bench {
namespace {

struct Contender {
  std::string name;
  std::string command;
  std::vector<double> seconds;
};

// Runs a command, checks that rank 0 printed the right sum, and returns its wall time.
double timed(const Contender& contender, int ranks) {
  const auto start = std::chrono::steady_clock::now();
  FILE* pipe = ::popen((contender.command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) throw SystemError("bench", "cannot start a shell", errno);
  std::string output;
  char buffer[4096];
  for (std::size_t n; (n = ::fread(buffer, 1, sizeof buffer, pipe)) > 0;) output.append(buffer, n);
  const int ended = ::pclose(pipe);
  const int code = WIFEXITED(ended) ? WEXITSTATUS(ended) : -1;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::string expected = fmt::format("sum {}", ranks * (ranks + 1) / 2);
  if (code != 0 || output.find(expected) == std::string::npos)
    throw Error("bench", fmt::format("'{}' failed (exit code {}) or did not print '{}':\n{}",
                                     contender.command, code, expected, output));
  return seconds;
}

// How much faster than `base`: the median over rounds, so that one disturbed run counts little.
double speedup(const Contender& base, const Contender& other) {
  std::vector<double> ratios;
  for (std::size_t round = 0; round < other.seconds.size(); ++round)
    ratios.push_back(base.seconds[round] / other.seconds[round]);
  return median(std::move(ratios));
}

// Prints and returns whether a goal (0: none) is met.
bool reaches(const Contender& contender, double ratio, double required) {
  if (ratio >= required) return true;
  fmt::print(stderr, "launch: {} is {:.2f}x as fast as torchrun + Python, {}x required\n",
             contender.name, ratio, required);
  return false;
}

std::vector<Contender> contenders_for(int ranks) {
  const std::string python = env::get("LOCKSTEP_PYTHON").value_or(default_python());
  const std::string script = peer("allreduce_once.py");
  const std::string ours = program_beside("../bin/lockstep");
  const std::string flags = fmt::format("--standalone --nproc-per-node={}", ranks);
  return {
      {"torchrun + Python",
       fmt::format("'{}' -m torch.distributed.run {} '{}'", python, flags, script),
       {}},
      {"lockstep run + Python",
       fmt::format("PYTHON_EXEC='{}' '{}' run {} '{}'", python, ours, flags, script),
       {}},
      {"lockstep run + C++",
       fmt::format("'{}' run {} '{}' _allreduce-once", ours, flags,
                   program_beside("lockstep-bench")),
       {}},
  };
}

}  // namespace

int launch_main(int argc, char** argv) {
  CLI::App app{"Start-to-end time of a program that does one all-reduce"};
  int ranks = 4;
  int rounds = 5;
  double require_python = 0;
  double require_cpp = 0;
  std::string csv;
  app.add_option("--ranks", ranks, "processes per job")->check(CLI::Range(1, 64));
  app.add_option("--rounds", rounds, "interleaved repetitions")->check(CLI::Range(1, 1000));
  app.add_option(
      "--require-python", require_python,
      "fail when lockstep run + Python is less than this many times as fast as torchrun; 0: never");
  app.add_option("--require-cpp", require_cpp, "the same for lockstep run + C++");
  app.add_option("--csv", csv, "also write the table to this file");
  if (const auto code = parse_arguments(app, argc, argv)) return *code;

  auto contenders = contenders_for(ranks);
  for (auto& contender : contenders) timed(contender, ranks);  // warms the page cache; verifies
  for (int round = 0; round < rounds; ++round) {
    for (auto& contender : contenders) {
      contender.seconds.push_back(timed(contender, ranks));
      fmt::print(stderr, "round {}/{}: {} {:.2f} s\n", round + 1, rounds, contender.name,
                 contender.seconds.back());
    }
  }
  Table table({"one all-reduce, " + std::to_string(ranks) + " ranks", "min s", "p50 s", "max s",
               "torchrun + Python / this"});
  for (const auto& contender : contenders) {
    const Summary s = summarize(contender.seconds);
    table.add({contender.name, fmt::format("{:.2f}", s.min), fmt::format("{:.2f}", s.p50),
               fmt::format("{:.2f}", s.max),
               fmt::format("{:.2f}x", speedup(contenders[0], contender))});
  }
  publish(table, csv);
  const bool python_met =
      reaches(contenders[1], speedup(contenders[0], contenders[1]), require_python);
  const bool cpp_met = reaches(contenders[2], speedup(contenders[0], contenders[2]), require_cpp);
  return python_met && cpp_met ? 0 : 1;
}

}  // namespace lockstep::bench
