// A process for nvml_test.py: prints a /metrics page of this host's GPUs and of this process.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "lockstep/monitor/prometheus.h"

int main() {
  using namespace lockstep::monitor;
  using namespace std::chrono_literals;
  const GpuSampler sampler;
  sampler.wait_for_samples(2, 30s);
  Prometheus prometheus;
  publish(prometheus, sampler.snapshot());
  publish(prometheus, 0, read_process(::getpid()).value());
  publish(prometheus, 0,
          CgroupSample{.cpu_limit_cores = 1.5,
                       .throttled_s = 0.25,
                       .memory_limit_bytes = 1u << 30,
                       .memory_used_bytes = 1u << 20,
                       .memory_cache_bytes = 0});
  prometheus.set({"lockstep_odd_label", "A label with everything in it."},
                 {{"text", "a\"b\\c\nd \xF0\x9F\x98\x80"}}, -1e-9);
  fmt::print("{}", prometheus.text());
  return 0;
}
