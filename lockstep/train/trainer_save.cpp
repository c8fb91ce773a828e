// Checkpoints in and out of a run.
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/io/file.h"
#include "lockstep/io/manifest.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/trainer_impl.h"

namespace lockstep::train {
namespace {

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

// An earlier run's checkpoints get a folder of their own: the newest is the one with the highest
// step, so under their names they would be resumed from instead of this run's. Says which folder;
// empty: there are none.
std::string put_aside(const std::string& output_dir) {
  namespace fs = std::filesystem;
  const auto old = io::list_numbered(output_dir, kCheckpointPrefix);
  if (old.empty()) return {};
  fs::path place;
  for (int number = 1; place.empty() || fs::exists(place); ++number)
    place = fmt::format("{}/earlier-{}", output_dir, number);
  std::error_code error;
  fs::create_directory(place, error);
  if (error) throw io::file_error("make the directory", place.string(), error.value());
  for (const io::NumberedDir& dir : old) {
    fs::rename(dir.path, place / fs::path(dir.path).filename(), error);
    if (error) throw io::file_error("rename", dir.path, error.value());
  }
  return place.string();
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

// With save_on_each_node every host has folders of its own, and one may have lost its newest. The
// newest step that is whole on all of them is gone on from; empty: there is none.
std::string choose_on_each_node(World& world, const TrainingArguments& a, bool writes) {
  const std::string& wish = *a.resume_from_checkpoint;
  if (wish != "auto") {
    ask_writers(world, writes, [&] { return find_checkpoint(a.output_dir, wish).path; });
    return wish;
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

// The leader looks, all hear: what it finds, or why it refuses.
std::string TrainerImpl::choose_checkpoint() {
  const std::string wish = arguments_.resume_from_checkpoint.value_or("never");
  if (arguments_.save_on_each_node && wish != "never")
    return choose_on_each_node(world_, arguments_, writes());
  std::string answer;
  if (world_.is_leader()) {
    try {
      if (wish != "never") {
        const io::Newest found = find_checkpoint(arguments_.output_dir, wish);
        for (const io::PassedOver& passed : found.passed_over)
          log::warning("checkpoint", "{} is passed over: {}", passed.path, passed.reason);
        if (!found.remark.empty()) log::warning("checkpoint", "{}: {}", found.path, found.remark);
        if (found.step >= 0) answer = "+" + found.path;
      } else if (const std::string place = put_aside(arguments_.output_dir); !place.empty()) {
        log::warning("checkpoint",
                     "this is a new run, and the checkpoints of an earlier one have been moved to "
                     "{}. To go on from them: --resume {}/checkpoint-<step>; next time: "
                     "resume_from_checkpoint: auto (lockstep train --resume auto).",
                     place, place);
      }
    } catch (const std::exception& e) {
      answer = std::string("-") + e.what();
    }
  }
  answer = world_.broadcast(answer, 0);
  if (answer.empty()) {
    if (world_.is_leader() && wish == "auto")
      log::info("checkpoint", "{} holds none: a new run", arguments_.output_dir);
    return {};
  }
  if (answer.front() == '-') {
    // The leader's words are complete; the component stands in them.
    std::string text = answer.substr(1);
    if (text.rfind("[checkpoint] ", 0) == 0) text = text.substr(13);
    throw UsageError("checkpoint", "{}", text);
  }
  return answer.substr(1);
}

void TrainerImpl::resume(const Checkpoint& checkpoint) {
  stepper_->load_state_dict(checkpoint.optimizer());
  state = checkpoint.state();
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
  // The run that saved may itself have gone on from one with other numbers.
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
  saved_step_ = state.global_step;
  if (world_.is_leader())
    log::info("trainer", "resumed from {} at step {}, epoch {:.2f}", checkpoint.path(),
              state.global_step, state.epoch);
}

void TrainerImpl::restore_random(const Checkpoint& checkpoint) {
  const TensorDict mine = checkpoint.rng(world_.rank());
  // A rank that was not there then keeps the state that seed + rank gave it.
  if (!mine.empty()) optim::set_rng_state(mine);
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

// The optimizer's own memory where there is much of it, so that the saver copies it while the next
// forward and backward run. state_dict() has the same names and values, as copies.
TensorDict TrainerImpl::optimizer_state() {
  TensorDict live;
  std::set<at::TensorImpl*> seen;  // a parameter of two names has its state under the first
  const auto& states = optimizer_->state();
  for (const auto& [name, parameter] : optim::named(*task_.module)) {
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second)
      continue;
    const auto found = states.find(parameter.unsafeGetTensorImpl());
    const auto* adam = found == states.end()
                           ? nullptr
                           : dynamic_cast<const optim::AdamState*>(found->second.get());
    if (adam == nullptr || !adam->step.defined()) return stepper_->state_dict();
    live[name + ".exp_avg"] = adam->exp_avg;
    live[name + ".exp_avg_sq"] = adam->exp_avg_sq;
    live[name + ".step"] = adam->step.to(at::kDouble).reshape({});  // a copy
  }
  return live;
}

// What the next forward changes is copied here; parameters and optimizer state are not.
CheckpointContents TrainerImpl::contents(const std::vector<std::string>& random) {
  CheckpointContents all;
  all.model = model_tensors(*task_.module, /*copy_buffers=*/true);
  all.state = state;
  all.state.num_input_tokens_seen += static_cast<std::int64_t>(tokens_since_log());
  all.arguments = arguments_json(arguments_);
  all.model_config = task_.model_config;
  all.only_model = arguments_.save_only_model;
  if (all.only_model) return all;
  all.optimizer = optimizer_state();
  for (const std::string& bytes : random) all.rng.push_back(unpack_tensors(bytes));
  all.position = position();
  all.scheduler = json_object({{"type", text_node(arguments_.lr_scheduler_type)},
                               {"last_epoch", integer_node(state.global_step)},
                               {"base_lr", real_node(arguments_.learning_rate)},
                               {"last_lr", real_node(stepper_->lr(0))}});
  if (scaler_) all.scaler = scaler_json(scaler_->state_dict());
  return all;
}

// Collective: every rank's generators go to those that write.
void TrainerImpl::save() {
  saved_step_ = state.global_step;
  const std::string path = checkpoint_path(arguments_.output_dir, state.global_step);
  if (state.best_global_step == state.global_step) state.best_model_checkpoint = path;
  const auto random = world_.all_gather(pack_tensors(optim::rng_state()));
  if (saver_) {
    const bool keep_best = arguments_.load_best_model_at_end && state.best_model_checkpoint;
    saver_->begin(contents(random), keep_best ? *state.best_model_checkpoint : std::string());
  }
  tell(&Observer::on_save, nullptr, &path);
}

// What a save has come to; its errors surface here, at the next step.
void TrainerImpl::collect_save(bool wait) {
  if (!saver_) return;
  for (;;) {
    const std::optional<SaveOutcome> ended = wait ? saver_->wait() : saver_->poll();
    if (!ended) return;
    if (ended->committed) committed_ = ended->path;
    if (ended->alert.empty()) {
      log::info("checkpoint", "{} is durable (copied in {:.0f} ms, written in {:.0f} ms)",
                ended->path, ended->copy_ms, ended->write_ms);
      continue;
    }
    log::error("checkpoint", "{}", ended->alert);
    tell(&Observer::on_alert, nullptr, nullptr, &ended->alert);
  }
}

// The leader looks: all load it, or none does.
void TrainerImpl::load_best() {
  const std::string& path = *state.best_model_checkpoint;
  std::string wrong;
  if (world_.is_leader()) {
    auto faults = io::verify(path);
    std::erase_if(faults, [](const io::Fault& f) { return f.kind == io::FaultKind::kExtra; });
    if (!faults.empty()) wrong = io::describe(faults);
  }
  wrong = world_.broadcast(wrong, 0);
  if (!wrong.empty()) {
    if (world_.is_leader())
      log::warning("trainer", "the best model, {}, cannot be loaded: {} The last weights stay.",
                   path, wrong);
    return;
  }
  Checkpoint(path).load_model(*task_.module);
  if (world_.is_leader())
    log::info("trainer", "the best model is that of step {} ({} {})", *state.best_global_step,
              arguments_.metric_for_best_model, *state.best_metric);
}

}  // namespace lockstep::train
