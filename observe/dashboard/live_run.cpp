#include "observe/dashboard/live_run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <map>
#include <utility>

#include "launcher/output.h"
#include "launcher/process.h"
#include "launcher/report.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/env.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/monitor/rank_recorder.h"
#include "lockstep/monitor/run_record.h"
#include "lockstep/monitor/stoppable_thread.h"
#include "observe/dashboard/rank_sampler.h"
#include "observe/dashboard/run_summary.h"

namespace lockstep::dashboard {
namespace {

using Clock = std::chrono::steady_clock;
using monitor::Position;
using monitor::RankState;
using monitor::RankStatus;
using monitor::RunView;
using monitor::Stall;
using std::chrono::milliseconds;

constexpr milliseconds kLook{250};
constexpr milliseconds kInterval{1000};
constexpr milliseconds kEagerFor{5000};  // intervals of kLook at the start
// Before the first step and without ten samples of the GPUs nothing is known that could be said.
constexpr milliseconds kSettled{12'000};
// Ranks that only start up: a Trainer says only after that where it records.
constexpr std::chrono::hours kLongestStart{1};
constexpr milliseconds kStopWithin{2000};
// No rank moves for this long and for ten steps: they are stalled. Less where one is stopped.
constexpr double kQuiet_s = 10;
constexpr double kQuietStopped_s = 1;
constexpr int kQuietSteps = 10;
constexpr std::size_t kRanksNamed = 4;
constexpr std::size_t kIntervals = 600;
constexpr std::size_t kLogLines = 50;
constexpr std::size_t kLineBytes = 500;
constexpr std::size_t kTailBytes = 16u << 10;

// The visible part of a progress bar: the text after its last carriage return.
std::string_view shown(std::string_view line) {
  while (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  const std::size_t back = line.rfind('\r');
  if (back != line.npos) line.remove_prefix(back + 1);
  return line.substr(0, kLineBytes);
}

std::string& unfinished_of(std::array<std::string, 2>& lines, launch::OutputKind kind) {
  return lines[kind == launch::OutputKind::kOut ? 0 : 1];
}

void add_line(std::deque<std::string>& log, std::string_view line) {
  log.emplace_back(shown(line));
  if (log.size() > kLogLines) log.pop_front();
}

// The newest lines of files that the rank writes itself.
std::deque<std::string> tail_of(const launch::RankStarted& rank) {
  std::deque<std::string> lines;
  for (const std::string& path : {rank.out_file, rank.err_file}) {
    if (path.empty()) continue;
    const std::string text = launch::end_of_file(path, kTailBytes);
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      add_line(lines, std::string_view(text).substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return lines;
}

std::optional<Position> position_of(const ledger::File* file) {
  if (file == nullptr || !file->opened()) return std::nullopt;
  const ledger::Snapshot seen = file->read();
  if (seen.records.empty()) return std::nullopt;
  // The oldest collective in progress is the one that the rank waits for.
  const auto pending = std::ranges::find_if(
      seen.records, [](const ledger::Record& record) { return record.under_way(); });
  const ledger::Record& record = pending != seen.records.end() ? *pending : seen.records.back();
  const std::uint64_t now = ledger::monotonic_ns();
  const double age_ns = now > record.posted_ns ? static_cast<double>(now - record.posted_ns) : 0;
  return Position{record.operation, record.sequence, ledger::name(record.state), age_ns * 1e-9};
}

bool same_folder(const std::string& a, const std::string& b) {
  std::error_code problem;
  return !a.empty() && !b.empty() && std::filesystem::equivalent(a, b, problem);
}

// A run has not failed if its launcher (128 + signal) or one of its ranks stopped on request.
bool has_failed(const launch::RunEnded& run) {
  const bool stopped = run.cause.empty()
                           ? run.code > 128
                           : run.cause.find(" stopped on request: ") != run.cause.npos;
  return run.code != 0 && !stopped;
}

// "rank 1 is stopped (kill -CONT 4712 continues it)"
std::string stopped_text(const std::vector<const RankState*>& stopped) {
  if (stopped.size() == 1)
    return fmt::format("rank {} is stopped (kill -CONT {} continues it)", stopped[0]->rank,
                       stopped[0]->pid);
  std::vector<int> some;
  for (std::size_t i = 0; i < std::min(stopped.size(), kRanksNamed); ++i)
    some.push_back(stopped[i]->rank);
  return fmt::format("ranks {}{} are stopped (kill -CONT continues them)", fmt::join(some, ", "),
                     stopped.size() > some.size() ? ", ..." : "");
}

// The state of a rank; guarded by the run's mutex.
struct Tracked {
  launch::RankStarted started;
  RankState shown;
  // Text below the log: incomplete lines of stdout and stderr.
  std::array<std::string, 2> unfinished{};
  Clock::time_point began = Clock::now();
  Clock::time_point stopped_since{};           // while it is
  std::optional<ledger::Totals> end_totals{};  // when it ended
  bool closed = false;                         // its last interval is there
  monitor::RankRecord record{};
};

}  // namespace

// Shared by the supervisor's thread, the looking thread, and callers of view().
struct LiveRun::State : monitor::StoppableState {
  explicit State(const LiveRunOptions& chosen) : options(chosen) {}

  // Used by the sampling thread alone.
  struct Look;
  void work();
  void look(Look& own, bool last);
  void sample(Look& own);
  void follow_metrics(Look& own);
  bool settled(const Look& own) const;
  bool records_itself(Look& own, bool last);
  void write_record(Look& own, bool last);
  void write_end(const Look& own);
  void judge(Look& own);
  void note_movement(Look& own);

  void add_gpus(monitor::RunRecord& run) const;
  // With the mutex held.
  monitor::RunRecord record() const;  // without GPUs
  std::optional<Stall> stall() const;

  const LiveRunOptions options;
  std::unique_ptr<monitor::GpuSampler> gpus;  // null: the run uses none

  // With the mutex held, as everything below.
  int generation = 0;  // of attempts
  int host = 0;
  Clock::time_point attempt_began{};
  double attempt_unix_s = 0;
  RunView view{};              // without record, ranks, GPUs, time, stall and verdict
  bool enough = false;         // steps, to judge
  Clock::time_point moved{};   // a rank did last
  Clock::time_point tabled{};  // the launcher's table came
  bool python = false;         // the program is a script, and so no Trainer
  std::map<int, Tracked> ranks;
  monitor::RunFacts facts{};
  std::vector<std::string> lines;  // to be said
  std::thread thread;
};

// Used by the looking thread only.
struct LiveRun::State::Look {
  int generation = -1;
  std::map<int, RankSampler> samplers{};
  std::map<int, monitor::Interval> made{};  // at this look
  std::map<int, std::uint64_t> heartbeats{};
  Clock::time_point interval_began{};
  std::optional<Clock::time_point> first_step{};
  monitor::MetricsFile metrics{};
  std::string output_dir{};
  bool facts_read = false;
  StandingFindings standing{};
  std::optional<RecordWriter> writer{};
  bool recording = false;  // the writer has begun
  std::vector<std::pair<int, monitor::Interval>> unwritten{};
  std::uint64_t gpu_samples = 0;  // that were written
  bool diagnosis_failed = false;

  bool eager(Clock::time_point now, Clock::time_point attempt_began) const {
    return now - attempt_began < kEagerFor || (first_step && now - *first_step < kEagerFor);
  }
};

// ---------------------------------------------------------------- the looking thread

void LiveRun::State::work() {
  try {
    Look own;
    if (!options.record_dir.empty()) own.writer.emplace(options.record_dir, host);
    for (Clock::time_point next = Clock::now() + kLook; wait_until(next);
         next = std::max(next + kLook, Clock::now()))
      look(own, false);
    look(own, true);
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex);
    lines.push_back(fmt::format("[doctor] the run is no longer looked at: {}", error.what()));
  }
}

void LiveRun::State::look(Look& own, bool last) {
  const auto now = Clock::now();
  Clock::time_point began;
  std::vector<std::pair<launch::RankStarted, Clock::time_point>> fresh;
  {
    const std::lock_guard lock(mutex);
    began = attempt_began;
    if (own.generation != generation) {
      own.samplers.clear();
      own.heartbeats.clear();
      own.first_step.reset();
      own.facts_read = false;
      own.generation = generation;
      own.interval_began = now;
    }
    for (const auto& [rank, tracked] : ranks)
      if (!own.samplers.contains(rank)) fresh.emplace_back(tracked.started, tracked.began);
  }
  for (const auto& [rank, since] : fresh) own.samplers.try_emplace(rank.rank, rank, since);
  if (!own.first_step && std::ranges::any_of(own.samplers, [](const auto& item) {
        const auto& file = item.second.rank().ledger;
        return file && file->opened() && file->totals().steps > 0;
      }))
    own.first_step = now;
  note_movement(own);
  if (!last && now - own.interval_began < kInterval && !own.eager(now, began)) return;
  own.interval_began = now;
  sample(own);
  follow_metrics(own);
  write_record(own, last);
  if (last) write_end(own);
  judge(own);
}

// As the launcher's watch has it: a step, a phase or an operation has begun or ended.
void LiveRun::State::note_movement(Look& own) {
  bool any = false;
  for (const auto& [rank, sampler] : own.samplers) {
    if (!sampler.rank().ledger) continue;
    const std::uint64_t heartbeat = sampler.rank().ledger->heartbeat();
    any |= std::exchange(own.heartbeats[rank], heartbeat) != heartbeat;
  }
  if (!any) return;
  const std::lock_guard lock(mutex);
  moved = Clock::now();
}

std::optional<Stall> LiveRun::State::stall() const {
  if (view.state != "running") return std::nullopt;
  std::vector<const RankState*> stopped;
  std::vector<std::string> places;
  double stopped_s = 0;
  double step_s = 0;
  for (const auto& [rank, tracked] : ranks) {
    const RankState& shown = tracked.shown;
    if (shown.status == RankStatus::kFailed) return std::nullopt;  // the run is being ended
    if (shown.status == RankStatus::kEnded) continue;
    step_s = std::max(step_s, monitor::recent_step_ms(tracked.record.intervals) / 1e3);
    if (shown.status == RankStatus::kStopped) {
      stopped.push_back(&shown);
      stopped_s = std::max(stopped_s, seconds_since(tracked.stopped_since));
    }
    const ledger::File* const file = tracked.started.ledger.get();
    if (file == nullptr || !file->opened() || file->phase() == ledger::Phase::kEnded) continue;
    const std::string phase = ledger::name(file->phase());
    if (places.size() < kRanksNamed)
      places.push_back(fmt::format("rank {} in {}", rank, phase.empty() ? "no phase" : phase));
  }
  const double quiet_s = seconds_since(moved);
  const double limit_s =
      stopped.empty() ? std::max(kQuiet_s, kQuietSteps * step_s) : kQuietStopped_s;
  const bool tabled_now = tabled > moved;
  // As the launcher's watch has it, a rank alone waits for no other.
  const bool quiet =
      facts.world_size > 1 && !places.empty() && ((step_s > 0 && quiet_s >= limit_s) || tabled_now);
  if (stopped.empty() && !quiet) return std::nullopt;
  std::string who =
      stopped.empty() ? fmt::format("{}", fmt::join(places, ", ")) : stopped_text(stopped);
  if (!quiet) {
    who[0] = 'R';
    return Stall{stopped_s, who + "."};
  }
  const std::string since =
      fmt::format("No {} for {:.0f} s", step_s > 0 ? "step has ended" : "rank has moved", quiet_s);
  if (stopped.empty() && tabled_now) return Stall{quiet_s, since + ". " + view.stall_table->cause};
  return Stall{quiet_s, since + ": " + who + "."};
}

// Reads without the lock, which the supervisor may be waiting for.
void LiveRun::State::sample(Look& own) {
  own.made.clear();
  std::map<int, std::optional<ledger::Totals>> open;
  {
    const std::lock_guard lock(mutex);
    if (own.generation != generation) return;
    for (const auto& [rank, tracked] : ranks)
      if (!tracked.closed) open[rank] = tracked.end_totals;
  }
  std::map<int, std::deque<std::string>> tails;
  for (const auto& [rank, end] : open) {
    const auto sampler = own.samplers.find(rank);
    if (sampler == own.samplers.end()) continue;
    own.made[rank] = sampler->second.close(end);
    const launch::RankStarted& started = sampler->second.rank();
    if (!started.out_file.empty() || !started.err_file.empty()) tails[rank] = tail_of(started);
  }
  const std::lock_guard lock(mutex);
  if (own.generation != generation) return;
  for (const auto& [rank, interval] : own.made) {
    Tracked& tracked = ranks.at(rank);
    const RankSampler& sampler = own.samplers.at(rank);
    auto& intervals = tracked.record.intervals;
    intervals.push_back(interval);
    if (intervals.size() > kIntervals) intervals.erase(intervals.begin());
    tracked.closed = open[rank].has_value();
    tracked.shown.pid = sampler.pid();
    tracked.shown.process = sampler.process();
    tracked.shown.cgroup = sampler.cgroup();
    RankStatus& status = tracked.shown.status;
    if (status == RankStatus::kRunning || status == RankStatus::kStopped) {
      const bool before = status == RankStatus::kStopped;
      status = sampler.stopped() ? RankStatus::kStopped : RankStatus::kRunning;
      if (!before && sampler.stopped()) tracked.stopped_since = Clock::now();
    }
    if (const auto tail = tails.find(rank); tail != tails.end()) tracked.shown.log = tail->second;
    if (rank != ranks.begin()->first || interval.steps == 0 || interval.step < 0) continue;
    monitor::add_point(view.step_ms, interval.step, monitor::recent_step_ms(intervals));
    if (view.step_ms.size() > kIntervals) view.step_ms.erase(view.step_ms.begin());
  }
}

// The Trainer's own facts are better than what is seen from outside.
void LiveRun::State::follow_metrics(Look& own) {
  for (const auto& [rank, sampler] : own.samplers) {
    if (!own.output_dir.empty() || !sampler.rank().ledger) break;
    own.output_dir = sampler.rank().ledger->output_dir();
  }
  if (own.output_dir.empty()) return;
  if (const std::string log = own.output_dir + "/metrics.jsonl"; log != own.metrics.path())
    own.metrics = monitor::MetricsFile(log, monitor::MetricsFile::Part::kNewest);
  own.metrics.read();
  std::optional<monitor::RunFacts> better;
  const std::string path = own.output_dir + "/" + std::string(monitor::kRecordFolder) + "/run.json";
  try {
    if (!own.facts_read) better = monitor::parse_facts(read_file(path, 1u << 20), path);
  } catch (const std::exception&) {  // not there yet, or none
  }
  const std::lock_guard lock(mutex);
  view.metrics = own.metrics.lines();
  // One of an earlier run in the same folder, or of an earlier attempt, is not about this one.
  if (!better || better->started_unix_s <= attempt_unix_s) return;
  own.facts_read = true;
  better->gpus_visible = std::max(better->gpus_visible, facts.gpus_visible);
  better->ended_unix_s = facts.ended_unix_s;
  better->failure = facts.failure;
  better->failed_ranks = facts.failed_ranks;
  facts = *better;
}

bool LiveRun::State::settled(const Look& own) const {
  const std::lock_guard lock(mutex);
  return own.first_step || Clock::now() - attempt_began > kSettled;
}

// Whether the launcher writes the record. A Trainer moves earlier files of its output_dir away,
// announces that folder before its first step, and records into it unless record_run is false: if
// it is the launcher's folder, its files are there a second after its first step.
bool LiveRun::State::records_itself(Look& own, bool last) {
  if (own.recording) return true;
  bool alone = false;
  {
    const std::lock_guard lock(mutex);
    alone = facts.hosts == 1;
  }
  if (python && alone) return true;
  const bool shared = same_folder(own.output_dir, options.record_dir);
  if (shared && std::ranges::any_of(own.samplers, [&](const auto& item) {
        return own.writer->rank_records(item.first);
      })) {
    own.writer.reset();
    own.unwritten.clear();
    return false;
  }
  if (last) return true;
  const auto now = Clock::now();
  if (shared) return own.first_step && now - *own.first_step > kSettled;
  const bool starts = std::ranges::any_of(own.samplers, [](const auto& item) {
    return item.second.rank().ledger && item.second.rank().ledger->opened();
  });
  if (!starts || python || own.first_step || !own.output_dir.empty()) return settled(own);
  const std::lock_guard lock(mutex);
  return now - attempt_began > kLongestStart;
}

void LiveRun::State::write_record(Look& own, bool last) {
  if (!own.writer) return;
  own.unwritten.insert(own.unwritten.end(), own.made.begin(), own.made.end());
  own.recording = records_itself(own, last);
  if (!own.writer) return;
  monitor::RunFacts known;
  {
    const std::lock_guard lock(mutex);
    known = facts;
  }
  if (!own.recording) {
    // Tells readers that the run exists; a Trainer replaces these facts.
    if (known.hosts == 1) own.writer->write_first(known);
    return;
  }
  own.writer->write(known);
  for (const auto& [rank, interval] : std::exchange(own.unwritten, {}))
    own.writer->add(rank, interval);
  if (gpus) {
    const monitor::GpuSnapshot now = gpus->snapshot();
    const std::size_t unwritten = now.samples - std::exchange(own.gpu_samples, now.samples);
    const auto visible = visible_gpus(now.gpus, env::get("CUDA_VISIBLE_DEVICES"));
    const monitor::HostGpus added = host_gpus(host, now.gpus, visible, gpus->history(unwritten));
    for (const monitor::GpuSample& sample : added.samples)
      if (!visible.empty()) own.writer->add(sample, added.gpus);
  }
  if (const std::string place = own.writer->moved_to(); !place.empty()) {
    const std::lock_guard lock(mutex);
    lines.push_back(fmt::format("[record] the record of an earlier run was moved to {}", place));
  }
  if (const std::string problem = own.writer->problem(); !problem.empty()) {
    const std::lock_guard lock(mutex);
    lines.push_back(fmt::format("[record] nothing more is recorded: {}", problem));
  }
}

// A rank that was killed cannot say so in the record that it wrote itself.
void LiveRun::State::write_end(const Look& own) {
  if (!own.facts_read || host != 0) return;
  const std::lock_guard lock(mutex);
  try {
    monitor::write_facts(own.output_dir, facts);
  } catch (const std::exception& error) {
    lines.push_back(fmt::format("[record] the end of the run is not recorded: {}", error.what()));
  }
}

void LiveRun::State::judge(Look& own) {
  monitor::RunRecord now;
  {
    const std::lock_guard lock(mutex);
    now = record();
  }
  add_gpus(now);
  std::int64_t step = -1;
  for (const monitor::RankRecord& rank : now.ranks)
    step = std::max(step, rank.intervals.back().step);
  std::vector<monitor::Finding> findings;
  bool judged = false;
  try {
    findings = options.diagnose(now);
    judged = monitor::enough_to_judge(now);
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex);
    if (!std::exchange(own.diagnosis_failed, true))
      lines.push_back(fmt::format("[doctor] the rules failed: {}", error.what()));
  }
  if (!settled(own)) findings.clear();
  const std::vector<std::string> said = own.standing.look(findings, step);
  const std::lock_guard lock(mutex);
  view.findings = std::move(findings);
  enough = judged;
  if (options.doctor) lines.insert(lines.end(), said.begin(), said.end());
}

monitor::RunRecord LiveRun::State::record() const {
  monitor::RunRecord copy{.facts = facts};
  for (const auto& [rank, tracked] : ranks)
    if (!tracked.record.intervals.empty()) copy.ranks.push_back(tracked.record);
  return copy;
}

void LiveRun::State::add_gpus(monitor::RunRecord& run) const {
  if (!gpus) return;
  const monitor::GpuSnapshot now = gpus->snapshot();
  const auto visible = visible_gpus(now.gpus, env::get("CUDA_VISIBLE_DEVICES"));
  run.facts.gpus_visible = std::max(run.facts.gpus_visible, static_cast<int>(visible.size()));
  if (!visible.empty()) run.gpus.push_back(host_gpus(host, now.gpus, visible, gpus->history()));
}

// ---------------------------------------------------------------- LiveRun

LiveRun::LiveRun(LiveRunOptions options)
    : not_started_(std::move(options.companions)),
      options_(std::move(options)),
      state_(std::make_shared<State>(options_)) {
  if (!options_.record_dir.empty()) const RecordWriter writer(options_.record_dir, 0);
}

LiveRun::~LiveRun() {
  stop();
}

// One that the kernel holds, in a file system that does not answer, is left behind.
void LiveRun::stop() {
  monitor::stop_or_leave(*state_, state_->thread, kStopWithin);
}

void LiveRun::left_behind() {
  not_started_.clear();
}

void LiveRun::run_started(const launch::LaunchPlan& plan) {
  const std::string device = env::get("LOCKSTEP_DEVICE").value_or("");
  {
    const std::lock_guard lock(state_->mutex);
    State& now = *state_;
    now.host = plan.node_rank;
    now.view.id = plan.run_id;
    now.view.started_s = unix_time_s();
    now.facts.world_size = plan.nnodes * plan.nproc_per_node;
    now.facts.hosts = plan.nnodes;
    now.facts.device = device;
    now.facts.backend = env::get("LOCKSTEP_BACKEND").value_or("");
    now.facts.program = launch::shell_text(plan.command);
    now.facts.started_unix_s = now.view.started_s;
    now.facts.cores = allowed_cores();
    now.facts.ranks_on_host = plan.nproc_per_node;
    now.facts.writer = monitor::process_identity(::getpid());
    now.python = launch::runs_python(plan.command);
  }
  // GPUs of other people's runs are no concern of a run on CPUs.
  if (device != "cpu") state_->gpus = std::make_unique<monitor::GpuSampler>(options_.gpus);
  state_->thread = monitor::start_stoppable(state_, [](State& state) { state.work(); });
  for (const Companion& start : not_started_) companions_.push_back(start(*this));
}

void LiveRun::attempt_started(const launch::AttemptStarted& attempt) {
  const std::lock_guard lock(state_->mutex);
  ++state_->generation;
  state_->attempt_began = Clock::now();
  state_->attempt_unix_s = unix_time_s();
  state_->moved = state_->attempt_began;
  state_->ranks.clear();
  state_->view.attempt = attempt.attempt;
  state_->facts.world_size = attempt.world_size;
  state_->view.state = "running";
  state_->view.message.clear();
}

void LiveRun::rank_started(const launch::RankStarted& rank) {
  const std::lock_guard lock(state_->mutex);
  Tracked tracked{.started = rank, .shown = {.rank = rank.rank, .host = state_->host}};
  tracked.shown.pid = rank.pid;
  tracked.record.rank = rank.rank;
  state_->ranks.insert_or_assign(rank.rank, std::move(tracked));
}

void LiveRun::output_line(int rank, launch::OutputKind kind, std::string_view line) {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->ranks.find(rank);
  if (found == state_->ranks.end()) return;
  unfinished_of(found->second.unfinished, kind).clear();
  add_line(found->second.shown.log, line);
}

void LiveRun::output_progress(int rank, launch::OutputKind kind, std::string_view line) {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->ranks.find(rank);
  if (found == state_->ranks.end()) return;
  const std::string_view text = shown(line);
  // A bar that was wiped with blanks is no line.
  const bool blank = text.find_first_not_of(' ') == text.npos;
  unfinished_of(found->second.unfinished, kind) = blank ? std::string_view() : text;
}

void LiveRun::rank_ended(const launch::RankEnded& rank) {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->ranks.find(rank.rank);
  if (found == state_->ranks.end()) return;
  Tracked& tracked = found->second;
  tracked.shown.status = rank.failed ? RankStatus::kFailed : RankStatus::kEnded;
  tracked.shown.exit = rank.outcome;
  tracked.end_totals = tracked.started.ledger ? tracked.started.ledger->totals() : ledger::Totals{};
}

void LiveRun::ranks_stalled(const launch::RanksStalled& stall) {
  const std::lock_guard lock(state_->mutex);
  state_->tabled = Clock::now();
  state_->view.stall_table = monitor::StallTable{unix_time_s(), stall.cause, stall.text};
}

void LiveRun::attempt_ended(int) {
  const std::lock_guard lock(state_->mutex);
  state_->view.state = "starting";  // until the next attempt, if there is one
}

std::vector<std::string> LiveRun::tick() {
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->lines, {});
}

std::vector<std::string> LiveRun::run_ended(const launch::RunEnded& run) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->facts.ended_unix_s = unix_time_s();
    if (has_failed(run)) {
      std::string& failure = state_->facts.failure;
      failure = run.cause.empty() ? fmt::format("ended with code {}", run.code) : run.cause;
      if (!run.hint.empty()) failure += ". " + run.hint;
    }
    NodeMembers failed;
    for (const auto& [rank, tracked] : state_->ranks)
      if (tracked.shown.status == RankStatus::kFailed)
        failed.emplace_back(std::to_string(rank), text_node(tracked.shown.exit));
    if (!failed.empty()) state_->facts.failed_ranks = map_node(std::move(failed));
  }
  stop();
  {
    const std::lock_guard lock(state_->mutex);
    state_->view.state = has_failed(run) ? "failed" : "ended";
    std::int64_t step = -1;
    for (const auto& [rank, tracked] : state_->ranks)
      if (!tracked.record.intervals.empty())
        step = std::max(step, tracked.record.intervals.back().step);
    state_->view.message = monitor::end_message(state_->facts, step, run.code != 0);
  }
  std::vector<std::string> said = tick();
  if (options_.doctor) {
    const monitor::RunRecord all = *view().record;
    for (std::string& line : doctor_summary(all, options_.diagnose(all), run.code != 0))
      said.push_back(std::move(line));
  }
  companions_.clear();
  return said;
}

RunView LiveRun::view() const {
  RunView copy;
  std::vector<launch::RankStarted> started;
  bool enough = false;
  {
    const std::lock_guard lock(state_->mutex);
    copy = state_->view;
    copy.stall = state_->stall();
    copy.record = state_->record();
    enough = state_->enough;
    for (const auto& [rank, tracked] : state_->ranks) {
      copy.ranks.push_back(tracked.shown);
      for (const std::string& line : tracked.unfinished)
        if (!line.empty()) add_line(copy.ranks.back().log, line);
      started.push_back(tracked.started);
    }
  }
  state_->add_gpus(*copy.record);
  describe_ranks(copy);
  copy.time_s = unix_time_s();
  if (state_->gpus) copy.gpus = state_->gpus->snapshot();
  const auto visible = visible_gpus(copy.gpus.gpus, env::get("CUDA_VISIBLE_DEVICES"));
  for (std::size_t i = 0; i < started.size(); ++i) {
    RankState& rank = copy.ranks[i];
    const ledger::File* const file = started[i].ledger.get();
    rank.position = position_of(file);
    rank.gpu = gpu_of_rank(copy.gpus, visible, {rank.pid, started[i].local_rank});
    if (file == nullptr || !file->opened()) continue;
    rank.phase = ledger::name(file->phase());
    rank.step = file->step();
  }
  copy.verdict = verdict_of(copy, enough);
  return copy;
}

bool LiveRun::ready() const {
  const std::lock_guard lock(state_->mutex);
  return state_->view.state == "running" && !state_->ranks.empty() &&
         std::ranges::all_of(state_->ranks, [](const auto& item) {
           return item.second.shown.status == RankStatus::kRunning;
         });
}

}  // namespace lockstep::dashboard
