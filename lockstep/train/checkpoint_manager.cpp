#include "lockstep/train/checkpoint_manager.h"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <optional>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/document.h"
#include "lockstep/core/log.h"
#include "lockstep/io/manifest.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/divided_save.h"
#include "lockstep/train/run_checks.h"
#include "lockstep/train/train_optimizer.h"

namespace lockstep::train {
namespace {

// Long enough for training that waits, short enough to notice a signal.
constexpr std::chrono::seconds kLongWait{1};
constexpr std::chrono::milliseconds kListenEvery{50};

// The checkpoint of this name in the folder that holds `checkpoint`. The path that was recorded is
// used only where there is none: the run's folder may have been renamed or copied since.
std::string beside(const std::string& checkpoint, const std::string& recorded) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::path folder = fs::path(checkpoint).lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();  // "out/checkpoint-40/"
  const fs::path here = folder.parent_path() / fs::path(recorded).filename();
  return fs::is_directory(here, error) ? here.string() : recorded;
}

SaverOptions saver_options(const TrainingArguments& a) {
  return {.output_dir = a.output_dir, .limit = static_cast<int>(a.save_total_limit.value_or(0))};
}

}  // namespace

// ---------------------------------------------------------------- before the first step

void CheckpointManager::resume(const Checkpoint& checkpoint) {
  run_.state = checkpoint.state();
  auto& best = run_.state.best_model_checkpoint;
  if (best) best = beside(checkpoint.path(), *best);
  durable_best_ = best.value_or("");
  newest_ = checkpoint.path();
  saved_step_ = run_.result.durable_step = run_.state.global_step;
}

void CheckpointManager::open(bool only_last) {
  if (!run_.writes()) return;
  const TrainingArguments& a = run_.arguments;
  saver_ = std::make_unique<AsyncSaver>(saver_options(a));
  CheckpointSize size{.optimizer = state_bytes(run_)};
  for (const auto& [name, tensor] :
       saved_tensors(*run_.task.module, run_.task.model_files, /*copy_buffers=*/false)) {
    if (size.model == 0) AsyncSaver::prepare(tensor.device());
    size.model += tensor.nbytes();
  }
  // Parameters are slices, and a checkpoint has the whole.
  size.model *= static_cast<std::uint64_t>(a.tensor_parallel_degree);
  size.optimizer *= static_cast<std::uint64_t>(a.tensor_parallel_degree);
  // Older checkpoints are deleted after the new one is durable, so with a limit two exist side by
  // side; without one their number is unknown.
  const bool has_one = run_.result.durable_step >= 0;  // and it goes when there are two more
  check_room(a, size,
             a.save_strategy != Interval::kNo && a.save_total_limit && !only_last && !has_one);
  claim_output_dir();
}

// ---------------------------------------------------------------- saving

void CheckpointManager::wait_copied() {
  if (saver_) saver_->wait_copied();
  whole_.reset();
}

// All ranks wait together for those that write, however long the disk takes: they exchange
// meanwhile, so that no operation's timeout bounds the wait but the save's own progress
// (async_saver.h). A stop is noticed too, unless the run is over anyway. Returns how long it took.
std::chrono::duration<double> CheckpointManager::wait_for_saves(bool last) {
  using Clock = std::chrono::steady_clock;
  std::optional<Clock::time_point> start;  // a rank that comes late here is not the disk's fault
  for (;;) {
    collect();
    const bool saving = saver_ && saver_->busy();
    if (!control_.any_saving(saving, last)) break;
    if (!start) start = Clock::now();
    if (saving) saver_->wait_a_while(kListenEvery);
  }
  return start ? Clock::now() - *start : Clock::duration(0);
}

void CheckpointManager::end_previous() {
  const std::chrono::duration<double> waited = wait_for_saves(/*last=*/false);
  if (saver_ && waited > kLongWait)
    control_.alert(
        fmt::format("step {}: training waited {:.1f} s for the save before this one. Save less "
                    "often, or to a faster disk.",
                    run_.state.global_step, waited.count()));
}

// What the next forward changes is copied here; parameters and optimizer state are not.
CheckpointContents CheckpointManager::contents(const DataPosition& position,
                                               TrainOptimizer& optimizer,
                                               const std::vector<std::string>& random) {
  CheckpointContents all;
  all.files = run_.task.model_files;
  all.model = saved_tensors(*run_.task.module, all.files, /*copy_buffers=*/true);
  all.state = run_.state;
  all.arguments = to_json(arguments_node(run_.arguments)) + "\n";
  all.model_config = run_.task.model_config;
  all.only_model = run_.arguments.save_only_model;
  if (all.only_model) return all;
  optimizer.save(all);
  all.rng = unpack_random_states(random);
  all.position = position;
  return all;
}

// Every rank's generators go to those that write.
void CheckpointManager::save(const DataPosition& position, TrainOptimizer& optimizer,
                             std::int64_t tokens_not_logged) {
  TrainerState& state = run_.state;
  saved_step_ = state.global_step;
  const std::string path = checkpoint_path(run_.arguments.output_dir, state.global_step);
  const auto random = all_gather_bytes(run_.world, packed_random_state(run_.mesh));
  if (state.best_global_step == state.global_step) state.best_model_checkpoint = path;
  // A model that is divided is written by all ranks together, before the next forward.
  const bool divided = run_.parallelism->divided();
  if (!divided) whole_ = run_.gathered();
  TensorDict optimizer_state;  // of a sharded optimizer every rank sends its share
  if (!run_.arguments.save_only_model)
    optimizer_state = optimizer.state(saver_ != nullptr, divided);
  if (saver_ || divided) {
    CheckpointContents all = contents(position, optimizer, random);
    all.optimizer = std::move(optimizer_state);
    all.state.num_input_tokens_seen += tokens_not_logged;
    const bool keep_best = run_.arguments.load_best_model_at_end && state.best_model_checkpoint;
    const std::string keep = keep_best ? *state.best_model_checkpoint : std::string();
    if (!divided) {
      saver_->begin(std::move(all), keep);
    } else {
      const SaveOutcome outcome =
          write_divided(run_.mesh, std::move(all), saver_options(run_.arguments), keep);
      if (saver_) take(outcome);
    }
  }
  control_.notify(&Observer::on_save, {.path = &path});
}

void CheckpointManager::best_found() {
  if (saved()) saved_step_ = -1;
}

void CheckpointManager::collect() {
  if (!saver_) return;
  while (const std::optional<SaveOutcome> ended = saver_->poll()) take(*ended);
}

void CheckpointManager::take(const SaveOutcome& ended) {
  TrainResult& result = run_.result;
  auto& best = run_.state.best_model_checkpoint;
  if (ended.committed) result.checkpoint = newest_ = ended.path;
  result.lost_step = ended.committed ? -1 : ended.step;
  if (ended.committed && !run_.arguments.save_only_model) result.durable_step = ended.step;
  if (ended.path == best) {
    // The best that was saved stays the best until a better one is durable.
    if (ended.committed) durable_best_ = ended.path;
    if (!durable_best_.empty()) best = durable_best_;
  }
  if (ended.alert.empty()) {
    log::info("checkpoint",
              "{} is durable (training waited {:.1f} ms; copied beside it in {:.0f} ms, written "
              "in {:.0f} ms)",
              ended.path, ended.waited_ms, ended.copy_ms, ended.write_ms);
    return;
  }
  // No save is tried after it.
  const bool last = control_.over() && ended.step == run_.state.global_step;
  control_.alert(ended.alert + (ended.committed ? ""
                                : last          ? "."
                                       : "; training continues. Free some space: the next save is "
                                         "tried as planned."));
}

// ---------------------------------------------------------------- the end

// Nobody leaves before the last checkpoint is durable: a rank that ends ends the others.
void CheckpointManager::finish() {
  TrainResult& result = run_.result;
  wait_for_saves(/*last=*/true);
  control_.report_last_alerts();
  const double durable = saver_ ? static_cast<double>(result.durable_step) : INFINITY;
  result.durable_step = static_cast<std::int64_t>(all_reduce(run_.world, durable, ReduceOp::kMin));
  result.lost_step = static_cast<std::int64_t>(
      all_reduce(run_.world, static_cast<double>(result.lost_step), ReduceOp::kMax));
}

// The leader looks: all load what it names, or none does.
void CheckpointManager::load_best() {
  const TrainerState& state = run_.state;
  const bool leader = run_.world.is_leader();
  const std::string path = broadcast_bytes(run_.world, *state.best_model_checkpoint);
  std::string wrong;
  if (leader) {
    const auto damage = io::damage_of(path);
    if (!damage.empty()) wrong = io::describe(damage);
  }
  wrong = broadcast_bytes(run_.world, wrong);
  if (!wrong.empty()) {
    if (leader)
      log::warning("trainer", "the best model, {}, cannot be loaded: {}. The last weights stay.",
                   path, wrong);
    return;
  }
  const Checkpoint best(path);
  const std::shared_ptr<void> whole = run_.parallelism->divided() ? nullptr : run_.gathered();
  best.load_model(*run_.task.module, run_.task.model_files);
  if (!leader) return;
  const std::string& metric = run_.arguments.metric_for_best_model;
  if (best.state().global_step != *state.best_global_step) {
    log::warning("trainer",
                 "step {} was the best ({} {}) and could not be saved. {}, the best that was, is "
                 "loaded.",
                 *state.best_global_step, metric, *state.best_metric, path);
  } else {
    log::info("trainer", "the best model is that of step {} ({} {})", *state.best_global_step,
              metric, *state.best_metric);
  }
}

}  // namespace lockstep::train
