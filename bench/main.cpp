// lockstep-bench: the subcommands that need LibTorch. `lockstep` executes it, so that everything
// else starts in milliseconds.
#include <fmt/format.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "bench/bench.h"
#include "bench/other_programs.h"
#include "bench/strategies.h"
#include "cli/guarded.h"

namespace {

using Command = std::function<int(int, char**)>;

const std::map<std::string, Command>& benchmarks() {
  static const std::map<std::string, Command> table{
      {"launch", lockstep::bench::launch_main},     {"ddp", lockstep::bench::ddp_main},
      {"overlap", lockstep::bench::overlap_main},   {"allreduce", lockstep::bench::allreduce_main},
      {"step", lockstep::bench::step_main},         {"train", lockstep::bench::train_main},
      {"loader", lockstep::bench::loader_main},     {"kernels", lockstep::bench::kernels_main},
      {"gpt", lockstep::bench::gpt_main},           {"lora", lockstep::bench::lora_main},
      {"resnet", lockstep::bench::resnet_main},     {"dp-vs-ddp", lockstep::bench::dp_vs_ddp_main},
      {"presets", lockstep::bench::presets_main},   {"ablation", lockstep::bench::ablation_main},
      {"timeline", lockstep::bench::timeline_main}, {"scale", lockstep::bench::scale_main},
      {"recipes", lockstep::bench::recipes_main},
  };
  return table;
}

int bench(int argc, char** argv) {
  if (argc >= 2) {
    const auto found = benchmarks().find(argv[1]);
    if (found != benchmarks().end()) {
      const lockstep::bench::OtherPrograms others;
      const int code = found->second(argc - 1, argv + 1);
      // `scale` knows from the records of its runs how long their ranks have waited.
      if (found->first != "scale") fmt::print(stderr, "{}", others.note());
      return code;
    }
  }
  const bool asked = argc >= 2 && std::strcmp(argv[1], "--help") == 0;
  std::FILE* out = asked ? stdout : stderr;
  if (argc >= 2 && !asked) fmt::print(out, "lockstep bench: unknown benchmark '{}'\n", argv[1]);
  fmt::print(out,
             "usage: lockstep bench NAME [OPTIONS]   (NAME --help lists its options)\n\n"
             "  launch     start-to-end time of a one-all-reduce program, beside torchrun\n"
             "  ddp        what the wrapper costs in a world of one, beside PyTorch's\n"
             "  overlap    how much communication is hidden behind backward\n"
             "  allreduce  shared memory beside gloo and Open MPI, over size\n"
             "  step       gradient synchronisation and optimizer in one pass, beside two\n"
             "  train      a small GPT on the CPU, beside PyTorch's DDP over gloo\n"
             "  loader     load, collate, copy and wait times of a batch, beside PyTorch's\n"
             "  kernels    fused operations beside ATen's and beside a copy of as many bytes\n"
             "  gpt        training a GPT-2 of 124 M to 1.3 B parameters, beside PyTorch\n"
             "  lora       fine-tuning Phi-3 with LoRA, beside PyTorch\n"
             "  resnet     training a ResNet on images, beside PyTorch\n"
             "  recipes    the files of examples/configs through lockstep train, beside PyTorch\n"
             "  scale      a training file on 1, 2, ... ranks: speed-up and step budget\n"
             "  dp-vs-ddp  one process that drives all devices, beside one process for each\n"
             "  presets    the presets standard and fast, beside one rank and a guide's figures\n"
             "  ablation   what each speed setting of a training file is worth\n"
             "  timeline   traces of a split model and of two ranks, for tools/timeline.py\n");
  return asked ? 0 : 2;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::cli::end_at_once(lockstep::cli::guarded([&] {
    const std::string command = argc >= 2 ? argv[1] : "";
    if (command == "bench") return bench(argc - 1, argv + 1);
    if (command == "_allreduce-once") return lockstep::bench::allreduce_once_main();
    if (command == "_allreduce-rank")
      return lockstep::bench::allreduce_rank_main(argc - 1, argv + 1);
    if (command == "_step-rank") return lockstep::bench::step_rank_main(argc - 1, argv + 1);
    if (command == "_train-rank") return lockstep::bench::train_rank_main(argc - 1, argv + 1);
    if (command == "_model-rank") return lockstep::bench::model_rank_main(argc - 1, argv + 1);
    if (command == "_dp-vs-ddp-rank")
      return lockstep::bench::dp_vs_ddp_rank_main(argc - 1, argv + 1);
    if (command == "_timeline-rank") return lockstep::bench::timeline_rank_main(argc - 1, argv + 1);
    fmt::print(stderr, "lockstep: unknown command '{}'. lockstep --help lists them.\n", command);
    return 2;
  }));
}
