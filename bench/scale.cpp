// lockstep bench scale: a training file on several numbers of ranks: time, throughput, speed-up,
// efficiency, utilisation and step budget, as CSV, JSON, SVG and an HTML page.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>

#include "bench/bench.h"
#include "bench/goals.h"
#include "bench/stats.h"
#include "bench/train_runs.h"
#include "launcher/accelerate_config.h"
#include "launcher/host.h"
#include "lockstep/core/cores.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/io/file.h"
#include "lockstep/train/config.h"
#include "lockstep/train/effective_batch.h"
#include "observe/report/scale_report.h"

namespace lockstep::bench {
namespace {

namespace fs = std::filesystem;
using report::ScalePoint;
using report::ScaleRow;

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

// A run and how it is started, before anything is measured.
struct Plan {
  std::vector<ScalePoint> points;  // by ranks, without rates
  std::vector<std::string> flags;  // for every run
  report::ScaleSetting setting;
};

// The file's values for `ranks`, as its runs will have them.
TrainingArguments arguments_of(const Request& request, const std::vector<std::string>& more) {
  std::vector<std::string> flags = request.flags;
  flags.insert(flags.end(), more.begin(), more.end());
  return train::load_config(request.file, flags, launch::launcher_keys()).arguments;
}

bool on_cpu(const TrainingArguments& arguments) {
  return arguments.use_cpu || env::get("LOCKSTEP_DEVICE") == "cpu" ||
         launch::find_gpus().count == 0;
}

// Turns off what only takes time away from the steps, would change the batch between them, or makes
// no sense for so few of them (a schedule).
std::vector<std::string> common_flags(const Request& request) {
  const std::int64_t logged = std::max<std::int64_t>(1, request.steps / 6);
  return {fmt::format("--max_steps={}", request.steps),
          fmt::format("--logging_steps={}", logged),
          "--logging_strategy=steps",
          "--logging_first_step=false",
          "--lr_scheduler_type=constant",
          "--lr_scheduler_kwargs=none",
          "--warmup_steps=0",
          "--eval_strategy=no",
          "--eval_on_start=false",
          "--early_stopping_patience=none",
          "--load_best_model_at_end=false",
          "--save_strategy=no",
          "--report_to=none",
          "--disable_tqdm=true",
          "--auto_find_batch_size=false",
          "--elastic_gpu=false",
          "--record_run=true",
          "--tune=none",
          "--resume_from_checkpoint=never"};
}

// The global batch is the file's with the fewest ranks.
std::int64_t strong_batch(std::int64_t batch, int fewest, int ranks) {
  const std::int64_t shared = batch * fewest;
  if (shared % ranks == 0) return shared / ranks;
  const std::int64_t part = std::lcm(ranks, fewest);  // divides evenly over every number of ranks
  const std::int64_t below = shared / part * part, above = below + part;
  throw UsageError("bench",
                   "--strong: {} samples ({} per rank x {} rank{}) cannot be shared by {} ranks. "
                   "Choose other --ranks, or a global batch that {} divides, such as {}{}: "
                   "-- --per_device_train_batch_size={}.",
                   shared, batch, fewest, fewest == 1 ? "" : "s", ranks, ranks,
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
  Plan plan{.points = {}, .flags = common_flags(request), .setting = {}};
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
    plan.setting.notes.push_back(fmt::format(
        "Ranks on the CPU, {} thread{} each; this host has {} "
        "core{} for them.",
        request.threads, request.threads == 1 ? "" : "s", cores, cores == 1 ? "" : "s"));
  if (cpu && request.threads * request.ranks.back() > cores)
    plan.setting.notes.push_back(
        fmt::format("{} ranks with {} thread{} share {} cores: a speed-up beyond {:.3g} cannot be "
                    "measured here.",
                    request.ranks.back(), request.threads, request.threads == 1 ? "" : "s", cores,
                    static_cast<double>(cores) / request.threads));
  return plan;
}

// Deletes earlier runs there, so it must not mistake a folder of somebody else's for one.
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

// The metric in all lines after the first, which includes the start.
std::vector<double> settled(const monitor::RunView& run, const char* metric) {
  std::vector<double> values;
  for (const monitor::MetricLine& line : run.metrics)
    if (const double* value = line.find(metric); value != nullptr && *value > 0)
      values.push_back(*value);
  if (values.size() > 1) values.erase(values.begin());
  return values;
}

// Makes one run and adds its rates to the point.
monitor::RunView run_once(const Request& request, const Plan& plan, ScalePoint& point, int round) {
  TrainJob job{.name = fmt::format("{} ranks", point.ranks),
               .ranks = point.ranks,
               .file = request.file,
               .flags = request.flags};
  job.flags.insert(job.flags.end(), plan.flags.begin(), plan.flags.end());
  job.flags.push_back(fmt::format("--per_device_train_batch_size={}", point.batch));
  if (request.threads > 0) job.environment["OMP_NUM_THREADS"] = fmt::format("{}", request.threads);
  const std::string folder =
      fmt::format("{}/scale_runs/ranks_{}_round_{}", request.output, point.ranks, round + 1);
  const auto begin = Deadline::Clock::now();
  run_train(job, folder);
  monitor::RunView run = monitor::read_run_view(folder, monitor::Detail::kAll);
  const auto rates = settled(run, "samples_per_second");
  if (rates.empty())
    throw Error("bench", fmt::format("{} has no samples_per_second in its metrics. Use more "
                                     "--steps.",
                                     folder));
  point.samples_per_s.push_back(median(rates));
  if (const auto tokens = settled(run, "tokens_per_second"); !tokens.empty())
    point.tokens_per_s.push_back(median(tokens));
  fmt::print(stderr, "round {}/{}, {} rank{}: {:.2f} ms a step, {:.1f} samples/s ({:.1f} s)\n",
             round + 1, request.rounds, point.ranks, point.ranks == 1 ? "" : "s",
             1e3 * static_cast<double>(point.global_batch()) / point.samples_per_s.back(),
             point.samples_per_s.back(), seconds_since(begin));
  return run;
}

// Rates of ranks that had to wait for cores do not describe the machine.
void note_starved(Plan& plan, int ranks, const std::vector<monitor::RunView>& runs) {
  std::vector<double> shares;
  for (const monitor::RunView& run : runs)
    if (run.record) shares.push_back(monitor::starved_share(*run.record).value_or(0));
  const double most = shares.empty() ? 0 : *std::ranges::max_element(shares);
  if (most == 0) return;
  plan.setting.notes.push_back(fmt::format(
      "With {} rank{} in {} of {} rounds the ranks waited for a core, up to {:.0f} % of "
      "the time: other programs used the cores, or there are too few of them. Measure "
      "again on an idle machine before you use these figures.",
      ranks, ranks == 1 ? "" : "s",
      std::ranges::count_if(shares, [](double share) { return share > 0; }), runs.size(),
      100 * most));
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

void write_report(const Request& request, const report::ScaleSetting& setting,
                  const std::vector<ScaleRow>& rows) {
  const auto write = [&](const char* name, const std::string& text) {
    write_file_atomically((fs::path(request.output) / name).string(), text);
  };
  const auto cells = report::scale_csv_rows(rows);
  Table table(cells.front());
  for (std::size_t i = 1; i < cells.size(); ++i) table.add(cells[i]);
  write("scale.csv", table.csv());
  write("scale.json", to_json(report::scale_node(rows, setting)) + "\n");
  write("speedup.svg", report::svg_file({draw(report::speedup_chart(rows, setting))}));
  write("budget.svg", report::svg_file({draw(report::scale_budget_chart(rows))}));
  write("utilisation.svg", report::svg_file({draw(report::scale_utilisation_chart(rows))}));
  write("report.html", report::scale_page(rows, setting));
}

Table table_of(const std::vector<ScaleRow>& rows) {
  Table table({"ranks", "batch", "global", "ms/step", "samples/s", "speed-up", "efficiency",
               "utilisation", "data wait", "communication"});
  const auto percent = [](double share) { return fmt::format("{:.1f} %", 100 * share); };
  for (const ScaleRow& row : rows) {
    const bool recorded = row.budget.steps > 0;
    table.add({fmt::format("{}", row.point.ranks),
               fmt::format("{} x {}", row.point.batch, row.point.accumulation),
               fmt::format("{}", row.point.global_batch()), fmt::format("{:.2f}", 1e3 * row.step_s),
               fmt::format("{:.1f}", row.samples_per_s), fmt::format("{:.2f}", row.speedup),
               percent(row.efficiency), row.utilisation ? percent(*row.utilisation) : "-",
               recorded ? percent(row.budget.share(ledger::Phase::kData)) : "-",
               recorded ? percent(row.budget.share(ledger::Phase::kCommunication)) : "-"});
  }
  return table;
}

// 1 where a speed-up falls short of what --require-speedup asks for.
int judge(const std::vector<ScaleRow>& rows, const std::map<int, double>& wanted) {
  Goals goals("scale");
  for (const ScaleRow& row : rows)
    if (const auto found = wanted.find(row.point.ranks); found != wanted.end())
      goals.at_least(fmt::format("the speed-up of {} rank{}", row.point.ranks,
                                 row.point.ranks == 1 ? "" : "s"),
                     row.speedup, found->second);
  return goals.exit_code();
}

}  // namespace

int scale_main(int argc, char** argv) {
  Request request;
  CLI::App app{"A training file on several numbers of ranks: speed-up, efficiency, step budget"};
  app.add_option("--ranks", request.ranks, "numbers of ranks, with commas")
      ->delimiter(',')
      ->allow_extra_args(false)  // what follows is the file
      ->check(CLI::Range(1, 1024));
  auto* weak = app.add_flag("--weak", request.weak, "the same batch for each rank (the default)");
  app.add_flag("--strong", request.strong, "the same global batch, shared by the ranks")
      ->excludes(weak);
  app.add_option("--steps", request.steps, "optimizer steps of a run")
      ->check(CLI::Range(2, 10'000'000));
  app.add_option("--rounds", request.rounds, "runs of each number of ranks, by turns")
      ->check(CLI::Range(1, 1000));
  app.add_option("--threads", request.threads,
                 "threads of a rank; 0: on the CPU the cores by the most ranks, for all the same")
      ->check(CLI::Range(0, 4096));
  app.add_option("--output", request.output, "folder of the report and of the runs");
  app.add_option("--require-speedup", request.require,
                 "RANKS:RATIO,...: fail when the speed-up of that many ranks is below");
  app.add_option("file", request.file, "a training file, as of lockstep train");
  app.add_option("keys", request.flags, "after --: keys that override the file's, as --seed=7");
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
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
  const auto wanted =
      parse_goals(request.require, request.ranks, {"RANKS", "number of ranks", "--ranks"});
  Plan plan = plan_of(request);
  prepare_output(request.output);
  for (const std::string& note : plan.setting.notes) fmt::print(stderr, "note: {}\n", note);
  measure(request, plan);
  const auto rows = report::scale_rows(std::move(plan.points));
  write_report(request, plan.setting, rows);
  fmt::print("{}report in {}/report.html\n", table_of(rows).text(), request.output);
  return judge(rows, wanted);
}

}  // namespace lockstep::bench
