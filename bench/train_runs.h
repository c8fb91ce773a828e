// Runs of `lockstep train` that a benchmark compares: each is a process of its own, whose
// measurements are read from its metrics.jsonl.
//
//   const TrainFigures figures = run_train({.name = "fast", .ranks = 2, .file = "fast.json"},
//                                          scratch.file("out"));
//   figures.runtime_s, figures.samples_per_second
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/processes.h"
#include "lockstep/train/arguments.h"

namespace lockstep::bench {

struct TrainJob {
  std::string name;
  int ranks = 1;
  std::string file{};                // a training file; empty: none
  std::vector<std::string> flags{};  // "--max_steps=10"
  Environment environment{};
};

struct TrainFigures {
  double runtime_s = 0;  // for training, without the start of the process
  double train_loss = 0;
  // One value per log, oldest first; tokens of a language model alone.
  std::vector<double> losses{}, samples_per_second{}, tokens_per_second{};

  // Samples a second: the median of the logs except the first, which holds the start.
  double settled_rate() const { return settled(samples_per_second); }
  // The same of any of them.
  static double settled(const std::vector<double>& logged);
};

// Flags of a run of so many steps that is measured: they turn off what only takes time away from
// its steps, would change the batch between them, or makes no sense for so few (a schedule). Later
// flags override them.
std::vector<std::string> short_run(std::int64_t steps, std::int64_t logging_steps);

// Whether a run of that file trains on the CPU of this machine.
bool on_cpu(const TrainingArguments& arguments);

// `folder` becomes output_dir. Error with the last lines of its output when it fails.
TrainFigures run_train(const TrainJob& job, const std::string& folder);

}  // namespace lockstep::bench
