// Metrics as Prometheus reads them: the text of a /metrics page.
//
// Values come through a bounded queue, so that whoever sets one never waits for whoever reads the
// page. A gauge or counter is set to its present value; of two values the later one stands.
//
//   Prometheus page;
//   const auto loss = page.declare({"lockstep_loss", "Training loss of the last step."});
//   page.set(loss, {{"rank", "0"}}, 1.25);
//   respond(Prometheus::kContentType, page.text());
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::monitor {

enum class MetricType { kGauge, kCounter };

struct Metric {
  std::string name;  // lockstep_..., with the unit last: _seconds, _bytes, _ratio, _total
  std::string help;
  MetricType type = MetricType::kGauge;
};

using Labels = std::vector<std::pair<std::string, std::string>>;

struct PrometheusOptions {
  std::size_t capacity = 16384;    // values that wait to be entered; more are dropped
  std::size_t max_series = 65536;  // of all metrics together; values of more are dropped
};

// Any thread may call.
class Prometheus {
 public:
  static constexpr const char* kContentType = "text/plain; version=0.0.4; charset=utf-8";
  using Id = std::size_t;

  explicit Prometheus(const PrometheusOptions& options = {});
  ~Prometheus();
  Prometheus(const Prometheus&) = delete;
  Prometheus& operator=(const Prometheus&) = delete;

  // The same metric again gives the same id. UsageError for a name that Prometheus does not take,
  // and for one that is declared with another type or help.
  Id declare(const Metric& metric);
  // UsageError for a label's name that Prometheus does not take. Any text can be a label's value.
  void set(Id metric, const Labels& labels, double value);
  // The series that have these labels, among others, are no longer on the page: a rank has ended.
  void remove(const Labels& labels);

  // With a counter of what was dropped. Waits until what was set before is on it, at most `limit`.
  std::string text(std::chrono::milliseconds limit = std::chrono::milliseconds(200));
  std::uint64_t dropped() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::monitor
