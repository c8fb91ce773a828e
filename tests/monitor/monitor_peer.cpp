// A process for sinks_test.py:
//   monitor_peer page         a /metrics page of this host's GPUs and of this process, on stdout
//   monitor_peer trace PATH   a timeline of two threads, until it is killed
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <thread>

#include "lockstep/monitor/chrome_trace.h"
#include "lockstep/monitor/resource_metrics.h"

namespace {

using namespace lockstep::monitor;
using namespace std::chrono_literals;

int page() {
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

[[noreturn]] void trace(const std::string& path) {
  ChromeTrace file(path, {.rank = 1});
  file.thread_name(0, "main");
  file.thread_name(1, "backward");
  const auto work = [&](int thread) {
    for (long step = 0;; ++step) {
      const auto begin = std::chrono::steady_clock::now();
      std::this_thread::sleep_for(100us);
      file.complete({.name = fmt::format("step {}", step),
                     .category = "compute",
                     .thread = thread,
                     .begin = begin,
                     .end = std::chrono::steady_clock::now()});
      if (step % 10 == 0) file.counter("memory", begin, {{"used", static_cast<double>(step)}});
    }
  };
  std::thread other([&] { work(1); });
  work(0);
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "page") return page();
  if (command == "trace" && argc == 3) trace(argv[2]);
  fmt::print(stderr, "usage: monitor_peer page | trace PATH\n");
  return 2;
}
