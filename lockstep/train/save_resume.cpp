#include "lockstep/train/save_resume.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/core/text.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"
#include "lockstep/io/manifest.h"
#include "lockstep/optim/local_gradients.h"
#include "lockstep/train/async_saver.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/effective_batch.h"
#include "lockstep/train/folder_owner.h"

namespace lockstep {
namespace {

using train::TensorDict;

constexpr std::chrono::milliseconds kSavePoll{50};

void check_parts(const CheckpointParts& parts) {
  if (parts.module == nullptr)
    throw UsageError("checkpoint",
                     "the parts have no module. Name the one that the loop trains: {{.module = "
                     "net.get(), .optimizer = &optimizer}}.");
}

std::vector<double> learning_rates(const CheckpointParts& parts) {
  std::vector<double> rates;
  for (std::size_t group = 0; parts.optimizer != nullptr && group < parts.optimizer->groups();
       ++group)
    rates.push_back(parts.optimizer->lr(group));
  return rates;
}

// torch's schedulers have no functions to save their state. Apart from the learning rates, which
// are the optimizer's, it is this number.
struct StepCount : torch::optim::LRScheduler {
  static unsigned& of(LRScheduler& scheduler) { return scheduler.*(&StepCount::step_count_); }
};

std::string schedule_text(const CheckpointParts& parts, std::int64_t step) {
  const bool known = parts.schedule != nullptr;
  std::optional<std::int64_t> step_count;
  if (parts.scheduler != nullptr) step_count = StepCount::of(*parts.scheduler);
  return train::scheduler_text(known ? parts.schedule->name() : "",
                               known ? parts.schedule->factor(step) : 0, step,
                               learning_rates(parts), step_count);
}

void restore_step_count(const CheckpointParts& parts, const Node& root, const std::string& name,
                        bool is_leader) {
  const Entry* saved = root.find("step_count");
  if (parts.scheduler == nullptr) {
    if (saved != nullptr && is_leader)
      log::warning("checkpoint",
                   "{} was saved with a torch::optim::LRScheduler, and the parts of this run have "
                   "none. One that the loop makes begins at its first step again. Add it to the "
                   "parts: {{.scheduler = &scheduler}}.",
                   name);
    return;
  }
  if (saved == nullptr)
    throw UsageError("checkpoint",
                     "{} has no step_count: it was saved without a torch::optim::LRScheduler. "
                     "Leave the scheduler out of the parts; it then begins at its first step.",
                     name);
  StepCount::of(*parts.scheduler) = static_cast<unsigned>(as_integer(saved->value, "step_count"));
}

// Older files of a Trainer have one rate for all groups. If the number of groups has changed, a
// rate is taken over only if it is the same for all of the saved groups.
std::vector<double> saved_rates(const Node& saved, std::size_t groups) {
  if (!saved.is(NodeKind::kList)) return std::vector<double>(groups, as_real(saved, "last_lr"));
  std::vector<double> rates;
  for (const Node& rate : saved.items) rates.push_back(as_real(rate, "last_lr"));
  const bool same = std::ranges::all_of(rates, [&](double rate) { return rate == rates[0]; });
  if (same && !rates.empty()) rates.resize(groups, rates[0]);
  return rates;
}

void restore_schedule(const CheckpointParts& parts, const train::Checkpoint& checkpoint,
                      bool is_leader) {
  const std::string name = checkpoint.path() + "/scheduler.json";
  const std::string text = checkpoint.text("scheduler.json");
  if (text.empty()) return;
  const Node root = parse_json(text, name);
  if (const Entry* saved = root.find("last_lr"); saved != nullptr && parts.optimizer != nullptr) {
    const std::size_t groups = parts.optimizer->groups();
    const std::vector<double> rates = saved_rates(saved->value, groups);
    if (rates.size() != groups)
      throw UsageError("checkpoint",
                       "{} has learning rates for {} parameter groups, and the optimizer has {}. "
                       "Make the groups that the saved run had.",
                       name, rates.size(), groups);
    for (std::size_t group = 0; group < groups; ++group)
      parts.optimizer->set_lr(group, rates[group]);
  }
  restore_step_count(parts, root, name, is_leader);
  const Entry* type = root.find("type");
  const Entry* factor = root.find("factor");
  if (parts.schedule == nullptr || type == nullptr || factor == nullptr || !is_leader) return;
  const std::int64_t step = checkpoint.state().global_step;
  if (as_string(type->value, "type") != parts.schedule->name() ||
      as_real(factor->value, "factor") != parts.schedule->factor(step))
    log::warning("checkpoint",
                 "{} was saved with the schedule {} at factor {}; this run has {} at {} in step "
                 "{}. The learning rate changes here.",
                 checkpoint.path(), as_string(type->value, "type"),
                 as_real(factor->value, "factor"), parts.schedule->name(),
                 parts.schedule->factor(step), step);
}

train::DataPosition position_of(const CheckpointParts& parts, const Mesh& mesh,
                                std::int64_t epoch) {
  train::DataPosition position{
      .epoch = epoch, .world_size = mesh.batch().size(), .threads = at::get_num_threads()};
  if (parts.loader == nullptr) return position;
  const data::SamplerState at = parts.loader->state();
  position.epoch = at.epoch;
  position.cursor = at.cursor;
  position.seed = static_cast<std::int64_t>(at.seed);
  position.batch_size = parts.loader->options().batch_size;
  position.accumulation = parts.accumulation;
  position.dataset_size = at.size;
  position.order = at.order;
  return position;
}

void restore_loader(data::Loader& loader, const train::Checkpoint& checkpoint) {
  const train::DataPosition& saved = checkpoint.position();
  if (!checkpoint.resumable() || saved.dataset_size == 0)
    throw UsageError("checkpoint",
                     "{} has no position in the data: it was saved without a loader. Leave the "
                     "loader out of the parts; the epoch then begins at its first sample.",
                     checkpoint.path());
  loader.load_state({.epoch = saved.epoch,
                     .cursor = saved.cursor,
                     .seed = static_cast<std::uint64_t>(saved.seed),
                     .size = saved.dataset_size,
                     .order = saved.order});
}

void note_other_batch(const CheckpointParts& parts, const Mesh& mesh,
                      const train::DataPosition& saved) {
  if (parts.loader == nullptr || !mesh.world().is_leader()) return;
  const train::BatchParts then{saved.world_size, saved.batch_size, saved.accumulation};
  const train::BatchParts now{mesh.batch().size(), parts.loader->options().batch_size,
                              parts.accumulation};
  if (then != now) log::warning("checkpoint", "{}", train::other_batch_text(then, now));
}

// Completed epochs, with the fraction of the current one.
double epoch_progress(const train::DataPosition& position) {
  const auto epoch = static_cast<double>(position.epoch);
  if (position.dataset_size == 0) return epoch;
  return epoch + static_cast<double>(position.cursor) / static_cast<double>(position.dataset_size);
}

train::CheckpointContents contents_of(const CheckpointParts& parts, const Mesh& mesh,
                                      const SaveOptions& options) {
  train::CheckpointContents all;
  all.files = parts.model_files;
  all.model = train::saved_tensors(*parts.module, all.files, /*copy_buffers=*/false);
  all.position = position_of(parts, mesh, options.epoch);
  all.state.global_step = options.step;
  all.state.epoch = epoch_progress(all.position);
  if (parts.loader != nullptr) all.state.train_batch_size = parts.loader->options().batch_size;
  if (!options.metrics.empty())
    all.state.log_history.push_back(
        {.step = options.step, .epoch = all.state.epoch, .values = options.metrics});
  all.scheduler = schedule_text(parts, options.step);
  if (parts.scaler != nullptr) all.scaler = train::scaler_text(parts.scaler->state_dict());
  all.model_config = options.model_config;
  return all;
}

// A rank's contribution: its step, then its generators.
std::string contribution_of(const CheckpointParts& parts, const Mesh& mesh,
                            const SaveOptions& options) {
  check_parts(parts);
  optim::refuse_incomplete(parts.module->parameters(), "checkpoint");
  if (options.step < 0)
    throw UsageError("checkpoint", "step is {}, and must not be negative.", options.step);
  std::string text = fmt::format("{}\n", options.step);
  if (parts.rng) text += train::packed_random_state(mesh);
  return text;
}

// A tensor's bits, added up as integers, so that no order of summation changes the sum.
std::int64_t sum_of_bits(const at::Tensor& tensor) {
  const std::size_t bytes = tensor.element_size();
  const at::ScalarType type = bytes == 1   ? at::kByte
                              : bytes == 2 ? at::kShort
                              : bytes == 4 ? at::kInt
                                           : at::kLong;
  constexpr std::int64_t kAtOnce = 1 << 24;  // the sum converts them to 64 bits
  std::int64_t sum = 0;
  for (const at::Tensor& some : tensor.detach().flatten().view(type).split(kAtOnce))
    sum += some.sum(at::kLong).item<std::int64_t>();
  return sum;
}

// A line for each trained parameter, with its sum. Empty where a wrapper keeps replicas equal, or
// where the parts name the tensors: a program may collect those from its ranks by itself.
std::string unwrapped_parameters(const CheckpointParts& parts) {
  if (parts.model_files.tensors) return {};
  std::string text;
  for (const auto& parameter : parts.module->named_parameters()) {
    const at::Tensor& value = parameter.value();
    if (optim::is_watched(value)) return {};
    if (value.requires_grad() && value.layout() == at::kStrided)
      text += fmt::format("{} {}\n", parameter.key(), sum_of_bits(value));
  }
  return text;
}

// Rank 0's model would be saved for all. Collective; throws the same on every rank.
void refuse_separate_models(World& world, const CheckpointParts& parts) {
  if (world.size() == 1) return;
  const auto all = agree(world, [&] { return unwrapped_parameters(parts); });
  const std::vector<std::string> first = lines_of(all[0]);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const std::vector<std::string> here = lines_of(all[rank]);
    if (here.size() != first.size()) continue;  // another model, or one that is wrapped
    const auto other = std::ranges::mismatch(first, here).in1;
    if (other == first.end()) continue;
    throw UsageError("checkpoint",
                     "parameter '{}' of rank {} is not that of rank 0, and the model is not "
                     "wrapped: each rank probably trains a model of its own. Wrap it "
                     "(lockstep::DistributedDataParallel) and train the wrapper. To save rank 0's "
                     "model alone, call save_checkpoint() there with a World().",
                     other->substr(0, other->rfind(' ')), rank);
  }
}

// Every rank has the same list, so all of them throw or none does.
void check_same_step(const std::vector<std::string>& all) {
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank].substr(0, all[rank].find('\n')) != all[0].substr(0, all[0].find('\n')))
      throw UsageError("checkpoint",
                       "rank 0 saves step {} and rank {} step {}. Ranks probably took different "
                       "numbers of steps. Count steps identically on all of them.",
                       all[0].substr(0, all[0].find('\n')), rank,
                       all[rank].substr(0, all[rank].find('\n')));
}

void clear_way(const std::string& directory, const SaveOptions& options) {
  train::LoopDirectory::hold(directory).make_way(options.step, options.overwrite_output_dir);
  for (const std::string& left : io::sweep(directory).removed)
    log::info("checkpoint", "removed {}, which a writer that was killed left behind", left);
}

std::string chosen_path(const std::string& directory, const ResumeOptions& options) {
  const io::Newest found =
      train::find_checkpoint(directory, options.checkpoint.empty() ? "auto" : options.checkpoint);
  for (const io::PassedOver& passed : found.passed_over)
    log::warning("checkpoint", "{} is skipped: {}", passed.path, passed.reason);
  if (!found.remark.empty()) log::warning("checkpoint", "{}: {}", found.path, found.remark);
  if (found.step < 0)
    log::info("checkpoint", "{} has no checkpoint to resume from: a new run", directory);
  return found.step < 0 ? std::string() : found.path;
}

// Throws the same on every rank.
void check_same_folder(const std::string& path, const std::vector<std::string>& sums) {
  for (std::size_t rank = 1; rank < sums.size(); ++rank)
    if (sums[rank] != sums[0])
      throw UsageError("checkpoint",
                       "rank {} finds another {} than rank 0. The directory is probably not "
                       "shared between hosts. Put it on a file system that all hosts mount.",
                       rank, path);
}

}  // namespace

// ---------------------------------------------------------------- save and resume

namespace {

void say_saved(const std::string& directory, std::int64_t step, const train::SaveOutcome& outcome) {
  train::LoopDirectory::hold(directory).saved(step);
  if (!outcome.alert.empty()) log::warning("checkpoint", "{}", outcome.alert);
  log::info("checkpoint", "{} is durable (written in {:.0f} ms)", outcome.path, outcome.write_ms);
}

// Ranks exchange while rank 0 writes, so that the save's own progress bounds the wait and not the
// timeout of one operation.
void write_by_leader(World& world, const train::SaverOptions& saving, train::CheckpointContents all,
                     const std::string& retain) {
  const std::int64_t step = all.state.global_step;
  std::optional<train::AsyncSaver> saver;
  const auto write_for_a_while = [&]() -> std::string {
    if (!world.is_leader()) return {};
    if (!saver) saver.emplace(saving).begin(std::move(all), retain);
    saver->wait_a_while(kSavePoll);
    const std::optional<train::SaveOutcome> outcome = saver->poll();
    if (!outcome) return "busy";
    if (!outcome->committed) throw Error("checkpoint", outcome->alert + ".");
    say_saved(saving.output_dir, step, *outcome);
    return {};
  };
  while (!agree(world, write_for_a_while)[0].empty()) {
  }
}

}  // namespace

std::string save_checkpoint(const std::string& directory, Mesh mesh, const CheckpointParts& parts,
                            const SaveOptions& options) {
  const ledger::CallSite here;
  const ledger::PhaseScope phase(ledger::Phase::kSaving);
  World& world = mesh.world();
  const std::vector<std::string> ranks =
      agree(world, [&] { return contribution_of(parts, mesh, options); });
  check_same_step(ranks);
  const std::string path = train::checkpoint_path(directory, options.step);
  const bool divided = any_rank(
      world, train::any_divided(train::saved_tensors(*parts.module, parts.model_files, false)));
  if (!divided) refuse_separate_models(world, parts);
  TensorDict state;
  if (parts.optimizer != nullptr) {
    parts.optimizer->name_parameters(parts.module->named_parameters().pairs());
    agree(world, [&] {
      state = parts.optimizer->state_dict({.wanted = world.is_leader(), .divided = divided});
    });
  }
  train::CheckpointContents all;
  agree(world, [&] {
    if (world.is_leader()) clear_way(directory, options);
    if (!world.is_leader() && !divided) return;
    all = contents_of(parts, mesh, options);
    all.optimizer = std::move(state);
    std::vector<std::string> generators;
    for (const std::string& rank : ranks) generators.push_back(rank.substr(rank.find('\n') + 1));
    all.rng = train::unpack_random_states(generators);
  });
  const train::SaverOptions saving{
      .output_dir = directory, .limit = options.save_total_limit, .copy = false};
  if (!divided) {
    write_by_leader(world, saving, std::move(all), options.retain);
    return path;
  }
  const train::SaveOutcome outcome =
      train::write_divided(mesh, std::move(all), saving, options.retain);
  if (!outcome.committed) throw Error("checkpoint", outcome.alert + ".");
  if (world.is_leader()) say_saved(directory, options.step, outcome);
  return path;
}

std::optional<Resumed> resume(const std::string& directory, Mesh mesh, const CheckpointParts& parts,
                              const ResumeOptions& options) {
  World& world = mesh.world();
  const std::string path = agree(world, [&]() -> std::string {
    check_parts(parts);
    if (!world.is_leader()) return {};
    train::LoopDirectory& own = train::LoopDirectory::hold(directory);
    std::string chosen = chosen_path(directory, options);
    if (chosen.empty()) own.resumed({});
    return chosen;
  })[0];
  if (path.empty()) return std::nullopt;

  std::optional<train::Checkpoint> checkpoint;
  check_same_folder(path, agree(world, [&] {
                      checkpoint.emplace(path);
                      return io::manifest_digest(path);
                    }));
  TensorDict state;
  agree(world, [&] {
    checkpoint->load_model(*parts.module, parts.model_files);
    if (parts.optimizer != nullptr) state = checkpoint->optimizer();
  });
  if (parts.optimizer != nullptr) {
    parts.optimizer->name_parameters(parts.module->named_parameters().pairs());
    agree(world, [&] {
      parts.optimizer->sync_from_model();
      parts.optimizer->load_state_dict(state);
    });
  }
  agree(world, [&] {
    restore_schedule(parts, *checkpoint, world.is_leader());
    if (parts.loader != nullptr) restore_loader(*parts.loader, *checkpoint);
    if (parts.scaler != nullptr) {
      const std::string text = checkpoint->text("scaler.json");
      if (!text.empty())
        parts.scaler->load_state_dict(train::parse_scaler_text(text, path + "/scaler.json"));
    }
    if (parts.rng && checkpoint->resumable()) train::restore_random_state(mesh, *checkpoint);
  });

  const train::DataPosition& position = checkpoint->position();
  const train::TrainerState& saved = checkpoint->state();
  note_other_batch(parts, mesh, position);
  train::warn_of_other_threads(mesh, *checkpoint);
  ledger::continue_at(saved.global_step);
  if (world.is_leader()) {
    train::LoopDirectory::hold(directory).resumed(
        {.checkpoint = path, .step = saved.global_step, .newest = options.checkpoint.empty()});
    log::info("checkpoint", "resumed from {} at step {}, epoch {:.2f}", path, saved.global_step,
              saved.epoch);
  }
  const bool complete = position.dataset_size > 0 && position.cursor >= position.dataset_size;
  Resumed resumed{.path = path,
                  .step = saved.global_step,
                  .epoch = position.epoch + (complete ? 1 : 0),
                  .world_size = position.world_size,
                  .metrics = {}};
  if (!saved.log_history.empty() && saved.log_history.back().step == saved.global_step)
    resumed.metrics = saved.log_history.back().values;
  return resumed;
}

std::int64_t steps_left(const CheckpointParts& parts, std::int64_t epoch, std::int64_t epochs) {
  if (parts.loader == nullptr)
    throw UsageError("checkpoint",
                     "the parts have no loader, which says how many batches are left. Name the one "
                     "that the loop reads: {{.loader = &loader}}.");
  if (epoch >= epochs) return 0;
  const std::int64_t window = parts.accumulation;
  const auto steps = [&](std::int64_t batches) { return (batches + window - 1) / window; };
  return steps(parts.loader->batches_left(epoch)) +
         (epochs - epoch - 1) * steps(parts.loader->batches_per_epoch());
}

}  // namespace lockstep
