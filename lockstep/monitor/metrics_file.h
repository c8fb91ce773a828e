// The log of a run's metrics (metrics.jsonl), read whole or followed while it grows.
//
//   MetricsFile file("out/metrics.jsonl");
//   file.read();                                       // once, or again each second
//   plot(curve_of(file.lines(), "loss"));
//
// Used by one thread. The program writes the file: it may be missing, replaced or torn. Lines that
// cannot be read are counted and skipped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::monitor {

// One line of the log. A value that was not finite is NaN.
struct MetricLine {
  std::int64_t step = 0;
  double epoch = 0;
  std::vector<std::pair<std::string, double>> values{};

  const double* find(std::string_view name) const;  // nullptr without one
};

using Curve = std::vector<std::pair<double, double>>;  // (step, value), oldest first

// Steps increase: the points of a resumed run replace those that it repeats.
void add_point(Curve& curve, std::int64_t step, double value);
Curve curve_of(std::span<const MetricLine> lines, std::string_view name);
// The curve reduced to `most` points: of each stretch the lowest and the highest, and the last
// point. A value that is not finite counts as the lowest.
Curve thinned(const Curve& curve, std::size_t most);
// The names of all curves, in order of first appearance. A Trainer's last line, which summarises
// the run, adds none.
std::vector<std::string> metric_names(std::span<const MetricLine> lines);

class MetricsFile {
 public:
  static constexpr std::size_t kPoints = 500;  // of a curve that is shown
  static constexpr std::size_t kNames = 16;    // a program may log any number of names

  enum class Part { kAll, kNewest };  // kNewest: within these bounds, for a file that is followed
  explicit MetricsFile(std::string path = {}, Part part = Part::kAll)
      : path_(std::move(path)), part_(part) {}

  // Reads the lines that were added; the whole file again after it was replaced.
  void read();

  const std::string& path() const { return path_; }
  const std::vector<MetricLine>& lines() const { return lines_; }
  bool there() const { return inode_ != 0; }
  double unix_time_s() const { return unix_time_s_; }  // when a line was added last
  // "2 of 40 lines of metrics.jsonl cannot be read (the first is line 7)."; empty: all can.
  std::string problem() const;

 private:
  void take(std::string_view line, bool whole);
  void forget_old();

  std::string path_;
  Part part_;
  std::uint64_t inode_ = 0;
  std::uint64_t offset_ = 0;
  double unix_time_s_ = 0;
  std::string partial_;
  std::set<std::string> names_;
  std::vector<MetricLine> lines_;
  std::size_t count_ = 0, unread_ = 0, first_unread_ = 0;  // lines of the file
};

}  // namespace lockstep::monitor
