#include "lockstep/train/metrics_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"

namespace lockstep::train {
namespace {

// With lines of 200 bytes this is 20 MB.
constexpr std::size_t kMaxPending = 100'000;

// Nothing for a line that a crash or a full disk has cut short.
std::optional<LogEntry> read_line(const std::string& line) {
  try {
    return parse_log_entry(line, "metrics.jsonl");
  } catch (const UsageError&) {
    return std::nullopt;
  }
}

Fd open_to_append(const std::string& path) {
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!fd) throw io::file_error("open", path, errno);
  return fd;
}

// Writes all or nothing: 0, or an errno after a partial write was truncated.
int append_whole(int fd, std::string_view text) {
  const off_t end = ::lseek(fd, 0, SEEK_END);
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n > 0) {
      done += static_cast<std::size_t>(n);
    } else if (n == 0 || errno != EINTR) {
      const int error = n == 0 ? ENOSPC : errno;
      if (done > 0 && (end < 0 || ::ftruncate(fd, end) != 0))
        return ::write(fd, "\n", 1) == 1 ? error : EIO;  // at least the next line begins a line
      return error;
    }
  }
  return 0;
}

// Leaves the lines up to `step` in the file and moves later ones to `superseded`. A new file takes
// the old one's name, and only where something changes.
void keep_until(const std::string& path, const std::string& superseded, std::int64_t step) {
  std::ifstream old(path);
  if (!old) return;
  std::string earlier, later;
  bool changed = false;
  for (std::string line; std::getline(old, line);) {
    const std::optional<LogEntry> entry = read_line(line);
    if (entry) (entry->step <= step ? earlier : later) += line + '\n';
    changed |= !entry || entry->step > step || old.eof();
  }
  if (!changed) return;
  if (!later.empty()) {
    const Fd fd = open_to_append(superseded);
    int error = append_whole(fd.get(), later);
    if (error == 0 && ::fsync(fd.get()) != 0) error = errno;
    if (error != 0) throw io::file_error("write to", superseded, error, later.size());
  }
  const std::string temporary = path + ".new";
  ::unlink(temporary.c_str());
  io::FileWriter file(temporary);
  file.append(earlier);
  file.finish();
  if (::rename(temporary.c_str(), path.c_str()) != 0) throw io::file_error("rename", path, errno);
  io::sync_directory(std::filesystem::path(path).parent_path().string());
}

// "eval_loss" is a curve of its own beside "train/loss", as Hugging Face names them. A name that
// has a group keeps it.
std::string tag_of(const std::string& name) {
  if (name.rfind("eval_", 0) == 0) return "eval/" + name.substr(5);
  return name.find('/') != name.npos ? name : "train/" + name;
}

}  // namespace

MetricsLog::MetricsLog(const std::string& directory, const MetricsLogOptions& options)
    : path_(directory + "/metrics.jsonl"), run_name_(options.run_name) {
  io::make_directories(directory);
  const std::string superseded = directory + "/metrics.superseded.jsonl";
  io::refuse_link(path_);
  io::refuse_link(superseded);
  keep_until(path_, superseded, options.resumed_at > 0 ? options.resumed_at : -1);
  fd_ = open_to_append(path_);
  if (!options.tensorboard) return;
  // TensorBoard shows the folder's name as the run's.
  const std::string runs = directory + "/runs" + (run_name_.empty() ? "" : "/" + run_name_);
  io::refuse_link(runs);
  events_ = std::make_unique<io::EventFile>(runs);
  // What an earlier run logged for later steps stays in its files, and readers ignore it.
  events_->begin_at(options.resumed_at > 0 ? options.resumed_at + 1 : 0);
  events_->flush();
}

MetricsLog::~MetricsLog() {
  while (!pending_.empty() && write_line(pending_.front())) pending_.pop_front();
  lost_ += static_cast<std::int64_t>(pending_.size());
  if (lost_ > 0)
    log::error("trainer", "{} lines of metrics could not be written to {} and are lost.", lost_,
               path_);
}

void MetricsLog::write(const LogEntry& entry) {
  pending_.push_back(log_entry_json(entry, run_name_) + "\n");
  while (!pending_.empty() && write_line(pending_.front())) pending_.pop_front();
  if (pending_.size() > kMaxPending) {
    pending_.pop_front();
    ++lost_;
  }
  write_scalars(entry);
}

bool MetricsLog::write_line(std::string_view line) {
  const int error = append_whole(fd_.get(), line);
  if (error != 0 && !reported_) {
    reported_ = true;
    log::error("trainer", "{} Lines of metrics stay in memory until they can be written.",
               io::file_error("write to", path_, error).what());
  }
  return error == 0;
}

void MetricsLog::write_scalars(const LogEntry& entry) {
  if (!events_) return;
  std::vector<io::EventFile::Scalar> scalars;
  for (const auto& [name, value] : entry.values)
    scalars.emplace_back(tag_of(name), static_cast<float>(value));
  if (!std::isnan(entry.epoch))
    scalars.emplace_back("train/epoch", static_cast<float>(entry.epoch));
  try {
    events_->scalars(entry.step, scalars);
    events_->flush();
  } catch (const SystemError& e) {
    if (!reported_) log::error("trainer", "{}", e.what());
    reported_ = true;
  }
}

std::optional<LogEntry> newest_with(const std::string& path, std::string_view metric) {
  std::optional<LogEntry> newest;
  std::ifstream lines(path);
  for (std::string line; std::getline(lines, line);) {
    std::optional<LogEntry> entry = read_line(line);
    if (entry && find_metric(entry->values, metric) != nullptr) newest = std::move(entry);
  }
  return newest;
}

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::size_t kMinBar = 4, kMaxBar = 24;

std::string value_text(const std::string& name, double value) {
  if (std::isnan(value)) value = NAN;  // that of 0 / 0 may be printed as -nan
  if (name == "learning_rate") return fmt::format("lr {:.3e}", value);
  if (name == "grad_norm") return fmt::format("|g| {:.3f}", value);
  if (name == "samples_per_second") return fmt::format("{:.0f} samples/s", value);
  if (name == "data_wait_percent") return fmt::format("data {:.0f} %", value);
  if (name == "communication_percent") return fmt::format("communication {:.0f} %", value);
  if (name == "tokens_per_second") return fmt::format("{:.0f} tokens/s", value);
  if (name == "mfu") return fmt::format("mfu {:.1f} %", 100 * value);
  if (name == "gpu_memory_gib") return fmt::format("GPU {:.1f} GiB", value);
  if (name == "gpu_memory_peak_gib") return fmt::format("peak {:.1f} GiB", value);
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
  // If space is short, the numbers come first and the bar gets the rest.
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
