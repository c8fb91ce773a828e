// Observer: what a program learns about a run, and where it may ask to stop, save or evaluate.
//
//   struct Print : lockstep::Observer {
//     void on_log(lockstep::Event& event) override { std::cout << event.entry->step << '\n'; }
//   };
//   trainer.add(std::make_shared<Print>());
//
// Every rank calls its observers for every event, at the same steps. What one of them asks for on
// any rank (event.stop) is agreed by the next step's exchange and done by all.
//
// Called on the thread that trains; what an observer throws ends the run. Shared with the trainer.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/train/trainer_state.h"

namespace lockstep {

namespace optim {
class Optimizer;  // lockstep/optim/optimizer.h
}

// What a call is about. The pointers are null where an event has no such thing.
struct Event {
  const train::TrainerState& state;
  int rank = 0;
  // While training. What on_optimizer_step changes on every rank (set_lr) holds for that step; the
  // schedule sets the next learning rate.
  optim::Optimizer* optimizer = nullptr;
  const train::LogEntry* entry = nullptr;  // on_log, on_evaluate
  const std::string* path = nullptr;       // on_save: the folder
  const std::string* text = nullptr;       // what went wrong, although the run continues (on_alert)
  // StepFlags, read after the call.
  bool stop = false;
  bool save = false;
  bool evaluate = false;
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_train_begin(Event&) {}
  virtual void on_train_end(Event&) {}
  virtual void on_epoch_begin(Event&) {}
  virtual void on_epoch_end(Event&) {}
  virtual void on_step_begin(Event&) {}
  virtual void on_substep_end(Event&) {}     // a micro-batch that was not the window's last
  virtual void on_optimizer_step(Event&) {}  // with averaged gradients; captured steps: before all
  virtual void on_step_end(Event&) {}
  virtual void on_log(Event&) {}
  virtual void on_evaluate(Event&) {}
  virtual void on_save(Event&) {}   // handed to the writer; durable a little later
  virtual void on_alert(Event&) {}  // on every rank, a step after it was logged
};

}  // namespace lockstep
