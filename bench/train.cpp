// lockstep bench train: a small language model on the CPU, beside ranks that do not communicate and
// PyTorch's DDP over gloo. The ranks of all contenders stay alive for the whole run and
// take turns in blocks of steps.
#include "bench/train.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <deque>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/goals.h"
#include "bench/scratch.h"
#include "bench/stats.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

constexpr int kVerifiedSteps = 4;
constexpr int kVerifiedBatch = 1;
constexpr int kFewestRounds = 3;
// Both sides call the same kernels, so losses mostly agree in every bit; gloo adds over more than
// two ranks in another order. Twice the learning rate shows as 1e-3.
constexpr double kLossTolerance = 1e-4;
// Share of one core, while others are timed.
constexpr double kMaxIdleCpu = 0.05;

// Samples per second over all ranks, by contender and batch size, one per round.
using Rates = std::map<std::string, std::map<int, std::vector<double>>>;

struct Wanted {
  std::map<int, double> alone, python;  // by batch size: ours / the other
};

const char* long_name(const std::string& contender) {
  if (contender == kOurs) return "Lockstep: DDP + ShardedOptimizer on shm";
  if (contender == kSilent) return "ranks that do not communicate";
  if (contender == kCached) return "the same with cached memory, as under run()";
  if (contender == kMet) return "cached memory, and a barrier after every step";
  return "PyTorch DDP over gloo";
}

// ---------------------------------------------------------------- the start of all contenders

template <typename T>
void write_tensors(const std::string& path, const std::vector<at::Tensor>& tensors) {
  std::ofstream file(path, std::ios::binary);
  for (const auto& tensor : tensors) {
    const at::Tensor flat = tensor.contiguous();
    file.write(reinterpret_cast<const char*>(flat.const_data_ptr<T>()),
               static_cast<std::streamsize>(flat.nbytes()));
  }
  file.close();
  if (!file) throw Error("bench", fmt::format("cannot write '{}'", path));
}

int max_of(const std::vector<int>& batches) {
  return std::max(kVerifiedBatch, *std::max_element(batches.begin(), batches.end()));
}

double write_start(const TrainSettings& settings, const Scratch& scratch) {
  torch::manual_seed(0);
  const auto net = std::make_shared<SmallGpt>(settings.shape);
  write_tensors<float>(scratch.file("weights"), net->parameters());
  write_tensors<std::int64_t>(
      scratch.file("sequences"),
      {torch::randint(settings.shape.vocab,
                      {settings.ranks, 2, max_of(settings.batches), settings.shape.tokens},
                      torch::kLong)});
  double count = 0;
  for (const auto& parameter : net->parameters()) count += static_cast<double>(parameter.numel());
  return count;
}

CrewOptions crew_of(const std::string& contender, const TrainSettings& settings,
                    const Scratch& scratch) {
  CrewOptions crew{contender, settings.ranks, {}};
  if (contender == kPython) {
    crew.command = {env::get("LOCKSTEP_PYTHON").value_or(default_python()), peer("train_ddp.py")};
  } else {
    crew.command = {program_beside("lockstep-bench"), "_train-rank"};
  }
  const GptShape& shape = settings.shape;
  const double lr = kLearningRate * (settings.corrupt == contender ? 2 : 1);
  const std::vector<std::string> flags{"--contender", contender,
                                       "--weights",   scratch.file("weights"),
                                       "--sequences", scratch.file("sequences"),
                                       "--max-batch", fmt::format("{}", max_of(settings.batches)),
                                       "--layers",    fmt::format("{}", shape.layers),
                                       "--heads",     fmt::format("{}", shape.heads),
                                       "--width",     fmt::format("{}", shape.width),
                                       "--vocab",     fmt::format("{}", shape.vocab),
                                       "--tokens",    fmt::format("{}", shape.tokens),
                                       "--lr",        fmt::format("{}", lr)};
  crew.command.insert(crew.command.end(), flags.begin(), flags.end());
  return crew;
}

// ---------------------------------------------------------------- a block

struct Block {
  double samples_per_s = 0;  // over all ranks
  double idle_cpu_s = 0;     // for the rank that was busiest while it should have waited
  double idle_s = 0;
  std::vector<std::vector<double>> losses;  // by rank
};

Block run_block(Crew& crew, int batch, int steps, const std::string& whose) {
  Block block;
  const std::string order = fmt::format("run {} {} {}", batch, steps, whose);
  for (const auto& answer : crew.request(order, seconds(300))) {
    std::istringstream fields(answer);
    double took = 0, cpu = 0, idle = 0;
    fields >> took >> cpu >> idle;
    std::vector<double> losses;
    for (double loss = 0; fields >> loss;) losses.push_back(loss);
    if (took <= 0 || losses.size() != static_cast<std::size_t>(steps))
      throw Error("bench", fmt::format("'{}' answered '{}'", crew.name(), answer));
    block.samples_per_s += batch * steps / took;
    if (cpu >= block.idle_cpu_s) {
      block.idle_cpu_s = cpu;
      block.idle_s = idle;
    }
    block.losses.push_back(std::move(losses));
  }
  return block;
}

// ---------------------------------------------------------------- verification

double compare_losses(const Block& a, const Block& b, const std::string& who,
                      const std::string& on) {
  double worst = 0;
  for (std::size_t rank = 0; rank < a.losses.size(); ++rank) {
    for (std::size_t step = 0; step < a.losses[rank].size(); ++step) {
      const double x = a.losses[rank][step], y = b.losses[rank][step];
      const double difference = std::abs(x - y) / std::abs(x);
      worst = std::max(worst, difference);
      if (!(difference <= kLossTolerance))
        throw Error("bench", fmt::format("{} and {} do not train the same: on {} the loss of rank "
                                         "{} in step {} is {:.9g} and {:.9g}",
                                         kOurs, who, on, rank, step, x, y));
    }
  }
  return worst;
}

// From the same weights every contender must compute the same. With tokens of their own, ranks that
// average agree with PyTorch's; with the same tokens on every rank, averaging changes nothing, and
// ranks that do not communicate must agree too.
void verify(std::deque<Crew>& crews) {
  std::map<std::string, Block> own, same;
  for (auto& crew : crews) {
    crew.request("new", seconds(120));
    own[crew.name()] = run_block(crew, kVerifiedBatch, kVerifiedSteps, "own");
    crew.request("new", seconds(120));
    same[crew.name()] = run_block(crew, kVerifiedBatch, kVerifiedSteps, "same");
  }
  for (auto& crew : crews) {
    if (crew.name() == kOurs) continue;
    double worst = compare_losses(same[kOurs], same[crew.name()], crew.name(), "the same tokens");
    if (crew.name() == kPython)
      worst = std::max(worst, compare_losses(own[kOurs], own[kPython], kPython, "own tokens"));
    fmt::print(stderr, "verified: {} and {} train the same, losses differ by at most {:.1g}\n",
               kOurs, crew.name(), worst);
  }
}

// ---------------------------------------------------------------- measurement

void check_idle(const std::string& name, double cpu_s, double idle_s) {
  if (idle_s < 10 || cpu_s <= kMaxIdleCpu * idle_s) return;
  throw Error("bench", fmt::format("'{}' used {:.2f} s of a core in {:.2f} s of waiting, while "
                                   "others were timed",
                                   name, cpu_s, idle_s));
}

void measure_batch(std::deque<Crew>& crews, const TrainSettings& settings, int batch,
                   Rates& rates) {
  const double budget = settings.seconds / static_cast<double>(settings.batches.size());
  for (auto& crew : crews) run_block(crew, batch, 2, "own");
  const auto begin = Clock::now();
  std::map<std::string, std::pair<double, double>> idle;
  for (int round = 0; round < settings.rounds; ++round) {
    const double elapsed = std::chrono::duration<double>(Clock::now() - begin).count();
    if (round >= kFewestRounds && elapsed > budget) break;
    std::string shown;
    for (std::size_t k = 0; k < crews.size(); ++k) {
      Crew& crew = crews[(k + static_cast<std::size_t>(round)) % crews.size()];
      const Block block = run_block(crew, batch, settings.steps, "own");
      rates[crew.name()][batch].push_back(block.samples_per_s);
      idle[crew.name()].first += block.idle_cpu_s;
      idle[crew.name()].second += block.idle_s;
      shown += fmt::format(" {} {:.2f}", crew.name(), block.samples_per_s);
    }
    fmt::print(stderr, "batch {}, round {}/{}, {:.0f} of at most {:.0f} s:{} samples/s\n", batch,
               round + 1, settings.rounds, elapsed, budget, shown);
  }
  for (const auto& [name, used] : idle) check_idle(name, used.first, used.second);
}

Rates collect(const TrainSettings& settings, const Scratch& scratch) {
  std::deque<Crew> crews;
  std::vector<std::string> contenders{kOurs, kSilent};
  if (settings.cached) contenders.emplace_back(kCached);
  if (settings.met) contenders.emplace_back(kMet);
  if (settings.python) contenders.emplace_back(kPython);
  for (const auto& contender : contenders)
    crews.emplace_back(crew_of(contender, settings, scratch), scratch.file("orders-" + contender));
  for (auto& crew : crews) crew.wait_ready(seconds(300));
  verify(crews);
  for (auto& crew : crews) crew.request("new", seconds(120));
  Rates rates;
  for (const int batch : settings.batches) measure_batch(crews, settings, batch, rates);
  for (auto& crew : crews) crew.finish();
  return rates;
}

// ---------------------------------------------------------------- results

// How many times faster ours is, round by round.
Summary speedup(const Rates& rates, const std::string& over, int batch) {
  std::vector<double> ratios;
  const auto &ours = rates.at(kOurs).at(batch), &other = rates.at(over).at(batch);
  for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / other[i]);
  return summarize(ratios);
}

Table table_of(const Rates& rates, const TrainSettings& settings, double parameters) {
  Table table(
      {fmt::format("{} ranks training {:.3g} M parameters", settings.ranks, parameters / 1e6),
       "batch", "blocks", "min ms", "p50 ms", "p99 ms", "max ms", "samples/s", "ours / this", "p25",
       "p75"});
  for (const int batch : settings.batches) {
    for (const auto& [name, by_batch] : rates) {
      std::vector<double> ms;
      for (const double rate : by_batch.at(batch))
        ms.push_back(1e3 * settings.ranks * batch / rate);
      const Summary s = summarize(ms), r = speedup(rates, name, batch);
      std::vector<std::string> cells{long_name(name), fmt::format("{}", batch),
                                     fmt::format("{}", ms.size())};
      for (const double value : {s.min, s.p50, s.p99, s.max})
        cells.push_back(fmt::format("{:.2f}", value));
      cells.push_back(fmt::format("{:.2f}", median(by_batch.at(batch))));
      for (const double ratio : {r.p50, r.p25, r.p75})
        cells.push_back(fmt::format("{:.3f}", ratio));
      table.add(std::move(cells));
    }
  }
  return table;
}

std::string json_of(const Rates& rates, const TrainSettings& settings, double parameters) {
  nlohmann::json document{{"benchmark", "train"},
                          {"ranks", settings.ranks},
                          {"parameters", static_cast<std::int64_t>(parameters)},
                          {"steps_per_block", settings.steps}};
  for (const auto& [name, by_batch] : rates) {
    for (const auto& [batch, values] : by_batch) {
      const Summary r = speedup(rates, name, batch);
      document["rows"].push_back({{"contender", name},
                                  {"batch", batch},
                                  {"samples_per_s", values},
                                  {"p50_samples_per_s", median(values)},
                                  {"ours_times_this", r.p50},
                                  {"ours_times_this_p25", r.p25},
                                  {"ours_times_this_p75", r.p75}});
    }
  }
  return document.dump(1) + "\n";
}

int judge(const Rates& rates, const Wanted& wanted) {
  Goals goals("train");
  const auto check = [&](const char* contender, const std::map<int, double>& ratios) {
    for (const auto& [batch, ratio] : ratios)
      goals.at_least(fmt::format("ours / {} at batch {}", contender, batch),
                     speedup(rates, contender, batch).p50, ratio);
  };
  check(kSilent, wanted.alone);
  check(kPython, wanted.python);
  return goals.exit_code();
}

}  // namespace

int train_main(int argc, char** argv) {
  TrainSettings settings;
  std::string alone, python, csv, json;
  CLI::App app{"Training a small GPT on the CPU, one thread per rank, beside PyTorch's DDP"};
  app.add_option("--ranks", settings.ranks, "processes")->check(CLI::Range(1, 64));
  app.add_option("--batches", settings.batches, "sequences per rank")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096));
  app.add_option("--steps", settings.steps, "per block")->check(CLI::Range(1, 100000));
  app.add_option("--rounds", settings.rounds, "blocks of each contender and batch size, at most")
      ->check(CLI::Range(kFewestRounds, 100000));
  app.add_option("--seconds", settings.seconds, "of measuring, for all batch sizes together")
      ->check(positive_problem, "POSITIVE");
  app.add_option("--layers", settings.shape.layers, "blocks of the model")
      ->check(CLI::Range(1, 1000));
  app.add_option("--width", settings.shape.width, "a multiple of 4")->check(CLI::Range(4, 16384));
  app.add_option("--vocab", settings.shape.vocab, "size of the vocabulary")
      ->check(CLI::Range(2, 1000000));
  app.add_option("--tokens", settings.shape.tokens, "per sequence")->check(CLI::Range(1, 65536));
  app.add_flag("!--no-python", settings.python, "leave out the PyTorch peer");
  app.add_flag("--cached", settings.cached,
               "also ranks that do not communicate, but cache CPU memory as ours do");
  app.add_flag("--met", settings.met,
               "also ranks that cache CPU memory and have a barrier after every step, but exchange "
               "no data");
  app.add_option("--corrupt", settings.corrupt,
                 "let this contender train differently, to see that it is refused")
      ->check(CLI::IsMember(std::vector<std::string>{kOurs, kSilent, kCached, kMet, kPython}));
  app.add_option("--require-alone", alone,
                 "BATCH:RATIO,...: fail when ours / not communicating is below");
  app.add_option("--require-python", python, "BATCH:RATIO,...: the same beside PyTorch");
  app.add_option("--csv", csv, "also write the table to this file");
  app.add_option("--json", json, "also write every block's rate to this file");
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  const GoalWords words{"BATCH", "batch", "--batches"};
  const Wanted wanted{parse_goals(alone, settings.batches, words),
                      parse_goals(python, settings.batches, words)};
  if (settings.shape.width % settings.shape.heads != 0)
    throw UsageError("bench", "--width {} is not a multiple of {}, the number of heads.",
                     settings.shape.width, settings.shape.heads);
  if (!settings.python && (!wanted.python.empty() || settings.corrupt == kPython))
    throw UsageError("bench", "PyTorch's side is asked for and skipped. Drop --no-python.");
  const Scratch scratch;
  const double parameters = write_start(settings, scratch);
  const Rates rates = collect(settings, scratch);
  publish(table_of(rates, settings, parameters), csv);
  if (!json.empty()) write_file_atomically(json, json_of(rates, settings, parameters));
  return judge(rates, wanted);
}

}  // namespace lockstep::bench
