// lockstep bench ablation FILE: what each of a training file's speed settings is worth. The run
// begins without any of them on one rank, and gets them one after the other. And lockstep bench
// presets: one GPU's settings, those of a slow two-GPU run, and the presets standard and fast,
// beside what a performance guide predicts for them. All take the same optimizer steps on the same
// samples.
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <tuple>

#include "bench/harness.h"
#include "bench/processes.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/io/safetensors.h"
#include "lockstep/optim/algorithms.h"
#include "lockstep/train/config.h"
#include "lockstep/train/config_keys.h"
#include "lockstep/train/effective_batch.h"

namespace lockstep::bench {
namespace {

// A change below this counts as nothing, however often it was seen.
constexpr double kNoise = 0.02;
constexpr int kLogs = 5;  // per run; the first holds the warm-up and does not count

struct AblationOptions {
  std::string file;
  std::vector<std::string> set;  // "--key=value"
  int ranks = 2;
  int steps = 50;
  int threads = 0;
  int workers = 2;
};

// A point on the way from the baseline to all settings.
struct Stage {
  std::string name;
  int ranks = 1;
  std::vector<std::string> flags{};  // the later one counts
  Environment environment{};
  // Computes the same numbers as the previous stage.
  bool same_numbers = false;
  // Has no run of its own: the cost of an unfused optimizer is added to the stages before it.
  bool computed = false;
  std::vector<TrainFigures> rounds{};

  void set(const char* key, const auto& value) {
    flags.push_back(fmt::format("--{}={}", key, value));
  }
};
using Stages = std::vector<Stage>;

// ---------------------------------------------------------------- stages

constexpr const char* kCaches[] = {"LOCKSTEP_CPU_CACHE_MAX_BYTES",
                                   "LOCKSTEP_GRAD_INPLACE_MIN_BYTES"};

// The file on one rank, without its settings for speed.
Stage baseline_of(const AblationOptions& options, bool cpu) {
  Stage stage{.name = "baseline: fp32, 1 rank", .flags = options.set};
  const auto flags = short_run(options.steps, options.steps / kLogs);
  stage.flags.insert(stage.flags.end(), flags.begin(), flags.end());
  for (const char* key : {"bf16", "fp16", "gradient_checkpointing", "dataloader_pin_memory",
                          "dataloader_persistent_workers", "shard_optimizer", "compile_model"})
    stage.set(key, "false");
  for (const char* key : {"tf32", "dataloader_prefetch_factor"}) stage.set(key, "none");
  stage.set("dataloader_num_workers", 0);
  stage.environment["OMP_NUM_THREADS"] = fmt::format("{}", options.threads);
  if (cpu)
    for (const char* name : kCaches) stage.environment[name] = "0";
  return stage;
}

// The file's settings in the order in which they are usually recommended: memory, loading,
// optimizer, ranks.
Stages stages_of(const TrainingArguments& a, const AblationOptions& options) {
  const bool cpu = on_cpu(a);
  Stages stages{baseline_of(options, cpu)};
  const auto add = [&](const std::string& name, bool same_numbers) -> Stage& {
    Stage next = stages.back();
    next.name = "+ " + name;
    next.same_numbers = same_numbers;
    next.computed = false;
    return stages.emplace_back(std::move(next));
  };
  if (cpu) {
    Stage& cached = add("memory: caching CPU allocator", true);
    for (const char* name : kCaches) cached.environment.erase(name);
  }
  // On a GPU one would normally use 16 bits; on CPUs they often cost time, so the file decides.
  if (a.bf16 || a.fp16 || !cpu) {
    const char* precision = a.fp16 ? "fp16" : "bf16";
    Stage& stage = add(precision, false);
    stage.set(precision, true);
    if (a.tf32) stage.set("tf32", *a.tf32);
  }
  if (a.gradient_checkpointing)
    add("gradient_checkpointing", false)
        .set("gradient_checkpointing",
             to_json(train::value_of(a, *train::find_key("gradient_checkpointing"))));
  const std::int64_t workers =
      a.dataloader_num_workers > 0 ? a.dataloader_num_workers : options.workers;
  const std::int64_t ahead = a.dataloader_prefetch_factor.value_or(2);
  Stage& loader = add(fmt::format("loader: {} workers, {} batches ahead", workers, ahead), true);
  loader.set("dataloader_num_workers", workers);
  loader.set("dataloader_prefetch_factor", ahead);
  loader.set("dataloader_persistent_workers", true);
  loader.set("dataloader_pin_memory", true);
  if (a.compile_model == "true" || (a.compile_model == "auto" && !cpu))
    add("compile_model", false).set("compile_model", true);
  add("fused optimizer", true).computed = true;
  if (options.ranks == 1) return stages;
  add(fmt::format("DDP: {} ranks", options.ranks), false).ranks = options.ranks;
  if (a.shard_optimizer != "false")
    add("sharded optimizer", true).set("shard_optimizer", a.shard_optimizer);
  return stages;
}

// ---------------------------------------------------------------- measurement

TrainFigures run_stage(const Stage& stage, const AblationOptions& options, const Scratch& scratch) {
  return run_train({.name = stage.name,
                    .ranks = stage.ranks,
                    .file = options.file,
                    .flags = stage.flags,
                    .environment = stage.environment},
                   scratch.file("out"));
}

// Makes a first run of one step, whose checkpoint has the shapes of the parameters.
std::vector<std::vector<std::int64_t>> parameter_shapes(Stage stage, const AblationOptions& options,
                                                        const Scratch& scratch) {
  for (const char* key : {"max_steps", "logging_steps", "save_steps"}) stage.set(key, 1);
  stage.set("save_strategy", "steps");
  stage.set("save_only_model", true);
  run_stage(stage, options, scratch);
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

void measure(Stages& stages, const Turns& turns, const AblationOptions& options,
             const Scratch& scratch) {
  by_turns(turns, stages, [&](Stage& stage) {
    if (stage.computed) return static_cast<double>(NAN);
    return stage.rounds.emplace_back(run_stage(stage, options, scratch)).settled_rate();
  });
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

// ---------------------------------------------------------------- the optimizer

struct OptimizerTimes {
  double fused_ms = 0;
  double unfused_ms = 0;
};

struct OptimizerQuestion {
  std::vector<std::vector<std::int64_t>> shapes{};  // of the parameters
  std::string optim = "adamw";                      // or adam, sgd
  std::string device = "cpu";
  int threads = 1;
};

constexpr double kLr = 1e-3, kDecay = 0.1;
constexpr int kWarmup = 3, kSamples = 9;
// Relative to how far three steps move a parameter: the two round at different places.
constexpr double kTolerance = 1e-3;

std::vector<at::Tensor> make_parameters(const OptimizerQuestion& question) {
  torch::manual_seed(0);
  std::vector<at::Tensor> parameters;
  for (const auto& shape : question.shapes) {
    at::Tensor parameter = torch::randn(shape).to(c10::Device(question.device)).requires_grad_();
    parameter.mutable_grad() = torch::randn(shape).to(parameter.device());
    parameters.push_back(std::move(parameter));
  }
  return parameters;
}

std::unique_ptr<torch::optim::Optimizer> make_fused(const std::string& name,
                                                    const std::vector<at::Tensor>& parameters) {
  if (name == "sgd")
    return std::make_unique<optim::SGD>(
        parameters, optim::SGDOptions{.lr = kLr, .momentum = 0.9, .weight_decay = kDecay});
  if (name == "adam")
    return std::make_unique<optim::Adam>(parameters,
                                         optim::AdamOptions{.lr = kLr, .weight_decay = kDecay});
  return std::make_unique<optim::AdamW>(parameters,
                                        optim::AdamWOptions{.lr = kLr, .weight_decay = kDecay});
}

std::unique_ptr<torch::optim::Optimizer> make_unfused(const std::string& name,
                                                      const std::vector<at::Tensor>& parameters) {
  if (name == "sgd")
    return std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(kLr).momentum(0.9).weight_decay(kDecay));
  if (name == "adam")
    return std::make_unique<torch::optim::Adam>(
        parameters, torch::optim::AdamOptions(kLr).weight_decay(kDecay));
  return std::make_unique<torch::optim::AdamW>(
      parameters, torch::optim::AdamWOptions(kLr).weight_decay(kDecay));
}

double step_ms(torch::optim::Optimizer& optimizer, const at::Tensor& last) {
  const auto start = Deadline::Clock::now();
  optimizer.step();
  if (last.is_cuda()) torch::cuda::synchronize();
  return 1e3 * seconds_since(start);
}

void compare(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
             const std::vector<at::Tensor>& start) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double apart = (a[i] - b[i]).norm().item<double>();
    const double moved = (a[i] - start[i]).norm().item<double>();
    if (!(apart <= kTolerance * moved))
      throw Error("bench", fmt::format("the fused and the unfused optimizer move parameter {} "
                                       "differently: by {:.3g}, {:.3g} apart",
                                       i, moved, apart));
  }
}

// Medians of a step of lockstep::optim's and of torch::optim's, measured in turn. Both are compared
// first: Error when they move the parameters differently.
OptimizerTimes optimizer_times(const OptimizerQuestion& question) {
  prepare_device(question.device);
  torch::set_num_threads(question.threads);
  const std::vector<at::Tensor> ours = make_parameters(question), other = make_parameters(question),
                                start = make_parameters(question);
  const auto fused = make_fused(question.optim, ours);
  const auto unfused = make_unfused(question.optim, other);
  for (int i = 0; i < kWarmup; ++i) {
    fused->step();
    unfused->step();
  }
  compare(ours, other, start);
  std::vector<double> fused_ms, unfused_ms;
  for (int i = 0; i < kSamples; ++i) {
    fused_ms.push_back(step_ms(*fused, ours.back()));
    unfused_ms.push_back(step_ms(*unfused, other.back()));
  }
  return {.fused_ms = median(fused_ms), .unfused_ms = median(unfused_ms)};
}

// ---------------------------------------------------------------- results

// Samples a second in each round, with an unfused optimizer up to its stage.
std::vector<double> rates_of(const Stages& stages, std::size_t number, double unfused_s,
                             const TrainingArguments& arguments) {
  const auto fused = static_cast<std::size_t>(
      std::find_if(stages.begin(), stages.end(), [](const Stage& s) { return s.computed; }) -
      stages.begin());
  const Stage& stage = stages[number];
  const auto samples = static_cast<double>(train::effective_batch(arguments, stage.ranks));
  std::vector<double> rates;
  for (const TrainFigures& figures : stage.rounds)
    rates.push_back(samples /
                    (samples / figures.settled_rate() + (number < fused ? unfused_s : 0)));
  return rates;
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

int ablate(const Options& output, const Turns& turns, AblationOptions options) {
  const TrainingArguments arguments = train::load_config(options.file, options.set).arguments;
  for (const int ranks : {1, options.ranks}) train::accumulation_steps(arguments, ranks);
  if (options.threads == 0) options.threads = std::max(1, allowed_cores() / options.ranks);
  const Scratch scratch;
  Stages stages = stages_of(arguments, options);
  const OptimizerQuestion question{.shapes = parameter_shapes(stages.front(), options, scratch),
                                   .optim = arguments.optim,
                                   .device = on_cpu(arguments) ? "cpu" : "cuda",
                                   .threads = options.threads};
  measure(stages, turns, options, scratch);
  verify(stages);
  const OptimizerTimes optimizer = optimizer_times(question);
  const double unfused_s = (optimizer.unfused_ms - optimizer.fused_ms) / 1e3;
  Report report(
      "ablation", "setting",
      {{"file", options.file},
       {"steps", options.steps},
       {"threads", options.threads},
       {"optimizer_ms", {{"fused", optimizer.fused_ms}, {"unfused", optimizer.unfused_ms}}}});
  std::vector<std::vector<double>> rates;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    rates.push_back(rates_of(stages, i, unfused_s, arguments));
    const Summary step = over(rates[i], rates[i == 0 ? 0 : i - 1]);
    report.row(stages[i].name)
        .value("setting", stages[i].name)
        .number("ranks", stages[i].ranks, 0, "ranks")
        .value("computed", stages[i].computed)
        .number("samples/s", median(rates[i]), 2, "samples_per_s")
        .ratio("times before", step, "times_before")
        .number("times baseline", over(rates[i], rates[0]).p50, 3, "times_baseline")
        .text("remark", remark(stages[i], step, i == 0));
  }
  report.publish(output);
  fmt::print(
      "The optimizer of lockstep train is always fused. A step of it takes {:.2f} ms on these "
      "parameters, LibTorch's\nunfused one {:.2f} ms; rows before \"+ fused optimizer\" have the "
      "difference added.\n",
      optimizer.fused_ms, optimizer.unfused_ms);
  return 0;
}

}  // namespace

int ablation_main(int argc, char** argv) {
  AblationOptions o;
  Turns turns{.rounds = 3, .unit = "samples/s"};
  o.ranks = std::max(2, cuda_device_count());
  Options options(
      "What each speed setting of a training file is worth: memory, loading, fused optimizer, "
      "ranks, sharded optimizer, one after the other, each beside the run without it");
  options.app().add_option("file", o.file, "the training file")->required();
  options.app()
      .add_option("--set", o.set, "KEY=VALUE of the training file, as often as needed")
      ->allow_extra_args(false);
  options.number("--ranks", o.ranks, 1, 64, "of the last rows; 1: no such rows");
  options.number("--steps", o.steps, 2 * kLogs, 1e6, "optimizer steps of each run");
  options.number("--rounds", turns.rounds, 1, 1000, "runs of each row, by turns");
  options.number("--workers", o.workers, 1, 1024, "of the loader, where the file has none");
  options.number("--threads", o.threads, 0, 1024,
                 "of each rank on the CPU; 0: cores divided by ranks, for one rank too");
  if (const auto code = options.parse(argc, argv)) return *code;
  for (std::string& one : o.set) one = "--" + one;
  return ablate(options, turns, std::move(o));
}

// ---------------------------------------------------------------- lockstep bench presets

namespace {

// Relative tolerance for a run's mean loss: the same samples, added in another order. A different
// effective batch shows as several per cent.
constexpr double kMeanLossTolerance = 1e-3;

struct PresetOptions {
  int ranks = 2;
  int steps = 40;
  int threads = 0;
  std::string file;
};

struct PresetRun {
  std::string name;
  int ranks = 1;
  int batch = 1, accumulation = 1, logging = 1;
  int save_total_limit = 2, workers = 0;
  // What the guide's table and text predict for two ranks. 0 and "": nothing.
  double table = 0;
  const char* text = "";
  std::vector<double> seconds{}, losses{};  // of each round
};
using PresetRuns = std::vector<PresetRun>;

// The values of a preset, as the configuration has them.
PresetRun preset_run(const std::string& name, int ranks) {
  TrainingArguments values;
  for (const Entry& entry : train::preset_entries(name))
    train::assign(values, *train::find_key(entry.key), entry.value);
  return {.name = name,
          .ranks = ranks,
          .batch = static_cast<int>(values.per_device_train_batch_size),
          .accumulation = static_cast<int>(values.gradient_accumulation_steps),
          .logging = static_cast<int>(values.logging_steps),
          .save_total_limit = static_cast<int>(values.save_total_limit.value_or(1)),
          .workers = 4};
}

// With two ranks these are the guide's own numbers; otherwise the accumulation of the single rank
// is adapted, so that the effective batch is the same everywhere.
PresetRuns runs_of(const PresetOptions& options) {
  const int n = options.ranks;
  PresetRuns runs{{.name = "single", .ranks = 1, .batch = 4, .accumulation = 2 * n, .logging = 5},
                  {.name = "old", .ranks = n, .batch = 2, .accumulation = 4, .logging = 1}};
  for (const char* name : {"standard", "fast"}) runs.push_back(preset_run(name, n));
  if (n == 2) {
    static constexpr std::pair<double, const char*> kGuide[] = {
        {1.0, "1"}, {1.06, "1.2"}, {1.3, "1.4-1.5"}, {1.6, "1.7-2"}};
    for (std::size_t i = 0; i < runs.size(); ++i) std::tie(runs[i].table, runs[i].text) = kGuide[i];
  }
  return runs;
}

// A file that fixes the update's size would refuse the accumulation of the rows.
void check_file(const std::string& file) {
  if (file.empty()) return;
  const TrainingArguments arguments = train::load_config(file).arguments;
  if (arguments.global_batch_size || arguments.tokens_per_update)
    throw UsageError("bench",
                     "{} sets {}, and the rows set the accumulation themselves. Remove it from a "
                     "copy of the file.",
                     file, arguments.global_batch_size ? "global_batch_size" : "tokens_per_update");
}

TrainJob job_of(const PresetRun& run, const PresetOptions& options) {
  TrainJob job{.name = run.name, .ranks = run.ranks, .file = options.file};
  if (options.file.empty())
    job.flags.insert(job.flags.end(),
                     {"--model={name: gpt, n_layer: 4, n_head: 4, n_embd: 128}",
                      "--data={name: bytes, path: torch-headers, max_bytes: 1000000}",
                      "--max_seq_len=128", "--learning_rate=1e-3"});
  const auto add = [&](std::vector<std::string> flags) {
    job.flags.insert(job.flags.end(), flags.begin(), flags.end());
  };
  add(short_run(options.steps, run.logging));
  // Two checkpoints in a run: how many are retained is one of the differences.
  add({fmt::format("--per_device_train_batch_size={}", run.batch),
       fmt::format("--gradient_accumulation_steps={}", run.accumulation),
       fmt::format("--save_total_limit={}", run.save_total_limit),
       fmt::format("--dataloader_num_workers={}", run.workers), "--save_strategy=steps",
       fmt::format("--save_steps={}", std::max(1, options.steps / 2))});
  job.environment["OMP_NUM_THREADS"] = fmt::format("{}", options.threads);
  return job;
}

void verify(const PresetRuns& runs) {
  const double reference = runs.front().losses.front();
  double worst = 0;
  for (const PresetRun& run : runs) {
    for (const double loss : run.losses) {
      const double difference = std::abs(loss - reference) / std::abs(reference);
      if (!(difference <= kMeanLossTolerance))
        throw Error("bench", fmt::format("{} and {} do not train the same: their mean losses are "
                                         "{:.6g} and {:.6g}",
                                         runs.front().name, run.name, reference, loss));
      worst = std::max(worst, difference);
    }
  }
  fmt::print(stderr, "verified: mean losses differ by at most {:.1g}\n", worst);
}

Report report_of(const PresetRuns& runs, const PresetOptions& options) {
  Report report("presets", fmt::format("{} steps", options.steps),
                {{"ranks", options.ranks}, {"steps", options.steps}, {"threads", options.threads}});
  for (const PresetRun& run : runs) {
    const Summary times = over(runs.front().seconds, run.seconds);
    report.row(run.name)
        .value("preset", run.name)
        .number("ranks", run.ranks, 0, "ranks")
        .number("batch", run.batch, 0, "batch")
        .number("accum", run.accumulation, 0, "accumulation")
        .number("logging", run.logging, 0, "logging_steps")
        .number("effective batch", run.ranks * run.batch * run.accumulation, 0, "effective_batch")
        .value("seconds", run.seconds)
        .spread("s", run.seconds, 2, "min p50 max")
        .number("speed-up", times.p50, 2, "speedup")
        .number("p25", times.p25, 2)
        .number("p75", times.p75, 2)
        .text("guide's table", run.table > 0 ? fmt::format("{}", run.table) : "-")
        .text("guide's text", *run.text != '\0' ? run.text : "-")
        .value("train_loss", run.losses.front());
  }
  return report;
}

}  // namespace

int presets_main(int argc, char** argv) {
  PresetOptions o;
  Turns turns{.rounds = 3, .unit = "s"};
  Options options(
      "The presets standard and fast beside one rank and an older configuration, with the same "
      "effective batch and the same samples, and beside the speed-ups that a guide predicts");
  options.text("file", o.file, "a training file; without it a small GPT on bytes");
  options.number("--ranks", o.ranks, 2, 64, "of all but the first row");
  options.number("--steps", o.steps, 2, 1e6, "optimizer steps of each run");
  options.number("--rounds", turns.rounds, 1, 1000, "runs of each row, by turns");
  options.number("--threads", o.threads, 0, 1024,
                 "of each rank on the CPU; 0: cores divided by ranks, for one rank too");
  if (const auto code = options.parse(argc, argv)) return *code;
  if (o.threads == 0) o.threads = std::max(1, allowed_cores() / o.ranks);
  check_file(o.file);
  const Scratch scratch;
  PresetRuns runs = runs_of(o);
  by_turns(turns, runs, [&](PresetRun& run) {
    const TrainFigures figures = run_train(job_of(run, o), scratch.file(run.name));
    run.losses.push_back(figures.train_loss);
    return run.seconds.emplace_back(figures.runtime_s);
  });
  verify(runs);
  report_of(runs, o).publish(options);
  return 0;
}

}  // namespace lockstep::bench
