// Evaluator: computes the means over eval_data, and detects the best ones so far.
//
//   Evaluator evaluator(run, control);
//   const Metrics metrics = evaluator.evaluate();      // a collective
//   const bool best = evaluator.judge(metrics);
//
// Every rank has one. Owns the loader of eval_data. One thread.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "lockstep/data/loader.h"
#include "lockstep/train/run_control.h"

namespace lockstep::train {

class Evaluator {
 public:
  Evaluator(RunContext& run, RunControl& control) : run_(run), control_(control) {}

  // Evaluates every sample once, whatever the number of ranks, running the model once per batch. A
  // stop signal ends it early: control.take_agreed() then has it, and the means are partial.
  Metrics evaluate();

  // Remembers the best value in the run's state, and stops a run whose patience is exhausted.
  // Metrics are the same on every rank, so all judge identically without an exchange.
  bool judge(const Metrics& metrics);

 private:
  struct Sums;
  Sums sum_up();
  void sum_up_windows(Sums& sums);
  void add(Sums& sums, const data::Batch& batch, const LossOutput& result) const;
  bool divided() const { return run_.parallelism && run_.parallelism->divided(); }
  bool in_windows() const { return divided() && run_.parallelism->takes_windows(); }
  data::Batch stand_in() const;
  double gain_of(double value) const;

  RunContext& run_;
  RunControl& control_;
  std::optional<data::Loader> loader_;
  bool direction_said_ = false;  // whether the best metric is the greatest
};

}  // namespace lockstep::train
