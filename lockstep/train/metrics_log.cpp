#include "lockstep/train/metrics_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/io/file.h"

namespace lockstep::train {
namespace {

// The step of a line of ours, or -1 for one that a crash has cut short.
std::int64_t step_of(const std::string& line) {
  try {
    const Node node = parse_json(line, "metrics.jsonl");
    const Entry* step = node.find("step");
    return step == nullptr ? -1 : as_integer(step->value, "step");
  } catch (const UsageError&) {
    return -1;
  }
}

// Keeps the lines up to `step`; a new file takes the old one's name.
void keep_until(const std::string& path, std::int64_t step) {
  std::ifstream old(path);
  if (!old) return;
  const std::string temporary = path + ".new";
  {
    std::ofstream kept(temporary, std::ios::trunc);
    for (std::string line; std::getline(old, line);) {
      const std::int64_t at = step_of(line);
      if (at >= 0 && at <= step) kept << line << '\n';
    }
    kept.flush();
    if (!kept) throw io::file_error("write", temporary, EIO);
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) throw io::file_error("rename", path, errno);
}

// "eval_loss" is a curve of its own beside "train/loss", as Hugging Face names them.
std::string tag_of(const std::string& name) {
  return name.rfind("eval_", 0) == 0 ? "eval/" + name.substr(5) : "train/" + name;
}

}  // namespace

MetricsLog::MetricsLog(const std::string& directory, const MetricsLogOptions& options)
    : path_(directory + "/metrics.jsonl"), run_name_(options.run_name) {
  std::error_code problem;
  std::filesystem::create_directories(directory, problem);
  if (problem) throw io::file_error("make", directory, problem.value());
  if (options.resumed_at > 0) {
    keep_until(path_, options.resumed_at);
  } else {
    ::unlink(path_.c_str());
  }
  fd_ = Fd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!fd_) throw io::file_error("open", path_, errno);
  if (!options.tensorboard) return;
  // TensorBoard shows the folder's name as the run's.
  const std::string runs = directory + "/runs" + (run_name_.empty() ? "" : "/" + run_name_);
  events_ = std::make_unique<io::EventFile>(runs);
  // What an earlier run has said of steps to come stays in its files, and is forgotten by readers.
  events_->begin_at(options.resumed_at > 0 ? options.resumed_at + 1 : 0);
  events_->flush();
}

void MetricsLog::write(const LogEntry& entry) {
  const std::string line = log_entry_json(entry, run_name_) + "\n";
  const ssize_t written = ::write(fd_.get(), line.data(), line.size());
  if (written != static_cast<ssize_t>(line.size()) && !told_) {
    told_ = true;
    log::error("trainer", "{}", io::file_error("write to", path_, errno).what());
  }
  write_scalars(entry);
}

void MetricsLog::write_scalars(const LogEntry& entry) {
  if (!events_) return;
  std::vector<io::EventFile::Scalar> scalars;
  for (const auto& [name, value] : entry.values)
    scalars.emplace_back(tag_of(name), static_cast<float>(value));
  scalars.emplace_back("train/epoch", static_cast<float>(entry.epoch));
  try {
    events_->scalars(entry.step, scalars);
    events_->flush();
  } catch (const SystemError& e) {
    if (!told_) log::error("trainer", "{}", e.what());
    told_ = true;
  }
}

}  // namespace lockstep::train
