// lockstep bench launch: from the command line to the end of a program with one all-reduce.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "bench/bench.h"
#include "bench/harness.h"
#include "bench/processes.h"
#include "lockstep/core/error.h"

namespace lockstep::bench {
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
