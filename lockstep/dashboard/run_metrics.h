// A run as Prometheus reads it: state, steps, time per phase, loss, and what the samplers saw of
// the ranks' processes, control groups and GPUs.
//
//   RunMetrics metrics;
//   respond(Prometheus::kContentType, metrics.text(run.view()));
#pragma once

#include <set>
#include <string>

#include "lockstep/monitor/prometheus.h"
#include "lockstep/monitor/resource_metrics.h"
#include "lockstep/monitor/run_view.h"

namespace lockstep::dashboard {

// Used by one thread at a time.
class RunMetrics {
 public:
  RunMetrics() : resources_(page_) {}

  std::string text(const monitor::RunView& view);

 private:
  void publish(const monitor::RunView& view);
  void publish(const monitor::RankState& rank);
  void gauge(const char* name, const char* help, const monitor::Labels& labels, double value);

  monitor::Prometheus page_;
  monitor::ResourceMetrics resources_;
  std::set<int> ranks_;  // on the page
  std::set<std::string> rules_;
};

}  // namespace lockstep::dashboard
