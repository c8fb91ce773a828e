#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "cli/commands.h"
#include "cli/plan.h"
#include "lockstep/core/document.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/train/checks.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/rule_options.h"
#include "observe/plan/ranking.h"

namespace lockstep::cli {

plan::Training training_of(const train::Config& config, const TaskConfig& task) {
  const TrainingArguments& arguments = config.arguments;
  plan::Training training;
  plan::Model& model = training.model;
  if (task.model.name == "mlp")
    model.config = task.model.mlp;
  else if (task.model.name.starts_with("resnet"))
    model.config = resnet_config(task);
  else
    model.config = causal_lm_config(task.model);
  model.lora = task.lora;
  model.nf4 = task.model.load_in_4bit;
  model.image_size = task.data.image_size;
  if (model.causal_lm() != nullptr) model.length = task.data.length;
  training.batch = arguments.per_device_train_batch_size;
  training.accumulation = arguments.gradient_accumulation_steps;
  training.global_batch = arguments.global_batch_size;
  if (arguments.tokens_per_update)
    training.global_batch = std::max<std::int64_t>(
        1, *arguments.tokens_per_update / arguments.max_seq_len.value_or(model.length));
  training.half = arguments.bf16 || arguments.fp16;
  training.bf16 = arguments.bf16;
  training.tf32 = arguments.tf32.value_or(false);
  training.again = models::block_parts(arguments.gradient_checkpointing.parts);
  training.checkpointing = train::checkpoints_activations(arguments) && !training.again.any();
  if (const train::FsdpPlan fsdp = train::fsdp_plan(arguments); fsdp.on) {
    training.fsdp = fsdp.hybrid                  ? plan::Distribution::kHybridShard
                    : fsdp.reshard_after_forward ? plan::Distribution::kFullShard
                                                 : plan::Distribution::kShardGradOp;
    training.fixed_checkpointing = fsdp.activation_checkpointing;
    training.offload = fsdp.cpu_offload;
    training.shares_memory = fsdp.param_dtype.empty();  // what travels in another type is copied
  }
  training.shard_degree = static_cast<int>(arguments.data_parallel_shard_degree.value_or(0));
  training.shares_memory &= arguments.ddp_backend.value_or("shm") == "shm";
  training.captured = arguments.compile_model != "false";
  training.sharded_optimizer = arguments.shard_optimizer == "true";
  training.may_shard = arguments.shard_optimizer != "false";
  training.adapts = arguments.elastic_gpu            ? "elastic_gpu"
                    : arguments.auto_find_batch_size ? "auto_find_batch_size"
                                                     : "";
  training.state_bytes = train::state_bytes(arguments, plan::trained_tensors(model));
  training.device_map = task.model.device_map.has_value();
  training.built_whole = arguments.auto_find_batch_size || model.causal_lm() == nullptr;
  training.fp8 = arguments.mixed_precision == "fp8";
  training.rowwise = train::fp8_recipe_name(arguments) == "rowwise";
  training.may_fp8 = !model.nf4;
  training.pipeline = static_cast<int>(arguments.pipeline_parallel_degree);
  training.gpipe = arguments.pipeline_parallel_schedule == "GPipe";
  if (arguments.pipeline_parallel_schedule == "Interleaved1F1B") training.chunks = 2;
  training.tensor = static_cast<int>(arguments.tensor_parallel_degree);
  if (config.setting("sequence_parallel").origin != train::Origin::kDefault)
    training.sequence = arguments.sequence_parallel;
  // What `lockstep train` refuses beside them and no strategy changes. elastic_gpu follows slices
  // that were measured, and no stages.
  const bool plain = arguments.shard_optimizer != "true";
  training.may_pipeline = training.pipeline > 1 || (plain && training.adapts.empty());
  training.may_tensor = plain && arguments.optim != "muon" && arguments.optim != "adafactor";
  return training;
}

plan::Devices found_cards(const launch::Gpus& gpus) {
  return plan::detected_devices(
      gpus.models, gpus.count > 0 ? "the driver does not say what they are" : gpus.reason);
}

namespace {

// As fastest_batch(), with a measurement in place of the estimate.
plan::Choice choose_for(const plan::Training& training, const plan::Card& card, int ranks,
                        const std::optional<plan::Measurement>& measured) {
  if (!measured) return plan::fastest_batch(training, card, ranks);
  plan::Training held = training;
  held.global_batch = measured->batch * measured->accumulation * measured->parts.replicas();
  held.checkpointing = measured->checkpointing;
  if (held.checkpointing) held.again = {};
  return plan::make_choice(held, card, measured->parts, measured->batch);
}

void set_arguments(TrainingArguments& arguments, const plan::Training& training,
                   const plan::Choice& choice, bool measured) {
  arguments.per_device_train_batch_size = choice.batch;
  // With global_batch_size or tokens_per_update the accumulation follows from the batch.
  if (!training.global_batch) arguments.gradient_accumulation_steps = choice.accumulation;
  if (choice.slices > 1) {
    arguments.tensor_parallel_degree = choice.slices;
    arguments.sequence_parallel = choice.sequence;
    arguments.elastic_gpu = false;  // no batch is tried on a model that no rank has whole
  }
  if (arguments.shard_optimizer != "auto" || training.fsdp) return;
  if (choice.distribution == plan::Distribution::kShardedOptimizer)
    arguments.shard_optimizer = "true";
  if (measured && choice.distribution == plan::Distribution::kDdp)
    arguments.shard_optimizer = "false";
  if (const std::string_view word = fsdp_word(choice.distribution); !word.empty())
    arguments.fsdp = std::string(word);
}

// "DDP on 4 GPUs", "1 CPU rank".
std::string place_text(const plan::Choice& choice, const plan::Card& card, int ranks) {
  const std::string places =
      fmt::format("{} {}{}", ranks, card.cpu ? "CPU rank" : "GPU", ranks == 1 ? "" : "s");
  return ranks == 1 ? places : fmt::format("{} on {}", parts_text(choice, card.cpu), places);
}

}  // namespace

TrainingArguments with_shared_batch(TrainingArguments arguments, int copies) {
  while (const auto size = train::update_size(arguments)) {
    const std::string uneven = train::uneven_text(*size, copies);
    if (uneven.empty()) break;
    if (arguments.per_device_train_batch_size == 1)
      throw UsageError("config", "elastic_gpu may choose any batch per device, and even so {}",
                       uneven);
    --arguments.per_device_train_batch_size;
  }
  return arguments;
}

std::string apply_plan(TrainingArguments& arguments, const plan::Training& training,
                       const plan::Card& card, int ranks,
                       std::optional<plan::Measurement> measured) {
  if (measured && measured->memory_bytes > plan::usable_bytes(card)) measured.reset();
  // A rank does not have the GPUs of a device map to itself.
  if (training.device_map) return {};
  with_shared_batch(arguments, ranks);  // or the refusal
  const plan::Choice choice = choose_for(training, card, ranks, measured);
  const bool split = choice.distribution == plan::Distribution::kSplit;
  if (!split) set_arguments(arguments, training, choice, measured.has_value());
  if (measured && !training.fixed_checkpointing &&
      measured->checkpointing != training.checkpointing)
    arguments.gradient_checkpointing = measured->checkpointing;
  std::string text = fmt::format(
      "elastic_gpu: {}: {} per device x {} accumulation x {} rank{} = global batch {}, "
      "about {:.1f} GiB each",
      place_text(choice, card, ranks), choice.batch, choice.accumulation, choice.replicas(),
      choice.replicas() == 1 ? "" : "s", choice.global_batch,
      static_cast<double>(choice.memory.total()) / (1u << 30));
  if (measured)
    text += fmt::format("; {:.1f} ms a step when `lockstep plan --probe` ran it{}",
                        1e3 * measured->step_s,
                        measured->disturbance.empty() ? "" : " while " + measured->disturbance);
  if (!choice.fits)
    text += fmt::format(" of {:.1f}: it may not fit (`lockstep plan` says what to change)",
                        static_cast<double>(card.memory_bytes) / (1u << 30));
  if (split)
    text +=
        ". Ranks cannot split a model; training stays data parallel as it is written. Set "
        "model.device_map: balanced and start one rank";
  return text;
}

// ---------------------------------------------------------------- what was measured on this host

namespace {

namespace fs = std::filesystem;

constexpr const char* kDisturbance = "disturbance";

Node read_record() {
  try {
    return parse_json(read_file(plan_record_path()), plan_record_path());
  } catch (const std::exception&) {
    return {};
  }
}

// Puts `fresh` in place of the entries that have the same texts under `keys`. What was measured
// while nothing else ran stays where the fresh one was disturbed.
void replace(const char* list, const std::vector<std::string>& keys, std::vector<Node> fresh) {
  const Node record = read_record();
  NodeMembers members;
  for (const char* name : {"links", "ways"}) {
    std::vector<Node> all;
    for (const Node& old : record.get(name).items) {
      const auto same = std::ranges::find_if(fresh, [&](const Node& one) {
        return name == std::string_view(list) &&
               std::ranges::all_of(keys, [&](const std::string& key) {
                 const Entry* a = old.find(key);
                 const Entry* b = one.find(key);
                 return a != nullptr && b != nullptr &&
                        plain_text(a->value) == plain_text(b->value);
               });
      });
      const bool better = same != fresh.end() && old.find(kDisturbance) != nullptr &&
                          old.get(kDisturbance).text.empty() &&
                          !same->get(kDisturbance).text.empty();
      if (better || same == fresh.end()) all.push_back(old);
      if (better) fresh.erase(same);
    }
    if (name == std::string_view(list)) std::ranges::move(fresh, std::back_inserter(all));
    members.emplace_back(name, list_node(std::move(all)));
  }
  try {
    const std::string path = plan_record_path();
    fs::create_directories(fs::path(path).parent_path());
    write_file_atomically(path, to_json(map_node(std::move(members))) + "\n");
  } catch (const std::exception& e) {
    print_text(stderr, "note: what was measured is not kept: {}\n", e.what());
  }
}

NodeMembers members_of(const plan::Measurement& strategy) {
  return {{"gpus", integer_node(strategy.parts.gpus)},
          {"strategy", integer_node(static_cast<int>(strategy.parts.distribution))},
          {"strategy_text", text_node(parts_text(strategy.parts))},
          {"stages", integer_node(strategy.parts.stages)},
          {"slices", integer_node(strategy.parts.slices)},
          {"sequence_parallel", bool_node(strategy.parts.sequence)},
          {"per_device_train_batch_size", integer_node(strategy.batch)},
          {"gradient_accumulation_steps", integer_node(strategy.accumulation)},
          {"gradient_checkpointing", bool_node(strategy.checkpointing)},
          {"half", bool_node(strategy.half)},
          {"fp8", bool_node(strategy.fp8)},
          {"step_s", real_node(strategy.step_s)},
          {"memory_bytes", integer_node(static_cast<std::int64_t>(strategy.memory_bytes))},
          {"tokens_per_sample", real_node(strategy.tokens)},
          {kDisturbance, text_node(strategy.disturbance)}};
}

// Nothing for one from another version: it lacks a key, or its text does not belong to its number.
std::optional<plan::Measurement> measurement_in(const Node& node) {
  const auto integer = [&](const char* key) {
    return static_cast<std::int64_t>(node.get(key).real);
  };
  const plan::Parts parts{.gpus = static_cast<int>(integer("gpus")),
                          .distribution = static_cast<plan::Distribution>(integer("strategy")),
                          .stages = static_cast<int>(integer("stages")),
                          .slices = static_cast<int>(integer("slices")),
                          .sequence = node.get("sequence_parallel").boolean};
  if (parts.stages < 1 || parts.slices < 1) return std::nullopt;
  const plan::Measurement strategy{
      .parts = parts,
      .batch = integer("per_device_train_batch_size"),
      .accumulation = integer("gradient_accumulation_steps"),
      .checkpointing = node.get("gradient_checkpointing").boolean,
      .half = node.get("half").boolean,
      .fp8 = node.get("fp8").boolean,
      .step_s = node.get("step_s").real,
      .memory_bytes = static_cast<std::uint64_t>(integer("memory_bytes")),
      .tokens = node.get("tokens_per_sample").real,
      .disturbance = node.get(kDisturbance).text};
  if (node.get("strategy_text").text != parts_text(parts) || !(strategy.step_s > 0) ||
      node.find("tokens_per_sample") == nullptr)
    return std::nullopt;
  return strategy;
}

}  // namespace

std::string plan_record_path() {
  if (const auto folder = env::get("LOCKSTEP_CACHE"); folder && !folder->empty())
    return *folder + "/plan.json";
  const auto cache = env::get("XDG_CACHE_HOME");
  const std::string base =
      cache && !cache->empty() ? *cache : env::get("HOME").value_or("/tmp") + "/.cache";
  return base + "/lockstep/plan.json";
}

void save_link(const std::string& device, const plan::MeasuredLink& link) {
  replace("links", {"host", "device", "ranks"},
          {map_node({{"host", text_node(host_name())},
                     {"device", text_node(device)},
                     {"backend", text_node(link.backend)},
                     {"ranks", integer_node(link.ranks)},
                     {"bus_bytes_per_s", real_node(link.bandwidth)},
                     {kDisturbance, text_node(link.disturbance)}})});
}

std::optional<plan::MeasuredLink> saved_link(const std::string& device, int ranks) {
  std::optional<plan::MeasuredLink> best;
  const Node record = read_record();
  for (const Node& node : record.get("links").items) {
    if (node.get("host").text != host_name() || node.get("device").text != device) continue;
    plan::MeasuredLink link{.backend = node.get("backend").text,
                            .ranks = static_cast<int>(node.get("ranks").real),
                            .bandwidth = node.get("bus_bytes_per_s").real,
                            .disturbance = node.get(kDisturbance).text};
    if (link.ranks < 2 || !(link.bandwidth > 0)) continue;
    if (!best || std::abs(link.ranks - ranks) < std::abs(best->ranks - ranks))
      best = std::move(link);
  }
  return best;
}

std::string training_key(const plan::Training& t, const std::string& device, int gpus) {
  const plan::Parameters p = plan::parameters_of(t.model);
  return fmt::format(
      "{} of {} parameters in {} blocks, {} tensors, {:.6g} operations a token, {} tokens, global "
      "batch {}, state {}, {}{}{}{}",
      p.trainable, p.total(), t.model.blocks(), p.tensors, plan::flops_per_token(t.model),
      t.model.length, t.global_batch.value_or(t.batch * t.accumulation * gpus),
      t.state_bytes.value_or(0), device, t.captured ? ", captured" : "",
      t.unfused ? ", unfused" : "", t.tf32 ? ", tf32" : "");
}

void save_strategies(const std::string& training,
                     const std::vector<plan::Measurement>& strategies) {
  std::vector<Node> nodes;
  for (const plan::Measurement& strategy : strategies) {
    NodeMembers members = members_of(strategy);
    members.emplace_back("host", text_node(host_name()));
    members.emplace_back("training", text_node(training));
    nodes.push_back(map_node(std::move(members)));
  }
  replace("ways",
          {"host", "training", "gpus", "strategy", "stages", "slices", "sequence_parallel",
           "per_device_train_batch_size", "gradient_checkpointing", "half", "fp8"},
          std::move(nodes));
}

std::vector<plan::Measurement> saved_strategies(const std::string& training) {
  std::vector<plan::Measurement> strategies;
  const Node record = read_record();
  for (const Node& node : record.get("ways").items) {
    if (node.get("host").text != host_name() || node.get("training").text != training) continue;
    if (const auto strategy = measurement_in(node)) strategies.push_back(*strategy);
  }
  return strategies;
}

std::optional<plan::Measurement> fastest_strategy(const std::vector<plan::Measurement>& strategies,
                                                  const plan::Training& training, int ranks) {
  using plan::Distribution;
  std::optional<plan::Measurement> best;
  for (const plan::Measurement& strategy : strategies) {
    const auto& [gpus, distribution, stages, slices, sequence] = strategy.parts;
    const bool open = training.may_shard && !training.sharded_optimizer && !training.fsdp;
    const bool written = distribution == Distribution::kDdp || distribution == Distribution::kSingle
                             ? !training.sharded_optimizer && !training.fsdp
                         : distribution == Distribution::kShardedOptimizer
                             ? training.sharded_optimizer
                             : distribution == training.fsdp;
    const bool followed = stages == 1 && distribution < Distribution::kSplit &&
                          (slices == 1 || (training.may_tensor && open)) &&
                          (!sequence || training.sequence.value_or(true));
    if (gpus != ranks || !followed || strategy.half != training.half ||
        strategy.fp8 != training.fp8 || !(open || written))
      continue;
    if (!best || strategy.step_s < best->step_s) best = strategy;
  }
  return best;
}

std::string measurement_text(const plan::Measurement& strategy) {
  return to_json(map_node(members_of(strategy)));
}

std::optional<plan::Measurement> parse_measurement(const std::string& text) {
  if (text.empty()) return std::nullopt;
  return measurement_in(parse_json(text, "a measurement"));
}

}  // namespace lockstep::cli
