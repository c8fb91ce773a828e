// What a person sees of a run: a bar that is redrawn on a terminal, otherwise one line per logging
// step.
//
//   Progress progress({.total_steps = 1000, .done_steps = 40});
//   progress.step(41);
//   progress.log({.step = 50, .epoch = 0.5, .values = {{"loss", 1.25}, {"learning_rate", 3e-4}}});
//
// Used by one thread, on rank 0. Writes to stdout.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "lockstep/train/trainer_state.h"

namespace lockstep::train {

struct ProgressOptions {
  std::int64_t total_steps = 0;
  std::int64_t done_steps = 0;  // before this start
  bool bar = true;              // where stdout is a terminal, or the launcher's pipe to one
};

class Progress {
 public:
  explicit Progress(const ProgressOptions& options);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(std::int64_t step);
  void log(const LogEntry& entry);

 private:
  void draw();
  void clear();

  ProgressOptions options_;
  bool bar_ = false;
  bool drawn_ = false;
  std::int64_t step_ = 0;
  std::string newest_;  // the bar's right side
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point drawn_at_;
};

// "step 50/1000  epoch 0.50  loss 1.2500  lr 3.000e-04  |g| 0.81  512 samples/s  eta 0:12"
std::string progress_line(const LogEntry& entry, std::int64_t total_steps, double eta_s);
// "1:02:03"
std::string duration_text(double seconds);

}  // namespace lockstep::train
