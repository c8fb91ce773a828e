#include "lockstep/train/metrics_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "lockstep/core/error.h"
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

// All of it or nothing: 0, or an errno after what was written has been taken back.
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

}  // namespace lockstep::train
