// lockstep-bench: the subcommands that need LibTorch. `lockstep` executes it, so that everything
// else starts in milliseconds.
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "bench/bench.h"
#include "cli/guarded.h"
#include "lockstep/core/cores.h"
#include "lockstep/core/deadline.h"

namespace lockstep::bench {
namespace {

struct Benchmark {
  std::string name;
  const char* about;
  Main* run;
};
const Benchmark kBenchmarks[] = {
    {"launch", "start-to-end time of a one-all-reduce program, beside torchrun", launch_main},
    {"allreduce", "shared memory beside gloo and Open MPI, over size", allreduce_main},
    {"step", "gradient synchronisation and optimizer in one pass, beside two", step_main},
    {"train", "a small GPT on the CPU, beside PyTorch's DDP over gloo", train_main},
    {"loader", "load, collate, copy and wait times of a batch, beside PyTorch's", loader_main},
    {"kernels", "fused operations beside ATen's and beside a copy of as many bytes", kernels_main},
    {"recipes", "training files through lockstep train, beside PyTorch", recipes_main},
    {"scale", "a training file on 1, 2, ... ranks: speed-up and step budget", scale_main},
    {"dp-vs-ddp", "one process that drives all devices, beside one process for each",
     dp_vs_ddp_main},
    {"presets", "the presets standard and fast, beside one rank and a guide's figures",
     presets_main},
    {"ablation", "what each speed setting of a training file is worth", ablation_main},
};

const std::map<std::string, RankMain*> kRanks{{"allreduce", allreduce_rank},
                                              {"step", step_rank},
                                              {"model", model_rank},
                                              {"dp-vs-ddp", dp_vs_ddp_rank}};

// ---------------------------------------------------------------- other programs

constexpr double kShortest_s = 1;  // an error or a help text is no measurement
constexpr double kMuch = 0.10;     // share of the cores that others use
// Others take nothing away while cores are idle.
constexpr double kAllInUse = 0.9;

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

// CPU seconds of all programs on the cores that this process may use; 0 where the kernel does not
// say, and then there is no note.
double busy_s() {
  const auto cpus = allowed_cpus();
  std::ifstream file("/proc/stat");
  double ticks = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string name;
    fields >> name;
    if (std::ranges::none_of(cpus, [&](int cpu) { return name == fmt::format("cpu{}", cpu); }))
      continue;
    double user = 0, nice = 0, system = 0, idle = 0, io = 0, irq = 0, softirq = 0, steal = 0;
    fields >> user >> nice >> system >> idle >> io >> irq >> softirq >> steal;
    ticks += user + nice + system + irq + softirq + steal;
  }
  return ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

// How much of the cores other programs use while a benchmark measures: figures from a busy machine
// do not describe the machine.
class OtherPrograms {
 public:
  // A line if others used 10 % of the cores while nearly all cores were busy; otherwise nothing.
  std::string note() const {
    const auto cores = static_cast<double>(allowed_cpus().size());
    const double seconds = seconds_since(begin_);
    if (seconds < kShortest_s) return "";
    const double all = (busy_s() - all_s_) / seconds;
    const double others = all - (own_s() - own_s_) / seconds;
    if (others < kMuch * cores || all < kAllInUse * cores) return "";
    return fmt::format(
        "note: other programs used {:.1f} of the {} cores meanwhile. Measure again on an idle "
        "machine before you use these figures.\n",
        others, cores);
  }

 private:
  // CPU seconds of this process, with those of the children that have ended.
  static double own_s() {
    double sum = 0;
    for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
      rusage used{};
      ::getrusage(who, &used);
      sum += seconds_of(used.ru_utime) + seconds_of(used.ru_stime);
    }
    return sum;
  }

  const Deadline::Clock::time_point begin_ = Deadline::Clock::now();
  const double all_s_ = busy_s(), own_s_ = own_s();
};

int run_benchmark(int argc, char** argv) {
  const std::string name = argc >= 2 ? argv[1] : "";
  for (const Benchmark& benchmark : kBenchmarks) {
    if (name != benchmark.name) continue;
    const OtherPrograms others;
    const int code = benchmark.run(argc - 1, argv + 1);
    // `scale` knows from the records of its runs how long their ranks have waited.
    if (name != "scale") fmt::print(stderr, "{}", others.note());
    return code;
  }
  const bool asked = name == "--help";
  std::FILE* out = asked ? stdout : stderr;
  if (argc >= 2 && !asked) fmt::print(out, "lockstep bench: unknown benchmark '{}'\n", name);
  fmt::print(out, "usage: lockstep bench NAME [OPTIONS]   (NAME --help lists its options)\n\n");
  for (const Benchmark& benchmark : kBenchmarks)
    fmt::print(out, "  {:9}  {}\n", benchmark.name, benchmark.about);
  return asked ? 0 : 2;
}

int command_main(int argc, char** argv) {
  const std::string command = argc >= 2 ? argv[1] : "";
  if (command == "bench") return run_benchmark(argc - 1, argv + 1);
  if (command == "_allreduce-once") return allreduce_once_main();
  if (command == "_rank" && argc == 5)
    return kRanks.at(argv[2])(nlohmann::json::parse(argv[3]), argv[4]);
  fmt::print(stderr, "lockstep: unknown command '{}'. lockstep --help lists them.\n", command);
  return 2;
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  return lockstep::cli::end_at_once(
      lockstep::cli::guarded([&] { return lockstep::bench::command_main(argc, argv); }));
}
