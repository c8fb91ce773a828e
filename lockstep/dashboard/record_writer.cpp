#include "lockstep/dashboard/record_writer.h"

#include <fmt/format.h>

#include <exception>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/io/file.h"

namespace lockstep::dashboard {
namespace {

namespace fs = std::filesystem;

constexpr double kCoarse_s = monitor::kCoarser - 0.5;  // looks come a little early or late

std::string rank_file(int rank) {
  return fmt::format("rank_{}.jsonl", rank);
}

}  // namespace

RecordWriter::RecordWriter(const std::string& directory, int host)
    : folder_(directory + "/" + monitor::kRecordFolder), host_(host) {
  io::make_directories(folder_);
  before_ = listing();
}

RecordWriter::~RecordWriter() {
  for (auto& [name, file] : files_)
    if (file.pending.seconds > 0) append(file, monitor::interval_json(file.pending));
}

RecordWriter::Listing RecordWriter::listing() const {
  Listing files;
  std::error_code problem;
  for (fs::directory_iterator at(folder_, problem), end; !problem && at != end;
       at.increment(problem)) {
    std::error_code gone;
    const auto size = fs::file_size(*at, gone);
    const auto time = fs::last_write_time(*at, gone);
    if (!gone) files[at->path().filename().string()] = {size, time};
  }
  return files;
}

bool RecordWriter::rank_records(int rank) const {
  const Listing now = listing();
  const auto found = now.find(rank_file(rank));
  if (began_ || found == now.end()) return false;
  const auto before = before_.find(found->first);
  return before == before_.end() || before->second != found->second;
}

// Where something has changed meanwhile, launchers of several hosts share the folder, and another
// one has moved it.
void RecordWriter::begin() {
  if (std::exchange(began_, true) || before_.empty() || listing() != before_) return;
  fs::path place;
  for (int number = 1; place.empty() || fs::exists(place); ++number)
    place = fmt::format("{}.{}", folder_, number);
  std::error_code problem;
  fs::rename(folder_, place, problem);
  if (!problem) moved_to_ = place.string();
  if (problem && problem != std::errc::no_such_file_or_directory)
    throw io::file_error("rename", folder_, problem.value());
  io::make_directories(folder_);
}

void RecordWriter::write(const monitor::RunFacts& facts) {
  const std::string text = monitor::facts_json(facts) + "\n";
  if (failed_ || text == std::exchange(facts_, text)) return;
  const std::string path = folder_ + "/run.json";
  try {
    begin();
    // Launchers of several hosts may share the folder; the facts of the first one stand.
    if (host_ == 0 || !fs::exists(path)) write_file_atomically(path, text);
  } catch (const std::exception& error) {
    failed_ = true;
    problem_ = error.what();
  }
}

void RecordWriter::write_first(const monitor::RunFacts& facts) {
  if (began_ || failed_ || !facts_.empty() || !listing().empty()) return;
  facts_ = monitor::facts_json(facts) + "\n";
  try {
    write_file_atomically(folder_ + "/run.json", facts_);
  } catch (const std::exception&) {  // write() will report it
    facts_.clear();
  }
}

void RecordWriter::add(int rank, const monitor::Interval& interval) {
  File& to = file(rank_file(rank));
  if (interval.start && to.pending.seconds > 0)
    append(to, monitor::interval_json(std::exchange(to.pending, {})));
  join(to.pending, interval);
  if (to.count >= monitor::kFineLines && to.pending.seconds < kCoarse_s) return;
  append(to, monitor::interval_json(std::exchange(to.pending, {})));
}

void RecordWriter::add(const monitor::GpuSample& sample,
                       const std::vector<monitor::GpuIdentity>& gpus) {
  File& to = file(fmt::format("gpus_{}.jsonl", host_));
  if (to.count >= monitor::kFineLines && sample.unix_time_s - to.time_s < kCoarse_s) return;
  to.time_s = sample.unix_time_s;
  append(to, monitor::gpu_sample_json(sample, gpus));
}

RecordWriter::File& RecordWriter::file(const std::string& name) {
  return files_.try_emplace(name, folder_ + "/" + name).first->second;
}

void RecordWriter::append(File& file, const std::string& line) {
  if (failed_) return;
  try {
    begin();
    file.lines.append(line);
    ++file.count;
  } catch (const std::exception& error) {
    failed_ = true;
    problem_ = error.what();
  }
}

std::string RecordWriter::moved_to() {
  return std::exchange(moved_to_, {});
}

std::string RecordWriter::problem() {
  return std::exchange(problem_, {});
}

}  // namespace lockstep::dashboard
