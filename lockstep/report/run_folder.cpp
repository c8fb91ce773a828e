#include "lockstep/report/run_folder.h"

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
#include "lockstep/io/manifest.h"
#include "lockstep/io/numbered_dirs.h"

namespace lockstep::report {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostBytes = 1u << 30;  // of one file
constexpr const char* kCheckpoints = "checkpoint-";

bool there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

std::string text_of(const fs::path& path) {
  return read_file(path.string(), kMostBytes);
}

// A number, or NaN for null. Nothing for what is not a number: the name of the run.
std::optional<double> number_at(JsonReader& json) {
  const char first = json.peek();
  if (first == '"' || first == '{' || first == '[' || first == 't' || first == 'f') {
    json.skip();
    return std::nullopt;
  }
  const std::string text(json.scalar());
  return text == "null" ? NAN : std::strtod(text.c_str(), nullptr);
}

MetricLine parse_line(std::string_view text) {
  JsonReader json(text);
  MetricLine line;
  bool numbered = false;
  json.enter_object();
  for (std::string key; json.next_key(key);) {
    const std::optional<double> value = number_at(json);
    if (!value) continue;
    if (key == "step") {
      numbered = std::abs(*value) < 1e18;
      line.step = numbered ? static_cast<std::int64_t>(*value) : 0;
    } else if (key == "epoch") {
      line.epoch = *value;
    } else {
      line.values.emplace_back(key, *value);
    }
  }
  json.end();
  if (!numbered) json.fail("a line without a step");
  return line;
}

// A crash may have cut the last line short; any other that cannot be read is mentioned.
std::vector<MetricLine> read_metrics(const fs::path& path, std::vector<std::string>& missing) {
  std::vector<MetricLine> lines;
  const std::string text = text_of(path);
  std::size_t number = 0, unread = 0, first_unread = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    ++number;
    try {
      lines.push_back(parse_line(std::string_view(text).substr(at, end - at)));
    } catch (const JsonError&) {
      if (end < text.size() && unread++ == 0) first_unread = number;
    }
    at = end + 1;
  }
  if (unread > 0)
    missing.push_back(fmt::format("{} of {} lines of {} cannot be read (the first is line {}).",
                                  unread, number, path.filename().string(), first_unread));
  return lines;
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

void read_checkpoints(RunFolder& run) {
  for (const io::NumberedDir& dir : io::list_numbered(run.path, kCheckpoints)) {
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

void read_best(RunFolder& run) {
  if (run.checkpoints.empty()) return;
  const fs::path file = fs::path(run.path) / run.checkpoints.back().name / "trainer_state.json";
  if (!there(file)) return;
  const std::string text = text_of(file);
  JsonReader json(text);
  json.enter_object();
  for (std::string key; json.next_key(key);) {
    if (key != "best_metric" && key != "best_global_step") {
      json.skip();
      continue;
    }
    const std::optional<double> value = number_at(json);
    if (!value || !std::isfinite(*value)) continue;
    if (key == "best_metric") run.best_metric = *value;
    if (key == "best_global_step" && std::abs(*value) < 1e18)
      run.best_step = static_cast<std::int64_t>(*value);
  }
}

// ---------------------------------------------------------------- configuration

// {"settings": {"seed": {"value": 42, "from": "default", "beats": [...]}, ...}}
void read_effective_config(RunFolder& run, const fs::path& file) {
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

void add_arguments(RunFolder& run, const Node& arguments) {
  for (const Entry& entry : arguments.entries)
    run.config.push_back({.key = entry.key, .value = plain_text(entry.value)});
}

// As `lockstep train` writes it, or of a program's own Trainer, which has no origins.
void read_config(RunFolder& run) {
  const fs::path effective = fs::path(run.path) / "effective_config.json";
  if (there(effective)) return read_effective_config(run, effective);
  if (run.record && !run.record->facts.arguments.entries.empty())
    return add_arguments(run, run.record->facts.arguments);
  if (!run.checkpoints.empty()) {
    const fs::path file = fs::path(run.path) / run.checkpoints.back().name / "training_args.json";
    if (there(file)) return add_arguments(run, parse_json(text_of(file), file.string()));
  }
  run.missing.push_back(
      "The configuration is not recorded: there is neither effective_config.json, which lockstep "
      "train writes, nor a checkpoint.");
}

void read_archived(RunFolder& run) {
  std::error_code error;
  for (auto it = fs::directory_iterator(run.path, error); !error && it != fs::directory_iterator();
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with("earlier-")) run.archived.push_back(name);
  }
  std::ranges::sort(run.archived);
}

// Each part by itself: one that cannot be read does not take the others with it.
template <typename Read>
void attempt(RunFolder& run, const char* what, Read&& read) {
  try {
    read();
  } catch (const std::exception& e) {
    run.missing.push_back(fmt::format("{} cannot be read: {}", what, e.what()));
  }
}

}  // namespace

const double* MetricLine::find(std::string_view name) const {
  const auto found = std::ranges::find(values, name, &std::pair<std::string, double>::first);
  return found == values.end() ? nullptr : &found->second;
}

RunFolder read_run_folder(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error))
    throw UsageError("report", "{} is not a directory. Give the output_dir of a run.", path);
  RunFolder run{.path = path};
  const fs::path place(path);
  attempt(run, "metrics.jsonl", [&] {
    if (there(place / "metrics.jsonl"))
      run.metrics = read_metrics(place / "metrics.jsonl", run.missing);
    else
      run.missing.push_back("There is no metrics.jsonl: no loss and no throughput over steps.");
  });
  attempt(run, "metrics.superseded.jsonl", [&] {
    if (there(place / "metrics.superseded.jsonl"))
      run.superseded = read_metrics(place / "metrics.superseded.jsonl", run.missing);
  });
  attempt(run, "the record in monitor/", [&] {
    if (there(place / monitor::kRecordFolder))
      run.record = monitor::read_run(path);
    else
      run.missing.push_back(
          "There is no folder monitor/: the run is older than the record of step budget and "
          "utilisation, or did not write one.");
  });
  attempt(run, "the checkpoints", [&] { read_checkpoints(run); });
  attempt(run, "the state of the newest checkpoint", [&] { read_best(run); });
  attempt(run, "the configuration", [&] { read_config(run); });
  read_archived(run);
  if (run.metrics.empty() && !run.record && run.checkpoints.empty()) {
    std::string found;
    for (const std::string& what : run.missing) found += " " + what;
    throw UsageError("report",
                     "{} holds nothing of a run.{} Give the output_dir of a Trainer, or the folder "
                     "of lockstep run --record.",
                     path, found);
  }
  return run;
}

}  // namespace lockstep::report
