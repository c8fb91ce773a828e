#include "lockstep/monitor/prometheus.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::monitor {
namespace {

// Letters, digits and _; `more` are those that only a metric's name may have.
bool is_name(std::string_view text, std::string_view more) {
  const auto letter = [&](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           more.find(c) != std::string_view::npos;
  };
  if (text.empty() || !letter(text.front())) return false;
  return std::all_of(text.begin(), text.end(),
                     [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
}

// Backslashes and line ends, and quotes where the text is in quotes. U+FFFD for what is not UTF-8.
std::string escaped(std::string_view text, bool quotes) {
  std::string out;
  while (!text.empty()) {
    const std::size_t size = utf8_size(text);
    if (size == 0)
      out += "\xEF\xBF\xBD";
    else if (text[0] == '\\')
      out += "\\\\";
    else if (text[0] == '\n')
      out += "\\n";
    else if (text[0] == '"' && quotes)
      out += "\\\"";
    else
      out += text.substr(0, size);
    text.remove_prefix(std::max<std::size_t>(size, 1));
  }
  return out;
}

std::string label_text(const Labels& labels) {
  std::string text;
  for (const auto& [name, value] : labels)
    text += fmt::format("{}{}=\"{}\"", text.empty() ? "{" : ",", name, escaped(value, true));
  return text.empty() ? text : text + "}";
}

std::string value_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

const char* type_text(MetricType type) {
  return type == MetricType::kCounter ? "counter" : "gauge";
}

}  // namespace

Prometheus::Family& Prometheus::family_of(const Metric& metric) {
  for (Family& family : families_) {
    const Metric& known = family.metric;
    if (known.name != metric.name) continue;
    if (known.type != metric.type || known.help != metric.help)
      throw UsageError("prometheus",
                       "{} is on the page already, as a {} with the help '{}'. Use these, or take "
                       "another name.",
                       metric.name, type_text(known.type), known.help);
    return family;
  }
  if (!is_name(metric.name, ":"))
    throw UsageError("prometheus",
                     "'{}' cannot be the name of a metric. Use letters, digits and _, not a digit "
                     "first.",
                     metric.name);
  return families_.emplace_back(Family{metric, {}});
}

void Prometheus::set(const Metric& metric, Labels labels, double value) {
  for (const auto& label : labels) {
    if (!is_name(label.first, "") || label.first.rfind("__", 0) == 0)
      throw UsageError("prometheus",
                       "'{}' cannot be the name of a label. Use letters, digits and _, not a digit "
                       "or __ first.",
                       label.first);
  }
  std::ranges::sort(labels);
  family_of(metric).series[label_text(labels)] = value;
}

std::string Prometheus::text() const {
  std::string out;
  for (const auto& [metric, series] : families_) {
    out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", metric.name, escaped(metric.help, false),
                       metric.name, type_text(metric.type));
    for (const auto& [labels, value] : series)
      out += fmt::format("{}{} {}\n", metric.name, labels, value_text(value));
  }
  return out;
}

// ---------------------------------------------------------------- what the samplers have read

namespace {

constexpr MetricType kCounter = MetricType::kCounter;

// Each value under its own metric, where there is one.
class Page {
 public:
  Page(Prometheus& page, const Labels& labels) : page_(page), labels_(labels) {}

  template <typename T>
  void operator()(const Metric& metric, const std::optional<T>& value) const {
    if (value) page_.set(metric, labels_, static_cast<double>(*value));
  }
  void operator()(const Metric& metric, double value) const { page_.set(metric, labels_, value); }
  Page with(const std::string& name, const std::string& value) const {
    Labels more = labels_;
    more.emplace_back(name, value);
    return {page_, more};
  }

 private:
  Prometheus& page_;
  Labels labels_;
};

// In the units that Prometheus's conventions ask for.
std::optional<double> ratio(std::optional<unsigned> percent) {
  return percent ? std::optional(*percent / 100.0) : std::nullopt;
}
std::optional<double> hertz(std::optional<unsigned> mhz) {
  return mhz ? std::optional(*mhz * 1e6) : std::nullopt;
}

void publish(const Page& gpu, const GpuReading& now) {
  gpu({"lockstep_gpu_up", "1 while this GPU answers."}, now.problem.empty() ? 1.0 : 0.0);
  gpu({"lockstep_gpu_utilization_ratio", "Share of time in which a kernel ran."},
      ratio(now.utilisation_percent));
  gpu({"lockstep_gpu_memory_utilization_ratio", "Share of time in which memory was accessed."},
      ratio(now.memory_utilisation_percent));
  gpu({"lockstep_gpu_memory_used_bytes", "Memory in use by all processes."}, now.memory_used_bytes);
  gpu({"lockstep_gpu_memory_size_bytes", "Memory of the GPU."}, now.memory_total_bytes);
  gpu({"lockstep_gpu_power_watts", "Power drawn."}, now.power_w);
  gpu({"lockstep_gpu_power_limit_watts", "Power limit in force."}, now.power_limit_w);
  gpu({"lockstep_gpu_temperature_celsius", "Temperature of the chip."}, now.temperature_c);
  gpu({"lockstep_gpu_sm_clock_hertz", "Clock of the multiprocessors."}, hertz(now.sm_clock_mhz));
  gpu({"lockstep_gpu_memory_clock_hertz", "Clock of the memory."}, hertz(now.memory_clock_mhz));
  const Metric ecc{"lockstep_gpu_ecc_errors_total", "Memory errors since the driver was loaded.",
                   kCounter};
  gpu.with("kind", "corrected")(ecc, now.ecc_corrected);
  gpu.with("kind", "uncorrected")(ecc, now.ecc_uncorrected);
  if (!now.clock_reasons) return;
  // All of them, so that a reason that is over reads 0.
  const auto active = clock_reason_words(*now.clock_reasons);
  for (const std::string& word : clock_reason_words(kKnownClockReasons))
    gpu.with("reason", word)(
        {"lockstep_gpu_clock_reason", "1 while this holds the clocks below their maximum."},
        std::find(active.begin(), active.end(), word) != active.end() ? 1.0 : 0.0);
}

}  // namespace

void publish(Prometheus& page, const GpuSnapshot& snapshot) {
  const Page driver(page, {});
  driver({"lockstep_gpu_driver_up", "1 while the NVIDIA driver answers."},
         snapshot.problem.empty() && snapshot.newest ? 1.0 : 0.0);
  for (const auto& [event, count] : snapshot.xid_counts)
    Page(page, {{"gpu", std::to_string(event.first)}, {"xid", std::to_string(event.second)}})(
        {"lockstep_gpu_xid_events_total", "Critical errors that the driver reported.", kCounter},
        static_cast<double>(count));
  if (!snapshot.newest) return;
  for (std::size_t i = 0; i < snapshot.newest->gpus.size(); ++i) {
    Labels labels = {{"gpu", std::to_string(i)}};
    if (i < snapshot.gpus.size()) labels.emplace_back("uuid", snapshot.gpus[i].uuid);
    publish(Page(page, labels), snapshot.newest->gpus[i]);
  }
}

void publish(Prometheus& page, int rank, const ProcessSample& now) {
  const Page process(page, {{"rank", std::to_string(rank)}});
  const Metric cpu{"lockstep_process_cpu_seconds_total", "CPU time of the rank.", kCounter};
  process.with("mode", "user")(cpu, now.user_s);
  process.with("mode", "system")(cpu, now.system_s);
  process({"lockstep_process_resident_memory_bytes", "Resident memory."},
          static_cast<double>(now.resident_bytes));
  const Metric faults{"lockstep_process_page_faults_total", "Page faults.", kCounter};
  process.with("kind", "minor")(faults, static_cast<double>(now.minor_faults));
  process.with("kind", "major")(faults, static_cast<double>(now.major_faults));
  // A gauge: the switches of a thread that has ended are no longer counted.
  const Metric switches{"lockstep_process_context_switches",
                        "Context switches of the threads that run."};
  process.with("kind", "voluntary")(switches, static_cast<double>(now.voluntary_switches));
  process.with("kind", "involuntary")(switches, static_cast<double>(now.involuntary_switches));
  process({"lockstep_process_threads", "Threads."}, now.threads);
  const Metric read{"lockstep_process_read_bytes_total", "Bytes read, from where.", kCounter};
  process.with("from", "any")(read, now.read_chars);
  process.with("from", "device")(read, now.read_bytes);
  const Metric written{"lockstep_process_written_bytes_total", "Bytes written, to where.",
                       kCounter};
  process.with("to", "any")(written, now.written_chars);
  process.with("to", "device")(written, now.written_bytes);
}

void publish(Prometheus& page, int rank, const CgroupSample& now) {
  const Page group(page, {{"rank", std::to_string(rank)}});
  group({"lockstep_cgroup_cpu_limit_cores", "CPU quota of the control group."},
        now.cpu_limit_cores);
  group({"lockstep_cgroup_throttled_seconds_total", "CPU time that the quota withheld.", kCounter},
        now.throttled_s);
  group({"lockstep_cgroup_memory_limit_bytes", "Memory limit of the control group."},
        now.memory_limit_bytes);
  group({"lockstep_cgroup_memory_used_bytes", "Memory in use in the control group."},
        now.memory_used_bytes);
  group({"lockstep_cgroup_memory_cache_bytes", "Page cache in it, which the kernel can take back."},
        now.memory_cache_bytes);
}

}  // namespace lockstep::monitor
