#include "lockstep/monitor/metrics_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>

#include "lockstep/core/fd.h"
#include "lockstep/core/json.h"

namespace lockstep::monitor {
namespace {

constexpr std::size_t kFirstBytes = 256u << 10;  // of a file that was there before: its newest part
constexpr std::size_t kMostBytes = 1u << 20;     // at one look
constexpr std::size_t kLongestLine = 64u << 10;
constexpr std::size_t kManyLines = 4 * MetricsFile::kPoints;

// A number, or NaN for null. Nothing for any other value: the name of the run.
std::optional<double> number_at(JsonReader& json) {
  const char first = json.peek();
  if (first == '"' || first == '{' || first == '[' || first == 't' || first == 'f') {
    json.skip();
    return std::nullopt;
  }
  const std::string text(json.scalar());
  return text == "null" ? NAN : std::strtod(text.c_str(), nullptr);
}

MetricLine parse_line(std::string_view text) {
  JsonReader json(text);
  MetricLine line;
  bool numbered = false;
  json.enter_object();
  for (std::string key; json.next_key(key);) {
    const std::optional<double> value = number_at(json);
    if (!value) continue;
    if (key == "step") {
      numbered = std::abs(*value) < 1e18;
      line.step = numbered ? static_cast<std::int64_t>(*value) : 0;
    } else if (key == "epoch") {
      line.epoch = *value;
    } else {
      line.values.emplace_back(key, *value);
    }
  }
  json.end();
  if (!numbered) json.fail("a line without a step");
  return line;
}

bool is_of_the_whole_run(const MetricLine& line) {
  return line.find("train_runtime") != nullptr;
}

}  // namespace

const double* MetricLine::find(std::string_view name) const {
  const auto found = std::ranges::find(values, name, &std::pair<std::string, double>::first);
  return found == values.end() ? nullptr : &found->second;
}

void add_point(Curve& curve, std::int64_t step, double value) {
  const auto x = static_cast<double>(step);
  while (!curve.empty() && curve.back().first >= x) curve.pop_back();
  curve.emplace_back(x, value);
}

Curve curve_of(std::span<const MetricLine> lines, std::string_view name) {
  Curve curve;
  for (const MetricLine& line : lines)
    if (const double* value = line.find(name)) add_point(curve, line.step, *value);
  return curve;
}

Curve thinned(const Curve& curve, std::size_t most) {
  if (curve.size() <= most) return curve;
  const auto lower = [](const auto& a, const auto& b) {
    return std::isfinite(a.second) && std::isfinite(b.second)
               ? a.second < b.second
               : !std::isfinite(a.second) && std::isfinite(b.second);
  };
  Curve few;
  const std::size_t parts = (most - 1) / 2;
  for (std::size_t part = 0; part < parts; ++part) {
    const auto at = [&](std::size_t i) {
      return curve.begin() + static_cast<std::ptrdiff_t>(i * curve.size() / parts);
    };
    const auto [low, high] = std::minmax_element(at(part), at(part + 1), lower);
    few.push_back(*std::min(low, high));
    if (low != high) few.push_back(*std::max(low, high));
  }
  if (few.back().first != curve.back().first) few.push_back(curve.back());
  return few;
}

std::vector<std::string> metric_names(std::span<const MetricLine> lines) {
  std::vector<std::string> names;
  for (const MetricLine& line : lines) {
    if (is_of_the_whole_run(line)) continue;
    for (const auto& [name, value] : line.values)
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return names;
}

void MetricsFile::read() {
  if (path_.empty()) return;
  const Fd file(::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  struct stat info {};
  if (!file || ::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return;
  const auto size = static_cast<std::uint64_t>(info.st_size);
  const bool bounded = part_ == Part::kNewest;
  if (inode_ != info.st_ino || size < offset_) {  // new, or its lines were taken back
    *this = MetricsFile(std::move(path_), part_);
    inode_ = info.st_ino;
    offset_ = bounded && size > kFirstBytes ? size - kFirstBytes : 0;
    partial_.assign(offset_ > 0 ? 1 : 0, '?');  // the first line is not whole
  }
  unix_time_s_ =
      static_cast<double>(info.st_mtim.tv_sec) + static_cast<double>(info.st_mtim.tv_nsec) * 1e-9;
  std::array<char, 64u << 10> buffer;
  for (std::size_t taken = 0; !bounded || taken < kMostBytes;) {
    const ssize_t n =
        ::pread(file.get(), buffer.data(), buffer.size(), static_cast<off_t>(offset_));
    if (n <= 0) break;
    taken += static_cast<std::size_t>(n);
    offset_ += static_cast<std::uint64_t>(n);
    partial_.append(buffer.data(), static_cast<std::size_t>(n));
    std::size_t begin = 0;
    for (std::size_t end; (end = partial_.find('\n', begin)) != partial_.npos; begin = end + 1)
      take(std::string_view(partial_).substr(begin, end - begin), true);
    partial_.erase(0, begin);
    if (partial_.size() > kLongestLine) partial_.assign(1, '?');
  }
  // A crash may have cut the last line short, or only its end.
  if (const std::string torn = partial_; !torn.empty()) take(torn, false);
  if (bounded && lines_.size() > kManyLines) forget_old();
}

void MetricsFile::take(std::string_view line, bool whole) {
  if (whole) ++count_;
  try {
    if (line.size() > kLongestLine) return;
    MetricLine read = parse_line(line);
    if (part_ == Part::kNewest)
      std::erase_if(read.values, [this](const auto& value) {
        if (names_.size() < kNames) names_.insert(value.first);
        return !names_.contains(value.first);
      });
    lines_.push_back(std::move(read));
    if (!whole) partial_.clear();
  } catch (const JsonError&) {
    if (whole && !line.empty() && unread_++ == 0) first_unread_ = count_;
  }
}

// Rare names keep their points however many lines the others fill.
void MetricsFile::forget_old() {
  std::map<std::string, std::size_t> seen;
  std::vector<MetricLine> kept;
  for (auto line = lines_.rbegin(); line != lines_.rend(); ++line) {
    bool needed = false;
    for (const auto& [name, value] : line->values) needed |= ++seen[name] <= kPoints;
    if (needed) kept.push_back(std::move(*line));
  }
  lines_.assign(std::make_move_iterator(kept.rbegin()), std::make_move_iterator(kept.rend()));
}

std::string MetricsFile::problem() const {
  if (unread_ == 0) return "";
  return fmt::format("{} of {} lines of {} cannot be read (the first is line {}).", unread_,
                     count_ + (partial_.empty() ? 0 : 1),
                     std::filesystem::path(path_).filename().string(), first_unread_);
}

}  // namespace lockstep::monitor
