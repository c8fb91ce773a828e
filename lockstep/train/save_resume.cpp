#include "lockstep/train/save_resume.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/io/atomic_dir.h"
#include "lockstep/io/checksum.h"
#include "lockstep/io/manifest.h"
#include "lockstep/io/numbered_dirs.h"
#include "lockstep/optim/determinism.h"
#include "lockstep/train/async_saver.h"
#include "lockstep/train/checkpoint.h"
#include "lockstep/train/previous_run.h"

namespace lockstep {
namespace {

using train::TensorDict;

constexpr std::chrono::milliseconds kSavePoll{50};
constexpr const char* kDeviceRng = "cuda";  // the rank's own device, whatever its number

void check_parts(const CheckpointParts& parts) {
  if (parts.module == nullptr)
    throw UsageError("checkpoint",
                     "the parts have no module. Name the one that the loop trains: {{.module = "
                     "net.get(), .optimizer = &optimizer}}.");
}

optim::NamedParameters names_of(const torch::nn::Module& module) {
  return module.named_parameters().pairs();
}

TensorDict generators_of(const World& world) {
  const optim::RngState all = optim::rng_state();
  TensorDict mine{{"cpu", all.at("cpu")}};
  if (!world.device().is_cpu()) mine.emplace(kDeviceRng, all.at(world.device().str()));
  return mine;
}

void restore_generators(const World& world, const train::Checkpoint& checkpoint) {
  TensorDict mine = checkpoint.rng(world.rank());
  if (auto device = mine.extract(kDeviceRng); device && !world.device().is_cpu()) {
    device.key() = world.device().str();
    mine.insert(std::move(device));
  }
  if (!mine.empty()) optim::set_rng_state(mine);
}

std::string schedule_text(const CheckpointParts& parts, std::int64_t step) {
  NodeMembers members;
  if (parts.schedule != nullptr) {
    members.emplace_back("type", text_node(parts.schedule->name()));
    members.emplace_back("factor", real_node(parts.schedule->factor(step)));
  }
  members.emplace_back("last_epoch", integer_node(step));
  if (parts.optimizer) {
    std::vector<Node> rates;
    for (const double rate : parts.optimizer.learning_rates()) rates.push_back(real_node(rate));
    members.emplace_back("last_lr", list_node(std::move(rates)));
  }
  return to_json(map_node(std::move(members))) + "\n";
}

// The Trainer writes one rate for all groups.
void restore_schedule(const CheckpointParts& parts, const train::Checkpoint& checkpoint,
                      bool is_leader) {
  const std::string name = checkpoint.path() + "/scheduler.json";
  const std::string text = checkpoint.text("scheduler.json");
  if (text.empty()) return;
  const Node root = parse_json(text, name);
  if (const Entry* saved = root.find("last_lr"); saved != nullptr && parts.optimizer) {
    std::vector<double> rates = parts.optimizer.learning_rates();
    if (!saved->value.is(NodeKind::kList)) {
      std::fill(rates.begin(), rates.end(), as_real(saved->value, "last_lr"));
    } else {
      if (saved->value.items.size() != rates.size())
        throw UsageError("checkpoint",
                         "{} has learning rates for {} parameter groups, and the optimizer has {}. "
                         "Make the groups that the saved run had.",
                         name, saved->value.items.size(), rates.size());
      for (std::size_t i = 0; i < rates.size(); ++i)
        rates[i] = as_real(saved->value.items[i], "last_lr");
    }
    parts.optimizer.set_learning_rates(rates);
  }
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

train::DataPosition position_of(const CheckpointParts& parts, const World& world,
                                std::int64_t epoch) {
  train::DataPosition position{.epoch = epoch, .world_size = world.size()};
  if (parts.loader == nullptr) return position;
  const data::SamplerState at = parts.loader->state();
  position.epoch = at.epoch;
  position.cursor = at.cursor;
  position.seed = static_cast<std::int64_t>(at.seed);
  position.batch_size = parts.loader->options().batch_size;
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

void note_other_ranks(const CheckpointParts& parts, const World& world,
                      const train::DataPosition& saved) {
  if (parts.loader == nullptr || !world.is_leader()) return;
  const std::int64_t batch = parts.loader->options().batch_size;
  if (saved.world_size == world.size() && saved.batch_size == batch) return;
  log::warning("checkpoint",
               "saved by {} ranks with batches of {}, resumed by {} with {}: the samples come in "
               "the same order, each once per epoch; a batch over all ranks has {} samples instead "
               "of {}.",
               saved.world_size, saved.batch_size, world.size(), batch, world.size() * batch,
               saved.world_size * saved.batch_size);
}

// Epochs that are done, with the share of the one under way.
double epoch_progress(const train::DataPosition& position) {
  const auto epoch = static_cast<double>(position.epoch);
  if (position.dataset_size == 0) return epoch;
  return epoch + static_cast<double>(position.cursor) / static_cast<double>(position.dataset_size);
}

train::CheckpointContents contents_of(const CheckpointParts& parts, const World& world,
                                      const SaveOptions& options) {
  train::CheckpointContents all;
  all.files = parts.model_files;
  all.model = train::saved_tensors(*parts.module, all.files, /*copy_buffers=*/false);
  all.position = position_of(parts, world, options.epoch);
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

// What a rank contributes: its step, then its generators.
std::string contribution_of(const CheckpointParts& parts, const World& world,
                            const SaveOptions& options) {
  check_parts(parts);
  if (options.step < 0)
    throw UsageError("checkpoint", "step is {}, and must not be negative.", options.step);
  std::string text = fmt::format("{}\n", options.step);
  if (parts.rng) text += train::pack_tensors(generators_of(world));
  return text;
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

void clear_way(const std::string& directory, const std::string& path, std::int64_t step) {
  for (const std::string& left : io::sweep(directory).removed)
    log::info("checkpoint", "removed {}, which a writer that was killed left behind", left);
  const std::string place = train::archive_checkpoints_above(directory, step);
  if (place.empty()) return;
  log::warning("checkpoint",
               "{} had checkpoints above step {}, of another run or of steps that are repeated. "
               "They were moved to {}, because resuming takes the highest step; {} is saved now.",
               directory, step, place, path);
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

// ---------------------------------------------------------------- the optimizer

OptimizerPart::OptimizerPart(torch::optim::Optimizer* optimizer)
    : stock_(dynamic_cast<optim::FusedBase*>(optimizer)) {
  if (optimizer != nullptr && stock_ == nullptr)
    throw UsageError("checkpoint",
                     "the optimizer is torch::optim's own, whose state cannot be saved by "
                     "parameter name. Use AdamW, Adam or SGD of lockstep::optim: the same rules, "
                     "with Python's names and bits.");
}

TensorDict OptimizerPart::state_dict(const torch::nn::Module& module) const {
  if (optimizer_ != nullptr) return optimizer_->state_dict();
  return stock_ != nullptr ? stock_->state_dict(names_of(module)) : TensorDict();
}

void OptimizerPart::load_state_dict(const torch::nn::Module& module,
                                    const TensorDict& state) const {
  if (optimizer_ != nullptr) {
    optimizer_->sync_from_model();
    optimizer_->load_state_dict(state);
  } else if (stock_ != nullptr) {
    stock_->load_state_dict(names_of(module), state);
  }
}

std::vector<double> OptimizerPart::learning_rates() const {
  std::vector<double> rates;
  const std::size_t groups = optimizer_ != nullptr ? optimizer_->groups()
                             : stock_ != nullptr   ? stock_->param_groups().size()
                                                   : 0;
  for (std::size_t i = 0; i < groups; ++i)
    rates.push_back(optimizer_ != nullptr ? optimizer_->lr(i) : stock_->lr(i));
  return rates;
}

void OptimizerPart::set_learning_rates(const std::vector<double>& rates) const {
  for (std::size_t i = 0; i < rates.size(); ++i) {
    if (optimizer_ != nullptr) optimizer_->set_lr(i, rates[i]);
    if (stock_ != nullptr) stock_->set_lr(i, rates[i]);
  }
}

// ---------------------------------------------------------------- save and resume

std::string save_checkpoint(const std::string& directory, World world, const CheckpointParts& parts,
                            const SaveOptions& options) {
  const std::vector<std::string> ranks =
      world.agree([&] { return contribution_of(parts, world, options); });
  check_same_step(ranks);
  const std::string path = train::checkpoint_path(directory, options.step);
  TensorDict sharded;
  if (parts.optimizer.collective()) sharded = parts.optimizer.state_dict(*parts.module);
  std::optional<train::AsyncSaver> saver;
  // Ranks exchange while rank 0 writes, so that the save's own progress bounds the wait and not the
  // timeout of one operation.
  const auto write_for_a_while = [&]() -> std::string {
    if (!world.is_leader()) return {};
    if (!saver) {
      clear_way(directory, path, options.step);
      train::CheckpointContents all = contents_of(parts, world, options);
      all.optimizer = parts.optimizer.collective() ? std::move(sharded)
                                                   : parts.optimizer.state_dict(*parts.module);
      for (const std::string& rank : ranks)
        all.rng.push_back(train::unpack_tensors(rank.substr(rank.find('\n') + 1)));
      saver.emplace(
          train::SaverOptions{.output_dir = directory, .limit = options.save_total_limit});
      saver->begin(std::move(all), options.retain);
    }
    saver->wait_a_while(kSavePoll);
    const std::optional<train::SaveOutcome> outcome = saver->poll();
    if (!outcome) return "busy";
    if (!outcome->committed) throw Error("checkpoint", outcome->alert + ".");
    if (!outcome->alert.empty()) log::warning("checkpoint", "{}", outcome->alert);
    log::info("checkpoint", "{} is durable (written in {:.0f} ms)", path, outcome->write_ms);
    return {};
  };
  while (!world.agree(write_for_a_while)[0].empty()) {
  }
  return path;
}

std::optional<Resumed> resume(const std::string& directory, World world,
                              const CheckpointParts& parts, const ResumeOptions& options) {
  const std::string path = world.agree([&]() -> std::string {
    check_parts(parts);
    return world.is_leader() ? chosen_path(directory, options) : std::string();
  })[0];
  if (path.empty()) return std::nullopt;

  std::optional<train::Checkpoint> checkpoint;
  check_same_folder(path, world.agree([&] {
    checkpoint.emplace(path);
    return fmt::format(
        "{:016x}", io::checksum64(io::bytes_of(checkpoint->text(std::string(io::kManifestName)))));
  }));
  TensorDict state;
  world.agree([&] {
    checkpoint->load_model(*parts.module, parts.model_files);
    if (parts.optimizer) state = checkpoint->optimizer();
    if (parts.optimizer && !parts.optimizer.collective())
      parts.optimizer.load_state_dict(*parts.module, state);
  });
  if (parts.optimizer.collective()) parts.optimizer.load_state_dict(*parts.module, state);
  world.agree([&] {
    restore_schedule(parts, *checkpoint, world.is_leader());
    if (parts.loader != nullptr) restore_loader(*parts.loader, *checkpoint);
    if (parts.scaler != nullptr) {
      const std::string text = checkpoint->text("scaler.json");
      if (!text.empty())
        parts.scaler->load_state_dict(train::parse_scaler_text(text, path + "/scaler.json"));
    }
    if (parts.rng && checkpoint->resumable()) restore_generators(world, *checkpoint);
  });

  const train::DataPosition& position = checkpoint->position();
  const train::TrainerState& saved = checkpoint->state();
  note_other_ranks(parts, world, position);
  if (world.is_leader())
    log::info("checkpoint", "resumed from {} at step {}, epoch {:.2f}", path, saved.global_step,
              saved.epoch);
  Resumed resumed{.path = path,
                  .step = saved.global_step,
                  .epoch = position.epoch,
                  .world_size = position.world_size,
                  .metrics = {}};
  if (!saved.log_history.empty() && saved.log_history.back().step == saved.global_step)
    resumed.metrics = saved.log_history.back().values;
  return resumed;
}

}  // namespace lockstep
