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

}  // namespace lockstep::monitor
