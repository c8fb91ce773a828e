// What the samplers have read, as metrics on a Prometheus page.
//
//   ResourceMetrics metrics(page);
//   metrics.publish(gpu_sampler.snapshot());
//   if (const auto sample = read_process(pid)) metrics.publish(rank, *sample);
#pragma once

#include "lockstep/monitor/cpu_sampler.h"
#include "lockstep/monitor/gpu_sampler.h"
#include "lockstep/monitor/prometheus.h"

namespace lockstep::monitor {

// Used by one thread. `page` must outlive it.
class ResourceMetrics {
 public:
  explicit ResourceMetrics(Prometheus& page) : page_(page) {}

  // Labels: gpu (NVML's index) and uuid.
  void publish(const GpuSnapshot& snapshot);
  // Label: rank.
  void publish(int rank, const ProcessSample& sample);
  void publish(int rank, const CgroupSample& sample);

 private:
  void publish(const Labels& labels, const GpuReading& reading);

  Prometheus& page_;
};

}  // namespace lockstep::monitor
