// RunLog: gives your own training loop the Trainer's outputs: the dashboard, `lockstep monitor`,
// `lockstep report`, TensorBoard and metrics.jsonl.
//
//   lockstep::RunLog run_log{"out", world, {.total_steps = 1000}};        // after resume()
//   ...                                                     // after an optimizer step:
//   run_log.log({{"loss", loss}, {"learning_rate", lr}, {"grad_norm", norm}}, step);
//   run_log.log({{"eval_loss", eval_loss}}, step);
//
// Make it and call it on every rank; rank 0's values are written. Nothing is averaged: pass a
// rank's own loss through all_reduce(world, loss, ReduceOp::kAvg) first (comm/numbers.h).
// A tensor on a GPU is not waited for: its line is written with the next log() or at the end.
//
//   out/metrics.jsonl    one line for each call, every number in full
//   out/runs/            TensorBoard's files: "loss" is train/loss, "eval_loss" is eval/loss
//   out/monitor/         where the time of every rank goes (docs/doctor.md)
//
// The names that the dashboard knows are the Trainer's: loss, eval_loss, learning_rate, grad_norm,
// tokens_per_second, samples_per_second; it draws any other, too. A run that resume() has restored
// continues the files. Any other is refused where there are checkpoints; without them the lines of
// the run before it are moved to metrics.superseded.jsonl, and its record is deleted.
//
// The constructor is a collective, log() is not. One thread. From then on rank 0's process holds
// the directory, as with save_checkpoint().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep {

// A number, or a tensor with one element.
class LogValue {
 public:
  LogValue(double number) : number_(number) {}
  LogValue(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  const at::Tensor& tensor() const { return tensor_; }  // undefined where it is a number
  double number() const { return number_; }

 private:
  double number_ = 0;
  at::Tensor tensor_;
};
using LogValues = std::vector<std::pair<std::string, LogValue>>;

struct RunLogOptions {
  std::int64_t total_steps = 0;  // to show how much is left; 0: not known
  bool tensorboard = true;
  bool record = true;      // where the time goes, once a second
  std::string run_name{};  // in every line, and TensorBoard's folder below runs/
  // The step from which a loop with its own checkpoints continues. Unset: the step that resume()
  // has restored from this directory, or else a new run.
  std::optional<std::int64_t> resumed_at{};
  // Delete the checkpoints of a run that this one does not continue, instead of refusing.
  bool overwrite_output_dir = false;
};

class RunLog {
 public:
  // UsageError on all ranks where another run has the directory or has left checkpoints there;
  // SystemError where rank 0 cannot write there.
  RunLog(const std::string& directory, World world, const RunLogOptions& options = {});
  ~RunLog();  // writes what is left, and that the run has ended
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  // Call it after `step` optimizer steps. The launcher and the page count by `step`: if nothing
  // else counts (one rank that calls loss.backward()), the loop has taken the steps since the last
  // call. A step lower than before is a repetition: later lines are moved to
  // metrics.superseded.jsonl. "epoch" among the values becomes the line's epoch. UsageError for a
  // tensor with several elements and for a name that is empty or "step".
  void log(const LogValues& values, std::int64_t step);
  // Logs at the step that the launcher counted last, at the end of a synchronised backward.
  // UsageError if none was counted.
  void log(const LogValues& values);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
