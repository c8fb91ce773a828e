// lockstep-bench: the subcommands that need LibTorch. `lockstep` executes it, so that everything
// else starts in milliseconds.
#include <fmt/format.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/harness.h"
#include "cli/commands.h"
#include "lockstep/core/host.h"

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

int run_benchmark(int argc, char** argv) {
  const std::string name = argc >= 2 ? argv[1] : "";
  for (const Benchmark& benchmark : kBenchmarks) {
    if (name != benchmark.name) continue;
    const OtherPrograms others;
    const int code = benchmark.run(argc - 1, argv + 1);
    // `scale` knows from the records of its runs how long their ranks have waited.
    constexpr double kShortest_s = 1;  // an error or a help text is no measurement
    if (const std::string what = others.text(kShortest_s); name != "scale" && !what.empty())
      fmt::print(stderr,
                 "note: {} meanwhile. Measure again on an idle machine before you use these "
                 "figures.\n",
                 what);
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
