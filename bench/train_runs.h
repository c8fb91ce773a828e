// Runs of `lockstep train` that a benchmark compares: each is a process of its own, whose
// measurements are read from its metrics.jsonl.
//
//   const TrainFigures figures = run_train({.name = "fast", .ranks = 2, .file = "fast.json"},
//                                          scratch.file("out"));
//   figures.runtime_s, figures.samples_per_second
#pragma once

#include <map>
#include <string>
#include <vector>

namespace lockstep::bench {

struct TrainJob {
  std::string name;
  int ranks = 1;
  std::string file{};                                // a training file; empty: none
  std::vector<std::string> flags{};                  // "--max_steps=10"
  std::map<std::string, std::string> environment{};  // added; an empty value: removed
};

struct TrainFigures {
  double runtime_s = 0;  // for training, without the start of the process
  double train_loss = 0;
  // One value per log, oldest first.
  std::vector<double> losses{}, samples_per_second{};
};

// `folder` becomes output_dir. Error with the last lines of its output when it fails.
TrainFigures run_train(const TrainJob& job, const std::string& folder);

}  // namespace lockstep::bench
