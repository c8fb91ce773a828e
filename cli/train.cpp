// `lockstep train`: a bundled model, trained as a file says; and the program that it is a part of.

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/plan.h"
#include "cli/train_commands.h"
#include "launcher/flags.h"
#include "launcher/host.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/core/log.h"
#include "lockstep/io/file.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/run.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config.h"
#include "lockstep/train/trainer.h"
#include "observe/plan/model_shape.h"
#include "observe/plan/strategy.h"

namespace lockstep::cli {
namespace {

constexpr const char* kTrainHelp =
    "usage: lockstep train [--nproc-per-node=N] [FILE] [--KEY VALUE ...]  (in any order)\n"
    "                      [--resume auto|PATH|never]\n\n"
    "Trains a bundled model (gpt, mlp, resnet18, resnet50) or one of a Hugging Face folder as\n"
    "FILE says, on one rank.\n\n"
    "--nproc-per-node=N   on N ranks (or auto, gpu). Every flag of `lockstep run` may be given:\n"
    "                 lockstep train --nproc-per-node=2 FILE is short for\n"
    "                 lockstep run --nproc-per-node=2 lockstep train FILE\n"
    "--resume auto    continue from the newest checkpoint in output_dir that verifies; a new run\n"
    "                 when there is none\n"
    "--resume PATH    continue from this folder\n"
    "--resume never   a new run (as without the flag; but an attempt that lockstep run\n"
    "                 --max-restarts has restarted resumes unless never is given)\n\n"
    "A stop signal (SIGTERM, SIGUSR1, SIGUSR2) to any rank ends in a checkpoint and exit code\n"
    "143 (1 when that could not be saved). A run whose last checkpoint could not be written ends\n"
    "with 1. `lockstep config keys` lists the keys, docs/training.md explains the rest\n"
    "(`lockstep --help` says where the documentation is).\n";

struct TrainRequest {
  std::string file;
  Args flags;
};

TrainRequest parse_train(int argc, char** argv) {
  Args flags(argv + 1, argv + argc);
  for (std::string& word : flags)
    if (word == "--resume" || word.starts_with("--resume="))
      word.insert(sizeof("--resume") - 1, "_from_checkpoint");
  const Args names = train::take_names(flags);
  if (names.size() > 1)
    throw UsageError("train", "one file is trained, and '{}' is another one beside {}.", names[1],
                     names[0]);
  return {names.empty() ? "" : names[0], std::move(flags)};
}

// Writes effective_config.json to output_dir: each value, its source and what it overrides. Done
// when the run begins, so that a refused run does not replace an earlier run's file.
struct KeepRecord : Observer {
  KeepRecord(std::string directory, std::string text)
      : path(std::move(directory) + "/effective_config.json"), record(std::move(text)) {}

  void on_train_begin(Event& event) override {
    if (event.rank != 0) return;
    try {
      write_file_atomically(path, record + "\n");
    } catch (const SystemError& e) {
      log::error("train", "{}", e.what());  // not fatal
    }
  }

  std::string path;
  std::string record;
};

// The files that every rank reads on its own before the rendezvous.
struct Prepared {
  train::Config config;
  TaskConfig task;
  std::string record;
};

Prepared read_everything(const TrainRequest& request) {
  Prepared read;
  read.config = train::load_config(request.file, request.flags, launch::launcher_keys());
  read.task = read_task(read.config.arguments);
  read.record = train::config_json(read.config);
  return read;
}

// Makes the data and the model, which takes too long to do before the rendezvous. A file that is
// damaged on one host ends all ranks, each with the reason; the rank that found it throws the
// original error.
TrainerTask make_task_everywhere(const Mesh& mesh, const Prepared& read) {
  World& world = mesh.world();
  std::optional<TrainerTask> task;
  std::exception_ptr mine;
  std::string said;
  try {
    train::check_precision(read.config.arguments, world.device().is_cpu());
    task = make_task(read.task, read.config.arguments, mesh);
  } catch (const std::exception& e) {
    mine = std::current_exception();
    said = fmt::format("on {} cannot begin: {}", host_name(), e.what());
  }
  const std::vector<std::string> all = all_gather_bytes(world, said);
  if (mine) std::rethrow_exception(mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty()) throw UsageError("train", "rank {} {}", rank, all[rank]);
  return std::move(*task);
}

// Counts the tensors on the CPU that the thread which trains has made, as the profiler does.
struct CountTensors : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t,
                         c10::Device device) override {
    if (!device.is_cpu()) return;
    live += bytes;
    peak = std::max(peak, live);
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t live = 0, peak = 0;
};

// `lockstep plan --probe`: how long each step took and the peak of this rank's memory, in a file
// of the rank. Made before the model, whose memory it is about.
class ProbeSteps : public Observer {
 public:
  ProbeSteps(const World& world, std::string folder)
      : device_(world.device()), folder_(std::move(folder)) {
    if (!device_.is_cpu()) return;
    tensors_ = std::make_shared<CountTensors>();
    counting_.emplace(c10::DebugInfoKind::PROFILER_STATE, tensors_);
  }

  void on_train_begin(Event&) override { last_ = Clock::now(); }
  void on_step_end(Event&) override {
    if (!device_.is_cpu()) torch::cuda::synchronize(device_.index());
    const auto now = Clock::now();
    steps_.push_back(real_node(std::chrono::duration<double>(now - last_).count()));
    // Not at the end, when a rank that is ahead may have freed its part.
    if (tensors_) shared_ = shared_bytes();
    last_ = Clock::now();
  }
  // Samples may be shorter than max_seq_len. Written once, after the last step.
  void on_log(Event& event) override {
    const double* tokens = train::find_metric(event.entry->values, "tokens_per_second");
    const double* samples = train::find_metric(event.entry->values, "samples_per_second");
    if (tokens != nullptr && samples != nullptr) tokens_per_sample_ = *tokens / *samples;
  }
  void on_train_end(Event& event) override {
    write_file_atomically(fmt::format("{}/rank_{}.json", folder_, event.rank),
                          to_json(map_node({{"step_s", list_node(steps_)},
                                            {"tokens_per_sample", real_node(tokens_per_sample_)},
                                            {"memory_bytes", integer_node(peak_bytes())}})));
  }

 private:
  using Clock = std::chrono::steady_clock;

  // This rank's part of what ranks have mapped together: buckets, and parameters that one of them
  // writes for all.
  static std::int64_t shared_bytes() {
    std::ifstream mapped("/proc/self/smaps_rollup");
    for (std::string word; mapped >> word;)
      if (std::int64_t kib = 0; word == "Pss_Shmem:" && mapped >> kib) return kib << 10;
    return 0;
  }
  std::int64_t peak_bytes() const {
    if (tensors_) return tensors_->peak + shared_;
    return c10::getDeviceAllocator(device_.type())
        ->getDeviceStats(device_.index())
        .allocated_bytes[0]
        .peak;
  }

  c10::Device device_;
  std::string folder_;
  std::shared_ptr<CountTensors> tensors_;
  std::optional<c10::DebugInfoGuard> counting_;
  std::int64_t shared_ = 0;
  Clock::time_point last_{};
  std::vector<Node> steps_;
  double tokens_per_sample_ = 0;
};

// The fastest strategy that `lockstep plan --probe` has run with this many ranks on the leader's
// host, as text; equal on every rank.
std::optional<plan::Measurement> agreed_strategy(World& world, const plan::Training& training) {
  std::string mine;
  if (world.is_leader()) {
    const char* device = world.device().is_cpu() ? "cpu" : "gpu";
    if (const auto strategy = fastest_strategy(
            saved_strategies(training_key(training, device, world.size())), training, world.size()))
      mine = measurement_text(*strategy);
  }
  return parse_measurement(all_gather_bytes(world, mine).front());
}

// elastic_gpu: batch, accumulation and sharding that fit the smallest device. Called before the
// arguments are used.
void follow_plan(World& world, Prepared& read) {
  TrainingArguments& arguments = read.config.arguments;
  if (!arguments.elastic_gpu) return;
  const c10::Device device = world.device();
  plan::Card card{.name = device.is_cpu() ? "cpu" : "GPU", .cpu = device.is_cpu()};
  const auto free_bytes =
      device.is_cpu()
          ? 0.0
          : static_cast<double>(
                c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).first);
  card.memory_bytes = static_cast<std::uint64_t>(all_reduce(world, free_bytes, ReduceOp::kMin));
  const plan::Training training = training_of(read.config, read.task);
  const std::string chosen =
      apply_plan(arguments, training, card, world.size(), agreed_strategy(world, training));
  if (world.is_leader() && !chosen.empty()) log::info("train", "{}", chosen);
}

// Operations of a token, and of the leader's GPUs in a second, for the log's mfu. With a device map
// a rank has several GPUs, and on a CPU no peak is known. Collective.
void count_operations(TrainerTask& task, World& world, const Prepared& read) {
  if (world.device().is_cpu() || read.task.model.device_map) return;
  double peak = 0;
  try {
    const plan::Training training = training_of(read.config, read.task);
    task.flops_per_token = plan::flops_per_token(training.model);
    if (world.is_leader()) peak = plan::peak_flops(training, found_cards(launch::find_gpus()).card);
  } catch (const std::exception& error) {
    log::debug("train", "{} The log has no mfu.", error.what());
  }
  task.device_peak_flops = all_reduce(world, peak, ReduceOp::kMax);
}

// The Trainer has reported every other end.
void say_result(const TrainResult& result, const TrainingArguments& arguments) {
  if (result.exit_code() != 0 || result.global_step <= result.first_step) return;
  const std::string since =
      result.first_step > 0 ? fmt::format(" since step {}", result.first_step) : "";
  print_text("trained {} steps, mean loss{} {:.4f}; {}\n", result.global_step, since,
             result.train_loss, arguments.output_dir);
}

// `probe`: a folder for what was measured of the steps; empty: an ordinary run.
int train(const TrainRequest& request, const std::string& probe) {
  Prepared read;
  // Without other ranks, a mistake in the files is reported as in any other command.
  const bool alone = read_rank_env().alone();
  if (alone) read = read_everything(request);
  const auto prepare = [&] {
    if (!alone) read = read_everything(request);
    const std::string digest = io::sha256(io::bytes_of(read.record)).substr(0, 16);
    WorldOptions options = world_options(read.config.arguments);
    options.options_hash = digest;  // ranks that were given different files do not train together
    return options;
  };
  const auto body = [&](World& world) {
    const train::Config& config = read.config;
    if (world.is_leader())
      for (const auto& notes : {config.notes, read.task.notes})
        for (const std::string& note : notes) log::warning("config", "{}", note);
    const auto probing = probe.empty() ? nullptr : std::make_shared<ProbeSteps>(world, probe);
    follow_plan(world, read);
    const Mesh mesh = mesh_for(world, config.arguments);
    TrainerTask task = make_task_everywhere(mesh, read);
    count_operations(task, world, read);
    Trainer trainer(mesh, std::move(task), config.arguments);
    trainer.add(std::make_shared<KeepRecord>(config.arguments.output_dir, read.record));
    if (probing) trainer.add(probing);
    const TrainResult result = trainer.train();
    if (world.is_leader()) say_result(result, config.arguments);
    return result.exit_code();
  };
  return run(prepare, body);
}

}  // namespace

int train_main(int argc, char** argv) {
  if (print_help(Args(argv + 1, argv + argc), kTrainHelp)) return 0;
  return train(parse_train(argc, argv), "");
}

int plan_probe_main(int argc, char** argv) {
  if (argc < 3)
    throw UsageError("plan",
                     "plan-probe needs a folder and a training file. Use lockstep plan "
                     "--probe.");
  return train(parse_train(argc - 1, argv + 1), argv[1]);
}

}  // namespace lockstep::cli

// lockstep-train: `lockstep train`, `generate`, `checkpoint import` and `checkpoint merge`, which
// need LibTorch, and the ranks of `lockstep doctor` and `lockstep plan --probe`.
// `lockstep` executes it, so that everything else starts in milliseconds.

int main(int argc, char** argv) {
  using namespace lockstep::cli;
  return end_at_once(guarded([&] {
    const std::string command = argc >= 2 ? argv[1] : "", action = argc >= 3 ? argv[2] : "";
    if (command == "train") return train_main(argc - 1, argv + 1);
    if (command == "generate") return generate_main(argc - 1, argv + 1);
    if (command == "plan-probe") return plan_probe_main(argc - 1, argv + 1);
    if (command == "doctor-probe") return doctor_probe_main(argc - 1, argv + 1);
    if (command == "checkpoint" && action == "import")
      return checkpoint_import_main(argc - 2, argv + 2);
    if (command == "checkpoint" && action == "merge")
      return checkpoint_merge_main(argc - 2, argv + 2);
    print_text(stderr, "lockstep: unknown command '{}'. lockstep --help lists them.\n", command);
    return 2;
  }));
}
