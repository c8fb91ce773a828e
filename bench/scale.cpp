// lockstep bench scale: a training file on several numbers of ranks: time, throughput, speed-up,
// efficiency, utilisation and step budget, as CSV, JSON and a page.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>

#include "bench/harness.h"
#include "bench/processes.h"
#include "launcher/flags.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/io/file.h"
#include "lockstep/train/config.h"
#include "lockstep/train/effective_batch.h"
#include "observe/dashboard/page.h"

namespace lockstep::bench {
namespace {

namespace fs = std::filesystem;
using dashboard::ScalePoint;
using dashboard::ScaleRow;

struct Request {
  std::vector<int> ranks{1, 2, 4};
  bool weak = false;
  bool strong = false;
  std::int64_t steps = 60;
  int rounds = 3;
  int threads = 0;
  std::string output = "scale";
  std::string require{};
  std::string file{};
  std::vector<std::string> flags{};  // keys that override the file's
};

std::string count(int number, const char* noun = "rank") {
  return fmt::format("{} {}{}", number, noun, number == 1 ? "" : "s");
}

// A run and how it is started, before anything is measured.
struct Plan {
  std::vector<ScalePoint> points;  // by ranks, without rates
  std::vector<std::string> flags;  // for every run
  dashboard::ScaleSetting setting;
};

// The file's values for `ranks`, as its runs will have them.
TrainingArguments arguments_of(const Request& request, const std::vector<std::string>& more) {
  std::vector<std::string> flags = request.flags;
  flags.insert(flags.end(), more.begin(), more.end());
  return train::load_config(request.file, flags, launch::launcher_keys()).arguments;
}

// The global batch is the file's with the fewest ranks.
std::int64_t strong_batch(std::int64_t batch, int fewest, int ranks) {
  const std::int64_t shared = batch * fewest;
  if (shared % ranks == 0) return shared / ranks;
  const std::int64_t part = std::lcm(ranks, fewest);  // divides evenly over every number of ranks
  const std::int64_t below = shared / part * part, above = below + part;
  throw UsageError("bench",
                   "--strong: {} samples ({} per rank x {}) cannot be shared by {} ranks. "
                   "Choose other --ranks, or a global batch that {} divides, such as {}{}: "
                   "-- --per_device_train_batch_size={}.",
                   shared, batch, count(fewest), ranks, ranks,
                   below > 0 ? fmt::format("{} or ", below) : "", above, above / fewest);
}

ScalePoint point_of(const Request& request, const TrainingArguments& arguments, int ranks) {
  ScalePoint point{.ranks = ranks, .batch = arguments.per_device_train_batch_size};
  point.accumulation = train::accumulation_steps(arguments, ranks);
  const bool fixed = arguments.global_batch_size || arguments.tokens_per_update;
  if (request.strong && !fixed) point.batch = strong_batch(point.batch, request.ranks[0], ranks);
  return point;
}

Plan plan_of(Request& request) {
  std::ranges::sort(request.ranks);
  request.ranks.erase(std::ranges::unique(request.ranks).begin(), request.ranks.end());
  Plan plan{.points = {}, .flags = short_run(request.steps, request.steps / 6), .setting = {}};
  plan.flags.emplace_back("--record_run=true");
  const TrainingArguments arguments = arguments_of(request, plan.flags);
  if (!request.strong && (arguments.global_batch_size || arguments.tokens_per_update))
    throw UsageError("bench",
                     "{} sets {}: its global batch is the same for every number of ranks. Measure "
                     "it with --strong, or add -- --{}=none.",
                     request.file,
                     arguments.global_batch_size ? "global_batch_size" : "tokens_per_update",
                     arguments.global_batch_size ? "global_batch_size" : "tokens_per_update");
  const bool cpu = on_cpu(arguments);
  const int cores = allowed_cores();
  // Each added rank brings its own cores, so that every rank has the same number.
  if (cpu && request.threads == 0)
    request.threads = static_cast<int>(env::get_int("OMP_NUM_THREADS", 1, 4096)
                                           .value_or(std::max(1, cores / request.ranks.back())));
  for (const int ranks : request.ranks) {
    plan.points.push_back(point_of(request, arguments, ranks));
    plan.points.back().cores_per_rank = cpu ? request.threads : 0;
  }
  plan.setting = {.file = request.file,
                  .strong = request.strong,
                  .steps = request.steps,
                  .rounds = request.rounds,
                  .cores = cpu ? cores : 0,
                  .notes = {}};
  if (cpu)
    plan.setting.notes.push_back(
        fmt::format("Ranks on the CPU, {} each; this host has {} for them.",
                    count(request.threads, "thread"), count(cores, "core")));
  if (cpu && request.threads * request.ranks.back() > cores)
    plan.setting.notes.push_back(
        fmt::format("{} ranks with {} share {} cores: a speed-up beyond {:.3g} cannot be measured "
                    "here.",
                    request.ranks.back(), count(request.threads, "thread"), cores,
                    static_cast<double>(cores) / request.threads));
  return plan;
}

// "2:1.9,4:3.8": the speed-up that is required of a number of ranks. UsageError for anything else.
std::map<int, double> required_speedups(const Request& request) {
  std::map<int, double> wanted;
  if (request.require.empty()) return wanted;
  for (const std::string& part : split(request.require, ',')) {
    const std::vector<std::string> both = split(part, ':');
    if (both.size() != 2 || !positive_problem(both[1]).empty())
      throw UsageError("bench", "'{}' is not RANKS:RATIO. Write 2:1.9,4:3.8.", part);
    const auto measured = std::ranges::find_if(
        request.ranks, [&](int ranks) { return fmt::format("{}", ranks) == both[0]; });
    if (measured == request.ranks.end())
      throw UsageError(
          "bench", "number of ranks {} is required but not measured. Add it to --ranks.", both[0]);
    wanted[*measured] = std::stod(both[1]);
  }
  return wanted;
}

// Deletes earlier runs there, so it must be sure that the folder belongs to one.
void prepare_output(const std::string& folder) {
  std::error_code error;
  if (fs::exists(folder, error) && !fs::is_empty(folder, error) &&
      !fs::exists(fs::path(folder) / "scale.json", error) &&
      !fs::exists(fs::path(folder) / "scale_runs", error))
    throw UsageError("bench",
                     "{} is not empty and holds no report of bench scale. Give another --output.",
                     folder);
  io::make_directories(folder);
  fs::remove_all(fs::path(folder) / "scale_runs", error);
}

// Makes one run and adds its rates to the point.
monitor::RunView run_once(const Request& request, const Plan& plan, ScalePoint& point, int round) {
  TrainJob job{.name = count(point.ranks),
               .ranks = point.ranks,
               .file = request.file,
               .flags = request.flags};
  job.flags.insert(job.flags.end(), plan.flags.begin(), plan.flags.end());
  job.flags.push_back(fmt::format("--per_device_train_batch_size={}", point.batch));
  if (request.threads > 0) job.environment["OMP_NUM_THREADS"] = fmt::format("{}", request.threads);
  const std::string folder =
      fmt::format("{}/scale_runs/ranks_{}_round_{}", request.output, point.ranks, round + 1);
  const auto begin = Deadline::Clock::now();
  const TrainFigures figures = run_train(job, folder);
  point.samples_per_s.push_back(figures.settled_rate());
  if (!figures.tokens_per_second.empty())
    point.tokens_per_s.push_back(TrainFigures::settled(figures.tokens_per_second));
  fmt::print(stderr, "round {}/{}, {}: {:.2f} ms a step, {:.1f} samples/s ({:.1f} s)\n", round + 1,
             request.rounds, count(point.ranks),
             1e3 * static_cast<double>(point.global_batch()) / point.samples_per_s.back(),
             point.samples_per_s.back(), seconds_since(begin));
  return monitor::read_run_view(folder, monitor::Detail::kAll);
}

// Rates of ranks that had to wait for cores do not describe the machine.
void note_starved(Plan& plan, int ranks, const std::vector<monitor::RunView>& runs) {
  std::vector<double> shares;
  for (const monitor::RunView& run : runs)
    if (run.record) shares.push_back(monitor::starved_share(*run.record).value_or(0));
  const double most = shares.empty() ? 0 : *std::ranges::max_element(shares);
  if (most == 0) return;
  plan.setting.notes.push_back(fmt::format(
      "With {} in {} of {} rounds the ranks waited for a core, up to {:.0f} % of the time: other "
      "programs used the cores, or there are too few of them. Measure again on an idle machine "
      "before you use these figures.",
      count(ranks), std::ranges::count_if(shares, [](double share) { return share > 0; }),
      runs.size(), 100 * most));
  fmt::print(stderr, "note: {}\n", plan.setting.notes.back());
}

// Measured in turn, so that a machine that slows down for a while does so for all numbers of ranks.
void measure(const Request& request, Plan& plan) {
  std::vector<std::vector<monitor::RunView>> runs(plan.points.size());
  for (int round = 0; round < request.rounds; ++round)
    for (std::size_t i = 0; i < plan.points.size(); ++i)
      runs[i].push_back(run_once(request, plan, plan.points[i], round));
  for (std::size_t i = 0; i < plan.points.size(); ++i) {
    note_starved(plan, plan.points[i].ranks, runs[i]);
    const auto& rates = plan.points[i].samples_per_s;
    const double middle = median(rates);
    const auto nearest =
        std::ranges::min_element(rates, {}, [&](double rate) { return std::abs(rate - middle); });
    plan.points[i].run = std::move(runs[i][static_cast<std::size_t>(nearest - rates.begin())]);
  }
}

void write_report(const Request& request, const dashboard::ScaleSetting& setting,
                  const std::vector<ScaleRow>& rows) {
  const auto write = [&](const char* name, const std::string& text) {
    write_file_atomically((fs::path(request.output) / name).string(), text);
  };
  const auto cells = dashboard::scale_csv_rows(rows);
  Report table("scale", cells.front().front());
  for (std::size_t i = 1; i < cells.size(); ++i) {
    Row& row = table.row(cells[i].front());
    for (std::size_t k = 1; k < cells[i].size(); ++k) row.text(cells.front()[k], cells[i][k]);
  }
  write("scale.csv", table.csv());
  write("scale.json", to_json(dashboard::scale_node(rows, setting)) + "\n");
  write("report.html", dashboard::page_file(dashboard::scale_state(rows, setting)));
}

std::string table_of(const std::vector<ScaleRow>& rows) {
  Report table("scale", "ranks");
  const auto percent = [](std::optional<double> share) {
    return share ? fmt::format("{:.1f} %", 100 * *share) : "-";
  };
  for (const ScaleRow& row : rows) {
    const auto spent = [&](ledger::Phase phase) {
      return row.budget.steps > 0 ? percent(row.budget.share(phase)) : "-";
    };
    table.row(fmt::format("{}", row.point.ranks))
        .text("batch", fmt::format("{} x {}", row.point.batch, row.point.accumulation))
        .number("global", static_cast<double>(row.point.global_batch()))
        .number("ms/step", 1e3 * row.step_s, 2)
        .number("samples/s", row.samples_per_s, 1)
        .number("speed-up", row.speedup, 2)
        .text("efficiency", percent(row.efficiency))
        .text("utilisation", percent(row.utilisation))
        .text("data wait", spent(ledger::Phase::kData))
        .text("communication", spent(ledger::Phase::kCommunication));
  }
  return table.text();
}

}  // namespace

int scale_main(int argc, char** argv) {
  Request request;
  Options options("A training file on several numbers of ranks: speed-up, efficiency, step budget",
                  /*publishes=*/false);
  options.number("--ranks", request.ranks, 1, 1024, "numbers of ranks, with commas");
  options.flag("--weak", request.weak, "the same batch for each rank (the default)");
  options.flag("--strong", request.strong, "the same global batch, shared by the ranks");
  options.app().get_option("--strong")->excludes("--weak");
  options.number("--steps", request.steps, 2, 1e7, "optimizer steps of a run");
  options.number("--rounds", request.rounds, 1, 1000, "runs of each number of ranks, by turns");
  options.number("--threads", request.threads, 0, 4096,
                 "threads of a rank; 0: on the CPU the cores by the most ranks, for all the same");
  options.text("--output", request.output, "folder of the report and of the runs");
  options.text("--require-speedup", request.require,
               "RANKS:RATIO,...: fail when the speed-up of that many ranks is below");
  options.text("file", request.file, "a training file, as of lockstep train");
  options.app().add_option("keys", request.flags,
                           "after --: keys that override the file's, as --seed=7");
  if (const auto code = options.parse(argc, argv)) return *code;
  // Not checked by the parser, which would mention the file before a mistyped flag.
  if (std::error_code error; !fs::is_regular_file(request.file, error)) {
    const std::string what = request.file.empty() ? "no training file was given"
                             : fs::exists(request.file, error)
                                 ? fmt::format("'{}' is not a training file", request.file)
                                 : fmt::format("'{}' does not exist", request.file);
    fmt::print(stderr, "lockstep bench scale: {}. Give one: {}\n", what,
               "lockstep bench scale --ranks 1,2 FILE");
    return 2;
  }
  const auto wanted = required_speedups(request);
  Plan plan = plan_of(request);
  prepare_output(request.output);
  for (const std::string& note : plan.setting.notes) fmt::print(stderr, "note: {}\n", note);
  measure(request, plan);
  const auto rows = dashboard::scale_rows(std::move(plan.points));
  write_report(request, plan.setting, rows);
  fmt::print("{}report in {}/report.html\n", table_of(rows), request.output);
  int code = 0;
  for (const ScaleRow& row : rows) {
    const auto found = wanted.find(row.point.ranks);
    if (found == wanted.end()) continue;
    const bool reached = row.speedup >= found->second;
    fmt::print(stderr, "scale: the speed-up of {} is {:.3f}, at least {} required: {}\n",
               count(row.point.ranks), row.speedup, found->second, reached ? "reached" : "MISSED");
    if (!reached) code = 1;
  }
  return code;
}

}  // namespace lockstep::bench
