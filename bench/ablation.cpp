// lockstep bench ablation FILE: what each of a training file's speed settings is worth. The run
// begins without any of them on one rank, and gets them one after the other.
#include "bench/ablation.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <deque>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/bench.h"
#include "bench/scratch.h"
#include "bench/stats.h"
#include "bench/strategies.h"
#include "bench/train_runs.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/cores.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/io/safetensors.h"
#include "lockstep/train/config.h"
#include "lockstep/train/effective_batch.h"

namespace lockstep::bench {
namespace {

// A change below this counts as nothing, however often it was seen.
constexpr double kNoise = 0.02;
constexpr int kLogs = 5;  // per run; the first holds the warm-up and does not count

struct AblationOptions {
  std::string file;
  std::vector<std::string> set;
  int ranks = 2;
  int steps = 50;
  int rounds = 3;
  int threads = 0;
  int workers = 2;
  std::string csv, json;
};

using Keys = std::map<std::string, Node>;

// A point on the way from the baseline to all settings.
struct Stage {
  std::string name;
  int ranks = 1;
  Keys keys{};
  std::map<std::string, std::string> environment{};
  // Computes the same numbers as the previous stage.
  bool same_numbers = false;
  // Has no run of its own: the cost of an unfused optimizer is added to the stages before it.
  bool computed = false;
  std::vector<TrainFigures> rounds{};
};
using Stages = std::deque<Stage>;

// ---------------------------------------------------------------- the training file

// Keys of a full training run that are useless in a short one, and those that the stages set.
constexpr const char* kDropped[] = {"preset",
                                    "num_train_epochs",
                                    "max_steps",
                                    "warmup_steps",
                                    "lr_scheduler_type",
                                    "lr_scheduler_kwargs",
                                    "auto_find_batch_size",
                                    "elastic_gpu",
                                    "logging_strategy",
                                    "logging_steps",
                                    "logging_first_step",
                                    "disable_tqdm",
                                    "report_to",
                                    "run_name",
                                    "eval_strategy",
                                    "eval_steps",
                                    "eval_delay",
                                    "eval_on_start",
                                    "load_best_model_at_end",
                                    "metric_for_best_model",
                                    "greater_is_better",
                                    "early_stopping_patience",
                                    "early_stopping_threshold",
                                    "output_dir",
                                    "save_strategy",
                                    "save_steps",
                                    "save_total_limit",
                                    "save_only_model",
                                    "save_on_each_node",
                                    "enable_jit_checkpoint",
                                    "resume_from_checkpoint",
                                    "ignore_data_skip",
                                    "bf16",
                                    "fp16",
                                    "tf32",
                                    "gradient_checkpointing",
                                    "compile_model",
                                    "dataloader_num_workers",
                                    "dataloader_pin_memory",
                                    "dataloader_prefetch_factor",
                                    "dataloader_persistent_workers",
                                    "shard_optimizer"};

Keys base_keys(const train::Config& config, const AblationOptions& options) {
  Keys keys;
  for (const train::Setting& setting : config.settings)
    if (setting.origin != train::Origin::kDefault && !setting.value.is(NodeKind::kNull))
      keys[std::string(setting.key->name)] = setting.value;
  for (const char* name : kDropped) keys.erase(name);
  keys["max_steps"] = integer_node(options.steps);
  keys["logging_steps"] = integer_node(std::max(1, options.steps / kLogs));
  keys["disable_tqdm"] = bool_node(true);
  keys["save_strategy"] = text_node("no");
  keys["enable_jit_checkpoint"] = bool_node(false);
  keys["dataloader_num_workers"] = integer_node(0);
  keys["dataloader_pin_memory"] = bool_node(false);
  keys["shard_optimizer"] = text_node("false");
  keys["compile_model"] = text_node("false");
  return keys;
}

std::string file_of(const Stage& stage, const Keys& more, const Scratch& scratch) {
  NodeMembers members;
  Keys keys = more;
  keys.insert(stage.keys.begin(), stage.keys.end());
  for (const auto& [key, value] : keys) members.emplace_back(key, value);
  const std::string path = scratch.file("stage.json");
  write_file_atomically(path, to_json(map_node(std::move(members))) + "\n");
  return path;
}

// ---------------------------------------------------------------- stages

bool on_cpu(const TrainingArguments& arguments) {
  return arguments.use_cpu || env::get("LOCKSTEP_DEVICE").value_or("") == "cpu" ||
         cuda_device_count() == 0;
}

void add_precision(Stages& stages, const TrainingArguments& a) {
  Stage next = stages.back();
  next.same_numbers = false;
  const bool chosen = a.bf16 || a.fp16;
  // On a GPU one would normally use 16 bits; on CPUs they often cost time, so the file decides.
  if (!chosen && on_cpu(a)) return;
  next.name = a.fp16 ? "+ fp16" : "+ bf16";
  next.keys[a.fp16 ? "fp16" : "bf16"] = bool_node(true);
  if (a.tf32) next.keys["tf32"] = bool_node(*a.tf32);
  stages.push_back(std::move(next));
}

// The file's settings in the order in which they are usually recommended: memory, loading,
// optimizer, ranks.
Stages stages_of(const train::Config& config, const AblationOptions& options) {
  const TrainingArguments& a = config.arguments;
  Stages stages{{.name = "baseline: fp32, 1 rank", .keys = base_keys(config, options)}};
  const auto add = [&](std::string name, bool same_numbers) -> Stage& {
    Stage next = stages.back();
    next.name = std::move(name);
    next.same_numbers = same_numbers;
    next.computed = false;
    stages.push_back(std::move(next));
    return stages.back();
  };
  for (const train::Setting& setting : config.settings)
    if (setting.origin == train::Origin::kEnvironment)
      stages.front().environment[setting.where] = "";  // it is in the file now
  stages.front().environment["OMP_NUM_THREADS"] = fmt::format("{}", options.threads);
  if (on_cpu(a)) {
    for (const char* name : {"LOCKSTEP_CPU_CACHE_MAX_BYTES", "LOCKSTEP_GRAD_INPLACE_MIN_BYTES"})
      stages.front().environment[name] = "0";
    Stage& cached = add("+ memory: caching CPU allocator", true);
    for (const char* name : {"LOCKSTEP_CPU_CACHE_MAX_BYTES", "LOCKSTEP_GRAD_INPLACE_MIN_BYTES"})
      cached.environment.erase(name);
  }
  add_precision(stages, a);
  if (a.gradient_checkpointing)
    add("+ gradient_checkpointing", false).keys["gradient_checkpointing"] = bool_node(true);
  const std::int64_t workers =
      a.dataloader_num_workers > 0 ? a.dataloader_num_workers : options.workers;
  const std::int64_t ahead = a.dataloader_prefetch_factor.value_or(2);
  Stage& loader = add(fmt::format("+ loader: {} workers, {} batches ahead", workers, ahead), true);
  loader.keys["dataloader_num_workers"] = integer_node(workers);
  loader.keys["dataloader_prefetch_factor"] = integer_node(ahead);
  loader.keys["dataloader_persistent_workers"] = bool_node(true);
  loader.keys["dataloader_pin_memory"] = bool_node(true);
  if (a.compile_model == "true" || (a.compile_model == "auto" && !on_cpu(a)))
    add("+ compile_model", false).keys["compile_model"] = text_node("true");
  add("+ fused optimizer", true).computed = true;
  if (options.ranks == 1) return stages;
  add(fmt::format("+ DDP: {} ranks", options.ranks), false).ranks = options.ranks;
  if (a.shard_optimizer != "false")
    add("+ sharded optimizer", true).keys["shard_optimizer"] = text_node(a.shard_optimizer);
  return stages;
}

// ---------------------------------------------------------------- measurement

TrainFigures run_stage(const Stage& stage, const Keys& more, const Scratch& scratch) {
  return run_train({.name = stage.name,
                    .ranks = stage.ranks,
                    .file = file_of(stage, more, scratch),
                    .environment = stage.environment},
                   scratch.file("out"));
}

// Makes a first run of one step, whose checkpoint has the shapes of the parameters.
std::vector<std::vector<std::int64_t>> parameter_shapes(const Stage& baseline,
                                                        const Scratch& scratch) {
  run_stage(baseline,
            {{"max_steps", integer_node(1)},
             {"logging_steps", integer_node(1)},
             {"save_strategy", text_node("steps")},
             {"save_steps", integer_node(1)},
             {"save_only_model", bool_node(true)}},
            scratch);
  std::vector<std::vector<std::int64_t>> shapes;
  for (const auto& entry :
       std::filesystem::directory_iterator(scratch.file("out") + "/checkpoint-1")) {
    const std::string name = entry.path().filename();
    if (!name.ends_with(".safetensors") || name.starts_with("rng_state")) continue;
    const io::SafetensorsFile file(entry.path());
    for (const io::TensorEntry& tensor : file.tensors()) shapes.push_back(tensor.shape);
  }
  if (shapes.empty()) throw Error("bench", "the checkpoint of the first run has no tensors");
  return shapes;
}

double rate_of(const TrainFigures& figures) {
  const std::vector<double>& all = figures.samples_per_second;
  if (all.size() < 2)
    throw Error("bench", "a run has logged less than twice. Give it more --steps");
  return median({all.begin() + 1, all.end()});
}

void measure(Stages& stages, const AblationOptions& options, const Scratch& scratch) {
  for (int round = 0; round < options.rounds; ++round) {
    std::string shown;
    for (std::size_t k = 0; k < stages.size(); ++k) {
      Stage& stage = stages[(k + static_cast<std::size_t>(round)) % stages.size()];
      if (stage.computed) continue;
      stage.rounds.push_back(run_stage(stage, {}, scratch));
      shown += fmt::format(" {:.2f}", rate_of(stage.rounds.back()));
    }
    fmt::print(stderr, "round {}/{}:{} samples/s\n", round + 1, options.rounds, shown);
  }
  for (std::size_t i = 1; i < stages.size(); ++i)
    if (stages[i].computed) stages[i].rounds = stages[i - 1].rounds;
}

// Settings that only concern speed must not change what is computed.
void verify(const Stages& stages) {
  int compared = 0;
  for (std::size_t i = 1; i < stages.size(); ++i) {
    if (!stages[i].same_numbers || stages[i].computed) continue;
    const TrainFigures &before = stages[i - 1].rounds.front(), &now = stages[i].rounds.front();
    if (before.losses != now.losses)
      throw Error("bench", fmt::format("'{}' changes the losses: mean {:.9g} before and {:.9g} now",
                                       stages[i].name, before.train_loss, now.train_loss));
    ++compared;
  }
  fmt::print(stderr, "verified: {} of the settings leave every logged loss as it was\n", compared);
}

// ---------------------------------------------------------------- results

struct Gains {
  double samples_per_s = 0;
  Summary step, total;  // how many times faster than the previous stage, and than the baseline
};

// Seconds of an optimizer step in each round, with an unfused optimizer up to its stage.
std::vector<double> step_seconds(const Stages& stages, std::size_t number, double unfused_s,
                                 const TrainingArguments& arguments) {
  const auto fused = static_cast<std::size_t>(
      std::find_if(stages.begin(), stages.end(), [](const Stage& s) { return s.computed; }) -
      stages.begin());
  const Stage& stage = stages[number];
  const auto samples = static_cast<double>(train::effective_batch(arguments, stage.ranks));
  std::vector<double> seconds;
  for (const TrainFigures& figures : stage.rounds)
    seconds.push_back(samples / rate_of(figures) + (number < fused ? unfused_s : 0));
  return seconds;
}

std::vector<Gains> gains_of(const Stages& stages, double unfused_s,
                            const TrainingArguments& arguments) {
  std::vector<Gains> gains;
  std::vector<std::vector<double>> rates;  // samples a second, by stage and round
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const auto samples = static_cast<double>(train::effective_batch(arguments, stages[i].ranks));
    rates.emplace_back();
    for (const double seconds : step_seconds(stages, i, unfused_s, arguments))
      rates.back().push_back(samples / seconds);
    const auto over = [&](std::size_t other) {
      std::vector<double> ratios;
      for (std::size_t r = 0; r < rates[i].size(); ++r)
        ratios.push_back(rates[i][r] / rates[other][r]);
      return summarize(ratios);
    };
    gains.push_back({median(rates[i]), over(i == 0 ? 0 : i - 1), over(0)});
  }
  return gains;
}

std::string remark(const Stage& stage, const Summary& step, bool first) {
  if (first) return "";
  const std::string text = std::abs(step.p50 - 1) < kNoise || (step.p25 <= 1 && step.p75 >= 1)
                               ? "nothing that can be measured"
                           : step.p50 < 1 ? "slower here"
                                          : "";
  if (!stage.computed) return text;
  return text.empty() ? "computed" : "computed; " + text;
}

Table table_of(const Stages& stages, const std::vector<Gains>& gains) {
  Table table(
      {"setting", "ranks", "samples/s", "times before", "p25", "p75", "times baseline", "remark"});
  for (std::size_t i = 0; i < stages.size(); ++i) {
    std::vector<std::string> cells{stages[i].name, fmt::format("{}", stages[i].ranks),
                                   fmt::format("{:.2f}", gains[i].samples_per_s)};
    for (const double value :
         {gains[i].step.p50, gains[i].step.p25, gains[i].step.p75, gains[i].total.p50})
      cells.push_back(fmt::format("{:.3f}", value));
    cells.push_back(remark(stages[i], gains[i].step, i == 0));
    table.add(std::move(cells));
  }
  return table;
}

std::string json_of(const Stages& stages, const std::vector<Gains>& gains,
                    const OptimizerTimes& optimizer, const AblationOptions& options) {
  nlohmann::json document{
      {"benchmark", "ablation"},
      {"file", options.file},
      {"steps", options.steps},
      {"threads", options.threads},
      {"optimizer_ms", {{"fused", optimizer.fused_ms}, {"unfused", optimizer.unfused_ms}}}};
  for (std::size_t i = 0; i < stages.size(); ++i)
    document["rows"].push_back({{"setting", stages[i].name},
                                {"ranks", stages[i].ranks},
                                {"computed", stages[i].computed},
                                {"samples_per_s", gains[i].samples_per_s},
                                {"times_before", gains[i].step.p50},
                                {"times_baseline", gains[i].total.p50}});
  return document.dump(1) + "\n";
}

int ablate(AblationOptions options) {
  std::vector<std::string> flags;
  for (const std::string& one : options.set) flags.push_back("--" + one);
  const train::Config config = train::load_config(options.file, flags);
  const TrainingArguments& arguments = config.arguments;
  for (const int ranks : {1, options.ranks}) train::accumulation_steps(arguments, ranks);
  if (options.threads == 0) options.threads = std::max(1, allowed_cores() / options.ranks);
  const Scratch scratch;
  Stages stages = stages_of(config, options);
  OptimizerQuestion question{.shapes = parameter_shapes(stages.front(), scratch),
                             .optim = arguments.optim,
                             .device = on_cpu(arguments) ? "cpu" : "cuda",
                             .threads = options.threads};
  measure(stages, options, scratch);
  verify(stages);
  const OptimizerTimes optimizer = optimizer_times(question);
  const double unfused_s = (optimizer.unfused_ms - optimizer.fused_ms) / 1e3;
  const std::vector<Gains> gains = gains_of(stages, unfused_s, arguments);
  publish(table_of(stages, gains), options.csv);
  fmt::print(
      "The optimizer of lockstep train is always fused. A step of it takes {:.2f} ms on these "
      "parameters, LibTorch's\nunfused one {:.2f} ms; rows before \"+ fused optimizer\" have the "
      "difference added.\n",
      optimizer.fused_ms, optimizer.unfused_ms);
  if (!options.json.empty())
    write_file_atomically(options.json, json_of(stages, gains, optimizer, options));
  return 0;
}

}  // namespace

int ablation_main(int argc, char** argv) {
  AblationOptions options;
  options.ranks = std::max(2, cuda_device_count());
  CLI::App app{
      "What each speed setting of a training file is worth: memory, loading, fused optimizer, "
      "ranks, sharded optimizer, one after the other, each beside the run without it"};
  app.add_option("file", options.file, "the training file")->required();
  app.add_option("--set", options.set, "KEY=VALUE of the training file, as often as needed")
      ->allow_extra_args(false);
  app.add_option("--ranks", options.ranks, "of the last rows; 1: no such rows")
      ->check(CLI::Range(1, 64));
  app.add_option("--steps", options.steps, "optimizer steps of each run")
      ->check(CLI::Range(2 * kLogs, 1000000));
  app.add_option("--rounds", options.rounds, "runs of each row, by turns")
      ->check(CLI::Range(1, 1000));
  app.add_option("--workers", options.workers, "of the loader, where the file has none")
      ->check(CLI::Range(1, 1024));
  app.add_option("--threads", options.threads,
                 "of each rank on the CPU; 0: cores divided by ranks, for one rank too")
      ->check(CLI::Range(0, 1024));
  app.add_option("--csv", options.csv, "also write the table to this file");
  app.add_option("--json", options.json, "also write the figures to this file");
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  return ablate(std::move(options));
}

}  // namespace lockstep::bench
