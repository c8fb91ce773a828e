#include "lockstep/train/previous_run.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>
#include <vector>

#include "lockstep/io/file.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::train {
namespace {

namespace fs = std::filesystem;

bool same_place(const fs::path& a, const fs::path& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) && !error;
}

bool stands_in(const std::string& folder, const std::string& output_dir) {
  std::error_code error;
  const fs::path place = fs::canonical(folder, error);
  return !error && same_place(place.parent_path(), output_dir);
}

bool holds_something(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error) && !fs::is_empty(path, error) && !error;
}

// Facts alone belong to a run that has not been recorded yet: `lockstep run --record` writes them
// first.
bool holds_a_record(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    if (at->path().filename() != "run.json") return true;
  return false;
}

bool continues_there(const std::string& output_dir, const RunStart& start) {
  return !start.checkpoint.empty() && stands_in(start.checkpoint, output_dir);
}

void add_measurements(const std::string& output_dir, std::vector<fs::path>& others) {
  for (const char* name :
       {"metrics.jsonl", "metrics.superseded.jsonl", "runs", "monitor", "report.html"}) {
    const fs::path path = fs::path(output_dir) / name;
    const bool record = path.filename() == "monitor";
    if (record ? holds_a_record(path) : holds_something(path)) others.push_back(path);
  }
}

fs::path make_place(const std::string& output_dir) {
  fs::path place;
  std::error_code error;
  for (int number = 1; place.empty() || fs::exists(place, error); ++number)
    place = fmt::format("{}/earlier-{}", output_dir, number);
  fs::create_directory(place, error);
  if (error) throw io::file_error("make the directory", place.string(), error.value());
  return place;
}

std::string move_away(const std::string& output_dir, const std::vector<fs::path>& others) {
  if (others.empty()) return {};
  const fs::path place = make_place(output_dir);
  for (const fs::path& path : others) {
    std::error_code error;
    fs::rename(path, place / path.filename(), error);
    if (error == std::errc::no_such_file_or_directory) continue;  // another rank's writer was first
    if (error) throw io::file_error("rename", path.string(), error.value());
  }
  io::sync_directory(place.string());
  io::sync_directory(output_dir);
  return place.string();
}

}  // namespace

bool is_before(const io::NumberedDir& dir, const std::string& output_dir, const RunStart& start) {
  return continues_there(output_dir, start) &&
         (dir.step <= start.step || same_place(dir.path, start.checkpoint));
}

std::string archive_previous_run(const std::string& output_dir, const RunStart& start) {
  std::vector<fs::path> others;
  for (const io::NumberedDir& dir : io::list_numbered(output_dir, kCheckpointPrefix))
    if (!is_before(dir, output_dir, start)) others.emplace_back(dir.path);
  if (!continues_there(output_dir, start)) {
    add_measurements(output_dir, others);
    const fs::path config = fs::path(output_dir) / "effective_config.json";
    if (holds_something(config)) others.push_back(config);
  }
  return move_away(output_dir, others);
}

std::string archive_measurements(const std::string& output_dir, const RunStart& start) {
  std::vector<fs::path> others;
  if (!continues_there(output_dir, start)) add_measurements(output_dir, others);
  return move_away(output_dir, others);
}

std::string archive_checkpoints(const std::string& output_dir,
                                const std::function<bool(const io::NumberedDir&)>& is_other) {
  std::vector<fs::path> others;
  for (const io::NumberedDir& dir : io::list_numbered(output_dir, kCheckpointPrefix))
    if (is_other(dir)) others.emplace_back(dir.path);
  return move_away(output_dir, others);
}

}  // namespace lockstep::train
