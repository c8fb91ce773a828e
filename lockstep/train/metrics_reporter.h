// MetricsReporter: what a run measures, and where it is written: losses and speeds, metrics.jsonl,
// TensorBoard, the progress bar, the log history and the summary.
//
//   MetricsReporter metrics(run, control);
//   metrics.open();
//   metrics.count(window, result);          // a step; everything stays on the device
//   metrics.log(learning_rate);             // the only place where a step reads the device
//
// Every rank has one; rank 0's writes. log(), tokens_since_log() and summarize() are collectives.
// One thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>

#include "lockstep/core/ledger.h"
#include "lockstep/data/batch.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/accumulation.h"
#include "lockstep/train/metrics_log.h"
#include "lockstep/train/progress.h"
#include "lockstep/train/run_control.h"

namespace lockstep::train {

class MetricsReporter {
 public:
  MetricsReporter(RunContext& run, RunControl& control) : run_(run), control_(control) {}

  void open(std::int64_t resumed_at);
  void start();  // the clocks, at the first step

  // Its samples, and the tokens that the model computes, prompts and padding among them: as many
  // as token ids in `data`, or else in `target`, and its samples where neither is token ids.
  void count_batch(const data::Batch& batch);
  void count(const Window& window, const optim::StepResult& result);
  void show_step();

  // How much of this rank's steps since the last log was spent waiting, for the step's exchange.
  Waits waits() const;

  // That the model has computed on all ranks.
  std::int64_t tokens_since_log() {
    return static_cast<std::int64_t>(totals_of(since_log_).input_tokens);
  }
  // Once per step.
  void log(double learning_rate);
  // A line of its own, such as an evaluation's.
  void report(Metrics values);

  // The most valuable finding of the doctor's rules (lockstep/monitor), if there is one: rank 0
  // reads the record that the ranks have written so far.
  void advise();

  // Writes the summary of the whole call into run.result.
  void summarize();
  void close();

 private:
  struct Totals {
    double input_tokens = 0;
    double mean_loss = 0;
  };
  Totals totals_of(const at::Tensor& sums);
  Metrics recorded_summary();

  RunContext& run_;
  RunControl& control_;
  std::unique_ptr<MetricsLog> file_;    // on rank 0
  std::unique_ptr<Progress> progress_;  // on rank 0
  // Sums of (loss x count, count, count with a finite loss, this rank's input tokens), float64 on
  // the device. A count is of what the loss is the mean of.
  at::Tensor since_log_;
  at::Tensor since_start_;
  at::Tensor skipped_;
  at::Tensor grad_norm_;
  std::int64_t samples_ = 0;       // this rank's since the last log; every rank has as many
  std::int64_t input_tokens_ = 0;  // this rank's since the last count()
  std::int64_t last_log_step_ = 0;
  ledger::Totals log_totals_;  // at the last log
  bool advised_ = false;
  std::chrono::steady_clock::time_point log_time_;
  std::chrono::steady_clock::time_point start_time_;
  std::chrono::steady_clock::time_point next_advice_;
};

}  // namespace lockstep::train
