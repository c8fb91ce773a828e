// lockstep-train: `lockstep train`, `generate`, `checkpoint import` and `checkpoint merge`, which
// need LibTorch, and the ranks of `lockstep doctor` and `lockstep plan --probe`.
// `lockstep` executes it, so that everything else starts in milliseconds.

#include <cstdio>
#include <string>

#include "cli/guarded.h"
#include "cli/print.h"
#include "cli/train_commands.h"

int main(int argc, char** argv) {
  return lockstep::cli::end_at_once(lockstep::cli::guarded([&] {
    const std::string command = argc >= 2 ? argv[1] : "";
    if (command == "train") return lockstep::cli::train_main(argc - 1, argv + 1);
    if (command == "generate") return lockstep::cli::generate_main(argc - 1, argv + 1);
    if (command == "plan-probe") return lockstep::cli::plan_probe_main(argc - 1, argv + 1);
    if (command == "doctor-probe") return lockstep::cli::doctor_probe_main(argc - 1, argv + 1);
    const std::string action = argc >= 3 ? argv[2] : "";
    if (command == "checkpoint" && action == "import")
      return lockstep::cli::checkpoint_import_main(argc - 2, argv + 2);
    if (command == "checkpoint" && action == "merge")
      return lockstep::cli::checkpoint_merge_main(argc - 2, argv + 2);
    lockstep::cli::print_text(
        stderr, "lockstep: unknown command '{}'. lockstep --help lists them.\n", command);
    return 2;
  }));
}
