// lockstep bench step: gradient synchronisation and optimizer of a training step, fused in one pass
// and separate.
#include "bench/step.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/bench.h"
#include "bench/goals.h"
#include "bench/scratch.h"
#include "bench/stats.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::bench {
namespace {

using Times = std::map<std::string, std::vector<double>>;  // milliseconds by round

struct Wanted {
  double gloo = 0;        // gloo / fused
  double replicated = 0;  // replicated / fused
  double alone = 0;       // fused / alone
  double limit = 0;       // the machine's limit / fused, in percent
};

struct Output {
  std::string csv, json;
};

// "32M" is 32 million: a count of parameters, not a size in bytes.
std::int64_t parse_count(const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  double factor = unit.empty() ? 1 : 0;
  if (unit == "K" || unit == "k") factor = 1e3;
  if (unit == "M" || unit == "m") factor = 1e6;
  if (unit == "G" || unit == "g") factor = 1e9;
  const double count = number * factor;
  if (!(count >= 1 && count <= 1e10))
    throw UsageError("bench", "'{}' is not a number of parameters. Write 500K, 32M or 1.3G.", text);
  return std::llround(count);
}

Times collect(const StepSettings& settings) {
  const Scratch scratch;
  const std::string output = scratch.file("times");
  run_command(fmt::format(
      "'{}' run --standalone --nproc-per-node={} '{}' _step-rank {} {} {} {} "
      "'{}' '{}'",
      program_beside("../bin/lockstep"), settings.ranks, program_beside("lockstep-bench"),
      settings.params, settings.clip ? 1 : 0, settings.rounds, settings.seconds,
      settings.corrupt.empty() ? "-" : settings.corrupt, output));
  Times times;
  std::ifstream file(output);
  std::string key;
  double ms = 0;
  while (file >> key >> ms) times[key].push_back(ms);
  for (const Tail& tail : tails_of(settings))
    if (times[tail.key].size() != times[kFused.key].size() || times[tail.key].empty())
      throw Error("bench", fmt::format("the ranks wrote no times for '{}'", tail.key));
  return times;
}

// Computed round by round, so that what slows a round down slows both sides of a ratio.
Summary ratios(const Times& times, const Tail& over, const Tail& under) {
  std::vector<double> out;
  const auto &a = times.at(over.key), &b = times.at(under.key);
  for (std::size_t i = 0; i < a.size(); ++i) out.push_back(a[i] / b[i]);
  return summarize(out);
}

// A step needs at least the slower of its bytes and its arithmetic.
double percent_of_limit(const Times& times) {
  return 100 * std::max(ratios(times, kMemory, kFused).p50, ratios(times, kArithmetic, kFused).p50);
}

Table table_of(const Times& times, const StepSettings& settings) {
  Table table({fmt::format("step tail of {} ranks with {:.4g} M parameters{}", settings.ranks,
                           static_cast<double>(settings.params) / 1e6,
                           settings.clip ? " and clipping" : ""),
               "rounds", "min ms", "p50 ms", "p99 ms", "max ms", "times fused", "p25", "p75"});
  for (const Tail& tail : tails_of(settings)) {
    const Summary s = summarize(times.at(tail.key));
    const Summary r = ratios(times, tail, kFused);
    std::vector<std::string> cells{tail.name, fmt::format("{}", times.at(tail.key).size())};
    for (const double ms : {s.min, s.p50, s.p99, s.max}) cells.push_back(fmt::format("{:.2f}", ms));
    for (const double ratio : {r.p50, r.p25, r.p75}) cells.push_back(fmt::format("{:.3f}", ratio));
    table.add(std::move(cells));
  }
  return table;
}

std::string json_of(const Times& times, const StepSettings& settings) {
  nlohmann::json document{{"benchmark", "step"},
                          {"ranks", settings.ranks},
                          {"parameters", settings.params},
                          {"clip", settings.clip}};
  for (const Tail& tail : tails_of(settings)) {
    const Summary s = summarize(times.at(tail.key));
    const Summary r = ratios(times, tail, kFused);
    document["rows"].push_back({{"contender", tail.key},
                                {"ms", times.at(tail.key)},
                                {"min_ms", s.min},
                                {"p50_ms", s.p50},
                                {"p99_ms", s.p99},
                                {"max_ms", s.max},
                                {"times_fused", r.p50},
                                {"times_fused_p25", r.p25},
                                {"times_fused_p75", r.p75}});
  }
  if (!settings.clip) document["percent_of_limit"] = percent_of_limit(times);
  return document.dump(1) + "\n";
}

int judge(const Times& times, const Wanted& wanted) {
  Goals goals("step");
  if (wanted.gloo > 0)
    goals.at_least("gloo / fused", ratios(times, kGloo, kFused).p50, wanted.gloo);
  if (wanted.replicated > 0)
    goals.at_least("replicated / fused", ratios(times, kReplicated, kFused).p50, wanted.replicated);
  if (wanted.alone > 0)
    goals.at_most("fused / alone", ratios(times, kFused, kAlone).p50, wanted.alone);
  if (wanted.limit > 0) goals.at_least("% of the limit", percent_of_limit(times), wanted.limit);
  return goals.exit_code();
}

}  // namespace

int step_main(int argc, char** argv) {
  StepSettings settings;
  Wanted wanted;
  Output output;
  std::string params = "32M";
  std::vector<std::string> keys;
  for (const Tail& tail : kTails) keys.emplace_back(tail.key);
  CLI::App app{"The tail of a step: gradient synchronisation and AdamW, one thread per rank"};
  app.add_option("--ranks", settings.ranks, "processes")->check(CLI::Range(2, 64));
  app.add_option("--params", params, "how many, in float: 500K, 32M (million), 1.3G");
  app.add_flag("--clip", settings.clip, "clip to a global norm before the update");
  app.add_option("--rounds", settings.rounds, "each contender once per round")
      ->check(CLI::Range(kFewestRounds, 100000));
  app.add_option("--seconds", settings.seconds, "begin no further round after this")
      ->check(positive_problem, "POSITIVE");
  app.add_option("--corrupt", settings.corrupt,
                 "give this contender a wrong gradient, to see that it is refused")
      ->check(CLI::IsMember(keys));
  app.add_option("--require-gloo", wanted.gloo, "fail when gloo / fused is below this")
      ->check(positive_problem, "POSITIVE");
  app.add_option("--require-replicated", wanted.replicated,
                 "fail when replicated / fused is below this")
      ->check(positive_problem, "POSITIVE");
  app.add_option("--require-alone", wanted.alone, "fail when fused / alone is above this")
      ->check(positive_problem, "POSITIVE");
  app.add_option("--require-limit", wanted.limit,
                 "fail when fused reaches less than this percentage of what memory and arithmetic "
                 "allow (without --clip)")
      ->check(positive_problem, "POSITIVE");
  app.add_option("--csv", output.csv, "also write the table to this file");
  app.add_option("--json", output.json, "also write every time to this file");
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  settings.params = parse_count(params);
  if (settings.clip && wanted.limit > 0)
    throw UsageError("bench",
                     "--require-limit: the limit is that of one pass, and --clip needs two. "
                     "Drop one of them.");
  const Times times = collect(settings);
  publish(table_of(times, settings), output.csv);
  if (!output.json.empty()) write_file_atomically(output.json, json_of(times, settings));
  return judge(times, wanted);
}

}  // namespace lockstep::bench
