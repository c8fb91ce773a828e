#include "lockstep/monitor/run_view.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "lockstep/core/deadline.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/json.h"
#include "lockstep/io/directory.h"
#include "lockstep/io/manifest.h"

namespace lockstep::monitor {

namespace {

constexpr double kRecent_s = 5;
constexpr std::int64_t kRecentSteps = 10;
// Steps that are skipped until a loss scale of fp16 is found, which halves from 2^16; and the share
// of all steps from which more of them are too many.
constexpr double kSkipsOfAScale = 17;
constexpr double kSkippedShare = 0.05;
// Below this model FLOPs utilisation a run is told what most of its time goes to.
constexpr double kLowMfu = 0.4;

// Taken from the record, or else from what was logged.
std::int64_t last_step(const RunView& run) {
  std::int64_t step = run.metrics.empty() ? -1 : run.metrics.back().step;
  if (run.record)
    for (const RankRecord& rank : run.record->ranks)
      if (!rank.intervals.empty()) step = std::max(step, rank.intervals.back().step);
  return step;
}

// Includes ranks that failed before they had recorded anything.
void mark_failed(RunView& run) {
  for (const Entry& entry : run.facts().failed_ranks.entries) {
    int number = -1;
    std::from_chars(entry.key.data(), entry.key.data() + entry.key.size(), number);
    if (number < 0 || number >= run.facts().world_size) continue;
    auto rank = std::ranges::find(run.ranks, number, &RankState::rank);
    if (rank == run.ranks.end()) rank = run.ranks.insert(rank, RankState{.rank = number});
    rank->status = RankStatus::kFailed;
    rank->exit = entry.value.text;
  }
  std::ranges::sort(run.ranks, {}, &RankState::rank);
}

// A run that learns nothing runs on: its numbers say so, and nothing else does. Not among the rules
// of diagnose(), since a record has times and no losses. `tolerated_skips`: at the newest line.
std::optional<Finding> not_finite(const RunView& run, double tolerated_skips) {
  const Curve loss = curve_of(run.metrics, "loss");
  const Curve skipped = curve_of(run.metrics, "skipped_steps");
  const auto finite = [](const auto& point) { return std::isfinite(point.second); };
  Finding finding{.rule = "not-finite", .remedy = "a smaller learning rate."};
  double skips = 0;
  for (const auto& [step, steps] : skipped) skips += steps;
  const double last =
      std::max(loss.empty() ? 0 : loss.back().first, skipped.empty() ? 0 : skipped.back().first);
  finding.evidence = fmt::format("{:.0f} of {:.0f} steps were skipped.", skips, last);
  if (!skipped.empty() && skipped.back().first == last && skipped.back().second > tolerated_skips) {
    finding.what = fmt::format(
        "At step {:.0f} the gradient was not finite: {:.0f} of the steps logged there were "
        "skipped.",
        last, skipped.back().second);
  } else if (!loss.empty() && !finite(loss.back())) {
    const auto since = std::ranges::find_if(loss.rbegin(), loss.rend(), finite).base();
    finding.what = fmt::format("The loss is not finite since step {:.0f}.", since->first);
    finding.evidence = fmt::format("The last {} of {} logged losses are not finite.",
                                   loss.end() - since, loss.size());
    finding.remedy =
        "a smaller learning rate; in a loop of your own step({.skip_non_finite = true}) leaves "
        "such steps out.";
  } else if (skips > kSkipsOfAScale && skips >= kSkippedShare * last) {
    finding.what = "Steps are skipped again and again, because their gradient is not finite.";
  } else {
    return std::nullopt;
  }
  return finding;
}

// The settings that lower the time of a phase.
const char* remedy_of(ledger::Phase phase) {
  switch (phase) {
    case ledger::Phase::kData:
      return "more dataloader_num_workers.";
    case ledger::Phase::kForward:
    case ledger::Phase::kBackward:
      return "a larger per_device_train_batch_size, bf16 or mixed_precision: fp8, and no "
             "gradient_checkpointing where the memory allows it.";
    case ledger::Phase::kCommunication:
    case ledger::Phase::kOptimizer:
      return "more passes for each update (gradient_accumulation_steps).";
    case ledger::Phase::kEvaluation:
    case ledger::Phase::kLogging:
    case ledger::Phase::kSaving:
      return "fewer evaluations, logs and checkpoints.";
    default:
      return "compile_model, and a larger per_device_train_batch_size.";
  }
}

// For GPUs whose peak rate is known, where no rule has found a cause.
std::optional<Finding> low_mfu(const RunView& run) {
  std::vector<double> logged;
  for (const auto& [step, share] : curve_of(run.metrics, "mfu")) logged.push_back(share);
  constexpr std::size_t kFewest = 3;  // the first includes warm-up
  if (logged.size() < kFewest || run.record->ranks.empty()) return std::nullopt;
  const double mfu = detail::median({logged.begin() + 1, logged.end()});
  const Interval budget = budget_of(run.record->ranks.front());
  if (!(mfu < kLowMfu) || !(budget.seconds > 0)) return std::nullopt;
  const PhaseSeconds spent = spent_s(budget);
  const auto largest = std::ranges::max_element(spent);
  const auto phase = static_cast<ledger::Phase>(largest - spent.begin());
  return Finding{
      .rule = "low-mfu",
      .what = fmt::format("The GPUs compute at {:.0f} % of their peak rate.", 100 * mfu),
      .evidence = fmt::format("The largest part of rank {}'s time is {}, {:.0f} %.",
                              run.record->ranks.front().rank,
                              phase == ledger::Phase::kNone ? "other" : ledger::name(phase),
                              100 * *largest / budget.seconds),
      .remedy = remedy_of(phase)};
}

}  // namespace

const RunFacts& RunView::facts() const {
  static const RunFacts none;
  return record ? record->facts : none;
}

const char* name(RankStatus status) {
  constexpr const char* kNames[] = {"running", "stopped", "ended", "failed"};
  return kNames[static_cast<std::size_t>(status)];
}

void conclude(RunView& run) {
  run.recorded = true;
  if (!run.record) return;
  const RunFacts& facts = run.facts();
  run.started_s = run.time_s = facts.started_unix_s;
  for (const RankRecord& rank : run.record->ranks)
    run.time_s = std::max(run.time_s, rank.intervals.back().unix_time_s);
  const Ending ending = ending_of(run);
  const bool failed = ending.over && !facts.failure.empty();
  run.state = failed ? "failed" : ending.killed ? "killed" : ending.over ? "ended" : "running";
  RunFacts said = facts;
  if (ending.killed && !failed)
    said.failure =
        "Its process is gone and has not written an end: it was killed, by a signal or for the "
        "memory that it used";
  if (ending.over) run.message = end_message(said, last_step(run), ending.early);
  for (const RankRecord& rank : run.record->ranks)
    run.ranks.push_back(
        {.rank = rank.rank, .status = ending.over ? RankStatus::kEnded : RankStatus::kRunning});
  mark_failed(run);
  describe_ranks(run);
  if (!run.record->ranks.empty()) {
    const std::span<const Interval> all = run.record->ranks.front().intervals;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i].steps > 0) add_point(run.step_ms, all[i].step, recent_step_ms(all.first(i + 1)));
  }
  run.findings = diagnose(*run.record);
  if (auto finding = not_finite(run, kSkipsOfAScale))
    run.findings.insert(run.findings.begin(), *finding);
  if (run.findings.empty())
    if (auto finding = low_mfu(run)) run.findings.push_back(*finding);
  run.verdict = verdict_of(run, enough_to_judge(*run.record));
}

Verdict verdict_of(const RunView& run, bool enough) {
  if (!run.findings.empty()) return {};
  if (run.state == "starting") return {false, "Waiting for the first steps."};
  if (run.stall) return {false, "Nothing can be judged while no step ends."};
  if (run.state == "failed") return {false, "Nothing found to change; the run itself failed."};
  if (run.state == "killed") return {false, "Nothing found to change; the run was killed."};
  if (enough) return {run.state == "running", "Nothing found that slows this run down."};
  if (!run.ranks.empty() && static_cast<int>(run.ranks.size()) < run.facts().world_size)
    return {false, fmt::format("Nothing found. {} of {} ranks are seen here; whether they wait for "
                               "the others is not judged.",
                               run.ranks.size(), run.facts().world_size)};
  const bool stepped =
      std::ranges::any_of(run.ranks, [](const RankState& rank) { return rank.step > 0; });
  return {false, stepped ? "Nothing found, and too few steps to judge the run."
                         : "No step has been seen, and without steps nothing can be judged."};
}

Ending ending_of(const RunView& run) {
  const RunFacts& facts = run.facts();
  const bool current = run.metrics_unix_s == 0 || run.metrics_unix_s >= facts.started_unix_s;
  Ending ending{.through = current && !run.metrics.empty() &&
                           run.metrics.back().find("train_runtime") != nullptr};
  const bool written = facts.ended_unix_s > 0 || ending.through;
  ending.killed = !written && is_over(facts);
  ending.known = written || ending.killed;
  ending.over = ending.known || unix_time_s() - run.time_s > kRecordIdle_s;
  ending.early = written && !ending.through && facts.program == "trainer" &&
                 last_step(run) < facts.total_steps;
  return ending;
}

std::string end_message(const RunFacts& facts, std::int64_t step, bool early) {
  std::string text = facts.failure;
  const bool stepped = facts.total_steps > 0 && step > 0;
  if (text.empty() && early) {
    text = stepped ? fmt::format("Stopped on request at step {} of {}", step, facts.total_steps)
                   : "Stopped on request";
  }
  if (text.empty()) return text;
  if (!text.ends_with('.')) text += '.';
  if (text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 'a' + 'A');
  if (facts.program == "trainer" && stepped)
    text +=
        " lockstep train --resume auto continues from its newest checkpoint, if it has saved "
        "one.";
  return text;
}

double recent_step_ms(std::span<const Interval> intervals) {
  const auto stepped = [](const Interval& interval) { return interval.steps > 0; };
  const auto first = std::ranges::find_if(intervals, stepped);
  if (first == intervals.end()) return 0;
  double seconds = 0;
  std::int64_t steps = 0;
  for (auto at = intervals.end(); at != first;) {
    --at;
    // An interval without a step belongs to the next one with steps; the first of those holds what
    // came before training.
    const bool enough = seconds >= kRecent_s && steps >= kRecentSteps;
    if (stepped(*at) && (enough || (at == first && steps > 0))) break;
    steps += at->steps;
    if (steps > 0) seconds += at->seconds;
  }
  return 1e3 * seconds / static_cast<double>(steps);
}

void describe_ranks(RunView& run) {
  if (!run.record) return;
  // A launcher's view covers one start, and the facts may be by another host's clock.
  const double from_unix_s = run.recorded ? run.facts().started_unix_s : 0;
  for (const RankRecord& record : run.record->ranks) {
    if (record.intervals.empty()) continue;
    auto rank = std::ranges::lower_bound(run.ranks, record.rank, {}, &RankState::rank);
    if (rank == run.ranks.end() || rank->rank != record.rank)
      rank = run.ranks.insert(rank, RankState{.rank = record.rank});
    rank->step = record.intervals.back().step;
    rank->newest = newest_sample(record);
    rank->step_ms = recent_step_ms(record.intervals);
    if (rank->status != RankStatus::kEnded && rank->status != RankStatus::kFailed) continue;
    // Its last second may have had no step.
    const Interval all = budget_of(record, 0, from_unix_s);
    rank->step_ms = 1e3 * all.step_s();
    if (all.steps == 0) continue;
    rank->newest->seconds = all.seconds;
    rank->newest->host_s = all.host_s;
    rank->newest->device_s = all.device_s;
  }
  if (!run.record->ranks.empty())
    run.mean_step_s = budget_of(run.record->ranks.front(), 0, from_unix_s).step_s();
}

std::optional<double> newest_logged(const RunView& run, std::string_view name) {
  for (auto line = run.metrics.rbegin(); line != run.metrics.rend(); ++line)
    if (const double* value = line->find(name)) return *value;
  return std::nullopt;
}

std::int64_t step_of(const RunView& run) {
  std::int64_t step = -1;
  for (const RankState& rank : run.ranks) step = std::max(step, rank.step);
  return step;
}

std::optional<double> seconds_left(const RunView& run) {
  const std::int64_t step = step_of(run);
  if (run.state != "running" || run.stall || run.mean_step_s <= 0 || step < 0 ||
      step > run.facts().total_steps || run.facts().total_steps == 0)
    return std::nullopt;
  return static_cast<double>(run.facts().total_steps - step) * run.mean_step_s;
}

// ---------------------------------------------------------------- the folder of a run

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

// ---------------------------------------------------------------- the snapshot (docs/dashboard.md)

namespace {

Node number(double value) {
  return std::isfinite(value) ? real_node(value) : Node{};
}

Node count(std::uint64_t value) {
  return integer_node(static_cast<std::int64_t>(std::min<std::uint64_t>(value, INT64_MAX)));
}

template <typename T>
Node optional_number(const std::optional<T>& value) {
  return value ? number(static_cast<double>(*value)) : Node{};
}

Node curve_node(const Curve& curve) {
  std::vector<Node> points;
  for (const auto& [step, value] : thinned(curve, MetricsFile::kPoints))
    points.push_back(list_node({integer_node(static_cast<std::int64_t>(step)), number(value)}));
  return list_node(std::move(points));
}

Node gpu_node(const RunView& run, int index) {
  const auto& known = run.gpus.gpus;
  for (std::size_t i = 0; index >= 0 && run.gpus.newest && i < known.size(); ++i) {
    if (known[i].index != index || i >= run.gpus.newest->gpus.size()) continue;
    const GpuReading& reading = run.gpus.newest->gpus[i];
    return map_node({{"index", integer_node(index)},
                     {"utilisation_percent", optional_number(reading.utilisation_percent)},
                     {"memory_used_bytes", optional_number(reading.memory_used_bytes)},
                     {"memory_total_bytes", optional_number(reading.memory_total_bytes)},
                     {"power_w", optional_number(reading.power_w)},
                     {"problem", text_node(reading.problem)}});
  }
  return Node{};
}

Node position_node(const std::optional<Position>& position) {
  if (!position) return Node{};
  return map_node({{"operation", text_node(position->operation)},
                   {"sequence", count(position->sequence)},
                   {"state", text_node(position->state)},
                   {"age_s", number(position->age_s)}});
}

Node known(std::int64_t value, std::int64_t least) {
  return value >= least ? integer_node(value) : Node{};
}

Node rank_node(const RunView& run, const RankState& rank) {
  const Interval newest = rank.newest.value_or(Interval{});
  return map_node(
      {{"rank", integer_node(rank.rank)},
       {"host", integer_node(rank.host)},
       {"pid", known(rank.pid, 1)},
       {"state", text_node(name(rank.status))},
       {"exit", text_node(rank.exit)},
       {"step", known(rank.step, 0)},
       {"step_ms", rank.step_ms > 0 ? number(rank.step_ms) : Node{}},
       {"phase", text_node(rank.phase)},
       {"budget", shares_node(newest, rank.step >= 0)},
       {"cores", newest.process ? number(newest.process->cores) : Node{}},
       {"resident_bytes", newest.resident_bytes > 0 ? count(newest.resident_bytes) : Node{}},
       {"threads", known(newest.threads, 1)},
       {"gpu", gpu_node(run, rank.gpu)},
       {"position", position_node(rank.position)}});
}

Node stall_node(const std::optional<Stall>& stall) {
  if (!stall) return Node{};
  return map_node({{"seconds", number(stall->seconds)}, {"what", text_node(stall->what)}});
}

Node table_node(const std::optional<StallTable>& table) {
  if (!table) return Node{};
  return map_node({{"time", number(table->time_s)}, {"text", text_node(table->text)}});
}

std::string trouble_of(const RunView& run) {
  const auto finding = not_finite(run, 0);
  return finding ? finding->what + " Try " + finding->remedy : "";
}

Node run_node(const RunView& run) {
  const std::optional<double> left = seconds_left(run);
  return map_node({{"id", text_node(run.id)},
                   {"world_size", integer_node(run.facts().world_size)},
                   {"started", number(run.started_s)},
                   {"attempt", integer_node(run.attempt)},
                   {"state", text_node(run.state)},
                   {"message", text_node(run.message.empty() ? trouble_of(run) : run.message)},
                   {"recorded", bool_node(run.recorded)},
                   {"total_steps", known(run.facts().total_steps, 1)},
                   {"left_s", optional_number(left)}});
}

}  // namespace

Node shares_node(const Interval& interval, bool counts_steps) {
  NodeMembers shares;
  const PhaseSeconds spent = spent_s(interval);
  for (std::size_t phase = 0; phase < ledger::kPhases; ++phase) {
    if (spent[phase] <= 0 || interval.seconds <= 0) continue;
    if (static_cast<ledger::Phase>(phase) == ledger::Phase::kNone && !counts_steps) continue;
    shares.emplace_back(phase_key(static_cast<ledger::Phase>(phase)),
                        number(spent[phase] / interval.seconds));
  }
  return map_node(std::move(shares));
}

Node snapshot_node(const RunView& run) {
  std::vector<Node> ranks;
  NodeMembers logs;
  for (const RankState& rank : run.ranks) {
    ranks.push_back(rank_node(run, rank));
    logs.emplace_back(std::to_string(rank.rank), texts_node({rank.log.begin(), rank.log.end()}));
  }
  NodeMembers series;
  for (const std::string& name : metric_names(run.metrics))
    if (name != "step_ms" && series.size() < MetricsFile::kNames)
      series.emplace_back(name, curve_node(curve_of(run.metrics, name)));
  series.emplace_back("step_ms", curve_node(run.step_ms));
  return map_node({{"time", number(run.time_s)},
                   {"run", run_node(run)},
                   {"ranks", list_node(std::move(ranks))},
                   {"series", map_node(std::move(series))},
                   {"log", map_node(std::move(logs))},
                   {"findings", findings_node(run.findings)},
                   {"verdict", map_node({{"healthy", bool_node(run.verdict.healthy)},
                                         {"text", text_node(run.verdict.text)}})},
                   {"stall", stall_node(run.stall)},
                   {"stall_table", table_node(run.stall_table)}});
}

std::string snapshot_json(const RunView& run) {
  return to_json(snapshot_node(run));
}

}  // namespace lockstep::monitor
