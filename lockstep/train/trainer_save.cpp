// Checkpoints in and out of a run.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/io/file.h"
#include "lockstep/io/manifest.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/previous_run.h"
#include "lockstep/train/run_checks.h"
#include "lockstep/train/trainer_impl.h"

namespace lockstep::train {
namespace {

// Long for a training that waits, short for a signal.
constexpr std::chrono::seconds kLongWait{1};
constexpr std::chrono::milliseconds kListenEvery{50};
// For a run that was killed a moment ago and is not gone yet.
constexpr std::chrono::seconds kLockTimeout{3};
constexpr const char* kGpu = "cuda";  // its generator's name in a checkpoint

std::string arguments_json(const TrainingArguments& arguments) {
  std::vector<std::pair<std::string, Node>> members;
  for (const KeySpec& key : key_table())
    members.emplace_back(std::string(key.name), value_of(arguments, key));
  return json_object(members);
}

std::string scaler_json(const optim::GradScalerState& s) {
  return json_object({{"scale", real_node(s.scale)},
                      {"growth_factor", real_node(s.growth_factor)},
                      {"backoff_factor", real_node(s.backoff_factor)},
                      {"growth_interval", integer_node(s.growth_interval)},
                      {"growth_tracker", integer_node(s.growth_tracker)}});
}

optim::GradScalerState parse_scaler(const std::string& text, const std::string& name) {
  const Node root = parse_json(text, name);
  optim::GradScalerState s;
  for (const Entry& entry : as_map(root, "scaler").entries) {
    if (entry.key == "scale") s.scale = as_real(entry.value, entry.key);
    if (entry.key == "growth_factor") s.growth_factor = as_real(entry.value, entry.key);
    if (entry.key == "backoff_factor") s.backoff_factor = as_real(entry.value, entry.key);
    if (entry.key == "growth_interval") s.growth_interval = as_integer(entry.value, entry.key);
    if (entry.key == "growth_tracker") s.growth_tracker = as_integer(entry.value, entry.key);
  }
  return s;
}

void say_passed_over(const io::Newest& found) {
  for (const io::PassedOver& passed : found.passed_over)
    log::warning("checkpoint", "{} is passed over: {}", passed.path, passed.reason);
  if (!found.remark.empty()) log::warning("checkpoint", "{}: {}", found.path, found.remark);
}

// Of this host's checkpoints the newest up to step `most` that verifies.
io::Newest newest_up_to(const std::string& output_dir, std::int64_t most) {
  io::Newest newest;
  for (const io::NumberedDir& dir : io::list_numbered(output_dir, kCheckpointPrefix)) {
    if (dir.step > most) continue;
    auto faults = io::verify(dir.path);
    std::erase_if(faults, [](const io::Fault& f) { return f.kind == io::FaultKind::kExtra; });
    if (faults.empty()) {
      newest.step = dir.step;
      newest.path = dir.path;
      return newest;
    }
    newest.passed_over.push_back({dir.path, io::describe(faults)});
  }
  return newest;
}

// The leader's words are complete; the component stands in them.
[[noreturn]] void refuse_as_said(std::string text, const std::string& component) {
  const std::string prefix = "[" + component + "] ";
  if (text.rfind(prefix, 0) == 0) text = text.substr(prefix.size());
  throw UsageError(component, "{}", text);
}

// What every writing rank says, by rank. One that throws does not leave the others waiting: all
// throw what it has said.
std::vector<std::string> ask_writers(World& world, bool writes,
                                     const std::function<std::string()>& ask) {
  std::string mine;
  if (writes) {
    try {
      mine = "+" + ask();
    } catch (const std::exception& e) {
      mine = std::string("-") + e.what();
    }
  }
  std::vector<std::string> said;
  const std::vector<std::string> all = world.all_gather(mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    if (all[rank].front() == '-')
      throw UsageError("checkpoint", "rank {}: {}", rank, all[rank].substr(1));
    said.push_back(all[rank].substr(1));
  }
  return said;
}

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

// Of a run: the leader's process, and a moment.
std::string run_token() {
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  return fmt::format("run {}-{}", ::getpid(), now);
}

io::FolderLock lock_folder(const std::string& folder, const std::string& token) {
  check_output_dir(folder);
  io::FolderLock lock(folder, token, std::chrono::milliseconds(0));
  if (!lock.holder().empty()) {
    log::info("trainer", "{} is in use by {}: waiting for {} s in case it is ending", folder,
              lock.holder(), kLockTimeout.count());
    lock = io::FolderLock(folder, token, kLockTimeout);
  }
  if (!lock.holder().empty())
    throw UsageError("trainer",
                     "another run trains in output_dir {}: {} holds {}/{}. Two would take each "
                     "other's checkpoints for their own. Wait for its end or stop it, or choose "
                     "another output_dir. If its host is gone, delete that file.",
                     folder, lock.holder(), folder, io::kFolderLockName);
  if (!lock.problem().empty())
    log::warning("trainer",
                 "{}. Nothing keeps a second run out of {}: take care that each run has an "
                 "output_dir of its own.",
                 lock.problem(), folder);
  return lock;
}

// With save_on_each_node every host has folders of its own, and one may have lost its newest. The
// newest step that is whole on all of them is continued from; empty: there is none.
std::string choose_on_each_node(World& world, const TrainingArguments& a, bool writes) {
  const std::string& flag = *a.resume_from_checkpoint;
  if (flag != "auto") {
    ask_writers(world, writes, [&] { return find_checkpoint(a.output_dir, flag).path; });
    return flag;
  }
  std::optional<io::Newest> mine;
  for (std::int64_t most = std::numeric_limits<std::int64_t>::max();;) {
    const auto said = ask_writers(world, writes, [&] {
      if (!mine || mine->step > most) {
        mine = newest_up_to(a.output_dir, most);
        say_passed_over(*mine);
      }
      return std::to_string(mine->step);
    });
    std::vector<std::int64_t> steps;
    for (const std::string& text : said) steps.push_back(std::stoll(text));
    const auto [lowest, highest] = std::ranges::minmax(steps);
    if (lowest < 0) {
      if (world.is_leader())
        log::info("checkpoint", "{} holds none that is whole on every host: a new run",
                  a.output_dir);
      return {};
    }
    if (lowest == highest) return checkpoint_path(a.output_dir, lowest);
    if (writes && mine->step > lowest)
      log::warning("checkpoint", "{} is passed over: another host has no whole one of that step",
                   mine->path);
    most = lowest;
  }
}

}  // namespace

bool TrainerImpl::writes() const {
  return arguments_.save_on_each_node ? world_.local_rank() == 0 : world_.is_leader();
}

// One run at a time in an output_dir. Before anything there is touched; collective: all ranks hear
// of a refusal. The leader is first, so that writers who share its folder know their own run.
io::FolderLock TrainerImpl::take_output_dir() {
  io::FolderLock lock;
  std::string answer;
  if (world_.is_leader()) {
    const std::string token = run_token();
    try {
      lock = lock_folder(arguments_.output_dir, token);
      answer = "+" + token;
    } catch (const UsageError& e) {
      answer = std::string("-") + e.what();
    }
  }
  answer = world_.broadcast(answer, 0);
  if (answer.front() == '-') refuse_as_said(answer.substr(1), "trainer");
  if (!arguments_.save_on_each_node) return lock;
  ask_writers(world_, writes() && !world_.is_leader(), [&] {
    lock = lock_folder(arguments_.output_dir, answer.substr(1));
    return std::string();
  });
  return lock;
}

// The leader looks, all hear: what it finds, or why it refuses.
std::string TrainerImpl::choose_checkpoint() {
  const std::string flag = arguments_.resume_from_checkpoint.value_or("never");
  if (arguments_.save_on_each_node && flag != "never")
    return choose_on_each_node(world_, arguments_, writes());
  std::string answer;
  if (world_.is_leader()) {
    try {
      if (flag != "never") {
        const io::Newest found = find_checkpoint(arguments_.output_dir, flag);
        say_passed_over(found);
        if (found.step >= 0) answer = "+" + found.path;
      }
    } catch (const std::exception& e) {
      answer = std::string("-") + e.what();
    }
  }
  answer = world_.broadcast(answer, 0);
  if (answer.empty()) {
    if (world_.is_leader() && flag == "auto")
      log::info("checkpoint", "{} holds none: a new run", arguments_.output_dir);
    return {};
  }
  if (answer.front() == '-') refuse_as_said(answer.substr(1), "checkpoint");
  return answer.substr(1);
}

// Once it is certain that the run begins: a start that is refused leaves everything in its place.
void TrainerImpl::make_way(const std::string& checkpoint) {
  const bool automatic = arguments_.resume_from_checkpoint.value_or("never") == "auto";
  const std::string place = archive_previous_run(
      arguments_.output_dir, {.checkpoint = checkpoint, .step = state.global_step});
  if (place.empty()) return;
  if (!checkpoint.empty()) {
    log::warning(
        "checkpoint",
        "the run continues from {}: checkpoints that are not on its way have been moved to "
        "{}.",
        checkpoint, place);
    return;
  }
  log::warning(
      "checkpoint",
      "this is a new run, and what an earlier one has left has been moved to {}. To continue "
      "from its checkpoints: --resume {}/checkpoint-<step>{}",
      place, place,
      automatic ? "."
                : "; next time: resume_from_checkpoint: auto (lockstep train --resume "
                  "auto).");
}

void TrainerImpl::resume(const Checkpoint& checkpoint) {
  optimizer_->load_state_dict(checkpoint.optimizer());
  state = checkpoint.state();
  newest_ = checkpoint.path();
  if (state.best_model_checkpoint)
    state.best_model_checkpoint = beside(checkpoint.path(), *state.best_model_checkpoint);
  const DataPosition saved = checkpoint.position();
  epoch_ = saved.epoch + saved.epoch_ended;
  evaluation_due_ = saved.evaluation_due != 0;
  if (!saved.epoch_ended && !arguments_.ignore_data_skip) {
    loader_->load_state({.epoch = saved.epoch,
                         .cursor = saved.cursor,
                         .seed = static_cast<std::uint64_t>(saved.seed),
                         .size = saved.dataset_size,
                         .order = saved.order});
  }
  if (scaler_) {
    const std::string text = checkpoint.text("scaler.json");
    if (!text.empty())
      scaler_->load_state_dict(parse_scaler(text, checkpoint.path() + "/scaler.json"));
  }
  const bool same = saved.world_size == world_.size() &&
                    saved.batch_size == arguments_.per_device_train_batch_size &&
                    saved.accumulation == accumulation_steps_;
  // In steps of today: the epoch's rest is what today's ranks make of it.
  const std::int64_t left =
      (loader_->batches_left(epoch_) + accumulation_steps_ - 1) / accumulation_steps_;
  // The run that saved may itself have continued from one with other numbers.
  const bool counted_alike = arguments_.ignore_data_skip ||
                             state.global_step == (epoch_ + 1) * plan_.steps_per_epoch - left;
  if (!same || !counted_alike) {
    const double share = static_cast<double>(left) / static_cast<double>(plan_.steps_per_epoch);
    plan_ =
        replan_steps(arguments_, plan_,
                     {.step = state.global_step, .epoch = static_cast<double>(epoch_) + 1 - share});
  }
  if (!same && world_.is_leader()) {
    log::warning("trainer",
                 "the checkpoint was made with {} ranks x batch {} x accumulation {}, now {} x {} "
                 "x {}: the samples come in the same order, each once per epoch; the effective "
                 "batch is {} instead of {}.",
                 saved.world_size, saved.batch_size, saved.accumulation, world_.size(),
                 arguments_.per_device_train_batch_size, accumulation_steps_,
                 world_.size() * arguments_.per_device_train_batch_size * accumulation_steps_,
                 saved.world_size * saved.batch_size * saved.accumulation);
  }
  if (world_.is_leader()) say_other_length(checkpoint);
  saved_step_ = durable_step_ = state.global_step;
  durable_best_ = state.best_model_checkpoint.value_or("");
  if (world_.is_leader())
    log::info("trainer", "resumed from {} at step {}, epoch {:.2f}", checkpoint.path(),
              state.global_step, state.epoch);
}

// A schedule reaches its end with the run's last step, so another number of steps is another
// learning rate from here on: allowed, and not to happen unnoticed.
void TrainerImpl::say_other_length(const Checkpoint& checkpoint) const {
  const std::string text = checkpoint.text("training_args.json");
  if (text.empty() || plan_.max_steps == checkpoint.state().max_steps) return;
  const Node then = parse_json(text, checkpoint.path() + "/training_args.json");
  std::vector<std::string> changed;
  for (const char* name : {"max_steps", "num_train_epochs"}) {
    const Node now = value_of(arguments_, *find_key(name));
    const Entry* before = then.find(name);
    if (before != nullptr && !same_value(before->value, now))
      changed.push_back(
          fmt::format("{} is {} and was {}", name, to_json(now), to_json(before->value)));
  }
  const std::string& type = arguments_.lr_scheduler_type;
  const bool share = arguments_.warmup_steps > 0 && arguments_.warmup_steps < 1;
  const bool endless =
      type == "constant" || ((type == "constant_with_warmup" || type == "inverse_sqrt") && !share);
  if (changed.empty() || endless) return;
  log::warning("trainer",
               "{} when the checkpoint was made: from step {} on the learning rate is that of {} "
               "over {} steps, not over {}.",
               fmt::join(changed, ", "), checkpoint.state().global_step, type, plan_.max_steps,
               checkpoint.state().max_steps);
}

void TrainerImpl::restore_random(const Checkpoint& checkpoint) {
  TensorDict mine = checkpoint.rng(world_.rank());
  if (auto gpu = mine.extract(kGpu); gpu && !world_.device().is_cpu()) {
    gpu.key() = world_.device().str();
    mine.insert(std::move(gpu));
  }
  if (!mine.empty()) optim::set_rng_state(mine);
}

// Of the CPU and of this rank's own GPU, which may have another number when the run continues.
TensorDict TrainerImpl::random_state() const {
  const optim::RngState all = optim::rng_state();
  TensorDict mine{{"cpu", all.at("cpu")}};
  if (!world_.device().is_cpu()) mine.emplace(kGpu, all.at(world_.device().str()));
  return mine;
}

DataPosition TrainerImpl::position() const {
  const data::SamplerState at = loader_->state();
  return {.epoch = at.epoch,
          .cursor = at.cursor,
          .seed = static_cast<std::int64_t>(at.seed),
          .world_size = world_.size(),
          .batch_size = arguments_.per_device_train_batch_size,
          .accumulation = accumulation_steps_,
          .dataset_size = at.size,
          .order = at.order,
          .epoch_ended = epoch_ended_ ? 1 : 0,
          .evaluation_due = evaluation_due_ ? 1 : 0};
}

// What the next forward changes is copied here; parameters and optimizer state are not.
CheckpointContents TrainerImpl::contents(const std::vector<std::string>& random,
                                         std::int64_t tokens_not_logged) {
  CheckpointContents all;
  all.model = model_tensors(*task_.module, /*copy_buffers=*/true);
  all.state = state;
  all.state.num_input_tokens_seen += tokens_not_logged;
  all.arguments = arguments_json(arguments_);
  all.model_config = task_.model_config;
  all.only_model = arguments_.save_only_model;
  if (all.only_model) return all;
  for (const std::string& bytes : random) all.rng.push_back(unpack_tensors(bytes));
  all.position = position();
  all.scheduler = json_object({{"type", text_node(arguments_.lr_scheduler_type)},
                               {"last_epoch", integer_node(state.global_step)},
                               {"base_lr", real_node(arguments_.learning_rate)},
                               {"last_lr", real_node(optimizer_->lr())}});
  if (scaler_) all.scaler = scaler_json(scaler_->state_dict());
  return all;
}

// All ranks wait together for those that write, however long the disk takes: they exchange
// meanwhile, so that no operation's timeout bounds the wait but the save's own progress
// (async_saver.h). A stop is noticed, too, unless the run is over anyway. Returns how long it took.
std::chrono::duration<double> TrainerImpl::wait_for_saves(bool last) {
  std::optional<Clock::time_point> start;  // a rank that comes late here is not the disk's fault
  for (;;) {
    collect_save();
    const bool saving = saver_ && saver_->busy();
    const StepFlags all = agreement_->exchange_now(
        {.stop_signal = last ? 0 : signals_->requested(), .saving = saving});
    note_exchange();
    if (all.stop_signal != 0 && stop_signal_ == 0) {
      obey(all.stop_signal);
      // A run that continues from the last step comes to no epoch's end.
      if (!epoch_ending_ && state.global_step >= plan_.max_steps)
        evaluation_due_ |= due_after_epoch(arguments_, state.epoch).evaluate;
    }
    if (!all.saving) break;
    if (!start) start = Clock::now();
    if (saving) saver_->wait_a_while(kListenEvery);
  }
  return start ? Clock::now() - *start : Clock::duration(0);
}

// One save in flight.
void TrainerImpl::end_save_before() {
  const std::chrono::duration<double> waited = wait_for_saves(/*last=*/false);
  if (saver_ && waited > kLongWait)
    alert(
        fmt::format("step {}: training waited {:.1f} s for the save before this one. Save less "
                    "often, or to a faster disk.",
                    state.global_step, waited.count()));
}

// Collective: every rank's generators go to those that write.
void TrainerImpl::save() {
  end_save_before();  // which is the best depends on whether that one is durable
  saved_step_ = state.global_step;
  const std::string path = checkpoint_path(arguments_.output_dir, state.global_step);
  const auto random = world_.all_gather(pack_tensors(random_state()));
  const auto tokens = static_cast<std::int64_t>(tokens_since_log());
  if (state.best_global_step == state.global_step) state.best_model_checkpoint = path;
  // Where state is not sharded, this is the optimizer's own memory, which the saver copies while
  // the next forward and backward run.
  TensorDict optimizer;
  if (!arguments_.save_only_model)
    optimizer = optimizer_->state_dict({.wanted = saver_ != nullptr, .copy = false});
  if (saver_) {
    const bool keep_best = arguments_.load_best_model_at_end && state.best_model_checkpoint;
    CheckpointContents all = contents(random, tokens);
    all.optimizer = std::move(optimizer);
    saver_->begin(std::move(all), keep_best ? *state.best_model_checkpoint : std::string());
  }
  notify(&Observer::on_save, nullptr, &path);
}

// What a save has come to; its errors surface here, at the next step.
void TrainerImpl::collect_save() {
  if (!saver_) return;
  while (const std::optional<SaveOutcome> ended = saver_->poll()) {
    if (ended->committed) committed_ = newest_ = ended->path;
    lost_step_ = ended->committed ? -1 : ended->step;
    if (ended->committed && !arguments_.save_only_model) durable_step_ = ended->step;
    if (ended->path == state.best_model_checkpoint) {
      // The best that was saved stays the best until a better one is durable.
      if (ended->committed) durable_best_ = ended->path;
      if (!durable_best_.empty()) state.best_model_checkpoint = durable_best_;
    }
    if (ended->alert.empty()) {
      log::info("checkpoint", "{} is durable (copied in {:.0f} ms, written in {:.0f} ms)",
                ended->path, ended->copy_ms, ended->write_ms);
      continue;
    }
    const bool last = over() && ended->step == state.global_step;  // none is tried after it
    alert(ended->alert + (ended->committed ? ""
                          : last
                              ? "."
                              : "; training continues. Free some space: the next save is tried as "
                                "planned."));
  }
}

// Said at once; observers hear of it on every rank, after the next exchange.
void TrainerImpl::alert(std::string text) {
  log::error("checkpoint", "{}", text);
  alerts_.push_back(std::move(text));
  flags_.alert = true;
}

// Collective.
void TrainerImpl::report_alerts() {
  std::string mine;
  for (const std::string& text : std::exchange(alerts_, {})) mine += text + '\0';
  for (const std::string& texts : world_.all_gather(mine)) {
    for (std::size_t at = 0; at < texts.size();) {
      const std::string text = texts.substr(at, texts.find('\0', at) - at);
      at += text.size() + 1;
      notify(&Observer::on_alert, nullptr, nullptr, &text);
    }
  }
}

// The leader looks: all load what it names, or none does.
void TrainerImpl::load_best() {
  const std::string path = world_.broadcast(*state.best_model_checkpoint, 0);
  std::string wrong;
  if (world_.is_leader()) {
    auto faults = io::verify(path);
    std::erase_if(faults, [](const io::Fault& f) { return f.kind == io::FaultKind::kExtra; });
    if (!faults.empty()) wrong = io::describe(faults);
  }
  wrong = world_.broadcast(wrong, 0);
  if (!wrong.empty()) {
    if (world_.is_leader())
      log::warning("trainer", "the best model, {}, cannot be loaded: {}. The last weights stay.",
                   path, wrong);
    return;
  }
  const Checkpoint best(path);
  best.load_model(*task_.module);
  optimizer_->sync_from_model();
  if (!world_.is_leader()) return;
  if (best.state().global_step != *state.best_global_step) {
    log::warning("trainer",
                 "step {} was the best ({} {}) and could not be saved. {}, the best that was, is "
                 "loaded.",
                 *state.best_global_step, arguments_.metric_for_best_model, *state.best_metric,
                 path);
    return;
  }
  log::info("trainer", "the best model is that of step {} ({} {})", *state.best_global_step,
            arguments_.metric_for_best_model, *state.best_metric);
}

}  // namespace lockstep::train
