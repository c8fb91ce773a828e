// A request to stop, agreed over the ranks: SIGTERM, SIGUSR1 or SIGUSR2 to any rank, or to the
// launcher, makes every rank leave its loop at the same step, with a checkpoint.
//
//   lockstep::StopRequest stop{world};            // before the loop
//   ...
//   optimizer.step();
//   ++step;
//   if (stop.received()) {                        // the same answer on every rank
//     lockstep::save_checkpoint("out", world, parts, {.step = step});
//     return stop.exit_code();                    // 143: the launcher does not restart it
//   }
//
// received() is a collective of a few microseconds. On a GPU the answer is that of the previous
// call, so that the host does not wait for the device. A rank that is signalled gives up, and with
// it the world, when the others have not asked within the deadline (or within twice the longest
// time between two calls, if that is longer; within five minutes before the second call): one of
// them is probably stuck. So ask in every step, and between the batches of a long evaluation.
//
// One per process (UsageError), and not beside a Trainer that handles signals; the destructor
// restores the handlers that were there before. One thread.
#pragma once

#include <chrono>
#include <memory>

#include "lockstep/comm/world.h"

namespace lockstep {

class StopRequest {
 public:
  explicit StopRequest(World world, std::chrono::milliseconds deadline = std::chrono::seconds(10));
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  // Whether a rank was asked to stop; true from then on. Collective.
  bool received();
  int signal() const;     // its number; 0: none
  int exit_code() const;  // 143 after a request, otherwise 0

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
