// Publishes the samples of GPUs and processes as metrics on a Prometheus page.
//
//   publish(page, gpu_sampler.snapshot());
//   if (const auto sample = read_process(pid)) publish(page, rank, *sample);
#pragma once

#include "lockstep/monitor/cpu_sampler.h"
#include "lockstep/monitor/gpu_sampler.h"
#include "lockstep/monitor/prometheus.h"

namespace lockstep::monitor {

// Labels: gpu (NVML's index) and uuid.
void publish(Prometheus& page, const GpuSnapshot& snapshot);
// Label: rank.
void publish(Prometheus& page, int rank, const ProcessSample& sample);
void publish(Prometheus& page, int rank, const CgroupSample& sample);

}  // namespace lockstep::monitor
