// lockstep bench dp-vs-ddp: one process that drives all devices (DataParallel) beside one process
// for each (DistributedDataParallel). Both stay alive for the whole run and take turns.
#include "bench/dp_vs_ddp.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/goals.h"
#include "bench/scratch.h"
#include "bench/stats.h"
#include "bench/strategies.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/cores.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;
using std::chrono::minutes;

// Few, because batch norms over small batches let rounding errors grow from step to step.
constexpr int kVerifiedSteps = 2;
constexpr int kBlock = 10;      // steps of one side before the other's turn
constexpr int kPartSteps = 10;  // at most
// The two sides may differ by the rounding of both, each about the difference between float32 and
// float64 on one side; twice that for good measure.
constexpr double kRoundings = 4;
// Rounding must be small compared to how far the steps have moved, or the comparison is
// meaningless.
constexpr double kMaxRounding = 0.05;

struct Options {
  DpSettings settings;
  int steps = 100;
  std::string corrupt, csv, json;
  double require_ratio = 0;
};

struct DpSide {
  DpSide(const DpSettings& settings, const Scratch& scratch)
      : crew({settings.contender,
              settings.contender == kDp ? 1 : settings.ranks,
              {program_beside("lockstep-bench"), "_dp-vs-ddp-rank", "--settings",
               scratch.file(settings.contender)}},
             scratch.file("orders-" + settings.contender)) {}

  Crew crew;
  int trained = 0;
  double parameters = 0;
  std::vector<double> block_ms{};  // per step, for each block
  std::vector<double> parts{};     // rank 0's
};

// ---------------------------------------------------------------- orders

void begin(DpSide& side, const std::string& type) {
  const std::string answer = side.crew.request("new " + type, minutes(10)).at(0);
  side.trained = 0;
  if (std::sscanf(answer.c_str(), "ok %lf", &side.parameters) != 1)
    throw Error("bench", fmt::format("'{}' answered '{}'", side.crew.name(), answer));
}

// Milliseconds per step of the slowest rank.
double train(DpSide& side, int steps) {
  double slowest = 0;
  const std::string order = fmt::format("run {} {}", side.trained, steps);
  for (const std::string& answer : side.crew.request(order, minutes(60))) {
    double seconds = 0, loss = NAN;
    std::istringstream(answer) >> seconds >> loss;
    if (seconds <= 0 || !std::isfinite(loss))
      throw Error("bench", fmt::format("'{}' answered '{}'", side.crew.name(), answer));
    slowest = std::max(slowest, seconds);
  }
  side.trained += steps;
  return 1e3 * slowest / steps;
}

std::vector<double> weights(DpSide& side, const Scratch& scratch) {
  const std::string path = scratch.file("weights-" + side.crew.name());
  side.crew.request("save " + path, minutes(10));
  const std::string bytes = read_file(path, std::size_t{1} << 33);
  std::vector<double> values(bytes.size() / sizeof(double));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(double));
  return values;
}

// ---------------------------------------------------------------- verification

// The length of a - b.
double distance(const std::vector<double>& a, const std::vector<double>& b) {
  LOCKSTEP_ASSERT(a.size() == b.size() && !a.empty());
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

// From the same weights and batches both must arrive at the same weights. The effect of float32 is
// measured: DataParallel also trains in float64.
void verify(DpSide& dp, DpSide& ddp, const Scratch& scratch) {
  begin(dp, "float64");
  const std::vector<double> start = weights(dp, scratch);
  train(dp, kVerifiedSteps);
  const std::vector<double> exact = weights(dp, scratch);
  const auto trained = [&](DpSide& side) {
    begin(side, "float32");
    train(side, kVerifiedSteps);
    return weights(side, scratch);
  };
  const std::vector<double> one = trained(dp), many = trained(ddp);
  const double moved = distance(exact, start), rounding = distance(one, exact);
  const double difference = distance(one, many);
  if (!(rounding <= kMaxRounding * moved))
    throw Error("bench", fmt::format("{} in float32 and float64 differ by {:.2g} of what {} steps "
                                     "moved the weights; nothing could be verified",
                                     kDp, rounding / moved, kVerifiedSteps));
  if (!(difference <= kRoundings * rounding))
    throw Error("bench",
                fmt::format("{} and {} do not train the same: after {} steps the weights "
                            "are {:.3g} apart; rounding explains {:.3g}, and they moved "
                            "by {:.3g}",
                            kDp, kDdp, kVerifiedSteps, difference, kRoundings * rounding, moved));
  fmt::print(stderr,
             "verified: after {} steps the weights of both are {:.2g} apart; they moved by {:.2g}, "
             "and rounding explains {:.2g}\n",
             kVerifiedSteps, difference, moved, kRoundings * rounding);
}

// ---------------------------------------------------------------- measurement

void measure(DpSide& dp, DpSide& ddp, int steps) {
  for (DpSide* side : {&dp, &ddp}) {
    begin(*side, "tf32");
    train(*side, std::min(steps, 3));
  }
  const int blocks = (steps + kBlock - 1) / kBlock;
  for (int block = 0; block < blocks; ++block) {
    const int count = std::min(kBlock, steps - block * kBlock);
    DpSide* order[] = {&dp, &ddp};
    if (block % 2 == 1) std::swap(order[0], order[1]);
    for (DpSide* side : order) side->block_ms.push_back(train(*side, count));
    fmt::print(stderr, "block {}/{}: {} {:.2f}, {} {:.2f} ms a step\n", block + 1, blocks, kDp,
               dp.block_ms.back(), kDdp, ddp.block_ms.back());
  }
  for (DpSide* side : {&dp, &ddp}) {
    const std::string order = fmt::format("parts {}", std::min(steps, kPartSteps));
    std::istringstream fields(side->crew.request(order, minutes(10)).at(0));
    for (double ms = 0; fields >> ms;) side->parts.push_back(ms);
    LOCKSTEP_ASSERT(side->parts.size() == std::size(kDpParts));
  }
}

// DataParallel's time divided by the other's, block by block.
Summary ratio(const DpSide& dp, const DpSide& other) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < dp.block_ms.size(); ++i)
    ratios.push_back(dp.block_ms[i] / other.block_ms[i]);
  return summarize(ratios);
}

// Time spent on what DistributedDataParallel does not do at all, or does while it computes.
double overhead_ms(const DpSide& dp) {
  double sum = 0;
  for (std::size_t i = 0; i < dp.parts.size(); ++i)
    for (const char* part : {"scatter", "replicate", "gather", "gradients"})
      if (std::strcmp(kDpParts[i], part) == 0) sum += dp.parts[i];
  return sum;
}

// ---------------------------------------------------------------- results

Table steps_table(const DpSide& dp, const DpSide& ddp, const Options& options) {
  const DpSettings& s = options.settings;
  Table table({fmt::format("{} of {:.3g} M parameters, batch {} of 3x{}x{}, Adam", s.model,
                           dp.parameters / 1e6, s.batch_size, s.image_size, s.image_size),
               "steps", "blocks", "min ms/step", "p50 ms/step", "max ms/step", "samples/s",
               "DP / this", "p25", "p75"});
  const auto add = [&](const std::string& name, const DpSide& side) {
    const Summary ms = summarize(side.block_ms), times = ratio(dp, side);
    std::vector<std::string> cells{name, fmt::format("{}", options.steps),
                                   fmt::format("{}", side.block_ms.size())};
    for (const double value : {ms.min, ms.p50, ms.max})
      cells.push_back(fmt::format("{:.2f}", value));
    cells.push_back(fmt::format("{:.1f}", static_cast<double>(s.batch_size) / ms.p50 * 1e3));
    for (const double value : {times.p50, times.p25, times.p75})
      cells.push_back(fmt::format("{:.3f}", value));
    table.add(std::move(cells));
  };
  add(fmt::format("DataParallel, 1 process, {} replicas", s.ranks), dp);
  add(fmt::format("DistributedDataParallel, {} processes", s.ranks), ddp);
  return table;
}

// Timed in separate steps, with a wait for the devices after each part.
Table parts_table(const DpSide& dp, const DpSide& ddp) {
  Table table({"ms of a step", "DataParallel", "DistributedDataParallel", "what DP does there"});
  static const char* const notes[] = {"copies parts of the batch to the replicas",
                                      "copies all weights to the replicas",
                                      "all replicas at once",
                                      "copies the outputs to device 0",
                                      "on device 0, the others wait",
                                      "all replicas at once",
                                      "adds the replicas' on device 0 (DDP: exposed all-reduce)",
                                      "on device 0, the others wait"};
  const auto text = [](double ms) { return ms < 0 ? "-" : fmt::format("{:.2f}", ms); };
  for (std::size_t i = 0; i < std::size(kDpParts); ++i)
    table.add({kDpParts[i], text(dp.parts[i]), text(ddp.parts[i]), notes[i]});
  return table;
}

std::string json_of(const DpSide& dp, const DpSide& ddp, const Options& options) {
  json document{{"benchmark", "dp-vs-ddp"}, {"settings", options.settings}};
  document["settings"].erase("contender");
  document["parameters"] = dp.parameters;
  document["overhead_ms"] = overhead_ms(dp);
  for (const DpSide* side : {&dp, &ddp}) {
    json row{{"contender", side->crew.name()},
             {"ms", side->block_ms},
             {"p50_ms", median(side->block_ms)},
             {"dp_times_this", ratio(dp, *side).p50}};
    for (std::size_t i = 0; i < std::size(kDpParts); ++i)
      if (side->parts[i] >= 0) row["parts_ms"][kDpParts[i]] = side->parts[i];
    document["rows"].push_back(std::move(row));
  }
  return document.dump(1) + "\n";
}

int compare(const Options& options) {
  const Scratch scratch;
  const auto start = [&](const char* contender) {
    DpSettings settings = options.settings;
    settings.contender = contender;
    if (options.corrupt == contender) settings.lr *= 2;
    write_file_atomically(scratch.file(contender), json(settings).dump());
    return settings;
  };
  DpSide dp(start(kDp), scratch), ddp(start(kDdp), scratch);
  for (DpSide* side : {&dp, &ddp}) side->crew.wait_ready(minutes(5));
  verify(dp, ddp, scratch);
  measure(dp, ddp, options.steps);
  for (DpSide* side : {&dp, &ddp}) side->crew.finish();
  publish(steps_table(dp, ddp, options), options.csv);
  fmt::print("min, p50, max and the ratios are of blocks of up to {} steps, a mean of each.\n",
             kBlock);
  fmt::print("\n{}", parts_table(dp, ddp).text());
  fmt::print(
      "scatter, replicate, gather and gradients take {:.2f} ms, {:.0f} % of DataParallel's "
      "step.\n",
      overhead_ms(dp), 100 * overhead_ms(dp) / median(dp.block_ms));
  if (!options.json.empty()) write_file_atomically(options.json, json_of(dp, ddp, options));
  Goals goals("dp-vs-ddp");
  if (options.require_ratio > 0)
    goals.at_least("DataParallel / DistributedDataParallel", ratio(dp, ddp).p50,
                   options.require_ratio);
  return goals.exit_code();
}

// Checks that the devices exist and every replica gets an equal part of the batch.
void check(const DpSettings& s) {
  if (s.batch_size % s.ranks != 0)
    throw UsageError("bench",
                     "--batch_size {} is not a multiple of --ranks {}: the sides would weigh "
                     "samples differently. Try --batch_size {}.",
                     s.batch_size, s.ranks, (s.batch_size / s.ranks + 1) * s.ranks);
  if (s.device == "cpu") return;
  const int visible = cuda_device_count();
  const bool share = visible > 0 && env::get_bool("LOCKSTEP_SHARE_DEVICE").value_or(false);
  if (visible < s.ranks && !share)
    throw UsageError("bench",
                     "--device cuda with --ranks {} needs as many GPUs, and {} visible. Use fewer "
                     "ranks, or --device cpu.",
                     s.ranks, visible == 1 ? "1 is" : fmt::format("{} are", visible));
}

}  // namespace

int dp_vs_ddp_main(int argc, char** argv) {
  const bool gpu = cuda_device_count() > 0;
  Options options;
  DpSettings& s = options.settings;
  s.device = gpu ? "cuda" : "cpu";
  s.model = gpu ? "resnet50" : "mlp";
  s.image_size = gpu ? 224 : 32;
  s.threads = 0;
  CLI::App app{
      "DataParallel (one process scatters, replicates, gathers) beside DistributedDataParallel "
      "(one process per device), from the same weights on the same batches"};
  app.add_option("--ranks", s.ranks, "replicas of one side, processes of the other")
      ->check(CLI::Range(1, 64));
  app.add_option("--steps", options.steps, "timed steps of each side, in blocks by turns")
      ->check(CLI::Range(1, 1000000));
  app.add_option("--batch_size", s.batch_size, "samples per step of all replicas together")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--model", s.model, "what is trained")
      ->check(CLI::IsMember(std::vector<std::string>{"mlp", "resnet18", "resnet50"}));
  app.add_option("--image_size", s.image_size, "height and width of the images in pixels")
      ->check(CLI::Range(1, 4096));
  app.add_option("--threads", s.threads,
                 "of each replica and rank on the CPU; 0: cores divided by ranks")
      ->check(CLI::Range(0, 1024));
  app.add_option("--device", s.device, "cpu, or cuda: a GPU for each replica")
      ->check(CLI::IsMember(std::vector<std::string>{"cpu", "cuda"}));
  app.add_option("--corrupt", options.corrupt,
                 "let this side train differently, to see that it is refused")
      ->check(CLI::IsMember(std::vector<std::string>{kDp, kDdp}));
  app.add_option("--require-ratio", options.require_ratio,
                 "fail when DataParallel takes less than this times as long; 0: never");
  app.add_option("--csv", options.csv, "also write the table to this file");
  app.add_option("--json", options.json, "also write the time of every block to this file");
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  check(s);
  if (s.threads == 0) s.threads = std::max(1, allowed_cores() / s.ranks);
  return compare(options);
}

}  // namespace lockstep::bench
