// Agreement: what one rank flags, all ranks do at the same step.
//
// A flag (stop, save, evaluate) is a number in a tiny reduction that every step makes anyway before
// its update, so agreeing costs microseconds and no rank can act on a flag that another has not
// seen. On a GPU reading the answer would make the host wait for the device, so there the answer of
// a step is read one step later, on every rank identically.
//
//   Agreement agreement(world);
//   const StepFlags all = agreement.exchange({.stop_signal = signals.requested()});
//   if (all.stop_signal != 0) save_and_leave();
//
// One thread at a time. exchange() is a collective: every rank calls it, the same number of times.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "lockstep/comm/world.h"

namespace lockstep::train {

struct StepFlags {
  int stop_signal = 0;  // the signal's number; the largest of all ranks wins
  bool stop = false;
  bool save = false;
  bool evaluate = false;
  bool out_of_memory = false;
  bool alert = false;   // there is one to report to all
  bool saving = false;  // a save is being written
  // Shares of a rank's time since the last log, in 1/100 %; the largest of all ranks. -1: not
  // given.
  int data_wait = -1;
  int communication = -1;
};

class Agreement {
 public:
  explicit Agreement(World world);
  ~Agreement();
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  // Everybody's flags: from this call on a CPU, from the previous call on a GPU.
  StepFlags exchange(const StepFlags& mine);
  // The answer to this very call, even on a GPU: waits for the device.
  StepFlags exchange_now(const StepFlags& mine);

 private:
  struct Pending;
  World world_;
  std::unique_ptr<Pending> pending_;
};

}  // namespace lockstep::train
