// Outputs of a run's measurements. MetricsLog writes files in output_dir: metrics.jsonl, one JSON
// object per line with every number in full, and TensorBoard's event files in runs/ if report_to
// asks for them. Progress shows them on the terminal.
//
// A run that is resumed at step 40 measures step 41 again. Lines of later steps are first moved
// from metrics.jsonl to metrics.superseded.jsonl, so that each step is there once and nothing is
// deleted. TensorBoard's readers drop them, and for a new run everything that an earlier one has
// left in runs/.
//
//   MetricsLog metrics("out", {.tensorboard = true, .resumed_at = 40});
//   metrics.write({.step = 41, .epoch = 0.5, .values = {{"loss", 1.25}}});
//
// Used by one thread, on rank 0. metrics.jsonl holds whole lines only: what a full
// disk has no room for stays in memory, up to a limit, and is written when there is room again. The
// log reports when that begins, and at the end how many lines are lost.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/core/fd.h"
#include "lockstep/io/event_file.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::train {

struct MetricsLogOptions {
  bool tensorboard = false;
  std::string run_name{};       // in every line, and TensorBoard's folder below runs/
  std::int64_t resumed_at = 0;  // 0: a new run; an older one's lines are moved away
};

class MetricsLog {
 public:
  // Makes the directory. SystemError when it cannot.
  explicit MetricsLog(const std::string& directory, const MetricsLogOptions& options = {});
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  void write(const LogEntry& entry);

  const std::string& path() const { return path_; }

 private:
  bool write_line(std::string_view line);
  void write_scalars(const LogEntry& entry);

  std::string path_;
  std::string run_name_;
  Fd fd_;
  std::deque<std::string> pending_;  // lines that could not be written yet
  std::int64_t lost_ = 0;
  std::unique_ptr<io::EventFile> events_;
  bool reported_ = false;
};

// The newest line of a metrics.jsonl that has this value.
std::optional<LogEntry> newest_with(const std::string& path, std::string_view metric);

struct ProgressOptions {
  std::int64_t total_steps = 0;
  std::int64_t done_steps = 0;  // before this start
  bool bar = true;              // where stdout is a terminal, or the launcher's pipe to one
};

// On stdout: a bar that is redrawn on a terminal, otherwise one line per logging step.
//
//   Progress progress({.total_steps = 1000, .done_steps = 40});
//   progress.step(41);
//   progress.log({.step = 50, .epoch = 0.5, .values = {{"loss", 1.25}, {"learning_rate", 3e-4}}});
class Progress {
 public:
  explicit Progress(const ProgressOptions& options);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(std::int64_t step);
  void log(const LogEntry& entry);

 private:
  void draw();
  void clear();

  ProgressOptions options_;
  bool bar_ = false;
  bool drawn_ = false;
  std::int64_t step_ = 0;
  std::string newest_;  // the bar's right side
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point drawn_at_;
};

// "step 50/1000  epoch 0.50  loss 1.2500  lr 3.000e-04  |g| 0.81  512 samples/s  eta 0:12"
std::string progress_line(const LogEntry& entry, std::int64_t total_steps, double eta_s);
// "1:02:03"
std::string duration_text(double seconds);

}  // namespace lockstep::train
