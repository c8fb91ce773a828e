#include "observe/dashboard/rank_sampler.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <numeric>
#include <system_error>
#include <utility>

#include "launcher/process.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"

namespace lockstep::dashboard {

namespace {

namespace fs = std::filesystem;

// The totals of the interval in which the ledger was opened: what came before was the start.
// Where more was counted than there was time, it ran before anybody looked, and only later
// intervals can be known.
ledger::Totals first_totals(const monitor::Interval& interval, const ledger::Totals& read) {
  const std::uint64_t whole = static_cast<std::uint64_t>(interval.seconds * 1e9);
  const std::uint64_t counted =
      std::accumulate(read.host_ns.begin(), read.host_ns.end(), std::uint64_t{0});
  ledger::Totals spent = counted <= whole ? read : ledger::Totals{};
  spent.time_ns = whole;
  if (counted <= whole) spent.host_ns[ledger::index(ledger::Phase::kStartup)] += whole - counted;
  return spent;
}

// A collective that ends on no rank before all have begun it. One with a root or a message is none.
bool is_of_all(const ledger::Record& record, const std::string& group) {
  return record.group == group && !record.message && record.peer < 0 &&
         record.state != ledger::State::kReleased && record.operation != "connect";
}

}  // namespace

RankSampler::RankSampler(launch::RankStarted rank, Clock::time_point began)
    : rank_(std::move(rank)), pid_(rank_.pid), began_(began), process_(pid_) {}

// Trusts a pid from the rank's ledger only if the process is below this one.
void RankSampler::find_process() {
  const int named = rank_.ledger ? rank_.ledger->pid() : 0;
  if (named == std::exchange(ledger_pid_, named)) return;
  pid_ = named > 0 && launch::is_below(::getpid(), named) ? named : rank_.pid;
}

bool RankSampler::stopped() const {
  const auto& seen = process();
  return seen && (seen->state == 'T' || seen->state == 't');
}

// For a rank that counts no steps, from its newest records; a ring that has turned since the last
// look covers less than the interval.
void RankSampler::add_collectives(monitor::Interval& interval) {
  const ledger::Snapshot seen = rank_.ledger->read();
  if (seen.records.empty()) return;
  const ledger::Record& oldest = seen.records.front();
  if (!group_ && oldest.ticket == 1) group_ = oldest.group;
  const std::uint64_t now = ledger::monotonic_ns();
  const std::uint64_t before = std::exchange(looked_ns_, now);
  const ledger::Ticket last = std::exchange(newest_, seen.records.back().ticket);
  if (!group_ || before == 0) return;
  const std::uint64_t from = oldest.ticket > last + 1 ? std::max(before, oldest.posted_ns) : before;
  std::uint64_t covered = from;  // records are in the order in which they were posted
  std::uint64_t under_way = 0;
  for (const ledger::Record& record : seen.records) {
    if (!is_of_all(record, *group_)) continue;
    interval.collectives += record.ticket > last ? 1 : 0;
    const std::uint64_t begin = std::max(record.posted_ns, covered);
    const std::uint64_t end = std::min(record.under_way() ? now : record.ended_ns, now);
    if (end <= begin) continue;
    under_way += end - begin;
    covered = end;
  }
  if (now > from)
    interval.collective_share = static_cast<double>(under_way) / static_cast<double>(now - from);
}

monitor::Interval RankSampler::close(const std::optional<ledger::Totals>& end) {
  monitor::Interval interval;
  const auto now = Clock::now();
  interval.unix_time_s = unix_time_s();
  interval.seconds = std::chrono::duration<double>(now - std::exchange(began_, now)).count();
  if (rank_.ledger && rank_.ledger->opened()) {
    const ledger::Totals read = end ? *end : rank_.ledger->totals();
    interval = monitor::interval_of(totals_ ? ledger::since(*totals_, read)
                                            : first_totals(interval, read));
    totals_ = read;
    interval.step = rank_.ledger->step();
    if (!end && read.steps == 0) add_collectives(interval);
  }
  interval.start = std::exchange(start_, false);
  if (end) return interval;
  find_process();
  process_.look(pid_, interval);
  return interval;
}

namespace {

// The place that one word of CUDA_VISIBLE_DEVICES names.
std::optional<std::size_t> place_of(const std::vector<monitor::GpuIdentity>& gpus,
                                    const std::string& word) {
  if (word.rfind("GPU-", 0) == 0) {
    const auto found = std::ranges::find_if(
        gpus, [&](const monitor::GpuIdentity& gpu) { return gpu.uuid.rfind(word, 0) == 0; });
    if (found == gpus.end()) return std::nullopt;
    return static_cast<std::size_t>(found - gpus.begin());
  }
  std::size_t number = 0;
  const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (error != std::errc() || stop != word.data() + word.size() || number >= gpus.size())
    return std::nullopt;
  return number;
}

}  // namespace

std::vector<std::size_t> visible_gpus(const std::vector<monitor::GpuIdentity>& gpus,
                                      const std::optional<std::string>& variable) {
  std::vector<std::size_t> visible;
  if (!variable) {
    visible.resize(gpus.size());
    std::iota(visible.begin(), visible.end(), 0);
    return visible;
  }
  for (std::string word : split(*variable, ',')) {
    std::erase_if(word, [](char c) { return c == ' ' || c == '\t'; });
    const auto place = place_of(gpus, word);
    if (!place) break;
    visible.push_back(*place);
  }
  return visible;
}

int gpu_of_rank(const monitor::GpuSnapshot& snapshot, const std::vector<std::size_t>& visible,
                const GpuUser& user) {
  if (!snapshot.newest) return -1;
  const auto& readings = snapshot.newest->gpus;
  for (std::size_t i = 0; i < readings.size() && i < snapshot.gpus.size(); ++i) {
    const bool uses = std::ranges::any_of(readings[i].processes, [&](const auto& process) {
      return process.pid == static_cast<std::int64_t>(user.pid);
    });
    if (uses) return snapshot.gpus[i].index;
  }
  const auto own = static_cast<std::size_t>(std::max(user.local_rank, 0));
  return own < visible.size() ? snapshot.gpus[visible[own]].index : -1;
}

monitor::HostGpus host_gpus(int host, const std::vector<monitor::GpuIdentity>& gpus,
                            const std::vector<std::size_t>& visible,
                            const std::vector<monitor::GpuSamplePtr>& samples) {
  monitor::HostGpus chosen{.host = host};
  for (const std::size_t place : visible) chosen.gpus.push_back(gpus[place]);
  for (const monitor::GpuSamplePtr& sample : samples) {
    monitor::GpuSample own{.unix_time_s = sample->unix_time_s};
    for (const std::size_t place : visible)
      if (place < sample->gpus.size()) own.gpus.push_back(sample->gpus[place]);
    chosen.samples.push_back(std::move(own));
  }
  return chosen;
}

// ---------------------------------------------------------------- RecordWriter

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
