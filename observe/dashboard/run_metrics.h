// A run as Prometheus reads it: state, steps, time per phase, loss, and what the samplers saw of
// the ranks' processes, control groups and GPUs.
//
//   RunMetrics metrics;
//   respond(Prometheus::kContentType, metrics.text(run.view()));
#pragma once

#include <set>
#include <string>

#include "lockstep/monitor/run_view.h"

namespace lockstep::dashboard {

// Used by one thread at a time.
class RunMetrics {
 public:
  std::string text(const monitor::RunView& view);

 private:
  std::set<std::string> rules_;  // that found something: they stay on the page with 0
};

}  // namespace lockstep::dashboard
