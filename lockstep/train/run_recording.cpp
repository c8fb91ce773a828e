#include "lockstep/train/run_recording.h"

#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <system_error>

#include "lockstep/comm/agree.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/core/cores.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/monitor/run_record.h"
#include "lockstep/parallel/oversubscription.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/loop.h"

namespace lockstep::train {
namespace {

// "sharded fused adamw", "fully sharded over 2 ranks, fused adamw"; "custom" for one that the task
// provides, about which nothing is known.
std::string optimizer_text(const RunContext& run) {
  const bool ours = !run.task.make_optimizer;
  const std::string text = run.parallelism->text();
  return fmt::format("{}{} {}", text, text.find(' ') == text.npos ? "" : ",",
                     ours ? "fused " + run.arguments.optim : "custom");
}

}  // namespace

monitor::RunFacts world_facts(const World& world) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  monitor::RunFacts facts;
  facts.world_size = world.size();
  facts.device = c10::DeviceTypeName(world.device().type(), /*lower_case=*/true);
  facts.backend = world.backend();
  facts.started_unix_s = std::chrono::duration<double>(now).count();
  facts.ranks_on_host = std::max(1, world.local_size());
  if (world.device().is_cuda()) facts.gpus_visible = static_cast<int>(torch::cuda::device_count());
  facts.threads_per_rank = at::get_num_threads();
  return facts;
}

monitor::RunFacts Loop::facts() const {
  monitor::RunFacts facts = world_facts(run_.world);
  facts.program = "trainer";
  for (const at::Tensor& parameter : run_.task.module->parameters()) {
    facts.parameters += parameter.numel();
    if (!parameter.requires_grad()) continue;
    facts.trainable_parameters += parameter.numel();
    facts.gradient_bytes += static_cast<std::int64_t>(parameter.nbytes());
  }
  facts.per_device_batch = run_.arguments.per_device_train_batch_size;
  facts.accumulation = accumulation_steps_;
  facts.optimizer = optimizer_text(run_);
  facts.arguments = arguments_node(run_.arguments);
  facts.total_steps = run_.state.max_steps;
  return facts;
}

Recording start_recording(World& world, const std::string& folder, const monitor::RunFacts& known,
                          bool record) {
  Recording recording{.facts = known};
  monitor::RunFacts& facts = recording.facts;
  std::error_code unknown;
  ledger::set_output_dir(std::filesystem::absolute(folder, unknown).string());
  // Every rank takes part in the exchanges, even one that records nothing. Ranks that are each
  // bound to a core of their own together have more cores than one of them may use.
  const bool one_host = world.local_size() == world.size();
  facts.cores = one_host ? parallel::cores_of_ranks(world) : allowed_cores();
  facts.hosts = static_cast<int>(all_reduce(world, world.node_rank(), ReduceOp::kMax)) + 1;
  // A launcher may start this rank again.
  facts.writer = monitor::process_identity(under_lockstep_run() ? ::getppid() : ::getpid());
  // After this exchange the folder is this run's on every rank: the ranks that write have
  // deleted an earlier run's record.
  agree(world, [&] {
    if (!world.is_leader() || !record) return;
    try {
      monitor::write_facts(folder, facts);
    } catch (const SystemError& error) {
      log::warning("record", "{} Training continues without a record.", error.what());
    }
  });
  if (record)
    recording.recorder = std::make_unique<monitor::RankRecorder>(
        monitor::RankRecorderOptions{.directory = folder,
                                     .rank = world.rank(),
                                     .host = world.node_rank(),
                                     .gpus = world.device().is_cuda() && world.local_rank() == 0});
  return recording;
}

void end_recording(const World& world, const std::string& folder, const std::string& failure) {
  if (!world.is_leader()) return;
  const std::string file = folder + "/" + monitor::kRecordFolder + "/run.json";
  try {
    monitor::RunFacts facts = monitor::parse_facts(read_file(file), file);
    facts.failure = failure;
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    if (failure.empty()) facts.ended_unix_s = std::chrono::duration<double>(now).count();
    monitor::write_facts(folder, facts);
  } catch (const Error& error) {  // not there, or not writable any more
    log::warning("record", "{} The record does not say how the run ended.", error.what());
  }
}

}  // namespace lockstep::train
