// lockstep bench presets: one GPU's settings, those of a slow two-GPU run, and the presets standard
// and fast, beside what a performance guide predicts for them. All take the same optimizer steps on
// the same samples.
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "bench/harness.h"
#include "bench/processes.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/train/config.h"

namespace lockstep::bench {
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
