#include "lockstep/monitor/prometheus.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/core/json.h"
#include "lockstep/core/utf8.h"
#include "lockstep/monitor/sink_queue.h"

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

struct Update {
  static constexpr std::size_t kRemove = SIZE_MAX;
  std::size_t metric = 0;
  Labels labels{};
  double value = 0;
};

// By label text, which is in one order because labels are sorted by name.
struct Series {
  Labels labels;
  double value = 0;
};

struct Table {
  std::mutex mutex;
  std::vector<Metric> metrics;
  std::vector<std::map<std::string, Series>> series;
  std::size_t count = 0;
  std::size_t max_count = 0;
  std::atomic<std::uint64_t> refused{0};

  void enter(const std::vector<Update>& updates) {
    const std::lock_guard lock(mutex);
    for (const Update& update : updates) {
      if (update.metric == Update::kRemove) {
        remove(update.labels);
        continue;
      }
      auto& of_metric = series[update.metric];
      std::string key = label_text(update.labels);
      const auto found = of_metric.find(key);
      if (found != of_metric.end()) {
        found->second.value = update.value;
      } else if (count < max_count) {
        of_metric.emplace(std::move(key), Series{update.labels, update.value});
        ++count;
      } else {
        ++refused;
      }
    }
  }

  void remove(const Labels& labels) {
    const auto has_all = [&](const Series& one) {
      return std::includes(one.labels.begin(), one.labels.end(), labels.begin(), labels.end());
    };
    for (auto& of_metric : series)
      count -= std::erase_if(of_metric, [&](const auto& entry) { return has_all(entry.second); });
  }
};

Labels sorted(Labels labels) {
  std::sort(labels.begin(), labels.end());
  return labels;
}

}  // namespace

struct Prometheus::Impl {
  explicit Impl(const PrometheusOptions& options)
      : queue({.capacity = options.capacity},
              [to = table](const std::vector<Update>& batch) { to->enter(batch); }) {
    table->max_count = options.max_series;
  }

  const std::shared_ptr<Table> table = std::make_shared<Table>();
  SinkQueue<Update> queue;
};

Prometheus::Prometheus(const PrometheusOptions& options) : impl_(std::make_unique<Impl>(options)) {}

Prometheus::~Prometheus() = default;

Prometheus::Id Prometheus::declare(const Metric& metric) {
  if (!is_name(metric.name, ":"))
    throw UsageError("prometheus",
                     "'{}' cannot be the name of a metric. Use letters, digits and _, not a digit "
                     "first.",
                     metric.name);
  Table& table = *impl_->table;
  const std::lock_guard lock(table.mutex);
  for (Id id = 0; id < table.metrics.size(); ++id) {
    const Metric& other = table.metrics[id];
    if (other.name != metric.name) continue;
    if (other.type != metric.type || other.help != metric.help)
      throw UsageError("prometheus",
                       "{} is declared already, as a {} with the help '{}'. Declare it once, or "
                       "take another name.",
                       metric.name, type_text(other.type), other.help);
    return id;
  }
  table.metrics.push_back(metric);
  table.series.emplace_back();
  return table.metrics.size() - 1;
}

void Prometheus::set(Id metric, const Labels& labels, double value) {
  for (const auto& label : labels) {
    if (!is_name(label.first, "") || label.first.rfind("__", 0) == 0)
      throw UsageError("prometheus",
                       "'{}' cannot be the name of a label. Use letters, digits and _, not a digit "
                       "or __ first.",
                       label.first);
  }
  impl_->queue.push({metric, sorted(labels), value});
}

void Prometheus::remove(const Labels& labels) {
  impl_->queue.push({Update::kRemove, sorted(labels), 0});
}

std::uint64_t Prometheus::dropped() const {
  return impl_->queue.dropped() + impl_->table->refused.load();
}

std::string Prometheus::text(std::chrono::milliseconds limit) {
  impl_->queue.flush(limit);
  std::string out;
  const auto head = [&](const Metric& metric) {
    out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", metric.name, escaped(metric.help, false),
                       metric.name, type_text(metric.type));
  };
  {
    const Table& table = *impl_->table;
    const std::lock_guard lock(impl_->table->mutex);
    for (Id id = 0; id < table.metrics.size(); ++id) {
      if (table.series[id].empty()) continue;
      head(table.metrics[id]);
      for (const auto& [labels, one] : table.series[id])
        out += fmt::format("{}{} {}\n", table.metrics[id].name, labels, value_text(one.value));
    }
  }
  head({"lockstep_monitor_dropped_values_total",
        "Values that found no room on the way to this page.", MetricType::kCounter});
  out += fmt::format("lockstep_monitor_dropped_values_total {}\n", dropped());
  return out;
}

}  // namespace lockstep::monitor
