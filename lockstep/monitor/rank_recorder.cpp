#include "lockstep/monitor/rank_recorder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/log.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/file.h"
#include "lockstep/monitor/stoppable_thread.h"

namespace lockstep::monitor {

namespace {

double seconds(std::uint64_t ns) {
  return static_cast<double>(ns) / 1e9;
}

}  // namespace

Interval interval_of(const ledger::Totals& spent) {
  Interval interval{.unix_time_s = unix_time_s(), .seconds = seconds(spent.time_ns)};
  interval.step = ledger::step();
  interval.steps = static_cast<std::int64_t>(spent.steps);
  std::uint64_t known = 0;
  for (std::size_t i = 0; i < ledger::kPhases; ++i) {
    known += spent.host_ns[i];
    interval.host_s[i] = seconds(spent.host_ns[i]);
    interval.device_s[i] = seconds(spent.device_ns[i]);
  }
  if (known < spent.time_ns)
    interval.host_s[ledger::index(ledger::Phase::kNone)] += seconds(spent.time_ns - known);
  interval.counts = spent.counts;
  return interval;
}

std::optional<double> throttled_share(const CgroupSample& before, const CgroupSample& after) {
  if (!before.periods || !after.periods || !before.throttled_periods || !after.throttled_periods)
    return std::nullopt;
  if (*after.periods <= *before.periods || *after.throttled_periods < *before.throttled_periods)
    return std::nullopt;
  return static_cast<double>(*after.throttled_periods - *before.throttled_periods) /
         static_cast<double>(*after.periods - *before.periods);
}

void write_facts(const std::string& directory, const RunFacts& facts) {
  const std::string folder = directory + "/" + kRecordFolder;
  io::refuse_link(folder);
  io::make_directories(folder);
  write_file_atomically(folder + "/run.json", facts_json(facts) + "\n");
}

ProcessWatch::ProcessWatch(pid_t pid, const HostFiles& files)
    : files_(files), process_(read_process(pid, files)), cgroup_(read_cgroup(pid, files)) {}

void ProcessWatch::look(pid_t pid, Interval& interval) {
  if (const auto now = read_process(pid, files_)) {
    if (process_) interval.process = rates(*process_, *now);
    interval.resident_bytes = now->resident_bytes;
    interval.threads = now->threads;
    process_ = now;
  }
  const CgroupSample group = read_cgroup(pid, files_);
  interval.cpu_limit_cores = group.cpu_limit_cores;
  interval.throttled_share = throttled_share(cgroup_, group);
  cgroup_ = group;
}

struct RankRecorder::State : StoppableState {
  explicit State(const RankRecorderOptions& chosen)
      : options(chosen),
        files(chosen.directory + "/" + kRecordFolder,
              {.fine_lines = chosen.fine_lines,
               .coarse_s = kCoarser * std::chrono::duration<double>(chosen.interval).count()}),
        totals(ledger::totals()) {}

  // On the recorder's thread, as everything below.
  void work() {
    std::optional<GpuSampler> sampler;
    std::optional<ProcessWatch> process;
    attempt([&] {
      if (options.gpus)
        sampler.emplace(GpuSamplerOptions{.library = options.nvml, .interval = options.interval});
    });
    attempt([&] { process.emplace(::getpid(), options.files); });
    for (bool last = false; !last;) {
      last = !wait_until(std::chrono::steady_clock::now() + options.interval);
      attempt([&] { record_rank(process); });
      if (sampler) attempt([&] { record_gpus(*sampler); });
    }
    attempt([&] { files.end(); });
    sampler.reset();  // may wait for a driver that does not answer
  }

  template <typename Body>
  void attempt(const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      if (std::exchange(reported, true)) return;
      log::warning("record",
                   "{} Training continues; the record of this rank has a gap until it can be "
                   "written. record_run: false switches it off.",
                   error.what());
    }
  }

  void record_rank(std::optional<ProcessWatch>& process) {
    const ledger::Totals now = ledger::totals();
    const ledger::Totals spent = ledger::since(std::exchange(totals, now), now);
    if (spent.time_ns == 0) return;
    Interval interval = interval_of(spent);
    interval.start = std::exchange(start, false);
    if (process) process->look(::getpid(), interval);
    files.add(options.rank, interval);
  }

  void record_gpus(const GpuSampler& sampler) {
    constexpr std::size_t kMost = 16;  // of an interval of this recorder
    const GpuSnapshot snapshot = sampler.snapshot();
    for (const GpuSamplePtr& sample : sampler.history(kMost)) {
      if (sample->gpus.empty() || sample->unix_time_s <= gpu_time_s) continue;
      gpu_time_s = sample->unix_time_s;
      files.add(options.host, *sample, snapshot.gpus);
    }
  }

  const RankRecorderOptions options;
  RecordFiles files;
  ledger::Totals totals;
  double gpu_time_s = 0;
  bool start = true;
  bool reported = false;
};

RankRecorder::RankRecorder(const RankRecorderOptions& options)
    : state_(std::make_shared<State>(options)) {
  try {
    thread_ = start_stoppable(state_, [](State& state) { state.work(); });
  } catch (const std::system_error& error) {
    log::warning("record",
                 "rank {} is not recorded: no thread could be started ({}). Training continues; "
                 "see `ulimit -u`.",
                 options.rank, error.what());
  }
}

RankRecorder::~RankRecorder() {
  stop_or_leave(*state_, thread_, state_->options.end_limit);
}

namespace {

// A run that was killed may have left half a line, which only the last one may be.
void cut_torn_line(int fd) {
  constexpr off_t kBlock = 4096;
  char block[kBlock];
  const off_t size = ::lseek(fd, 0, SEEK_END);
  for (off_t end = size; end > 0;) {
    const off_t begin = end > kBlock ? end - kBlock : 0;
    const ssize_t n = ::pread(fd, block, static_cast<std::size_t>(end - begin), begin);
    if (n != static_cast<ssize_t>(end - begin)) return;
    const std::size_t last = std::string_view(block, static_cast<std::size_t>(n)).rfind('\n');
    const bool found = last != std::string_view::npos;
    end = found ? begin + static_cast<off_t>(last) + 1 : begin;
    if (!found && end > 0) continue;
    if (end < size && ::ftruncate(fd, end) != 0)
      throw SystemError("record", "cannot cut a torn line off", errno);
    return;
  }
}

}  // namespace

void LineFile::append(const std::string& line) {
  if (!fd_) open();
  struct stat info {};
  if (::fstat(fd_.get(), &info) == 0 && info.st_nlink == 0) {
    fd_.reset();  // somebody has deleted it: the next line makes it again
    throw io::file_error("write to", path_, ENOENT);
  }
  const std::string text = line + "\n";
  const off_t end = ::lseek(fd_.get(), 0, SEEK_END);
  try {
    write_all(fd_.get(), text);
  } catch (const SystemError& error) {
    [[maybe_unused]] const int cut = ::ftruncate(fd_.get(), end);
    throw io::file_error("write to", path_, error.error_number(), text.size());
  }
}

void LineFile::open() {
  io::make_directories(std::filesystem::path(path_).parent_path().string());
  Fd fd(::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!fd) throw io::file_error("open", path_, errno);
  cut_torn_line(fd.get());
  fd_ = std::move(fd);
}

RecordFiles::File& RecordFiles::file(const char* kind, int number) {
  const std::string path = fmt::format("{}/{}_{}.jsonl", folder_, kind, number);
  return files_.try_emplace(path, File{LineFile(path)}).first->second;
}

void RecordFiles::write(File& file) {
  file.file.append(interval_json(file.pending));
  ++file.lines;
  file.pending = {};
}

void RecordFiles::add(int rank, const Interval& interval) {
  File& to = file("rank", rank);
  if (interval.start && to.pending.seconds > 0) write(to);
  join(to.pending, interval);
  if (to.lines < limits_.fine_lines || to.pending.seconds >= limits_.coarse_s) write(to);
}

void RecordFiles::add(int host, const GpuSample& sample, const std::vector<GpuIdentity>& gpus) {
  File& to = file("gpus", host);
  if (to.lines >= limits_.fine_lines && sample.unix_time_s - to.time_s < limits_.coarse_s) return;
  to.file.append(gpu_sample_json(sample, gpus));
  ++to.lines;
  to.time_s = sample.unix_time_s;
}

void RecordFiles::end() {
  for (auto& [path, file] : files_)
    if (file.pending.seconds > 0) write(file);
}

}  // namespace lockstep::monitor
