#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"
#include "lockstep/monitor/run_figures.h"
#include "observe/dashboard/run_summary.h"

namespace lockstep::dashboard {

namespace {

constexpr std::size_t kRanksShown = 64;
constexpr int kOutputLines = 8;

std::optional<double> number(const Node& node) {
  if (!node.is(NodeKind::kInteger) && !node.is(NodeKind::kReal)) return std::nullopt;
  return std::isfinite(node.real) ? std::optional(node.real) : std::nullopt;
}

std::optional<double> number(const Node& node, std::string_view key) {
  return number(node.get(key));
}

std::string text_of(const Node& node, std::string_view key) {
  const Node& value = node.get(key);
  return value.is(NodeKind::kString) || value.is(NodeKind::kInteger) ? printable(value.text) : "";
}

std::string cut(const std::string& text, std::size_t columns) {
  std::size_t at = 0;
  for (std::size_t count = 0; at < text.size() && count < columns; ++count)
    next_character(text, at);
  return text.substr(0, at);
}

std::string padded(const std::string& text, std::size_t columns) {
  const std::size_t count = character_count(text);
  return count >= columns ? cut(text, columns) : text + std::string(columns - count, ' ');
}

std::string figure(std::optional<double> value) {
  if (!value) return "-";
  if (!std::isfinite(*value)) return "not finite";
  const double size = std::abs(*value);
  if (size >= 1e9) return fmt::format("{:.2f} G", *value / 1e9);
  if (size >= 1e6) return fmt::format("{:.2f} M", *value / 1e6);
  if (size >= 1e4) return fmt::format("{:.1f} K", *value / 1e3);
  if (size >= 100) return fmt::format("{:.0f}", *value);
  if (size >= 10) return fmt::format("{:.1f}", *value);
  if (size >= 0.1 || size == 0) return fmt::format("{:.3f}", *value);
  return size >= 1e-3 ? fmt::format("{:#.3g}", *value) : fmt::format("{:.2e}", *value);
}

std::string bytes(std::optional<double> value) {
  if (!value) return "-";
  if (*value >= 1ull << 30) return fmt::format("{:.1f} GiB", *value / (1ull << 30));
  return fmt::format("{:.0f} MiB", *value / (1ull << 20));
}

// Null stands for a number that is not finite.
std::optional<double> newest(const Node& snapshot, std::string_view series) {
  const Node& points = snapshot.get("series").get(series);
  if (points.items.empty() || points.items.back().items.size() != 2) return std::nullopt;
  const Node& value = points.items.back().items[1];
  if (value.is(NodeKind::kNull)) return std::numeric_limits<double>::quiet_NaN();
  return number(value);
}

// The parts of a text between `gap`s, as many on each line as there is room for.
std::vector<std::string> wrapped(const std::string& text, std::string_view gap,
                                 std::size_t columns) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(gap, begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const bool fits = !lines.empty() &&
                      character_count(lines.back()) + gap.size() + character_count(part) <= columns;
    if (fits) {
      lines.back().append(gap).append(part);
    } else {
      lines.push_back((lines.empty() ? "" : "  ") + part);
    }
    begin = end + gap.size();
  }
  return lines;
}

// Null while ranks move.
std::optional<double> stall_seconds(const Node& snapshot) {
  return number(snapshot.get("stall"), "seconds");
}

std::string shown_state(const Node& snapshot) {
  return stall_seconds(snapshot) ? "stalled" : run_state(snapshot);
}

const char* colour_of(const std::string& state) {
  if (state == "running") return "32";
  if (state == "failed" || state == "killed") return "1;31";
  return "33";
}

// Rows of a sparkline for one series: the newest values, as many as there is room for.
std::string sparkline(const Node& points, std::size_t columns) {
  static const char* const kLevels[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::vector<double> values;
  for (const Node& point : points.items)
    if (point.items.size() == 2)
      if (const auto value = number(point.items[1])) values.push_back(*value);
  if (values.size() > columns) values.erase(values.begin(), values.end() - columns);
  if (values.empty()) return "";
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  const double span = *high - *low;
  std::string text;
  for (const double value : values)
    text += kLevels[span > 0 ? static_cast<int>((value - *low) / span * 7.0) : 3];
  return text;
}

std::string use_of(const Node& rank) {
  if (const auto busy = number(rank.get("gpu"), "utilisation_percent"))
    return fmt::format("GPU {} {:.0f} %", text_of(rank.get("gpu"), "index"), *busy);
  const auto cores = number(rank, "cores");
  return cores ? fmt::format("{:.2f} cores", *cores) : "-";
}

std::string memory_of(const Node& rank) {
  const Node& gpu = rank.get("gpu");
  if (number(gpu, "memory_used_bytes"))
    return fmt::format("{} of {}", bytes(number(gpu, "memory_used_bytes")),
                       bytes(number(gpu, "memory_total_bytes")));
  return bytes(number(rank, "resident_bytes"));
}

std::string position_of(const Node& rank) {
  const Node& position = rank.get("position");
  if (!position.is(NodeKind::kMap)) return "-";
  const double age_s = number(position, "age_s").value_or(0);
  return fmt::format("{} #{} {}, {} s", text_of(position, "operation"),
                     text_of(position, "sequence"), text_of(position, "state"),
                     age_s < 10 ? fmt::format("{:.3f}", age_s) : figure(age_s));
}

std::string shares_of(const Node& rank) {
  std::vector<std::pair<double, std::string>> shares;
  for (const Entry& entry : rank.get("budget").entries)
    if (const auto share = number(entry.value); share && *share >= 0.005)
      shares.emplace_back(*share, printable(entry.key));
  std::sort(shares.rbegin(), shares.rend());
  std::string text;
  for (const auto& [share, phase] : shares)
    text += fmt::format("{}{} {:.0f} %", text.empty() ? "" : ", ", phase, 100 * share);
  return text;
}

class View {
 public:
  View(const Node& snapshot, const TerminalOptions& options)
      : snapshot_(snapshot), options_(options) {}

  std::string text() {
    head();
    ranks();
    budget();
    findings();
    stall_table();
    curves();
    log();
    if (options_.rows > 0 && static_cast<int>(lines_.size()) > options_.rows)
      lines_.resize(static_cast<std::size_t>(options_.rows));
    return fmt::format("{}\n", fmt::join(lines_, "\n"));
  }

 private:
  // `code` colours the whole line, which is cut before.
  void line(const std::string& text, const char* code = nullptr) {
    const std::string shown = cut(text, static_cast<std::size_t>(options_.columns));
    const bool painted = code != nullptr && options_.colour;
    lines_.push_back(painted ? fmt::format("\033[{}m{}\033[0m", code, shown) : shown);
  }

  // Wraps sentences, which would be incomprehensible if they were cut.
  void sentences(const std::string& text, const char* code = nullptr, std::string_view gap = " ") {
    const std::string indent(text.find_first_not_of(' ') == 2 ? 2 : 0, ' ');
    for (const std::string& each :
         wrapped(text.substr(indent.size()), gap,
                 static_cast<std::size_t>(options_.columns) - indent.size()))
      line(indent + each, code);
  }

  void head() {
    const std::string state = shown_state(snapshot_);
    sentences(status_line(snapshot_), colour_of(state), "  ");
    const bool bad = state == "failed" || state == "killed";
    if (const std::string message = text_of(snapshot_.get("run"), "message"); !message.empty())
      sentences(message, bad ? "1;31" : "1;33");
    if (const std::string what = text_of(snapshot_.get("stall"), "what"); !what.empty())
      sentences(what, "1;33");
    line("");
  }

  // A stall that is over is shown only where the run failed, perhaps because of it.
  void stall_table() {
    if (!stall_seconds(snapshot_) && run_state(snapshot_) != "failed") return;
    const Node& text = snapshot_.get("stall_table").get("text");
    if (text.text.empty()) return;
    for (const std::string& each : lines_of(text.text)) line(printable(each));
    line("");
  }

  void ranks() {
    line(fmt::format("{}{}{}{}{}{}{}{}", padded("RANK", 6), padded("STATE", 20), padded("STEP", 9),
                     padded("STEP MS", 9), padded("PHASE", 14), padded("USE", 14),
                     padded("MEMORY", 21), "LAST COLLECTIVE"),
         "2");
    const auto& all = snapshot_.get("ranks").items;
    for (std::size_t i = 0; i < std::min(all.size(), kRanksShown); ++i) {
      const Node& rank = all[i];
      std::string state = text_of(rank, "state");
      const bool failed = state == "failed";
      if (const std::string exit = text_of(rank, "exit"); failed && !exit.empty()) state = exit;
      const std::string phase = text_of(rank, "phase");
      const std::string step = text_of(rank, "step");
      line(fmt::format("{}{}{}{}{}{}{}{}", padded(text_of(rank, "rank"), 6),
                       padded(cut(state, 19), 20), padded(step.empty() ? "-" : step, 9),
                       padded(figure(number(rank, "step_ms")), 9),
                       padded(phase.empty() ? "-" : cut(phase, 13), 14), padded(use_of(rank), 14),
                       padded(memory_of(rank), 21), position_of(rank)),
           failed ? "1;31" : nullptr);
    }
    if (all.size() > kRanksShown) line(fmt::format("and {} more", all.size() - kRanksShown));
    line("");
  }

  void budget() {
    const auto& all = snapshot_.get("ranks").items;
    const std::size_t before = lines_.size();
    for (std::size_t i = 0; i < std::min(all.size(), kRanksShown); ++i)
      if (const std::string shares = shares_of(all[i]); !shares.empty())
        line(fmt::format("{}{}", padded("budget " + text_of(all[i], "rank"), 12), shares));
    if (lines_.size() > before) line("");
  }

  void curves() {
    const std::size_t before = lines_.size();
    for (const Entry& entry : snapshot_.get("series").entries) {
      const std::size_t room = static_cast<std::size_t>(std::max(options_.columns - 37, 8));
      const std::string drawn = sparkline(entry.value, std::min<std::size_t>(room, 100));
      const auto value = newest(snapshot_, entry.key);
      if (drawn.empty() && !value) continue;
      line(fmt::format("{}{}{}", padded(cut(printable(entry.key), 23), 25),
                       padded(figure(value), 12), drawn));
    }
    if (lines_.size() > before) line("");
  }

  void findings() {
    for (const Node& finding : snapshot_.get("findings").items) {
      const auto rank = number(finding, "rank");
      sentences(fmt::format("{}{}: {}", text_of(finding, "rule"),
                            rank && *rank >= 0 ? fmt::format(" (rank {:.0f})", *rank) : "",
                            text_of(finding, "what")),
                "33");
      sentences(fmt::format("  {}", text_of(finding, "remedy")));
    }
    if (!snapshot_.get("findings").items.empty()) line("");
  }

  // The log of the rank that failed, or else of the first.
  void log() {
    const Node& log = snapshot_.get("log");
    if (log.entries.empty()) return;
    std::string chosen = log.entries.front().key;
    for (const Node& rank : snapshot_.get("ranks").items)
      if (text_of(rank, "state") == "failed" && log.find(text_of(rank, "rank")) != nullptr)
        chosen = text_of(rank, "rank");
    const auto& lines = log.find(chosen)->value.items;
    if (lines.empty()) return;
    line(fmt::format("output of rank {}", printable(chosen)), "2");
    const std::size_t shown = std::min<std::size_t>(lines.size(), kOutputLines);
    for (std::size_t i = lines.size() - shown; i < lines.size(); ++i)
      line("  " + printable(lines[i].text));
  }

  const Node& snapshot_;
  const TerminalOptions& options_;
  std::vector<std::string> lines_;
};

std::string elapsed(double seconds) {
  const auto whole = static_cast<long long>(std::clamp(seconds, 0.0, 1e9));
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace

Node parse_snapshot(const std::string& json) {
  try {
    return parse_json(json, "the dashboard's answer",
                      {.bytes = 64u << 20, .depth = 32, .nodes = 10'000'000});
  } catch (const UsageError& error) {
    throw CommError("monitor",
                    fmt::format("the dashboard sent no state of a run: {}", error.what()));
  }
}

std::string run_state(const Node& snapshot) {
  return text_of(snapshot.get("run"), "state");
}

std::string status_line(const Node& snapshot) {
  const Node& run = snapshot.get("run");
  const auto& ranks = snapshot.get("ranks").items;
  const auto running = std::count_if(ranks.begin(), ranks.end(), [](const Node& rank) {
    return text_of(rank, "state") == "running";
  });
  double step = -1;
  std::vector<double> times;
  for (const Node& rank : ranks) {
    step = std::max(step, number(rank, "step").value_or(-1));
    if (const auto time = number(rank, "step_ms"); time && *time > 0) times.push_back(*time);
  }
  std::sort(times.begin(), times.end());
  std::string text = fmt::format("lockstep {}  {}  {} of {} ranks run", text_of(run, "id"),
                                 shown_state(snapshot), running, text_of(run, "world_size"));
  for (const char* state : {"stopped", "failed"}) {
    std::vector<int> named;
    for (const Node& rank : ranks)
      if (text_of(rank, "state") == state)
        named.push_back(static_cast<int>(number(rank, "rank").value_or(-1)));
    if (named.empty()) continue;
    text +=
        fmt::format(", rank{} {} {}", named.size() == 1 ? "" : "s", first_numbers(named), state);
  }
  const auto started = number(run, "started");
  const auto now = number(snapshot, "time");
  if (started && now) text += "  " + elapsed(*now - *started);
  if (step >= 0) text += fmt::format("  step {:.0f}", step);
  if (const auto total = number(run, "total_steps"); total && step >= 0)
    text += fmt::format(" of {:.0f}", *total);
  if (const auto left = number(run, "left_s")) text += "  " + elapsed(*left) + " left";
  const auto stall = stall_seconds(snapshot);
  if (stall && step >= 0) text += fmt::format("  no step for {:.0f} s", *stall);
  if (!stall && !times.empty()) text += fmt::format("  {} ms", figure(times[times.size() / 2]));
  if (const auto loss = newest(snapshot, "loss")) text += "  loss " + figure(loss);
  if (const auto rate = newest(snapshot, "tokens_per_second"))
    text += fmt::format("  {} tokens/s", figure(rate));
  const auto findings = snapshot.get("findings").items.size();
  if (findings > 0) text += fmt::format("  {} finding{}", findings, findings == 1 ? "" : "s");
  return text;
}

std::string terminal_view(const Node& snapshot, const TerminalOptions& options) {
  return View(snapshot, options).text();
}

namespace {

std::string key_of(const monitor::Finding& finding) {
  return fmt::format("{} {} {}", finding.rule, finding.rank, finding.cause);
}

}  // namespace

std::vector<std::string> StandingFindings::look(const std::vector<monitor::Finding>& findings,
                                                std::int64_t step) {
  std::vector<std::string> lines;
  std::set<std::string> present;
  for (const monitor::Finding& finding : findings) {
    const std::string key = key_of(finding);
    if (!present.insert(key).second) continue;
    Seen& seen = seen_[key];
    seen.absent = 0;
    if (++seen.present < kStands || seen.said) continue;
    seen.said = true;
    lines.push_back(fmt::format("[doctor]{} {}", step >= 0 ? fmt::format(" step {}:", step) : "",
                                finding_text(finding)));
  }
  for (auto item = seen_.begin(); item != seen_.end();) {
    Seen& seen = item->second;
    const bool absent = !present.contains(item->first);
    if (absent) seen.present = 0;
    const bool forgotten = absent && (!seen.said || ++seen.absent >= kGone);
    item = forgotten ? seen_.erase(item) : std::next(item);
  }
  return lines;
}

std::vector<std::string> doctor_summary(const monitor::RunRecord& run,
                                        const std::vector<monitor::Finding>& findings,
                                        bool failed) {
  if (run.ranks.empty()) return {"[doctor] no rank lived long enough to be looked at."};
  double seconds = 0;
  for (const monitor::RankRecord& rank : run.ranks) {
    double of_rank = 0;
    for (const monitor::Interval& interval : rank.intervals) of_rank += interval.seconds;
    seconds = std::max(seconds, of_rank);
  }
  const auto rows = monitor::budget_rows(run);
  const bool budget =
      std::ranges::any_of(rows, [](const auto& row) { return row.budget.steps > 0; });
  std::vector<std::string> lines = {fmt::format(
      "[doctor] {} of {} ranks, {:.1f} s{}:\n{}", run.ranks.size(), run.facts.world_size, seconds,
      budget ? "; where the time between the first and the last step went"
             : fmt::format("; {}", monitor::without_steps(run)),
      table_text(monitor::budget_table(rows)))};
  if (findings.empty())
    lines.push_back("[doctor] " + (failed ? "nothing found to change; the run itself failed."
                                          : monitor::nothing_found_text(run)));
  for (const monitor::Finding& finding : findings)
    lines.push_back("[doctor] " + finding_text(finding));
  return lines;
}

}  // namespace lockstep::dashboard
