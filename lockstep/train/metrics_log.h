// What a run has measured, as files in output_dir: metrics.jsonl, one JSON object a line with every
// number in full, and TensorBoard's event files in runs/ where report_to asks for them.
//
// The one hard idea: a run that is resumed at step 40 says step 41 again. Lines of later steps are
// taken out of metrics.jsonl first, so that each step stands there once; TensorBoard is told to
// forget them, and with a new run everything that an earlier one has left in runs/.
//
//   MetricsLog metrics("out", {.tensorboard = true, .resumed_at = 40});
//   metrics.write({.step = 41, .epoch = 0.5, .values = {{"loss", 1.25}}});
//
// Used by one thread, on rank 0. Owns its files. A disk that is full is told once (log), and the
// run goes on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/core/fd.h"
#include "lockstep/io/event_file.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::train {

struct MetricsLogOptions {
  bool tensorboard = false;
  std::string run_name{};       // in every line, and TensorBoard's folder below runs/
  std::int64_t resumed_at = 0;  // 0: a new run; the lines of an older one go
};

class MetricsLog {
 public:
  // Makes the directory. SystemError when it cannot.
  explicit MetricsLog(const std::string& directory, const MetricsLogOptions& options = {});

  void write(const LogEntry& entry);

  const std::string& path() const { return path_; }

 private:
  void write_scalars(const LogEntry& entry);

  std::string path_;
  std::string run_name_;
  Fd fd_;
  std::unique_ptr<io::EventFile> events_;
  bool told_ = false;
};

}  // namespace lockstep::train
