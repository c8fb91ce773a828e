// What a run has left in its output_dir, read for a report: metrics, checkpoints, configuration,
// and the record of where its time went.
//
//   const RunFolder run = read_run_folder("out");
//   for (const std::string& what : run.missing) say(what);     // an older run has less
//
// What is not there, or cannot be read, is a sentence in `missing`; only a folder that holds
// nothing of a run is an error. Values; read them from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/monitor/run_record.h"

namespace lockstep::report {

// A line of metrics.jsonl. A value that was not finite is NaN.
struct MetricLine {
  std::int64_t step = 0;
  double epoch = 0;
  std::vector<std::pair<std::string, double>> values{};

  const double* find(std::string_view name) const;  // nullptr without one
};

struct CheckpointInfo {
  std::int64_t step = 0;
  std::string name{};  // of its folder
  double unix_time_s = 0;
  std::uint64_t bytes = 0;
  std::string problem{};  // what its sizes and names show; empty: whole
};

struct ConfigValue {
  std::string key{};
  std::string value{};
  std::string from{};                // "default", "train.yaml:3:1", "--seed"; empty: not recorded
  std::vector<std::string> beats{};  // what it overrides
};

struct RunFolder {
  std::string path{};
  std::vector<MetricLine> metrics{};          // in the order of the file, which is that of steps
  std::vector<MetricLine> superseded{};       // measured, and measured again after a resume
  std::vector<CheckpointInfo> checkpoints{};  // by step
  std::optional<std::int64_t> best_step{};
  std::optional<double> best_metric{};
  std::vector<ConfigValue> config{};
  std::vector<std::string> archived{};  // folders with what earlier runs have left
  std::optional<monitor::RunRecord> record{};
  std::vector<std::string> missing{};
};

// UsageError when it is not a directory, or holds nothing of a run.
RunFolder read_run_folder(const std::string& path);

}  // namespace lockstep::report
