// lockstep bench presets: one GPU's settings, those of a slow two-GPU run, and the presets standard
// and fast, beside what a performance guide predicts for them. All take the same optimizer steps on
// the same samples.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <deque>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "bench/bench.h"
#include "bench/scratch.h"
#include "bench/stats.h"
#include "bench/strategies.h"
#include "bench/train_runs.h"
#include "lockstep/core/cores.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/train/config.h"

namespace lockstep::bench {
namespace {

// Relative tolerance for a run's mean loss: the same samples, added in another order. A different
// effective batch shows as several per cent.
constexpr double kLossTolerance = 1e-3;

struct PresetOptions {
  int ranks = 2;
  int steps = 40;
  int rounds = 3;
  int threads = 0;
  std::string file, csv, json;
};

struct PresetRun {
  std::string name;
  int ranks = 1;
  int batch = 1, accumulation = 1, logging = 1;
  int save_total_limit = 2, workers = 0;
  // What the guide's table and text predict for two ranks. 0 and "": nothing.
  double table = 0;
  const char* text = "";
  std::vector<TrainFigures> rounds{};

  int effective() const { return ranks * batch * accumulation; }
  std::vector<double> seconds() const {
    std::vector<double> all;
    for (const TrainFigures& figures : rounds) all.push_back(figures.runtime_s);
    return all;
  }
};
using PresetRuns = std::deque<PresetRun>;

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
  // Two checkpoints in a run: how many are retained is one of the differences.
  job.flags.insert(
      job.flags.end(),
      {fmt::format("--per_device_train_batch_size={}", run.batch),
       fmt::format("--gradient_accumulation_steps={}", run.accumulation),
       fmt::format("--logging_steps={}", run.logging),
       fmt::format("--save_total_limit={}", run.save_total_limit),
       fmt::format("--dataloader_num_workers={}", run.workers),
       fmt::format("--max_steps={}", options.steps), "--warmup_steps=0", "--save_strategy=steps",
       fmt::format("--save_steps={}", std::max(1, options.steps / 2)), "--eval_strategy=no",
       "--load_best_model_at_end=false", "--report_to=none", "--disable_tqdm=true",
       "--resume_from_checkpoint=never"});
  job.environment["OMP_NUM_THREADS"] = fmt::format("{}", options.threads);
  return job;
}

void verify(const PresetRuns& runs) {
  const double reference = runs.front().rounds.front().train_loss;
  double worst = 0;
  for (const PresetRun& run : runs) {
    for (const TrainFigures& figures : run.rounds) {
      const double difference = std::abs(figures.train_loss - reference) / std::abs(reference);
      if (!(difference <= kLossTolerance))
        throw Error("bench",
                    fmt::format("{} and {} do not train the same: their mean losses are "
                                "{:.6g} and {:.6g}",
                                runs.front().name, run.name, reference, figures.train_loss));
      worst = std::max(worst, difference);
    }
  }
  fmt::print(stderr, "verified: mean losses differ by at most {:.1g}\n", worst);
}

// How many times faster than `single`, round by round.
Summary speedup(const PresetRuns& runs, const PresetRun& run) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < run.rounds.size(); ++i)
    ratios.push_back(runs.front().rounds[i].runtime_s / run.rounds[i].runtime_s);
  return summarize(ratios);
}

Table table_of(const PresetRuns& runs, const PresetOptions& options) {
  Table table({fmt::format("{} steps", options.steps), "ranks", "batch", "accum", "logging",
               "effective batch", "min s", "p50 s", "max s", "speed-up", "p25", "p75",
               "guide's table", "guide's text"});
  for (const PresetRun& run : runs) {
    const Summary seconds = summarize(run.seconds()), times = speedup(runs, run);
    std::vector<std::string> cells{run.name};
    for (const int value : {run.ranks, run.batch, run.accumulation, run.logging, run.effective()})
      cells.push_back(fmt::format("{}", value));
    for (const double value :
         {seconds.min, seconds.p50, seconds.max, times.p50, times.p25, times.p75})
      cells.push_back(fmt::format("{:.2f}", value));
    cells.push_back(run.table > 0 ? fmt::format("{}", run.table) : "-");
    cells.emplace_back(*run.text != '\0' ? run.text : "-");
    table.add(std::move(cells));
  }
  return table;
}

std::string json_of(const PresetRuns& runs, const PresetOptions& options) {
  nlohmann::json document{{"benchmark", "presets"},
                          {"ranks", options.ranks},
                          {"steps", options.steps},
                          {"threads", options.threads}};
  for (const PresetRun& run : runs)
    document["rows"].push_back({{"preset", run.name},
                                {"ranks", run.ranks},
                                {"batch", run.batch},
                                {"accumulation", run.accumulation},
                                {"logging_steps", run.logging},
                                {"effective_batch", run.effective()},
                                {"seconds", run.seconds()},
                                {"speedup", speedup(runs, run).p50},
                                {"train_loss", run.rounds.front().train_loss}});
  return document.dump(1) + "\n";
}

}  // namespace

int presets_main(int argc, char** argv) {
  PresetOptions options;
  CLI::App app{
      "The presets standard and fast beside one rank and an older configuration, with the same "
      "effective batch and the same samples, and beside the speed-ups that a guide predicts"};
  app.add_option("file", options.file, "a training file; without it a small GPT on bytes");
  app.add_option("--ranks", options.ranks, "of all but the first row")->check(CLI::Range(2, 64));
  app.add_option("--steps", options.steps, "optimizer steps of each run")
      ->check(CLI::Range(2, 1000000));
  app.add_option("--rounds", options.rounds, "runs of each row, by turns")
      ->check(CLI::Range(1, 1000));
  app.add_option("--threads", options.threads,
                 "of each rank on the CPU; 0: cores divided by ranks, for one rank too")
      ->check(CLI::Range(0, 1024));
  app.add_option("--csv", options.csv, "also write the table to this file");
  app.add_option("--json", options.json, "also write the time of every run to this file");
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  if (options.threads == 0) options.threads = std::max(1, allowed_cores() / options.ranks);
  check_file(options.file);
  const Scratch scratch;
  PresetRuns runs = runs_of(options);
  for (int round = 0; round < options.rounds; ++round) {
    std::string shown;
    for (std::size_t k = 0; k < runs.size(); ++k) {
      PresetRun& run = runs[(k + static_cast<std::size_t>(round)) % runs.size()];
      run.rounds.push_back(run_train(job_of(run, options), scratch.file(run.name)));
      shown += fmt::format(" {} {:.2f}", run.name, run.rounds.back().runtime_s);
    }
    fmt::print(stderr, "round {}/{}:{} s\n", round + 1, options.rounds, shown);
  }
  verify(runs);
  publish(table_of(runs, options), options.csv);
  if (!options.json.empty()) write_file_atomically(options.json, json_of(runs, options));
  return 0;
}

}  // namespace lockstep::bench
