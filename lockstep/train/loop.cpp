#include "lockstep/train/loop.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/device.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/nn/nf4.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/optim/schedule.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/effective_batch.h"
#include "lockstep/train/train_optimizer.h"

namespace lockstep::train {
namespace {

std::optional<c10::ScalarType> type_named(const std::string& name) {
  if (name.empty()) return std::nullopt;
  return name == "bfloat16" ? at::kBFloat16 : name == "float16" ? at::kHalf : at::kFloat;
}

ParallelOptions parallel_options(const RunContext& run) {
  const TrainingArguments& a = run.arguments;
  const FsdpPlan plan = fsdp_plan(a);
  return {.data = {.bucket_cap_mb = a.ddp_bucket_cap_mb,
                   .find_unused_parameters = a.ddp_find_unused_parameters.value_or(false),
                   .static_graph = a.ddp_static_graph.value_or(false),
                   .broadcast_buffers = a.ddp_broadcast_buffers.value_or(true)},
          .shard = {.reshard_after_forward = plan.reshard_after_forward,
                    .param_dtype = type_named(plan.param_dtype),
                    .reduce_dtype = type_named(plan.reduce_dtype),
                    .cpu_offload = plan.cpu_offload},
          .schedule = parallel::schedule_named(a.pipeline_parallel_schedule)};
}

// The mesh has what the training file asks for.
void check_mesh(const RunContext& run) {
  const TrainingArguments& a = run.arguments;
  const bool fsdp = fsdp_plan(a).on;
  const char* const asked = fsdp                             ? "fsdp"
                            : a.shard_optimizer == "true"    ? "shard_optimizer: true"
                            : a.pipeline_parallel_degree > 1 ? "pipeline_parallel_degree"
                            : a.tensor_parallel_degree > 1   ? "tensor_parallel_degree"
                                                             : nullptr;
  if (run.task.make_parallelism && asked != nullptr)
    throw UsageError("trainer",
                     "{} is set, and TrainerTask::make_parallelism makes another parallelism. "
                     "Keep one of them.",
                     asked);
  for (const auto& [axis, degree] : {std::pair("pipeline", a.pipeline_parallel_degree),
                                     std::pair("tensor", a.tensor_parallel_degree)})
    if (degree > 1 && run.mesh.size(axis) != degree)
      throw UsageError("trainer",
                       "the mesh has {} ranks along '{}', and {}_parallel_degree is {}. Make them "
                       "equal, or give the Trainer the world.",
                       run.mesh.size(axis), axis, axis, degree);
  const auto is_shard = [](const MeshAxis& axis) { return axis.name == "shard"; };
  if (fsdp && std::ranges::none_of(run.mesh.axes(), is_shard))
    throw UsageError("trainer",
                     "fsdp is set, and the mesh ({}) has no axis 'shard'. Add it, or give the "
                     "Trainer the world.",
                     run.mesh.text());
  const char* const divides = std::ranges::any_of(run.mesh.axes(), is_shard) ? "fsdp"
                              : run.mesh.size("pipeline") > 1                ? "a pipeline"
                              : run.mesh.size("tensor") > 1                  ? "tensor parallelism"
                                                                             : nullptr;
  if (a.save_on_each_node && divides != nullptr && !run.task.make_parallelism &&
      run.world.size() > run.world.local_size())
    throw UsageError("trainer",
                     "save_on_each_node writes the whole model on every host, and {} has it "
                     "nowhere: all ranks write one folder together. Put output_dir on a file "
                     "system that all hosts mount, and delete save_on_each_node.",
                     divides);
}

void say_waits(const RunContext& run, PipelineSchedule schedule) {
  const int stages = run.mesh.size("pipeline");
  const std::int64_t passes = accumulation_steps(run.arguments, run.batch_ranks());
  const int interleaved = schedule == PipelineSchedule::kInterleaved1F1B ? 2 : 1;
  log::info("trainer",
            "a pipeline of {} ranks and {} micro-batch{} a step: by the schedule a rank waits "
            "at least {:.0f} % of the time, less with more micro-batches "
            "(gradient_accumulation_steps)",
            stages, passes, passes == 1 ? "" : "es",
            100.0 * (stages - 1) / static_cast<double>(interleaved * passes + stages - 1));
}

RunContext& make_parallelism(RunContext& run) {
  check_mesh(run);
  if (run.task.make_parallelism) {
    run.parallelism = run.task.make_parallelism(run.task.module, run.mesh);
    const Mesh& made = run.parallelism->mesh();
    if (made.axes() == run.mesh.axes()) return run;
    throw UsageError("trainer",
                     "the task's parallelism has a mesh of {}, and the Trainer one of {}, by which "
                     "it divides the samples. Give the Trainer the mesh, and make the parallelism "
                     "with the one that it passes on.",
                     made.text(), run.mesh.text());
  }
  run.why_sharded = reason_to_shard(run);
  ParallelOptions options = parallel_options(run);
  options.shard_optimizer = !run.why_sharded.empty();
  if (options.shard.cpu_offload && run.world.device().is_cpu() && run.world.is_leader())
    log::warning("trainer", "offload of fsdp has no effect: the model is on the CPU already.");
  run.parallelism = parallelize(*run.task.module, run.mesh, options);
  if (run.mesh.size("pipeline") > 1 && run.world.is_leader()) say_waits(run, options.schedule);
  return run;
}

data::Loader train_loader(const RunContext& run) {
  const TrainingArguments& a = run.arguments;
  // A step takes its batches at once, so those of the next one are loaded while it computes.
  const std::int64_t workers = std::max<std::int64_t>(1, a.dataloader_num_workers);
  const std::int64_t ahead = (accumulation_steps(a, run.batch_ranks()) + workers - 1) / workers;
  return data::loader(run.task.train_data, run.mesh.batch(),
                      {.batch_size = a.per_device_train_batch_size,
                       .shuffle = run.task.sampler == nullptr,
                       .drop_last = a.dataloader_drop_last,
                       .seed = data_seed(a),
                       .num_workers = static_cast<int>(a.dataloader_num_workers),
                       .prefetch_factor = static_cast<int>(
                           a.dataloader_prefetch_factor.value_or(std::max<std::int64_t>(2, ahead))),
                       .pin_memory = a.dataloader_pin_memory,
                       .persistent_workers = a.dataloader_persistent_workers,
                       .sampler = run.task.sampler});
}

// Ranks with windows of their own would wait for each other, or weigh by different numbers.
void compare_windows(RunContext& run, std::int64_t steps) {
  const auto all = all_gather_bytes(
      run.world, fmt::format("gradient_accumulation_steps {}, average_tokens_across_devices {}",
                             steps, run.arguments.average_tokens_across_devices));
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      throw UsageError("trainer",
                       "rank {} has {}, but rank 0 has {}. Give every rank the same arguments.",
                       rank, all[rank], all[0]);
}

// The arguments that a checkpoint was made with. They are only used to report a change, so a file
// that cannot be read does not end the run.
std::optional<Node> saved_arguments(const Checkpoint& checkpoint) {
  try {
    const std::string text = checkpoint.text("training_args.json");
    if (text.empty()) return std::nullopt;
    Node saved = parse_json(text, checkpoint.path() + "/training_args.json");
    if (saved.kind == NodeKind::kMap) return saved;
  } catch (const std::exception& error) {
    log::debug("trainer", "{} Nothing is said about changed arguments.", error.what());
  }
  return std::nullopt;
}

// When a run continues with a new learning rate, that rate was chosen for the present batch.
bool has_learning_rate_of(const Node& then, const TrainingArguments& a) {
  const Entry* rate = then.find("learning_rate");
  return rate == nullptr || same_value(rate->value, value_of(a, *find_key("learning_rate")));
}

// Variants of a captured micro-batch: the first one of a window makes the gradients, and the last
// one averages them over the ranks and takes the step.
constexpr int kFirst = 1, kLast = 2;

at::Tensor no_loss(const World& world) {
  return at::zeros({}, at::dtype(at::kDouble).device(world.device()));
}

// A batch without targets has a loss that is none.
void add_loss(const at::Tensor& sum, const at::Tensor& loss, const data::Batch& batch) {
  if (batch.tokens == 0) return;
  const at::Tensor mean = loss.to(sum.device(), at::kDouble).reshape({});
  sum.add_(mean, static_cast<double>(batch.tokens));
}

}  // namespace

// ---------------------------------------------------------------- before the first step

// The order matters: the parallelism hands rank 0's weights to all, the optimizer comes after it.
Loop::Loop(const LoopParts& parts)
    : run_(parts.run),
      control_(parts.control),
      metrics_(parts.metrics),
      checkpoints_(parts.checkpoints),
      evaluator_(parts.evaluator),
      accumulation_steps_(accumulation_steps(run_.arguments, run_.batch_ranks())),
      loader_(train_loader(run_)),
      plan_(plan_steps(run_.arguments, loader_.batches_per_epoch(), accumulation_steps_)),
      optimizer_(make_parallelism(run_)) {
  compare_windows(run_, accumulation_steps_);
  capture_steps();
}

void Loop::resume(const Checkpoint& checkpoint) {
  try {
    optimizer_.load(checkpoint);
  } catch (const UsageError& error) {
    const std::optional<Node> then = saved_arguments(checkpoint);
    const Entry* optim = then ? then->find("optim") : nullptr;
    if (optim == nullptr || plain_text(optim->value) == run_.arguments.optim) throw;
    throw UsageError("trainer",
                     "{} was saved with optim: {}, and optim is {} now. Set it back, or begin a "
                     "new run with the checkpoint's weights in another output_dir. ({})",
                     checkpoint.path(), plain_text(optim->value), run_.arguments.optim,
                     error.what());
  }
  checkpoints_.resume(checkpoint);
  resume_data(checkpoint.position());
  warn_of_other_threads(run_.mesh, checkpoint);
  if (!run_.world.is_leader()) return;
  const DataPosition& saved = checkpoint.position();
  const std::optional<Node> then = saved_arguments(checkpoint);
  resumed_batch_ = then && has_learning_rate_of(*then, run_.arguments)
                       ? saved.world_size * saved.batch_size * saved.accumulation
                       : effective_batch(run_.arguments, run_.batch_ranks());
  if (then) say_changes(checkpoint, *then);
  log::info("trainer", "resumed from {} at step {}, epoch {:.2f}", checkpoint.path(),
            run_.state.global_step, run_.state.epoch);
}

void Loop::resume_data(const DataPosition& saved) {
  const TrainingArguments& a = run_.arguments;
  const std::int64_t step = run_.state.global_step;
  epoch_ = saved.epoch + saved.epoch_ended;
  evaluation_due_ = saved.evaluation_due != 0;
  if (!saved.epoch_ended && !a.ignore_data_skip) {
    loader_.load_state({.epoch = saved.epoch,
                        .cursor = saved.cursor,
                        .seed = static_cast<std::uint64_t>(saved.seed),
                        .size = saved.dataset_size,
                        .order = saved.order});
  }
  const BatchParts then{saved.world_size, saved.batch_size, saved.accumulation};
  const BatchParts now{run_.batch_ranks(), a.per_device_train_batch_size, accumulation_steps_};
  const bool same = then == now;
  // In the present run's steps: its ranks divide the rest of the epoch.
  const std::int64_t left =
      (loader_.batches_left(epoch_) + accumulation_steps_ - 1) / accumulation_steps_;
  // The run that saved may itself have continued from one with other numbers.
  const bool counted_the_same =
      a.ignore_data_skip || step == (epoch_ + 1) * plan_.steps_per_epoch - left;
  if (!same || !counted_the_same) {
    const double share = static_cast<double>(left) / static_cast<double>(plan_.steps_per_epoch);
    plan_ =
        replan_steps(a, plan_, {.step = step, .epoch = static_cast<double>(epoch_) + 1 - share});
  }
  if (!same && run_.world.is_leader()) log::warning("trainer", "{}", other_batch_text(then, now));
}

// Other values of what a step does are allowed, but must not go unnoticed. A schedule reaches its
// end with the run's last step, so that another number of steps means other learning rates.
void Loop::say_changes(const Checkpoint& checkpoint, const Node& then) const {
  if (plan_.max_steps <= checkpoint.state().global_step) return;
  const TrainingArguments& a = run_.arguments;
  std::vector<std::string> changed;
  const auto compare = [&](const char* name) {
    const Node now = value_of(a, *find_key(name));
    const Entry* before = then.find(name);
    if (before != nullptr && !same_value(before->value, now))
      changed.push_back(
          fmt::format("{} is {} and was {}", name, plain_text(now), plain_text(before->value)));
  };
  for (const char* name : {"max_steps", "num_train_epochs"}) compare(name);
  const std::string& type = a.lr_scheduler_type;
  const bool share = a.warmup_steps > 0 && a.warmup_steps < 1;
  const bool endless =
      run_.task.schedule || (!optim::schedule_has_end(type) && (type == "constant" || !share));
  const std::int64_t steps = checkpoint.state().max_steps;
  const bool longer = !changed.empty() && !endless && plan_.max_steps != steps;
  if (!longer) changed.clear();
  for (const char* name : {"lr_scheduler_type", "learning_rate", "weight_decay", "adam_beta1",
                           "adam_beta2", "max_grad_norm"})
    compare(name);
  if (changed.empty()) return;
  log::warning("trainer", "{} when the checkpoint was made{}.", fmt::join(changed, ", "),
               longer
                   ? fmt::format(": from step {} on the learning rate is that of a schedule over "
                                 "{} steps, not over {}",
                                 checkpoint.state().global_step, plan_.max_steps, steps)
                   : "");
}

// Only logged: no rule holds for every model (docs/strategies.md).
void Loop::advise_learning_rate() const {
  if (!run_.task.param_groups.empty() || run_.task.make_optimizer) return;  // with rates of its own
  const std::string advice =
      learning_rate_advice(run_.arguments, run_.batch_ranks(), resumed_batch_);
  if (!advice.empty()) log::info("trainer", "{}", advice);
  // A given max_steps was checked before the data was read.
  const std::string warmup = short_warmup_text(run_.arguments, plan_.max_steps);
  if (run_.arguments.max_steps <= 0 && !run_.task.schedule && !warmup.empty())
    log::warning("trainer", "{}", warmup);
}

bool Loop::saves_at_the_end_alone() const {
  const std::string& strategy = run_.arguments.save_strategy;
  if (strategy == Interval::kSteps)
    return run_.state.global_step + plan_.save_steps >= plan_.max_steps;
  return strategy == Interval::kEpoch && plan_.num_train_epochs - epoch_ <= 1;
}

void Loop::open() {
  TrainerState& state = run_.state;
  optimizer_.set_schedule(plan_);
  state.max_steps = plan_.max_steps;
  state.num_train_epochs = plan_.num_train_epochs;
  state.train_batch_size = run_.arguments.per_device_train_batch_size;
  state.logging_steps = static_cast<double>(plan_.logging_steps);
  state.eval_steps = static_cast<double>(plan_.eval_steps);
  state.save_steps = static_cast<double>(plan_.save_steps);
  run_.result.first_step = state.global_step;
  control_.listen();
  checkpoints_.open(saves_at_the_end_alone());
  metrics_.open(checkpoints_.continues_in_place() ? state.global_step : 0);
  if (!run_.world.is_leader()) return;
  const auto& name = run_.arguments.run_name;
  log::info("trainer", "{}{} steps of {}, {} samples in {} steps per epoch",
            name ? *name + ": " : std::string(), plan_.max_steps,
            effective_batch_text(run_.arguments, run_.batch_ranks()), loader_.dataset_size(),
            plan_.steps_per_epoch);
  advise_learning_rate();
}

DataPosition Loop::position() const {
  const data::SamplerState at = loader_.state();
  return {.epoch = at.epoch,
          .cursor = at.cursor,
          .seed = static_cast<std::int64_t>(at.seed),
          .world_size = run_.batch_ranks(),
          .batch_size = run_.arguments.per_device_train_batch_size,
          .accumulation = accumulation_steps_,
          .dataset_size = at.size,
          .order = at.order,
          .epoch_ended = epoch_ended_ ? 1 : 0,
          .evaluation_due = evaluation_due_ ? 1 : 0,
          .threads = at::get_num_threads()};
}

// ---------------------------------------------------------------- a step

void Loop::step(const data::Window& window) {
  const at::Tensor loss = compute(window);
  if (!captured_) {
    mark_device_phase(ledger::Phase::kOptimizer, run_.world.device());
    before_step();
    const bool will_log = due_after_step(run_.arguments, plan_, run_.state.global_step + 1).log;
    step_result_ = run_.with_memory_advice(
        [&] { return optimizer_.step(will_log); });  // the first one makes Adam's state
    mark_device_phase(ledger::Phase::kNone, run_.world.device());
  }
  ledger::set_step(++run_.state.global_step);
  optimizer_.set_learning_rate();
  metrics_.count(window.tokens(), loss, step_result_);
}

// Leaves the step's gradients. Returns the sum of the losses of this rank's tokens, float64 on the
// device.
at::Tensor Loop::compute(const data::Window& window) {
  if (run_.parallelism->takes_windows())
    return run_.with_memory_advice([&] { return run_stages(window); });
  const at::Tensor sum = no_loss(run_.world);
  for (const data::MicroBatch& micro : window) {
    const at::Tensor loss = run_.with_memory_advice([&] {
      return captured_ ? captured_micro_batch(micro, /*first=*/&micro == &window[0])
                       : backward(micro, micro.weight, micro.last);
    });
    add_loss(sum, loss, micro);
    if (!micro.last) control_.notify(&Observer::on_substep_end);
  }
  return sum;
}

// The stages of a pipeline compute different micro-batches at a time.
at::Tensor Loop::run_stages(const data::Window& window) {
  const auto forward = [this](const data::Batch& batch) { return run_.forward(batch).loss; };
  const std::vector<at::Tensor> losses =
      run_.parallelism->run_window(passes_of(window, forward, optimizer_.scaler()));
  const at::Tensor sum = no_loss(run_.world);
  for (std::size_t i = 0; i < losses.size(); ++i) {
    add_loss(sum, losses[i], window[i]);
    if (i > 0) control_.notify(&Observer::on_substep_end);
  }
  return sum;
}

// Returns the loss, without its graph.
at::Tensor Loop::backward(const data::Batch& batch, const at::Tensor& weight, bool last) {
  const c10::Device device = run_.world.device();
  const ledger::PhaseScope forward(ledger::Phase::kForward);
  mark_device_phase(ledger::Phase::kForward, device);
  const at::Tensor loss = run_.parallelism->watch(run_.forward(batch).loss);
  if (loss.numel() != 1)
    throw UsageError("trainer",
                     "the loss has {} elements. It must be the mean over the batch. Use a "
                     "reduction, or call mean().",
                     loss.numel());
  ledger::set_phase(ledger::Phase::kBackward);
  mark_device_phase(ledger::Phase::kBackward, device);
  // The copy of the weight that a graph reads is no longer a number that takes the loss's type.
  const at::Tensor weighed = loss * weight.to(loss.device(), loss.scalar_type());
  optim::GradScaler* const scaler = optimizer_.scaler();
  run_.parallelism->backward(scaler != nullptr ? scaler->scale(weighed) : weighed, last);
  mark_device_phase(ledger::Phase::kNone, device);
  return loss.detach();
}

void Loop::before_step() {
  const ledger::PhaseScope optimizer(ledger::Phase::kOptimizer);
  checkpoints_.wait_copied();  // before the exchange: with it every rank has waited
  {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    Waits waits = metrics_.waits();
    // A graph is one piece of work, so how much of it is communication is unknown.
    if (captured_ && captured_->unavailable_reason().empty()) waits.communication = -1;
    control_.exchange(waits);
  }
  control_.notify(&Observer::on_optimizer_step);
  optimizer_.begin_step();
}

// ---------------------------------------------------------------- a step in a CUDA graph

void Loop::capture_steps() {
  const std::string& asked = run_.arguments.compile_model;
  const bool automatic = asked == "auto";
  if (asked == "false" || (automatic && !run_.world.device().is_cuda())) return;
  if (automatic && !run_.task.capturable) {
    if (run_.world.is_leader())
      log::info("trainer",
                "compile_model: auto: steps run without a CUDA graph: the task does not say that "
                "its loss function may be recorded (TrainerTask::capturable, or compile_model: "
                "true).");
    return;
  }
  // What a graph reads in each replay are its inputs: the weight, data and target.
  const auto work = [this](const CapturedStep::Tensors& inputs, int variant) {
    data::Batch batch = *captured_batch_;
    batch.data = inputs[1];
    if (inputs.size() > 2) batch.target = inputs[2];
    CapturedStep::Tensors outputs{backward(batch, inputs[0], /*last=*/(variant & kLast) != 0)};
    if ((variant & kLast) == 0) return outputs;
    const ledger::PhaseScope optimizer(ledger::Phase::kOptimizer);
    mark_device_phase(ledger::Phase::kOptimizer, run_.world.device());
    const optim::StepResult result = optimizer_.step(/*want_grad_norm=*/true);
    outputs.push_back(result.grad_norm);
    outputs.push_back(result.skipped);
    return outputs;
  };
  captured_ = std::make_unique<CapturedStep>(
      optimizer_.optimizer(),
      CapturedStepOptions{.step = optimizer_.step_options(/*want_grad_norm=*/true),
                          .parameters = run_.task.module->parameters(),
                          .parallelism = run_.parallelism,
                          .asked = !automatic},
      work);
  if (!captured_->unavailable_reason().empty()) captured_.reset();
}

// The micro-batch that ends a window takes the step with it, so what goes before a step comes
// first.
at::Tensor Loop::captured_micro_batch(const data::MicroBatch& micro, bool first) {
  if (micro.last) before_step();
  CapturedStep::Tensors inputs{micro.weight, micro.data};
  if (micro.target.defined()) inputs.push_back(micro.target);
  captured_batch_ = &micro;
  // A graph is one piece of work on the device, including the optimizer's step.
  const c10::Device device = run_.world.device();
  const ledger::PhaseScope forward(ledger::Phase::kForward);
  mark_device_phase(ledger::Phase::kForward, device);
  const CapturedStep::Tensors outputs =
      captured_->run(inputs, (first ? kFirst : 0) + (micro.last ? kLast : 0));
  mark_device_phase(ledger::Phase::kNone, device);
  ++batches_run_;
  if (captured_->replayed()) ++batches_replayed_;
  if (micro.last) step_result_ = {.grad_norm = outputs[1], .skipped = outputs[2]};
  return outputs[0];
}

// ---------------------------------------------------------------- after a step

// Does what is due, in Hugging Face's order: log, evaluate, save. Collective.
void Loop::after_step(Due due) {
  const StepFlags agreed = control_.take_agreed();
  due.save |= agreed.save;
  due.evaluate |= agreed.evaluate;
  if (agreed.stop_signal != 0) {
    // A run that continues from here reaches the end of the epoch, unless there is no step left to
    // take.
    evaluation_due_ = due.evaluate || (run_.at_last_step() &&
                                       due_after_epoch(run_.arguments, run_.state.epoch).evaluate);
    due = {.log = due.log, .evaluate = false, .save = true};
  }
  checkpoints_.collect();
  if (due.log) {
    const ledger::PhaseScope logging(ledger::Phase::kLogging);
    metrics_.log(optimizer_.learning_rate());
  }
  if (due.evaluate && run_.task.eval_data) evaluate(due);
  if (due.save && !checkpoints_.saved()) save();
}

void Loop::evaluate(Due& due) {
  const Metrics metrics = evaluator_.evaluate();
  if (control_.take_agreed().stop_signal != 0) {
    evaluation_due_ = due.save = true;
    return;
  }
  metrics_.report(metrics);
  control_.notify(&Observer::on_evaluate, {.entry = &run_.state.log_history.back()});
  if (!evaluator_.judge(metrics)) return;
  checkpoints_.best_found();
  // The best model must be saved now to be loaded at the end, whenever else checkpoints are due.
  due.save |=
      run_.arguments.save_strategy == Interval::kBest || run_.arguments.load_best_model_at_end;
}

void Loop::save() {
  const ledger::PhaseScope saving(ledger::Phase::kSaving);
  mark_device_phase(ledger::Phase::kSaving, run_.world.device());
  ledger::add(ledger::Counter::kSaves);
  const bool was_stopping = control_.stop_signal() != 0;
  if (!was_stopping && control_.over()) compare_replicas();
  checkpoints_.end_previous();  // the best one depends on whether that one is durable
  // A run that continues from the last step reaches no end of an epoch.
  const bool stopping = !was_stopping && control_.stop_signal() != 0;
  if (stopping && !epoch_ending_ && run_.at_last_step())
    evaluation_due_ |= due_after_epoch(run_.arguments, run_.state.epoch).evaluate;
  checkpoints_.save(position(), optimizer_, metrics_.tokens_since_log());
  mark_device_phase(ledger::Phase::kNone, run_.world.device());
}

// ---------------------------------------------------------------- epochs

void Loop::run_epoch(std::int64_t epoch) {
  epoch_ = epoch;
  epoch_ending_ = epoch_ended_ = false;
  control_.notify(&Observer::on_epoch_begin);
  auto windows = loader_.windows(epoch, {.micro_batches = accumulation_steps_,
                                         .weights = run_.arguments.average_tokens_across_devices
                                                        ? data::WindowWeights::kCounts
                                                        : data::WindowWeights::kOwnCounts});
  const auto total = static_cast<double>(loader_.batches_per_epoch());
  std::int64_t left = loader_.batches_left(epoch);
  while (left > 0 && !control_.over()) {
    auto window = run_.with_memory_advice([&] { return windows.next(); });
    LOCKSTEP_ASSERT(window.has_value());  // there are batches left, on every rank
    left = loader_.batches_left(epoch);
    for (const data::Batch& batch : *window) metrics_.count_batch(batch);
    control_.notify(&Observer::on_step_begin);
    step(*window);
    window.reset();  // evaluations and saves need its memory
    run_.state.epoch = static_cast<double>(epoch_) + 1 - static_cast<double>(left) / total;
    control_.notify(&Observer::on_step_end);
    metrics_.show_step();
    after_step(due_after_step(run_.arguments, plan_, run_.state.global_step));
  }
  if (control_.stop_signal() != 0) return;
  // As in Hugging Face, an epoch that max_steps or a flag cut short has an end too.
  epoch_ending_ = true;
  epoch_ended_ = left == 0;
  control_.notify(&Observer::on_epoch_end);
  after_step(due_after_epoch(run_.arguments, run_.state.epoch));
}

void Loop::run() {
  ledger::set_step(run_.state.global_step);
  metrics_.start();
  run_.task.module->train();
  if (run_.arguments.eval_on_start && run_.state.global_step == 0 && run_.task.eval_data) {
    const Metrics metrics = evaluator_.evaluate();
    // A run that continues from step 0 evaluates again.
    if (control_.take_agreed().stop_signal != 0) return save();
    metrics_.report(metrics);
    control_.notify(&Observer::on_evaluate, {.entry = &run_.state.log_history.back()});
  }
  if (std::exchange(evaluation_due_, false) && run_.task.eval_data) {
    Due due{.save = true};
    evaluate(due);
    if (due.save && !checkpoints_.saved()) save();  // it was the best
  }
  for (std::int64_t epoch = epoch_; !control_.over(); ++epoch) run_epoch(epoch);
  if (batches_run_ > 0 && captured_->unavailable_reason().empty() && run_.world.is_leader())
    log::info("trainer", "{} of {} batches were replayed as CUDA graphs", batches_replayed_,
              batches_run_);
  if (control_.stop_signal() == 0) compare_replicas();
}

// What DDP promises, looked at once at the end and before the last save: parameters that differ end
// the run on every rank. Buffers of a model may differ on purpose and are only reported.
void Loop::compare_replicas() {
  const int replicas = run_.mesh.size("data"), slices = run_.mesh.size("tensor");
  if (std::exchange(compared_, true) || (replicas == 1 && slices == 1)) return;
  run_.parallelism->verify_parameters();
  std::string difference;
  try {
    run_.parallelism->verify_buffers();
  } catch (const CommError& e) {
    difference = e.what();
  }
  if (!run_.world.is_leader()) return;
  if (!difference.empty()) return log::warning("trainer", "{}", difference);
  if (replicas > 1) log::info("trainer", "replicas identical on {} ranks", replicas);
  if (slices > 1)
    log::info("trainer", "parameters without slices identical on {} tensor parallel ranks", slices);
}

// ---------------------------------------------------------------- the record of the run

namespace {

// "sharded fused adamw", "fully sharded over 2 ranks, fused adamw"; "custom" for one that the task
// provides, about which nothing is known.
std::string optimizer_text(const RunContext& run) {
  const bool ours = !run.task.make_optimizer;
  const std::string text = run.why_sharded.empty() ? run.parallelism->text() : "sharded";
  return fmt::format("{}{} {}", text, text.find(' ') == text.npos ? "" : ",",
                     ours ? "fused " + run.arguments.optim : "custom");
}

}  // namespace

monitor::RunFacts Loop::facts() const {
  monitor::RunFacts facts = world_facts(run_.world);
  facts.program = "trainer";
  for (const at::Tensor& parameter : run_.task.module->parameters())
    facts.parameters += nn::is_nf4(parameter) ? nn::nf4_values(parameter) : parameter.numel();
  facts.per_device_batch = run_.arguments.per_device_train_batch_size;
  facts.accumulation = accumulation_steps_;
  facts.optimizer = optimizer_text(run_);
  facts.arguments = arguments_node(run_.arguments);
  facts.total_steps = run_.state.max_steps;
  return facts;
}

// ---------------------------------------------------------------- auto_find_batch_size

namespace {

// Memory like that of a step apart from the batch, its activations and its gradients: the
// optimizer's state, and with several ranks the buckets. It is never written.
std::vector<at::Tensor> memory_of_a_step(const RunContext& run) {
  std::vector<at::Tensor> held;
  for (const at::Tensor& state : state_of_a_run(run))
    held.push_back(at::empty_like(state, at::device(run.world.device())));
  for (const at::Tensor& parameter : run.task.module->parameters())
    if (run.batch_ranks() > 1 && parameter.requires_grad())
      held.push_back(at::empty_like(parameter));
  return held;
}

// One forward and backward on this rank alone; its side effects are undone.
bool batch_fits(const RunContext& run, std::int64_t batch_size) {
  torch::nn::Module& module = *run.task.module;
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& buffer : module.buffers()) buffers.push_back(buffer.clone());
  const optim::RngState random = optim::rng_state();
  bool fits = true;
  try {
    const auto held = memory_of_a_step(run);
    auto loader = data::loader(run.task.train_data, World{},
                               {.batch_size = batch_size,
                                .seed = data_seed(run.arguments),
                                .device = run.world.device(),
                                .check_ranks = false});
    auto batches = loader.epoch(0);
    if (const auto batch = batches.next()) {
      std::vector<at::Tensor> others;  // batches that the step holds at the same time
      for (std::int64_t i = 1; i < accumulation_steps(run.arguments, run.batch_ranks()); ++i)
        for (const at::Tensor& tensor : {batch->data, batch->target})
          if (tensor.defined()) others.push_back(at::empty_like(tensor));
      run.forward(*batch).loss.backward();
    }
  } catch (const std::bad_alloc&) {
    fits = false;
  } catch (const c10::Error& e) {
    if (!says_out_of_memory(e.what_without_backtrace())) throw;
    fits = false;
  }
  for (at::Tensor& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
  const torch::NoGradGuard no_grad;
  const auto now = module.buffers();
  for (std::size_t i = 0; i < buffers.size(); ++i) at::Tensor(now[i]).copy_(buffers[i]);
  optim::set_rng_state(random);
  return fits;
}

}  // namespace

void find_batch_size(RunContext& run, RunControl& control) {
  TrainingArguments& a = run.arguments;
  const int ranks = run.batch_ranks();
  run.task.module->train();
  for (;;) {
    const std::int64_t batch = a.per_device_train_batch_size;
    const std::int64_t window = batch * accumulation_steps(a, ranks);
    const bool fits = batch_fits(run, batch);
    if (!control.any_out_of_memory(!fits)) return;
    // Another rank on the GPU may need for the next trial what the allocator still holds from this
    // one.
    const at::Device device = run.world.device();
    if (!device.is_cpu()) c10::getDeviceAllocator(device.type())->emptyCache();
    if (batch == 1) run.out_of_memory("not even a batch of 1 fits");
    const std::int64_t smaller = smaller_batch(a, ranks);
    a.per_device_train_batch_size = smaller;
    if (!update_size(a)) a.gradient_accumulation_steps = window / smaller;
    if (run.world.is_leader())
      log::warning("trainer", "a batch of {} does not fit every rank's memory: {}", batch,
                   effective_batch_text(a, ranks));
  }
}

}  // namespace lockstep::train
