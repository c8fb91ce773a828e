#include "lockstep/train/trainer.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/core/thread_signals.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/effective_batch.h"
#include "lockstep/train/loop.h"
#include "lockstep/train/metrics_reporter.h"

namespace lockstep {
namespace train {
namespace {

void check_task(const TrainerTask& task) {
  const char* missing = !task.module ? "module" : !task.loss ? "loss" : nullptr;
  if (missing == nullptr && !task.train_data && !task.eval_data) missing = "train_data";
  if (missing != nullptr)
    throw UsageError("trainer", "the task has no {}. Set it: {{.module = net, .loss = ...}}.",
                     missing);
}

log::Level level_of(const std::string& name, log::Level passive) {
  if (name == "debug") return log::Level::kDebug;
  if (name == "info") return log::Level::kInfo;
  if (name == "warning") return log::Level::kWarning;
  if (name == "error" || name == "critical") return log::Level::kError;
  return passive;
}

void set_log_level(const TrainingArguments& a, const World& world) {
  const bool first = a.log_on_each_node ? world.local_rank() == 0 : world.is_leader();
  const std::string& name = first ? a.log_level : a.log_level_replica;
  if (first && name != "passive") log::set_level(level_of(name, log::Level::kInfo));
  if (!first && name != "warning" && name != "passive")
    log::set_level(level_of(name, log::Level::kWarning));
}

void set_switches(const TrainingArguments& a, const Mesh& mesh) {
  set_log_level(a, mesh.world());
  const auto seed = static_cast<std::uint64_t>(a.seed);
  if (a.full_determinism) {
    optim::full_determinism(seed, generator_rank(mesh));
  } else {
    optim::seed_everything(seed, generator_rank(mesh));
  }
  if (a.tf32) optim::set_tf32(*a.tf32);
}

}  // namespace

// The parts of a run, in the order in which they depend on each other.
class TrainerImpl {
 public:
  TrainerImpl(Mesh mesh, TrainerTask task, TrainingArguments arguments)
      : run_{std::move(mesh), std::move(task), std::move(arguments)} {
    // As reading a file does. Everything else asks the flags.
    TrainingArguments& a = run_.arguments;
    a.bf16 |= a.mixed_precision == "bf16" || a.mixed_precision == "fp8";
    a.fp16 |= a.mixed_precision == "fp16";
    check_arguments(run_.arguments);
    expand_paths(run_.arguments);
    check_task(run_.task);
  }

  TrainResult train();
  Metrics evaluate();
  void add(std::shared_ptr<Observer> observer) { control_.add(std::move(observer)); }
  const TrainerState& state() const { return run_.state; }

 private:
  void prepare();
  void make_mesh();
  void finish(std::unique_ptr<monitor::RankRecorder> recorder);
  void load_best();
  void say_end();

  std::optional<Mesh> given_;  // run_.world is of it, where another one is made
  RunContext run_;
  RunControl control_{run_};
  MetricsReporter metrics_{run_, control_};
  CheckpointManager checkpoints_{run_, control_};
  Evaluator evaluator_{run_, control_};
  std::optional<Loop> loop_;
};

// The order matters: weights before the wrapper (it hands rank 0's to all), the optimizer after it,
// and generators last, because everything before may draw from them.
void TrainerImpl::prepare() {
  make_mesh();
  set_switches(run_.arguments, run_.mesh);
  control_.connect();
  run_.task.module->to(run_.world.device());
  const std::string path = checkpoints_.choose();
  std::optional<Checkpoint> checkpoint;
  if (!path.empty()) {
    checkpoint.emplace(path);
    checkpoint->load_model(*run_.task.module, run_.task.model_files);
  }
  // The whole model is tried. One that will be divided is not: it need not fit whole.
  const auto is_shard = [](const MeshAxis& axis) { return axis.name == "shard"; };
  const bool divided =
      !run_.task.make_parallelism && std::ranges::any_of(run_.mesh.axes(), is_shard);
  if (run_.arguments.auto_find_batch_size || (run_.arguments.elastic_gpu && !divided))
    find_batch_size(run_, control_);
  loop_.emplace(LoopParts{run_, control_, metrics_, checkpoints_, evaluator_});
  if (checkpoint) loop_->resume(*checkpoint);
  loop_->open();
  if (checkpoint) restore_random_state(run_.mesh, *checkpoint);
}

void TrainerImpl::make_mesh() {
  if (given_ || run_.task.make_parallelism || run_.mesh.size("data") != run_.world.size()) return;
  given_ = run_.mesh;
  run_.mesh = mesh_for(run_.world, run_.arguments);
}

TrainResult TrainerImpl::train() {
  if (!run_.task.train_data)
    throw UsageError("trainer", "the task has no train_data. Set it, or call evaluate().");
  if (loop_)
    throw UsageError("trainer",
                     "train() was called a second time, and a Trainer trains once. Make another "
                     "one; the module keeps its weights.");
  check_evaluation(run_.arguments, run_.task.eval_data && run_.task.eval_data->size() > 0);
  const io::FolderLock alone = checkpoints_.lock();  // held to the end of the run, however it ends
  std::unique_ptr<monitor::RankRecorder> recorder;
  bool recording = false;
  try {
    prepare();
    recorder = start_recording(run_.world, run_.arguments.output_dir, loop_->facts(),
                               run_.arguments.record_run)
                   .recorder;
    recording = run_.arguments.record_run;
    control_.notify(&Observer::on_train_begin);
    loop_->run();
    finish(std::move(recorder));
  } catch (...) {
    checkpoints_.close();  // the saver may still be writing into that folder
    if (recording)
      end_recording(run_.world, run_.arguments.output_dir,
                    "training ended with an error, which its output has");
    throw;
  }
  return run_.result;
}

void TrainerImpl::finish(std::unique_ptr<monitor::RankRecorder> recorder) {
  const TrainerState& state = run_.state;
  TrainResult& result = run_.result;
  result.global_step = state.global_step;
  result.stop_signal = control_.stop_signal();
  control_.ignore_signals();  // the run ends by itself
  checkpoints_.finish();
  if (run_.task.whole_at_end) run_.gathered();  // for those who use the model from here on
  if (result.stop_signal != 0 && control_.received_signal() != 0)
    report_stop(
        fmt::format("stopped by {}, {}saved at step {}", signal_name(control_.received_signal()),
                    result.durable_step == state.global_step ? "" : "not ", state.global_step));
  const bool complete = result.stop_signal == 0;
  if (complete && run_.arguments.load_best_model_at_end && state.best_model_checkpoint) load_best();
  metrics_.summarize();
  control_.notify(&Observer::on_train_end);
  loop_->release_optimizer();
  metrics_.close();
  recorder.reset();
  if (run_.arguments.record_run) end_recording(run_.world, run_.arguments.output_dir, "");
  if (complete) {
    run_.world.barrier();  // the records of all ranks are there
    metrics_.advise();
  }
  say_end();
  control_.finish();
}

void TrainerImpl::load_best() {
  checkpoints_.load_best();
  loop_->sync_from_model();
}

// The run's last line, by the leader. Collective.
void TrainerImpl::say_end() {
  const TrainResult& result = run_.result;
  const std::string& newest = checkpoints_.newest();
  const std::string stop = result.stop_signal != 0 ? control_.stopped_by() : std::string();
  if (!run_.world.is_leader()) return;
  const std::int64_t step = result.global_step;
  const std::string ended = stop.empty() ? fmt::format("trained until step {}", step)
                                         : fmt::format("stopped by {} at step {}", stop, step);
  if (result.lost_step >= 0) {
    const std::string other = newest.empty()
                                  ? "There is no checkpoint to continue from."
                                  : fmt::format("The newest whole checkpoint is {}.", newest);
    log::error("trainer",
               "{}, but the last checkpoint (step {}) could not be written and is lost. {} Free "
               "some space, then run again with resume_from_checkpoint: auto (lockstep train "
               "--resume auto).",
               ended, result.lost_step, other);
  } else if (!stop.empty() && result.durable_step == step) {
    log::warning("trainer",
                 "stopped by {}, saved at step {}. To continue: resume_from_checkpoint: auto "
                 "(lockstep train --resume auto).",
                 stop, step);
  } else if (!stop.empty()) {
    log::error("trainer",
               "{}, of which {} has only the weights (save_only_model): no run can continue from "
               "there.",
               ended, newest);
  } else if (step == result.first_step) {
    const bool by_steps = run_.arguments.max_steps > 0;
    const std::string loss = std::isfinite(result.train_loss)
                                 ? fmt::format(" (mean loss {:.4f})", result.train_loss)
                                 : "";
    log::info("trainer",
              "nothing to do: the run in {} is {} step {}{}. To train longer, raise {} "
              "(now {}); to start again, overwrite_output_dir: true without resuming.",
              run_.arguments.output_dir,
              by_steps && step > run_.arguments.max_steps ? "past max_steps, at" : "complete at",
              step, loss, by_steps ? "max_steps" : "num_train_epochs",
              by_steps ? fmt::format("{}", run_.arguments.max_steps)
                       : fmt::format("{}", static_cast<double>(run_.arguments.num_train_epochs)));
  }
}

Metrics TrainerImpl::evaluate() {
  if (!run_.task.eval_data)
    throw UsageError("trainer", "the task has no eval_data to evaluate on. Set it.");
  make_mesh();  // the samples are divided as in training
  if (!loop_) run_.task.module->to(run_.world.device());
  control_.connect();
  const Metrics metrics = evaluator_.evaluate();
  if (loop_ && run_.task.whole_at_end) run_.gathered();
  return metrics;
}

}  // namespace train

WorldOptions world_options(const TrainingArguments& arguments) {
  WorldOptions options;
  options.backend = arguments.ddp_backend.value_or("auto");
  options.timeout = std::chrono::seconds(arguments.ddp_timeout);
  if (arguments.use_cpu) options.device = c10::Device(c10::kCPU);
  return options;
}

namespace train {
namespace {

// How many of the `ranks` that hold the same layers, or slices of them, divide these: of one host
// they never reach into another.
int shard_ranks(World& world, const TrainingArguments& arguments, const FsdpPlan& plan, int ranks) {
  const auto local = world.local_size();
  const auto slices = static_cast<int>(arguments.tensor_parallel_degree);
  if (plan.hybrid &&
      !all_ranks(world, world.size() % local == 0 &&
                            world.node_rank() * local + world.local_rank() == world.rank()))
    throw UsageError("trainer",
                     "fsdp: hybrid_shard divides the model inside a host, and hosts have different "
                     "numbers of ranks (this one {}, all {}). Start equally many on each, or use "
                     "full_shard.",
                     local, world.size());
  if (plan.hybrid) return local % slices == 0 ? std::gcd(ranks, local / slices) : 1;
  const auto asked = static_cast<int>(arguments.data_parallel_shard_degree.value_or(ranks));
  if (ranks % asked != 0 && ranks == world.size())
    throw UsageError("trainer",
                     "data_parallel_shard_degree is {}, and the run has {} rank{}. Start a "
                     "multiple of {}, or write {}.",
                     asked, ranks, ranks == 1 ? "" : "s", asked, ranks);
  if (ranks % asked != 0)
    throw UsageError("trainer",
                     "data_parallel_shard_degree is {}, and {} ranks hold the same part of the "
                     "model. Start a multiple of it: the others hold copies.",
                     asked, ranks);
  return asked;
}

}  // namespace
}  // namespace train

// Under fsdp ranks see the same samples as in the plain world. Stages of a pipeline are far from
// each other, as in torchtitan, so that copies and parts of a stage are near; slices of a layer are
// nearest.
Mesh mesh_for(World world, const TrainingArguments& arguments) {
  const auto stages = static_cast<int>(arguments.pipeline_parallel_degree);
  const auto slices = static_cast<int>(arguments.tensor_parallel_degree);
  const int ranks = train::batch_ranks(arguments, world.size());
  const train::FsdpPlan plan = train::fsdp_plan(arguments);
  if (!plan.on && stages * slices == 1) return world;
  const int shard = plan.on ? train::shard_ranks(world, arguments, plan, ranks) : 1;
  if (!plan.on && stages == 1) return Mesh(std::move(world), {{"data", -1}, {"tensor", slices}});
  std::vector<MeshAxis> axes;
  if (stages > 1) axes.push_back({"pipeline", stages});
  if (!plan.on || plan.hybrid || shard < ranks) axes.push_back({"data", ranks / shard});
  if (plan.on) axes.push_back({"shard", shard});
  if (slices > 1) axes.push_back({"tensor", slices});
  return Mesh(std::move(world), std::move(axes));
}

Trainer::Trainer(Mesh mesh, TrainerTask task, TrainingArguments arguments)
    : impl_(std::make_unique<train::TrainerImpl>(std::move(mesh), std::move(task),
                                                 std::move(arguments))) {}
Trainer::~Trainer() = default;

void Trainer::add(std::shared_ptr<Observer> observer) {
  impl_->add(std::move(observer));
}
TrainResult Trainer::train() {
  return impl_->train();
}
train::Metrics Trainer::evaluate() {
  return impl_->evaluate();
}
const train::TrainerState& Trainer::state() const {
  return impl_->state();
}

}  // namespace lockstep
