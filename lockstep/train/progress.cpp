#include "lockstep/train/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "lockstep/core/deadline.h"
#include "lockstep/core/fd.h"

namespace lockstep::train {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::size_t kMinBar = 4, kMaxBar = 24;

std::string value_text(const std::string& name, double value) {
  if (name == "learning_rate") return fmt::format("lr {:.3e}", value);
  if (name == "grad_norm") return fmt::format("|g| {:.3f}", value);
  if (name == "samples_per_second") return fmt::format("{:.0f} samples/s", value);
  if (name == "data_wait_percent") return fmt::format("data {:.0f} %", value);
  if (name == "communication_percent") return fmt::format("communication {:.0f} %", value);
  if (name == "tokens_per_second") return fmt::format("{:.0f} tokens/s", value);
  return fmt::format("{} {:.4f}", name, value);
}

// "[=====     ] ", at most as long as fits beside the other characters; "" for none.
std::string bar_text(std::size_t width, std::size_t others, std::int64_t step, std::int64_t total) {
  constexpr std::size_t kFrame = 3;
  if (width < others + kFrame + kMinBar) return {};
  const std::size_t cells = std::min(width - others - kFrame, kMaxBar);
  const std::size_t filled =
      cells * static_cast<std::size_t>(step) / static_cast<std::size_t>(total);
  return "[" + std::string(filled, '=') + std::string(cells - filled, ' ') + "] ";
}

void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

}  // namespace

std::string duration_text(double seconds) {
  constexpr double kMax_s = 1e15;  // a cast out of range differs between processors
  const auto total = static_cast<long long>(std::min(kMax_s, std::max(0.0, std::round(seconds))));
  if (total >= 3600)
    return fmt::format("{}:{:02}:{:02}", total / 3600, total / 60 % 60, total % 60);
  return fmt::format("{}:{:02}", total / 60, total % 60);
}

std::string progress_line(const LogEntry& entry, std::int64_t total_steps, double eta_s) {
  std::string line = fmt::format("step {}/{}  epoch {:.2f}", entry.step, total_steps, entry.epoch);
  for (const auto& [name, value] : entry.values) line += "  " + value_text(name, value);
  if (eta_s >= 0) line += fmt::format("  eta {}", duration_text(eta_s));
  return line;
}

Progress::Progress(const ProgressOptions& options)
    : options_(options),
      bar_(options.bar && terminal::columns(STDOUT_FILENO) > 0),
      step_(options.done_steps),
      start_(Clock::now()) {}

Progress::~Progress() {
  clear();
}

void Progress::clear() {
  if (!drawn_) return;
  print("\r\x1b[K");
  drawn_ = false;
}

void Progress::step(std::int64_t step) {
  step_ = step;
  if (!bar_ || (Clock::now() - drawn_at_ < kRedraw && step < options_.total_steps)) return;
  draw();
}

void Progress::draw() {
  drawn_at_ = Clock::now();
  const std::int64_t total = std::max<std::int64_t>(options_.total_steps, 1);
  std::string line = fmt::format("{}/{}", step_, total);
  const std::int64_t done = step_ - options_.done_steps;
  if (done > 0) {
    const double elapsed = seconds_since(start_);
    line += fmt::format(
        " {}<{}", duration_text(elapsed),
        duration_text(elapsed / static_cast<double>(done) * static_cast<double>(total - step_)));
  }
  line += newest_;
  // Where there is little room, the numbers come first and the bar gets what they leave.
  const std::string share = fmt::format("{:3}% ", 100 * step_ / total);
  const auto width = static_cast<std::size_t>(std::max(terminal::columns(STDOUT_FILENO) - 1, 10));
  line = share + bar_text(width, share.size() + line.size(), std::min(step_, total), total) + line;
  // A truncated number would be a different number.
  if (line.size() > width) {
    const std::size_t cut = line.rfind("  ", width);
    line.resize(cut == std::string::npos || cut < share.size() ? width : cut);
  }
  print("\r\x1b[K" + line);
  drawn_ = true;
}

void Progress::log(const LogEntry& entry) {
  step_ = std::max(step_, entry.step);
  const std::int64_t done = step_ - options_.done_steps;
  const double per_step = done > 0 ? seconds_since(start_) / static_cast<double>(done) : -1;
  const double eta = per_step * static_cast<double>(options_.total_steps - step_);
  const std::string line = progress_line(entry, options_.total_steps, eta);
  if (!bar_) return print(line + "\n");
  newest_.clear();
  // Shares of waiting are in the files; the bar needs their room.
  for (const auto& [name, value] : entry.values)
    if (!name.ends_with("_percent")) newest_ += "  " + value_text(name, value);
  // An evaluation stays on the screen; what the next log replaces does not.
  const bool evaluated = std::any_of(entry.values.begin(), entry.values.end(),
                                     [](const auto& v) { return v.first.rfind("eval_", 0) == 0; });
  if (evaluated) {
    clear();
    print(line + "\n");
    newest_.clear();
  }
  draw();
}

}  // namespace lockstep::train
