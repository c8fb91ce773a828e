// MetricsReporter: measures a run's losses and speeds, and writes them to metrics.jsonl,
// TensorBoard, the progress bar, the log history and the summary. start_recording(): records the
// run in output_dir/monitor (lockstep/monitor/run_record.h).
//
//   MetricsReporter metrics(run, control);
//   metrics.open();
//   metrics.count(tokens, loss, result);    // a step; everything stays on the device
//   metrics.log(learning_rate);             // the only place where a step reads the device
//
// Every rank has one; rank 0's writes. log(), tokens_since_log() and summarize() are collectives.
// One thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/comm/world.h"
#include "lockstep/core/ledger.h"
#include "lockstep/data/batch.h"
#include "lockstep/monitor/rank_recorder.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/train/metrics_log.h"
#include "lockstep/train/run_control.h"

namespace lockstep::train {

class MetricsReporter {
 public:
  MetricsReporter(RunContext& run, RunControl& control) : run_(run), control_(control) {}

  void open(std::int64_t resumed_at);
  void start();  // the clocks, at the first step

  // Counts the batch's samples, and the tokens that the model computes, prompts and padding
  // included: the token ids in `data`, or else in `target`, or else the samples.
  void count_batch(const data::Batch& batch);
  // A step: the tokens of this rank that its loss is a mean of, and the sum of their losses.
  void count(std::int64_t tokens, const at::Tensor& loss, const optim::StepResult& result);
  void show_step();

  // The share of this rank's time since the last log that was spent waiting, for exchange().
  Waits waits() const;

  // The tokens that the model has computed on all ranks.
  std::int64_t tokens_since_log() {
    return static_cast<std::int64_t>(totals_of(since_log_).input_tokens);
  }
  // Called once per step.
  void log(double learning_rate);
  // Writes a separate line, such as an evaluation's.
  void report(Metrics values);

  // Logs the most valuable finding of the doctor's rules (lockstep/monitor), if there is one: rank
  // 0 reads the record that the ranks have written so far.
  void advise();

  // Writes the summary of the whole call into run.result.
  void summarize();
  void close();

 private:
  struct Totals {
    double input_tokens = 0;
    double mean_loss = 0;
  };
  // Steps that changed nothing, because a gradient was not finite.
  struct Skips {
    double steps = 0;     // since the last log
    double bad_loss = 0;  // those in which this rank's own loss was not finite
    double in_a_row = 0;  // up to now
  };
  Totals totals_of(const at::Tensor& sums);
  void add_device_figures(Metrics& values, double tokens_per_second) const;
  Skips read_skips();
  std::string bad_ranks(const Skips& skips);
  // Throws where nothing is trained any more.
  void refuse_skips(double in_a_row, bool at_end);
  Metrics recorded_summary();

  RunContext& run_;
  RunControl& control_;
  std::unique_ptr<MetricsLog> file_;    // on rank 0
  std::unique_ptr<Progress> progress_;  // on rank 0
  // This rank's sums of four figures, float64 on the device: losses, tokens, tokens whose loss was
  // finite, and input tokens. In data without sequences a sample counts as a token.
  at::Tensor since_log_;
  at::Tensor since_start_;
  at::Tensor skips_;          // those of Skips, float64 on the device
  double skipped_steps_ = 0;  // of this call, as far as they were read
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

// The record of a run, of a Trainer or of a loop with a RunLog.
//
//   monitor::RunFacts facts = world_facts(world);
//   const Recording recording = start_recording(world, "out", facts);   // until it is destroyed
struct Recording {
  monitor::RunFacts facts{};  // as they were written
  std::unique_ptr<monitor::RankRecorder> recorder{};
};

// The facts that every run has: ranks, device, backend, threads. The run's time begins now.
monitor::RunFacts world_facts(const World& world);

// Collective, once this run owns `folder`; the launcher then reads the record there. Rank 0 writes
// the facts, and every rank has a recorder, unless `record` is false. A folder that cannot be
// written is reported and not an error.
Recording start_recording(World& world, const std::string& folder, const monitor::RunFacts& known,
                          bool record = true);

// On rank 0, records that the run has ended, or why it failed. A run with neither was killed. A
// failed run ends with its process, since a launcher may start it again.
void end_recording(const World& world, const std::string& folder, const std::string& failure);

}  // namespace lockstep::train
