#include "lockstep/dashboard/metrics_tail.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <limits>
#include <optional>

#include "lockstep/core/document.h"

namespace lockstep::dashboard {
namespace {

constexpr std::size_t kFirstBytes = 256u << 10;  // of a file that was there before: its newest part
constexpr std::size_t kMostBytes = 1u << 20;     // at one look
constexpr std::size_t kLongestLine = 64u << 10;

// What is not finite is null in a file of JSON.
std::optional<double> value_of(const Node& value) {
  if (value.is(NodeKind::kNull)) return std::numeric_limits<double>::quiet_NaN();
  if (!value.is(NodeKind::kReal) && !value.is(NodeKind::kInteger)) return std::nullopt;
  return value.real;
}

}  // namespace

void add_point(LiveSeries& series, std::int64_t step, double value, std::size_t most) {
  while (!series.empty() && series.back().first >= step) series.pop_back();
  series.emplace_back(step, value);
  while (series.size() > most) series.pop_front();
}

void MetricsTail::follow(const std::string& folder) {
  const std::string path = folder + "/metrics.jsonl";
  if (path == path_) return;
  *this = {};
  path_ = path;
}

void MetricsTail::read() {
  if (path_.empty()) return;
  const Fd file(::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  struct stat info {};
  if (!file || ::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return;
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (inode_ != info.st_ino || size < offset_) {  // new, or its lines were taken back
    inode_ = info.st_ino;
    offset_ = size > kFirstBytes ? size - kFirstBytes : 0;
    partial_.assign(offset_ > 0 ? 1 : 0, '?');  // the first line is not whole
  }
  std::array<char, 64u << 10> buffer;
  for (std::size_t taken = 0; taken < kMostBytes;) {
    const ssize_t n =
        ::pread(file.get(), buffer.data(), buffer.size(), static_cast<off_t>(offset_));
    if (n <= 0) return;
    taken += static_cast<std::size_t>(n);
    offset_ += static_cast<std::uint64_t>(n);
    partial_.append(buffer.data(), static_cast<std::size_t>(n));
    std::size_t begin = 0;
    for (std::size_t end; (end = partial_.find('\n', begin)) != partial_.npos; begin = end + 1)
      take(std::string_view(partial_).substr(begin, end - begin));
    partial_.erase(0, begin);
    if (partial_.size() > kLongestLine) partial_.assign(1, '?');
  }
}

// Null: there are enough.
LiveSeries* MetricsTail::series_of(const std::string& name) {
  const auto found = std::ranges::find(series_, name, &LoggedSeries::value_type::first);
  if (found != series_.end()) return &found->second;
  if (series_.size() == kSeries) return nullptr;
  return &series_.emplace_back(name, LiveSeries{}).second;
}

void MetricsTail::take(std::string_view line) {
  if (line.size() > kLongestLine) return;
  try {
    const Node entry = parse_json(line, "metrics.jsonl");
    const Entry* const step = entry.find("step");
    if (step == nullptr || step->value.kind != NodeKind::kInteger) return;
    if (entry.find("train_runtime") != nullptr) return;  // of the whole run, and no curve
    for (const Entry& member : entry.entries) {
      const std::optional<double> value = value_of(member.value);
      if (member.key == "step" || member.key == "epoch" || !value) continue;
      if (LiveSeries* const series = series_of(member.key))
        add_point(*series, step->value.integer, *value);
    }
  } catch (const std::exception&) {  // not a line of ours
  }
}

}  // namespace lockstep::dashboard
