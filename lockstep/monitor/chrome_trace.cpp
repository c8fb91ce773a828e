#include "lockstep/monitor/chrome_trace.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/json.h"
#include "lockstep/core/log.h"
#include "lockstep/monitor/sink_queue.h"

namespace lockstep::monitor {
namespace {

struct TraceEvent {
  char phase = 'X';  // X: complete, C: counter, M: metadata
  TraceSpan span{};
  ChromeTrace::Values values{};
};

// Microseconds with three digits; a double would lose them after 52 days of uptime.
std::string microseconds(std::chrono::nanoseconds time) {
  const std::int64_t ns = std::max<std::int64_t>(time.count(), 0);
  return fmt::format("{}.{:03}", ns / 1000, ns % 1000);
}

// JSON has neither NaN nor infinity.
std::string number(double value) {
  return std::isfinite(value) ? fmt::format("{}", value) : "0";
}

std::string json_of(const TraceEvent& event, int rank) {
  const TraceSpan& span = event.span;
  // Perfetto takes a thread 0 for the one whose number is the process's, and mixes the two.
  std::string text = fmt::format(R"({{"name":{},"ph":"{}","pid":{},"tid":{})",
                                 json_quote(span.name), event.phase, rank, span.thread + 1);
  if (event.phase != 'M')
    text += fmt::format(R"(,"ts":{})", microseconds(span.begin.time_since_epoch()));
  if (event.phase == 'X')
    text += fmt::format(R"(,"dur":{},"cat":{})", microseconds(span.end - span.begin),
                        json_quote(span.category));
  if (event.phase == 'M')
    text += fmt::format(R"(,"args":{{"name":{}}})", json_quote(span.category));
  if (event.phase == 'C') {
    std::string arguments;
    for (const auto& [name, value] : event.values)
      arguments +=
          fmt::format("{}{}:{}", arguments.empty() ? "" : ",", json_quote(name), number(value));
    text += fmt::format(R"(,"args":{{{}}})", arguments);
  }
  return text + "}";
}

// Used by the queue's thread alone, but for `lost`.
class TraceFile {
 public:
  TraceFile(const std::string& path, const ChromeTraceOptions& options)
      : path_(path), options_(options) {
    fd_.reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (!fd_) throw SystemError("trace", fmt::format("cannot create {}", path), errno);
    const TraceEvent process{
        .phase = 'M',
        .span = {.name = "process_name", .category = fmt::format("rank {}", options.rank)}};
    std::string begin = "[\n" + json_of(process, options.rank);
    end_ = begin.size();
    write_all(fd_.get(), begin += kClosing);
  }

  void append(const std::vector<TraceEvent>& events) {
    std::string text;
    std::uint64_t count = 0;
    for (const TraceEvent& event : events) {
      std::string line = ",\n" + json_of(event, options_.rank);
      line.insert(0, space_before(end_ + text.size(), line.size()), ' ');
      if (end_ + text.size() + line.size() + kClosing.size() > options_.max_bytes) {
        lost += events.size() - static_cast<std::size_t>(&event - events.data());
        report(fmt::format("has reached {} bytes", options_.max_bytes));
        break;
      }
      text += line;
      ++count;
    }
    if (text.empty()) return;
    // In one write over the closing bracket: who reads the file meanwhile finds a whole array.
    const std::uint64_t end = end_ + text.size();
    if (const int error = write_at(text += kClosing, end_); error == 0) {
      end_ = end;
    } else {
      lost += count;
      // Its place was written before, so this works on a full disk too.
      write_at(kClosing, end_);
      if (::ftruncate(fd_.get(), static_cast<off_t>(end_ + kClosing.size())) != 0) return;
      report(fmt::format("cannot be written ({})", std::strerror(error)));
    }
  }

  std::atomic<std::uint64_t> lost{0};

 private:
  static constexpr std::string_view kClosing = "\n]\n";

  // A write that SIGKILL interrupts ends with a page, so no event lies in two of them.
  static std::size_t space_before(std::uint64_t offset, std::size_t size) {
    constexpr std::size_t kPage = 4096;
    const std::size_t left = kPage - offset % kPage;
    return size <= left || size > kPage ? 0 : left;
  }

  int write_at(std::string_view text, std::uint64_t offset) {
    for (std::size_t done = 0; done < text.size();) {
      const ssize_t n = ::pwrite(fd_.get(), text.data() + done, text.size() - done,
                                 static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return n == 0 ? ENOSPC : errno;
      done += static_cast<std::size_t>(n);
    }
    return 0;
  }

  void report(const std::string& what) {
    if (reported_) return;
    reported_ = true;
    log::warning("trace", "{}: {}. Later events are dropped.", path_, what);
  }

  const std::string path_;
  const ChromeTraceOptions options_;
  Fd fd_;
  std::uint64_t end_ = 0;  // where the closing bracket is
  bool reported_ = false;
};

}  // namespace

struct ChromeTrace::Impl {
  Impl(const std::string& path, const ChromeTraceOptions& options)
      : file(std::make_shared<TraceFile>(path, options)),
        queue({.capacity = options.capacity},
              [to = file](const std::vector<TraceEvent>& batch) { to->append(batch); }) {}

  std::shared_ptr<TraceFile> file;
  SinkQueue<TraceEvent> queue;
};

ChromeTrace::ChromeTrace(const std::string& path, const ChromeTraceOptions& options)
    : impl_(std::make_unique<Impl>(path, options)) {}

ChromeTrace::~ChromeTrace() = default;

void ChromeTrace::complete(TraceSpan span) {
  impl_->queue.push({.phase = 'X', .span = std::move(span)});
}

void ChromeTrace::counter(std::string name, Time time, Values values) {
  impl_->queue.push({.phase = 'C',
                     .span = {.name = std::move(name), .begin = time},
                     .values = std::move(values)});
}

void ChromeTrace::thread_name(int thread, std::string name) {
  impl_->queue.push(
      {.phase = 'M',
       .span = {.name = "thread_name", .category = std::move(name), .thread = thread}});
}

std::uint64_t ChromeTrace::dropped() const {
  return impl_->queue.dropped() + impl_->file->lost.load();
}

bool ChromeTrace::flush(std::chrono::milliseconds limit) {
  return impl_->queue.flush(limit);
}

}  // namespace lockstep::monitor
