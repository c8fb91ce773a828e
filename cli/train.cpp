// `lockstep train`: a bundled model, trained as a file says.
#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/train_commands.h"
#include "cli/train_tasks.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/io/checksum.h"
#include "lockstep/io/file.h"
#include "lockstep/run.h"
#include "lockstep/train/config.h"
#include "lockstep/train/effective_batch.h"
#include "lockstep/train/trainer.h"

namespace lockstep::cli {
namespace {

constexpr const char* kHelp =
    "usage: lockstep train [FILE] [--KEY VALUE ...] [--resume auto|PATH|never]\n\n"
    "Trains a bundled model (gpt, mlp) as FILE says. Alone it is one rank; several are\n"
    "  lockstep run --standalone --nproc-per-node=2 lockstep train FILE\n\n"
    "--resume auto    go on from the newest checkpoint in output_dir that verifies; start anew\n"
    "                 when there is none\n"
    "--resume PATH    go on from this folder\n"
    "--resume never   start anew (as without the flag)\n\n"
    "A stop signal (SIGTERM, SIGUSR1, SIGUSR2) to any rank ends in a checkpoint and exit code\n"
    "143. `lockstep config keys` lists the keys, docs/training.md explains the rest.\n";

struct Request {
  std::string file;
  std::vector<std::string> flags;
};

Request read_words(int argc, char** argv) {
  Request request;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--resume") {
      if (i + 1 == argc)
        throw UsageError("train", "--resume needs a value: auto, never or a folder.");
      request.flags.push_back(std::string("--resume_from_checkpoint=") + argv[++i]);
    } else if (word.rfind("--resume=", 0) == 0) {
      request.flags.push_back("--resume_from_checkpoint=" + word.substr(9));
    } else if (word.rfind("--", 0) != 0 && request.flags.empty() && request.file.empty()) {
      request.file = word;
    } else {
      request.flags.push_back(word);
    }
  }
  return request;
}

WorldOptions world_options(const TrainingArguments& a, const std::string& digest) {
  WorldOptions options;
  options.backend = a.ddp_backend.value_or("auto");
  options.timeout = std::chrono::seconds(a.ddp_timeout);
  if (a.use_cpu) options.device = c10::Device(c10::kCPU);
  options.options_hash = digest;  // ranks that were given different files do not train together
  return options;
}

// Leaves in output_dir what the run was told, and by whom: values, winners and whom they have
// beaten. When the run begins, because an earlier one's files have been put aside by then.
struct KeepRecord : Observer {
  KeepRecord(std::string directory, std::string text)
      : path(std::move(directory) + "/effective_config.json"), record(std::move(text)) {}

  void on_train_begin(Event& event) override {
    if (event.rank != 0) return;
    try {
      const std::string fresh = path + ".new";
      ::unlink(fresh.c_str());
      io::FileWriter file(fresh);
      file.append(record);
      file.append("\n");
      file.finish();
      if (::rename(fresh.c_str(), path.c_str()) != 0) throw io::file_error("rename", path, errno);
    } catch (const SystemError& e) {
      log::error("train", "{}", e.what());  // a run does not end for that
    }
  }

  std::string path;
  std::string record;
};

}  // namespace

int train_main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--help" || std::string(argv[i]) == "-h") {
      std::fputs(kHelp, stdout);
      return 0;
    }
  }
  const Request request = read_words(argc, argv);
  const train::Config config = train::load_config(request.file, request.flags);
  const std::string record = train::config_json(config);
  const std::string digest = io::checksum_text(io::checksum64(io::bytes_of(record)));
  int code = 0;
  const auto body = [&](World& world) {
    if (world.is_leader())
      for (const std::string& note : config.notes) log::warning("config", "{}", note);
    Trainer trainer(world, make_task(config.arguments), config.arguments);
    trainer.add(std::make_shared<KeepRecord>(config.arguments.output_dir, record));
    const TrainResult result = trainer.train();
    code = result.exit_code();
    if (!world.is_leader()) return;
    if (result.stop_signal == 0) {
      fmt::print("trained {} steps, mean loss {:.4f}; {}\n", result.global_step, result.train_loss,
                 config.arguments.output_dir);
    } else {
      fmt::print("stopped at step {}; go on with --resume auto\n", result.global_step);
    }
  };
  const int ended = run(body, world_options(config.arguments, digest));
  return ended != 0 ? ended : code;
}

}  // namespace lockstep::cli
