// Everything before the first step: switches, data, optimizer, outputs, and what is resumed.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <new>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/io/atomic_dir.h"
#include "lockstep/io/file.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/parallel/sharded_optimizer.h"
#include "lockstep/train/effective_batch.h"
#include "lockstep/train/run_checks.h"
#include "lockstep/train/trainer_impl.h"

namespace lockstep::train {
namespace {

log::Level level_of(const std::string& name, log::Level passive) {
  if (name == "debug") return log::Level::kDebug;
  if (name == "info") return log::Level::kInfo;
  if (name == "warning") return log::Level::kWarning;
  if (name == "error" || name == "critical") return log::Level::kError;
  return passive;
}

optim::OptimizerOptions optimizer_options(const TrainingArguments& a) {
  if (a.optim == "sgd")
    return optim::SGDOptions{.lr = a.learning_rate, .weight_decay = a.weight_decay};
  const auto adam = [&](auto options) {
    options.lr = a.learning_rate;
    options.betas = {a.adam_beta1, a.adam_beta2};
    options.eps = a.adam_epsilon;
    options.weight_decay = a.weight_decay;
    return options;
  };
  if (a.optim == "adam") return adam(optim::AdamOptions{});
  return adam(optim::AdamWOptions{});
}

// Bytes of state of a replicated optimizer.
std::uint64_t state_bytes(const TrainingArguments& a, const torch::nn::Module& module) {
  std::uint64_t bytes = 0;
  for (const at::Tensor& parameter : module.parameters())
    if (parameter.requires_grad() && a.optim != "sgd") bytes += 2 * parameter.nbytes();
  return bytes;
}

// Bytes that this rank may still take: of its device, or of its part of the host's memory.
std::uint64_t available_bytes(const World& world) {
  const c10::Device device = world.device();
  if (!device.is_cpu())
    return c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).first;
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1)
      return kib * 1024 / static_cast<std::uint64_t>(world.local_size());
  }
  return std::numeric_limits<std::uint64_t>::max();
}

DdpOptions ddp_options(const TrainingArguments& a) {
  DdpOptions options;
  options.bucket_cap_mb = a.ddp_bucket_cap_mb;
  options.find_unused_parameters = a.ddp_find_unused_parameters.value_or(false);
  options.broadcast_buffers = a.ddp_broadcast_buffers.value_or(true);
  options.static_graph = a.ddp_static_graph.value_or(false);
  return options;
}

std::uint64_t data_seed(const TrainingArguments& a) {
  return static_cast<std::uint64_t>(a.data_seed.value_or(a.seed));
}

// Names the run whose attempt has begun in output_dir.
std::string run_file(const TrainingArguments& a) {
  return a.output_dir + "/.run_id";
}

std::string launchers_run() {
  return env::get("TORCHELASTIC_RUN_ID").value_or("");
}

}  // namespace

void TrainerImpl::set_switches() {
  const bool first = arguments_.log_on_each_node ? world_.local_rank() == 0 : world_.is_leader();
  const std::string& name = first ? arguments_.log_level : arguments_.log_level_replica;
  if (first && name != "passive") log::set_level(level_of(name, log::Level::kInfo));
  if (!first && name != "warning" && name != "passive")
    log::set_level(level_of(name, log::Level::kWarning));
  const auto seed = static_cast<std::uint64_t>(arguments_.seed);
  if (arguments_.full_determinism) {
    optim::full_determinism(seed, world_.rank());
  } else {
    optim::seed_everything(seed, world_.rank());
  }
  if (arguments_.tf32) optim::set_tf32(*arguments_.tf32);
  if (arguments_.compile_model && world_.is_leader())
    log::warning("trainer", "{}", kCompileModelNote);
}

// The order matters: weights before the wrapper (it hands rank 0's to all), the optimizer after it,
// generators last, because all before may draw from them.
void TrainerImpl::prepare() {
  set_switches();
  agreement_.emplace(world_);
  task_.module->to(world_.device());
  if (writes()) {
    for (const std::string& path : io::sweep(arguments_.output_dir).removed)
      log::info("checkpoint", "removed {}, which a run that died has left", path);
  }
  resume_restarted();
  const std::string path = choose_checkpoint();
  std::optional<Checkpoint> checkpoint;
  if (!path.empty()) {
    checkpoint.emplace(path);
    checkpoint->load_model(*task_.module);
  }
  if (arguments_.auto_find_batch_size || arguments_.elastic_gpu) find_batch_size();
  accumulation_steps_ = accumulation_steps(arguments_, world_.size());
  make_loader();
  plan_ = plan_steps(arguments_, loader_->batches_per_epoch(), accumulation_steps_);
  model_.emplace(task_.module, world_, ddp_options(arguments_));
  const auto weights =
      arguments_.average_tokens_across_devices ? WindowWeights::kCounts : WindowWeights::kOwnCounts;
  accumulation_ = std::make_unique<Accumulation>(
      *model_,
      AccumulationOptions{
          .steps = accumulation_steps_, .weights = weights, .expected_count = expected_count()});
  make_optimizer();
  if (checkpoint) resume(*checkpoint);
  schedule_ = optim::make_schedule({.name = arguments_.lr_scheduler_type,
                                    .warmup_steps = plan_.warmup_steps,
                                    .total_steps = plan_.max_steps,
                                    .lr = arguments_.learning_rate,
                                    .kwargs = arguments_.lr_scheduler_kwargs});
  set_learning_rate();
  state.max_steps = plan_.max_steps;
  state.num_train_epochs = plan_.num_train_epochs;
  state.train_batch_size = arguments_.per_device_train_batch_size;
  state.logging_steps = static_cast<double>(plan_.logging_steps);
  state.eval_steps = static_cast<double>(plan_.eval_steps);
  state.save_steps = static_cast<double>(plan_.save_steps);
  make_outputs(path);
  if (checkpoint) restore_random(*checkpoint);
}

// An attempt that the launcher has restarted continues where the one before it was, unless the user
// has said never. That one may have died before it put the checkpoints of an earlier run aside:
// then no file names this run, and the attempt begins as that one did.
void TrainerImpl::resume_restarted() {
  const std::string asked = arguments_.resume_from_checkpoint.value_or("");
  const std::int64_t attempt = env::get_int("TORCHELASTIC_RESTART_COUNT").value_or(0);
  if (attempt == 0 && world_.is_leader()) ::unlink(run_file(arguments_).c_str());
  if (attempt == 0 || asked == "never" || asked == "auto") return;
  std::string answer;
  if (world_.is_leader()) {
    try {
      const bool ours = read_file(run_file(arguments_)) == launchers_run();
      // Before its first checkpoint it begins again from the folder that it was given.
      if (ours && (asked.empty() || find_checkpoint(arguments_.output_dir, "auto").step >= 0))
        answer = "auto";
    } catch (const SystemError& e) {
      log::info("trainer", "no attempt of this run has begun in {} ({})", arguments_.output_dir,
                e.what());
    }
  }
  if (world_.broadcast(answer, 0).empty()) return;
  arguments_.resume_from_checkpoint = "auto";
  if (world_.is_leader())
    log::info("trainer",
              "attempt {} of this run resumes from its newest checkpoint (not with --resume never)",
              attempt);
}

void TrainerImpl::make_loader() {
  const auto& a = arguments_;
  loader_.emplace(
      data::loader(task_.train_data, world_,
                   {.batch_size = a.per_device_train_batch_size,
                    .shuffle = task_.sampler == nullptr,
                    .drop_last = a.dataloader_drop_last,
                    .seed = data_seed(a),
                    .num_workers = static_cast<int>(a.dataloader_num_workers),
                    .prefetch_factor = static_cast<int>(a.dataloader_prefetch_factor.value_or(2)),
                    .pin_memory = a.dataloader_pin_memory,
                    .persistent_workers = a.dataloader_persistent_workers,
                    .sampler = task_.sampler}));
}

// What gradients are weighed against. From the dataset's first sample and not from the first batch
// seen: a run that is resumed sees another one first, and must still give the same bits.
double TrainerImpl::expected_count() const {
  data::SampleRandom random({}, 0);
  const at::Tensor target = task_.train_data->get(0, random).target;
  const std::int64_t tokens = target.defined() ? data::count_tokens(target.unsqueeze(0), 1) : 1;
  return static_cast<double>(arguments_.per_device_train_batch_size *
                             std::max<std::int64_t>(1, tokens));
}

// Why the optimizer is sharded, the same on every rank; empty: it is replicated.
std::string TrainerImpl::reason_to_shard() {
  const std::string& asked = arguments_.shard_optimizer;
  if (asked != "auto") return asked == "true" ? "shard_optimizer: true" : "";
  if (world_.size() == 1) return "";
  std::string unable;
  try {
    model_->reducer().check_deferrable();
  } catch (const UsageError& e) {
    unable = e.what();
  }
  const bool shm = world_.device().is_cpu() && world_.backend() == "shm";
  // Activations and gradients need the other half.
  const bool needs_room =
      !shm && world_.any(state_bytes(arguments_, *task_.module) > available_bytes(world_) / 2);
  if (!shm && !needs_room) return "";
  if (world_.any(!unable.empty())) {
    if (world_.is_leader() && !unable.empty())
      log::info("trainer", "shard_optimizer: auto cannot shard this model: {}", unable);
    return "";
  }
  return shm ? "ranks share memory: averaging and step are one pass"
             : "the state of every rank would need more than half of the free memory";
}

void TrainerImpl::make_optimizer() {
  auto groups = optim::decay_groups(*task_.module, optimizer_options(arguments_));
  const std::string reason = reason_to_shard();
  if (reason.empty()) {
    optimizer_ = std::make_unique<optim::ReplicatedOptimizer>(*model_, std::move(groups));
  } else {
    optimizer_ = std::make_unique<ShardedOptimizer>(*model_, std::move(groups));
  }
  if (world_.is_leader())
    log::info("trainer", "optimizer {}: {}", arguments_.optim,
              reason.empty() ? "replicated"
                             : fmt::format("sharded over {} rank{} ({})", world_.size(),
                                           world_.size() == 1 ? "" : "s", reason));
  if (arguments_.fp16) scaler_ = std::make_unique<optim::GradScaler>(world_);
}

void TrainerImpl::make_outputs(const std::string& checkpoint) {
  since_log_ = at::zeros({2}, at::dtype(at::kDouble).device(world_.device()));
  since_start_ = at::zeros_like(since_log_);
  skipped_ = at::zeros({}, since_log_.options());
  StopSignalOptions stop{
      .install = arguments_.enable_jit_checkpoint,
      .give_up = [world = world_](const std::string& why) mutable { world.abort(why); }};
  // Alone there is nobody to agree with: the step's end is waited for, however long it takes.
  if (world_.size() == 1) stop.deadline = std::chrono::hours(24 * 365);
  signals_ = std::make_unique<StopSignals>(std::move(stop));
  if (writes()) {
    saver_ = std::make_unique<AsyncSaver>(
        SaverOptions{.output_dir = arguments_.output_dir,
                     .limit = static_cast<int>(arguments_.save_total_limit.value_or(0))});
    check_disk();
    make_way(checkpoint);
  }
  if (!world_.is_leader()) return;
  if (env::get_int("TORCHELASTIC_MAX_RESTARTS").value_or(0) > 0)
    write_file_atomically(run_file(arguments_), launchers_run());
  const auto& to = arguments_.report_to;
  const bool tensorboard = std::any_of(to.begin(), to.end(), [](const std::string& name) {
    return name == "tensorboard" || name == "all";
  });
  metrics_ = std::make_unique<MetricsLog>(
      arguments_.output_dir, MetricsLogOptions{.tensorboard = tensorboard,
                                               .run_name = arguments_.run_name.value_or(""),
                                               .resumed_at = state.global_step});
  progress_ = std::make_unique<Progress>(ProgressOptions{.total_steps = plan_.max_steps,
                                                         .done_steps = state.global_step,
                                                         .bar = !arguments_.disable_tqdm});
  const std::string name = arguments_.run_name ? *arguments_.run_name + ": " : std::string();
  log::info("trainer", "{}{} steps of {}, {} samples in {} steps per epoch", name, plan_.max_steps,
            effective_batch_text(arguments_, world_.size()), loader_->dataset_size(),
            plan_.steps_per_epoch);
}

// Older checkpoints are deleted after the new one is durable, so with a limit two stand side by
// side; without one nobody can say how many.
void TrainerImpl::check_disk() {
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : model_tensors(*task_.module, /*copy_buffers=*/false))
    bytes += tensor.nbytes();
  const bool only_last =
      arguments_.save_strategy == Interval::kSteps
          ? state.global_step + plan_.save_steps >= plan_.max_steps
          : arguments_.save_strategy == Interval::kEpoch && plan_.num_train_epochs - epoch_ <= 1;
  const bool has_one = durable_step_ >= 0;  // and it goes when there are two more
  check_room(arguments_, bytes,
             arguments_.save_strategy != Interval::kNo && arguments_.save_total_limit &&
                 !only_last && !has_one);
}

// ---------------------------------------------------------------- auto_find_batch_size

// As much as a step holds besides the batch, its activations and its gradients: Adam's state, and
// with several ranks the buckets. Nothing is written there.
std::vector<at::Tensor> TrainerImpl::memory_of_a_step() const {
  const int copies = (arguments_.optim == "sgd" ? 0 : 2) + (world_.size() > 1 ? 1 : 0);
  std::vector<at::Tensor> held;
  for (const at::Tensor& parameter : task_.module->parameters())
    for (int i = 0; i < copies && parameter.requires_grad(); ++i)
      held.push_back(at::empty_like(parameter));
  return held;
}

// One forward and backward of this rank alone; what it leaves behind is taken back.
bool TrainerImpl::batch_fits(std::int64_t batch_size) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& buffer : task_.module->buffers()) buffers.push_back(buffer.clone());
  const optim::RngState random = optim::rng_state();
  bool fits = true;
  try {
    const auto held = memory_of_a_step();
    auto loader = data::loader(task_.train_data, World{},
                               {.batch_size = batch_size,
                                .seed = data_seed(arguments_),
                                .device = world_.device(),
                                .check_ranks = false});
    auto batches = loader.epoch(0);
    if (const auto batch = batches.next()) forward(*batch).backward();
  } catch (const std::bad_alloc&) {
    fits = false;
  } catch (const c10::Error& e) {
    if (!says_out_of_memory(e.what_without_backtrace())) throw;
    fits = false;
  }
  for (at::Tensor& parameter : task_.module->parameters()) parameter.mutable_grad() = at::Tensor();
  const torch::NoGradGuard no_grad;
  const auto now = task_.module->buffers();
  for (std::size_t i = 0; i < buffers.size(); ++i) at::Tensor(now[i]).copy_(buffers[i]);
  optim::set_rng_state(random);
  return fits;
}

// Halves the batch until it fits every rank (or goes to the next smaller one that divides the
// window), and raises the accumulation: the effective batch, on which learning depends, stays.
void TrainerImpl::find_batch_size() {
  task_.module->train();
  for (;;) {
    const std::int64_t batch = arguments_.per_device_train_batch_size;
    const std::int64_t window = batch * accumulation_steps(arguments_, world_.size());
    const bool fits = batch_fits(batch);
    if (!agreement_->exchange_now({.out_of_memory = !fits}).out_of_memory) return;
    // What the allocator keeps of this trial, another rank on the GPU may need for the next.
    if (!world_.device().is_cpu()) c10::getDeviceAllocator(world_.device().type())->emptyCache();
    if (batch == 1) out_of_memory("not even a batch of 1 fits");
    const std::int64_t smaller = smaller_batch(arguments_, world_.size());
    arguments_.per_device_train_batch_size = smaller;
    if (!arguments_.tokens_per_update) arguments_.gradient_accumulation_steps = window / smaller;
    if (world_.is_leader())
      log::warning("trainer", "a batch of {} does not fit every rank's memory: {}", batch,
                   effective_batch_text(arguments_, world_.size()));
  }
}

}  // namespace lockstep::train
