#include "lockstep/train/checkpoint_manager.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/document.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/io/file.h"
#include "lockstep/io/manifest.h"
#include "lockstep/train/async_saver.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/folder_owner.h"
#include "lockstep/train/train_optimizer.h"

namespace lockstep::train {
namespace {

// Long enough for training that waits, short enough to notice a signal.
constexpr std::chrono::seconds kLongWait{1};
constexpr std::chrono::milliseconds kListenEvery{50};

// The checkpoint of this name in the folder of `checkpoint`. The recorded path is used only if that
// is missing: the run's folder may have been renamed or copied since.
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
  const auto slices = static_cast<std::uint64_t>(run_.mesh.size("tensor"));
  size.model *= slices;
  size.optimizer *= slices;
  // Older checkpoints are deleted after the new one is durable, so with a limit two exist side by
  // side; without one their number is unknown.
  const bool has_one = run_.result.durable_step >= 0;  // deleted when there are two newer ones
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

// Copies the tensors that the next forward changes, but not parameters and optimizer state.
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

// All ranks stay until the last checkpoint is durable: a rank that ends ends the others.
void CheckpointManager::finish() {
  TrainResult& result = run_.result;
  wait_for_saves(/*last=*/true);
  control_.report_last_alerts();
  const double durable = saver_ ? static_cast<double>(result.durable_step) : INFINITY;
  result.durable_step = static_cast<std::int64_t>(all_reduce(run_.world, durable, ReduceOp::kMin));
  result.lost_step = static_cast<std::int64_t>(
      all_reduce(run_.world, static_cast<double>(result.lost_step), ReduceOp::kMax));
}

// The leader decides: all ranks load the checkpoint that it names, or none does.
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

// ---------------------------------------------------------------- whose folder output_dir is

namespace {

// Names the run whose attempt has begun in output_dir.
std::string run_file(const TrainingArguments& a) {
  return a.output_dir + "/.run_id";
}

std::string launchers_run() {
  return env::get("TORCHELASTIC_RUN_ID").value_or("");
}

std::int64_t restarts() {
  return env::get_int("TORCHELASTIC_RESTART_COUNT").value_or(0);
}

// Collective. The previous attempt may have died before it began to write: then no file names this
// run, and this attempt begins as that one did.
void resume_restarted(RunContext& run) {
  TrainingArguments& a = run.arguments;
  const std::string asked = a.resume_from_checkpoint.value_or("");
  if (restarts() == 0 || asked == "auto") return;
  std::string answer;
  if (run.world.is_leader()) {
    try {
      const bool ours = read_file(run_file(a)) == launchers_run();
      // A restart before the first checkpoint resumes from the folder that was asked for.
      if (ours && asked == "never")
        answer = asked;
      else if (ours && (asked.empty() || find_checkpoint(a.output_dir, "auto").step >= 0))
        answer = "auto";
    } catch (const SystemError& e) {
      log::info("trainer", "no attempt of this run has begun in {} ({})", a.output_dir, e.what());
    }
  }
  answer = broadcast_bytes(run.world, answer);
  if (answer == "never") a.overwrite_output_dir = true;  // of what it has saved itself
  if (answer != "auto") return;
  a.resume_from_checkpoint = answer;
  if (run.world.is_leader())
    log::info("trainer",
              "attempt {} of this run resumes from its newest checkpoint (not with --resume never)",
              restarts());
}

io::Newest newest_up_to(const std::string& output_dir, std::int64_t most) {
  io::Newest found = io::newest_valid(output_dir, kCheckpointPrefix, most);
  for (const io::PassedOver& passed : found.passed_over)
    log::warning("checkpoint", "{} is passed over: {}", passed.path, passed.reason);
  if (!found.remark.empty()) log::warning("checkpoint", "{}: {}", found.path, found.remark);
  return found;
}

// With save_on_each_node every host has folders of its own, and one may have lost its newest. The
// run continues from the newest step that is complete on all of them; empty: there is none.
std::string newest_on_all(RunContext& run) {
  const std::string& folder = run.arguments.output_dir;
  std::optional<io::Newest> mine;
  for (std::int64_t most = std::numeric_limits<std::int64_t>::max();;) {
    const auto answers = agree(run.world, [&]() -> std::string {
      if (!run.writes()) return {};
      if (!mine || mine->step > most) mine = newest_up_to(folder, most);
      return fmt::format("{} {}", mine->step, mine->path);
    });
    std::vector<std::int64_t> steps;
    for (const std::string& text : answers)
      if (!text.empty()) steps.push_back(std::stoll(text));
    const auto [lowest, highest] = std::ranges::minmax(steps);
    if (lowest < 0) {
      if (run.world.is_leader()) {
        const bool damaged = mine && !mine->passed_over.empty();
        log::info("checkpoint", "{} has no checkpoint{}: a new run", folder,
                  run.arguments.save_on_each_node ? " that is whole on every host"
                  : damaged                       ? " that is whole"
                                                  : "");
      }
      return {};
    }
    if (lowest == highest) return answers[0].substr(answers[0].find(' ') + 1);
    if (run.writes() && mine->step > lowest)
      log::warning("checkpoint", "{} is passed over: another host has no whole one of that step",
                   mine->path);
    most = lowest;
  }
}

// Also deletes leftovers of an earlier run's writer that died.
void sweep_output_dir(const RunContext& run) {
  if (!run.writes()) return;
  for (const std::string& path : io::sweep(run.arguments.output_dir).removed)
    log::info("checkpoint", "removed {}, which a run that died has left", path);
}

}  // namespace

// The leader goes first, so that writers that share its folder recognise their own run.
io::FolderLock CheckpointManager::lock() {
  io::FolderLock lock;
  World& world = run_.world;
  const std::string& folder = run_.arguments.output_dir;
  const auto tokens = agree(world, [&]() -> std::string {
    if (!world.is_leader()) return {};
    const std::string token = new_lock_token();
    lock = lock_output_dir(folder, token);
    return token;
  });
  if (!run_.arguments.save_on_each_node) return lock;
  agree(world, [&] {
    if (run_.writes() && !world.is_leader()) lock = lock_output_dir(folder, tokens[0]);
  });
  return lock;
}

std::string CheckpointManager::choose() {
  resume_restarted(run_);
  const std::string flag = run_.arguments.resume_from_checkpoint.value_or("never");
  RunStart start;
  if (flag == "auto") {
    start = {.checkpoint = newest_on_all(run_), .newest = true};
  } else if (flag != "never") {
    agree(run_.world, [&] {
      if (run_.writes()) find_checkpoint(run_.arguments.output_dir, flag);
    });
    start.checkpoint = flag;
  }
  begin_at(start);
  return start.checkpoint;
}

// A start that is refused leaves everything in place.
void CheckpointManager::begin_at(const RunStart& start) {
  const TrainingArguments& a = run_.arguments;
  agree(run_.world, [&] {
    if (!run_.writes()) return;
    if (!a.overwrite_output_dir)
      refuse_others(a.output_dir, other_checkpoints(a.output_dir, start));
    in_place_ = continues_in(a.output_dir, start);
  });
  start_ = start;
  if (restarts() == 0 && run_.world.is_leader()) ::unlink(run_file(a).c_str());
  sweep_output_dir(run_);
}

// Only once it is certain that the run begins.
void CheckpointManager::claim_output_dir() const {
  const TrainingArguments& a = run_.arguments;
  remove_others(other_checkpoints(a.output_dir, start_));
  if (!in_place_) remove_record(a.output_dir);
  if (run_.world.is_leader() && env::get_int("TORCHELASTIC_MAX_RESTARTS").value_or(0) > 0)
    write_file_atomically(run_file(a), launchers_run());
}

}  // namespace lockstep::train
