#include "lockstep/train/run_recording.h"

#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <system_error>

#include "lockstep/core/cores.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/monitor/writer_process.h"
#include "lockstep/parallel/oversubscription.h"
#include "lockstep/parallel/sharded_optimizer.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/train/config_keys.h"

namespace lockstep::train {
namespace {

// "sharded fused adamw"; "custom" for one that the task brought along, of which nothing is known.
std::string optimizer_text(const RunContext& run) {
  const bool ours = !run.task.make_optimizer;
  const bool sharded = dynamic_cast<const ShardedOptimizer*>(run.optimizer) != nullptr;
  return std::string(sharded ? "sharded" : "replicated") +
         (ours ? " fused " + run.arguments.optim : " custom");
}

}  // namespace

monitor::RunFacts Loop::facts() const {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const World& world = run_.world;
  monitor::RunFacts facts;
  facts.world_size = world.size();
  facts.device = c10::DeviceTypeName(world.device().type(), /*lower_case=*/true);
  facts.backend = world.backend();
  facts.program = "trainer";
  facts.started_unix_s = std::chrono::duration<double>(now).count();
  facts.ranks_on_host = std::max(1, world.local_size());
  if (world.device().is_cuda()) facts.gpus_visible = static_cast<int>(torch::cuda::device_count());
  facts.threads_per_rank = at::get_num_threads();
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
  return facts;
}

std::unique_ptr<monitor::RankRecorder> start_recording(RunContext& run, const Loop& loop) {
  const std::string& folder = run.arguments.output_dir;
  std::error_code unknown;
  ledger::set_output_dir(std::filesystem::absolute(folder, unknown).string());
  // Every rank takes part in the exchanges, also one that records nothing. Ranks that are each
  // bound to a core of their own share more cores than one of them may use.
  const bool one_host = run.world.local_size() == run.world.size();
  const int cores = one_host ? parallel::cores_of_ranks(run.world) : allowed_cores();
  const int hosts = static_cast<int>(run.world.max(run.world.node_rank())) + 1;
  // With this exchange the folder is this run's on every rank: what an earlier one left there has
  // been moved away by those that write.
  run.world.agree([&] {
    if (!run.world.is_leader() || !run.arguments.record_run) return;
    try {
      monitor::RunFacts facts = loop.facts();
      facts.cores = cores;
      facts.hosts = hosts;
      // A launcher may start this rank again.
      facts.writer = monitor::process_identity(under_lockstep_run() ? ::getppid() : ::getpid());
      monitor::write_facts(folder, facts);
    } catch (const SystemError& error) {
      log::warning("record", "{} Training continues without a record.", error.what());
    }
  });
  if (!run.arguments.record_run) return nullptr;
  return std::make_unique<monitor::RankRecorder>(monitor::RankRecorderOptions{
      .directory = folder,
      .rank = run.world.rank(),
      .host = run.world.node_rank(),
      .gpus = run.world.device().is_cuda() && run.world.local_rank() == 0});
}

void end_recording(const RunContext& run, const std::string& failure) {
  if (!run.world.is_leader() || !run.arguments.record_run) return;
  const std::string& folder = run.arguments.output_dir;
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
