// Metrics in the text format of a Prometheus /metrics page.
//
//   Prometheus page;
//   page.set({"lockstep_loss", "Training loss of the last step."}, {{"rank", "0"}}, 1.25);
//   respond(Prometheus::kContentType, page.text());
//
// A page is made for one response, by one thread: metrics that are not set again disappear.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/monitor/cpu_sampler.h"
#include "lockstep/monitor/gpu_sampler.h"

namespace lockstep::monitor {

enum class MetricType { kGauge, kCounter };

struct Metric {
  std::string name;  // lockstep_..., with the unit last: _seconds, _bytes, _ratio, _total
  std::string help;
  MetricType type = MetricType::kGauge;
};

using Labels = std::vector<std::pair<std::string, std::string>>;

class Prometheus {
 public:
  static constexpr const char* kContentType = "text/plain; version=0.0.4; charset=utf-8";

  // A later value replaces an earlier one. UsageError for a name of a metric or of a label that
  // Prometheus does not take, and for a metric that has another type or help on this page. Any text
  // can be a label's value.
  void set(const Metric& metric, Labels labels, double value);

  std::string text() const;

 private:
  struct Family {
    Metric metric;
    std::map<std::string, double> series;  // by the text of the labels, which are sorted
  };
  Family& family_of(const Metric& metric);

  std::vector<Family> families_;  // in the order in which they came first
};

// What the samplers have read.
// Labels: gpu (NVML's index) and uuid.
void publish(Prometheus& page, const GpuSnapshot& snapshot);
// Label: rank.
void publish(Prometheus& page, int rank, const ProcessSample& sample);
void publish(Prometheus& page, int rank, const CgroupSample& sample);

}  // namespace lockstep::monitor
