// A run's folder as a RunView.
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/json.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/manifest.h"
#include "lockstep/monitor/run_view.h"

namespace lockstep::monitor {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostFileBytes = 1u << 30;  // of one file
constexpr const char* kCheckpoints = "checkpoint-";

bool there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

std::string text_of(const fs::path& path) {
  return read_file(path.string(), kMostFileBytes);
}

// ---------------------------------------------------------------- checkpoints

std::uint64_t bytes_in(const fs::path& folder) {
  std::uint64_t bytes = 0;
  std::error_code error;
  for (auto it = fs::recursive_directory_iterator(folder, error);
       !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    std::error_code ignored;
    if (it->is_regular_file(ignored)) bytes += it->file_size(ignored);
  }
  return bytes;
}

void read_checkpoints(RunView& run) {
  for (const io::NumberedDir& dir : io::list_numbered(run.id, kCheckpoints)) {
    CheckpointInfo info{.step = dir.step, .name = fs::path(dir.path).filename().string()};
    struct stat status {};
    if (::stat(dir.path.c_str(), &status) == 0)
      info.unix_time_s = static_cast<double>(status.st_mtim.tv_sec);
    info.bytes = bytes_in(dir.path);
    const auto faults = io::damage_of(dir.path, io::Depth::kSizes);
    if (!faults.empty()) info.problem = io::describe(faults);
    run.checkpoints.push_back(std::move(info));
  }
  std::ranges::sort(run.checkpoints, {}, &CheckpointInfo::step);
}

void read_best(RunView& run) {
  if (run.checkpoints.empty()) return;
  const fs::path file = fs::path(run.id) / run.checkpoints.back().name / "trainer_state.json";
  if (!there(file)) return;
  const std::string state = text_of(file);
  JsonReader json(state);
  json.enter_object();
  for (std::string key; json.next_key(key);) {
    if (key != "best_metric" && key != "best_global_step") {
      json.skip();
      continue;
    }
    const std::string text(json.scalar());
    const double value = text == "null" ? NAN : std::strtod(text.c_str(), nullptr);
    if (key == "best_metric" && std::isfinite(value)) run.best_metric = value;
    if (key == "best_global_step" && std::abs(value) < 1e18)
      run.best_step = static_cast<std::int64_t>(value);
  }
}

// ---------------------------------------------------------------- configuration

// {"settings": {"seed": {"value": 42, "from": "default", "beats": [...]}, ...}}
void read_effective_config(RunView& run, const fs::path& file) {
  const Node root = parse_json(text_of(file), file.string());
  for (const Entry& entry : root.at("settings").entries) {
    ConfigValue value{.key = entry.key,
                      .value = plain_text(entry.value.at("value")),
                      .from = plain_text(entry.value.at("from"))};
    if (const Entry* beats = entry.value.find("beats"))
      for (const Node& item : beats->value.items) value.beats.push_back(plain_text(item));
    run.config.push_back(std::move(value));
  }
}

void add_arguments(RunView& run, const Node& arguments) {
  for (const Entry& entry : arguments.entries)
    run.config.push_back({.key = entry.key, .value = plain_text(entry.value)});
}

// As `lockstep train` writes it, or of a program's own Trainer, which has no origins.
void read_config(RunView& run) {
  const fs::path effective = fs::path(run.id) / "effective_config.json";
  if (there(effective)) return read_effective_config(run, effective);
  if (run.record && !run.record->facts.arguments.entries.empty())
    return add_arguments(run, run.record->facts.arguments);
  if (!run.checkpoints.empty()) {
    const fs::path file = fs::path(run.id) / run.checkpoints.back().name / "training_args.json";
    if (there(file)) return add_arguments(run, parse_json(text_of(file), file.string()));
  }
  run.missing.push_back(
      "The configuration is not recorded: there is neither effective_config.json, which lockstep "
      "train writes, nor a checkpoint.");
}

// Each part by itself: one that cannot be read does not take the others with it.
template <typename Read>
void attempt(RunView& run, const char* what, Read&& read) {
  try {
    read();
  } catch (const std::exception& e) {
    run.missing.push_back(fmt::format("{} cannot be read: {}", what, e.what()));
  }
}

void read_everything(RunView& run, const MetricsFile& metrics) {
  std::error_code error;
  const fs::path place(run.id);
  if (!fs::is_directory(place, error))
    throw UsageError("report", "{} is not a directory. Give the output_dir of a run.", run.id);
  if (!metrics.there())
    run.missing.push_back(there(place / "metrics.jsonl")
                              ? "metrics.jsonl cannot be read: check who owns it."
                              : "There is no metrics.jsonl: no loss and no throughput over steps.");
  MetricsFile superseded((place / "metrics.superseded.jsonl").string());
  superseded.read();
  run.superseded = superseded.lines();
  for (const MetricsFile* file : {&metrics, &std::as_const(superseded)})
    if (std::string problem = file->problem(); !problem.empty())
      run.missing.push_back(std::move(problem));
  attempt(run, "the record in monitor/", [&] {
    if (there(place / kRecordFolder))
      run.record = read_run(run.id);
    else
      run.missing.push_back(
          "There is no folder monitor/: the run is older than the record of step budget and "
          "utilisation, or did not write one.");
  });
  attempt(run, "the checkpoints", [&] { read_checkpoints(run); });
  attempt(run, "the state of the newest checkpoint", [&] { read_best(run); });
  attempt(run, "the configuration", [&] { read_config(run); });
  if (!run.metrics.empty() || run.record || !run.checkpoints.empty()) return;
  throw UsageError("report",
                   "{} holds nothing of a run. {} Give the output_dir of a Trainer, or the folder "
                   "of lockstep run --record.",
                   run.id, fmt::format("{}", fmt::join(run.missing, " ")));
}

}  // namespace

RunView read_run_view(const std::string& path, Detail detail) {
  RunView run{.id = path};
  const fs::path place(path);
  MetricsFile metrics((place / "metrics.jsonl").string(), detail == Detail::kAll
                                                              ? MetricsFile::Part::kAll
                                                              : MetricsFile::Part::kNewest);
  metrics.read();
  run.metrics = metrics.lines();
  run.metrics_unix_s = metrics.unix_time_s();
  if (detail == Detail::kShown)
    run.record = read_run(path);
  else
    read_everything(run, metrics);
  conclude(run);
  return run;
}

}  // namespace lockstep::monitor
