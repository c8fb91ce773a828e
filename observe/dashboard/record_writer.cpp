#include "observe/dashboard/record_writer.h"

#include <fmt/format.h>

#include <exception>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"

namespace lockstep::dashboard {
namespace {

namespace fs = std::filesystem;

}  // namespace

RecordWriter::RecordWriter(const std::string& directory, int host)
    : folder_(directory + "/" + monitor::kRecordFolder), host_(host), files_(folder_) {
  io::refuse_link(folder_);
  io::make_directories(folder_);
  before_ = listing();
}

RecordWriter::~RecordWriter() {
  if (began_) attempt([&] { files_.end(); });
}

template <typename Body>
void RecordWriter::attempt(const Body& body) {
  if (failed_) return;
  try {
    begin();
    body();
  } catch (const std::exception& error) {
    failed_ = true;
    problem_ = error.what();
  }
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
  const auto found = now.find(fmt::format("rank_{}.jsonl", rank));
  if (began_ || found == now.end()) return false;
  const auto before = before_.find(found->first);
  return before == before_.end() || before->second != found->second;
}

// If something has changed meanwhile, launchers of several hosts share the folder, and another one
// has moved the files.
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
  attempt([&] {
    const std::string path = folder_ + "/run.json";
    // Launchers of several hosts may share the folder; the facts of the first one stand.
    if (host_ == 0 || !fs::exists(path)) write_file_atomically(path, text);
  });
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
  attempt([&] { files_.add(rank, interval); });
}

void RecordWriter::add(const monitor::GpuSample& sample,
                       const std::vector<monitor::GpuIdentity>& gpus) {
  attempt([&] { files_.add(host_, sample, gpus); });
}

std::string RecordWriter::moved_to() {
  return std::exchange(moved_to_, {});
}

std::string RecordWriter::problem() {
  return std::exchange(problem_, {});
}

}  // namespace lockstep::dashboard
