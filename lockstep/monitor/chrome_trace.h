// A timeline of one rank in Chrome's trace format, which Perfetto (ui.perfetto.dev) and
// chrome://tracing open: what ran when on which thread, and counters over time.
//
// Events go through a bounded queue to a thread that writes them. The file is a whole JSON array
// after each write, so a process that is killed leaves a trace up to its last tenth of a second.
// Where it is killed in the middle of a write, whole events are there and the last bracket is
// missing, which the format allows.
//
//   ChromeTrace trace("out/trace-0.json", {.rank = 0});
//   trace.thread_name(1, "backward");
//   trace.complete({.name = "bucket 3", .category = "comm", .thread = 1, .begin = t0, .end = t1});
//   trace.counter("memory", now, {{"used_gib", 31.5}});
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::monitor {

struct ChromeTraceOptions {
  int rank = 0;  // the process number in the timeline, so that files of several ranks can be joined
  std::size_t capacity = 16384;          // events that wait to be written; more are dropped
  std::uint64_t max_bytes = 1ull << 30;  // of the file; what comes later is dropped
};

// From begin to end on one thread.
struct TraceSpan {
  using Time = std::chrono::steady_clock::time_point;
  std::string name{};
  std::string category{};
  int thread = 0;  // from 0; a row of the timeline
  Time begin{};
  Time end{};
};

// Any thread may call; no call waits for the file. Owns the file. Times are of the steady clock,
// which all processes of a host share.
class ChromeTrace {
 public:
  using Time = TraceSpan::Time;
  using Values = std::vector<std::pair<std::string, double>>;

  // Makes or replaces the file. SystemError when it cannot.
  explicit ChromeTrace(const std::string& path, const ChromeTraceOptions& options = {});
  ~ChromeTrace();
  ChromeTrace(const ChromeTrace&) = delete;
  ChromeTrace& operator=(const ChromeTrace&) = delete;

  void complete(TraceSpan span);
  void counter(std::string name, Time time, Values values);
  void thread_name(int thread, std::string name);
  // Events that found no room in the queue, or could not be written.
  std::uint64_t dropped() const;
  // Until all that came before is in the file; false when the time is over first.
  bool flush(std::chrono::milliseconds limit = std::chrono::milliseconds(2000));

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::monitor
