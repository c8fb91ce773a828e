// lockstep bench train: a small language model on the CPU, beside ranks that do not communicate and
// PyTorch's DDP over gloo. The ranks of all contenders (models.h) stay alive for the whole run and
// take turns in blocks of steps.
#include <fmt/format.h>

#include <algorithm>
#include <deque>

#include "bench/harness.h"
#include "bench/models.h"
#include "bench/processes.h"
#include "lockstep/core/error.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;

constexpr const char* kOurs = "ours";         // DDP and ShardedOptimizer on shm
constexpr const char* kAloneRanks = "alone";  // ranks that do not communicate
constexpr const char* kCached = "cached";     // as alone, with the memory cache of run()
constexpr const char* kMet = "met";           // as cached, with a barrier after every step
constexpr const char* kPython = "python";     // PyTorch's DDP over gloo

constexpr int kFirstSteps = 4;
// Both sides call the same kernels, so losses mostly agree in every bit; gloo adds over more than
// two ranks in another order. Twice the learning rate shows as 1e-3.
constexpr double kLossTolerance = 1e-4;

struct TrainSide {
  TrainSide(const std::string& key, int ranks, ModelSettings settings, double lr)
      : name(key),
        lr(lr),
        ranks({.name = key,
               .ranks = ranks,
               .rank = key == kPython ? "model_peer.py" : "model",
               .settings = with(key, std::move(settings))}) {}

  static ModelSettings with(const std::string& key, ModelSettings settings) {
    settings.sharded = key == kOurs;
    settings.alone = key == kAloneRanks || key == kCached;
    settings.cached = key == kCached || key == kMet;
    settings.barrier = key == kMet;
    return settings;
  }

  const char* long_name() const {
    if (name == kOurs) return "Lockstep: DDP + ShardedOptimizer on shm";
    if (name == kAloneRanks) return "ranks that do not communicate";
    if (name == kCached) return "the same with cached memory, as under run()";
    if (name == kMet) return "cached memory, and a barrier after every step";
    return "PyTorch DDP over gloo";
  }

  // A model with the start's weights and a fresh optimizer. Returns how many parameters it has.
  double begin() {
    const bool ddp = name == kOurs || name == kPython;
    return ranks.ask(new_order("eager", lr, ddp)).at("parameters");
  }

  // The losses of every rank, one rank after the other.
  std::vector<double> first_losses(bool same) {
    begin();
    std::vector<double> all;
    for (const json& answer : ranks.ask_all(
             {{"do", "train"}, {"steps", kFirstSteps}, {"batch_size", 1}, {"same", same}}))
      for (const json& loss : answer.at("losses"))
        all.push_back(loss.is_number() ? loss.get<double>() : NAN);
    return all;
  }

  // Samples per second over all ranks.
  double block(int batch, int steps) {
    double rate = 0;
    for (const json& answer :
         ranks.ask_all({{"do", "time"}, {"warmup", 0}, {"steps", steps}, {"batch_size", batch}})) {
      double ms = 0;
      for (const double step : answer.at("ms").get<std::vector<double>>()) ms += step;
      rate += 1e3 * batch * steps / ms;
    }
    return rate;
  }

  std::string name;
  double lr;
  RankProcesses ranks;
  std::map<int, std::vector<double>> rates{};  // by batch size, one per round
};
using TrainSides = std::deque<TrainSide>;

// ---------------------------------------------------------------- verification

double compare_losses(const std::vector<double>& a, const std::vector<double>& b,
                      const std::string& who, const char* on) {
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b.at(i)) / std::abs(a[i]);
    worst = std::max(worst, difference);
    if (!(difference <= kLossTolerance))
      throw Error("bench",
                  fmt::format("{} and {} do not train the same: on {} the loss of rank {} "
                              "in step {} is {:.9g} and {:.9g}",
                              kOurs, who, on, i / kFirstSteps, i % kFirstSteps, a[i], b[i]));
  }
  return worst;
}

// From the same weights every contender must compute the same. With tokens of their own, ranks that
// average agree with PyTorch's; with the same tokens on every rank, averaging changes nothing, and
// ranks that do not communicate must agree too.
void verify(TrainSides& contenders) {
  const auto own = contenders.front().first_losses(false),
             same = contenders.front().first_losses(true);
  for (std::size_t i = 1; i < contenders.size(); ++i) {
    TrainSide& other = contenders[i];
    double worst = compare_losses(same, other.first_losses(true), other.name, "the same tokens");
    if (other.name == kPython)
      worst =
          std::max(worst, compare_losses(own, other.first_losses(false), kPython, "own tokens"));
    fmt::print(stderr, "verified: {} and {} train the same, losses differ by at most {:.1g}\n",
               kOurs, other.name, worst);
  }
}

// How many times faster ours is, round by round.
Summary speedup(const TrainSides& contenders, const TrainSide& other, int batch) {
  return over(contenders.front().rates.at(batch), other.rates.at(batch));
}

struct TrainOptions {
  ModelSettings model;
  std::vector<int> batches{1, 2, 4, 8};
  int ranks = 2, steps = 10;
  Turns turns{.rounds = 12, .seconds = 240, .unit = "samples/s"};
  std::vector<std::string> contenders{kOurs, kAloneRanks};
  std::string corrupt{};
};

Report report_of(const TrainSides& contenders, const TrainOptions& o, double parameters) {
  Report report("train",
                fmt::format("{} ranks training {:.3g} M parameters", o.ranks, parameters / 1e6),
                {{"ranks", o.ranks}, {"parameters", parameters}, {"steps_per_block", o.steps}});
  for (const int batch : o.batches)
    for (const TrainSide& each : contenders) {
      const auto& rates = each.rates.at(batch);
      std::vector<double> ms;
      for (const double rate : rates) ms.push_back(1e3 * o.ranks * batch / rate);
      report.row(each.long_name())
          .value("contender", each.name)
          .value("batch", batch)
          .number("batch", batch)
          .number("blocks", static_cast<double>(rates.size()))
          .spread("ms", ms, 2)
          .value("samples_per_s", rates)
          .number("samples/s", median(rates), 2, "p50_samples_per_s")
          .ratio("ours / this", speedup(contenders, each, batch), "ours_times_this");
    }
  return report;
}

void train(TrainOptions o, const Options& output) {
  const Scratch scratch;
  o.model.start = scratch.file("start");
  TrainSides contenders;
  for (const std::string& key : o.contenders)
    contenders.emplace_back(key, o.ranks, o.model, o.model.lr * (o.corrupt == key ? 2 : 1));
  contenders.front().ranks.ask_all({{"do", "write"}});
  verify(contenders);
  double parameters = 0;
  for (TrainSide& each : contenders) parameters = each.begin();
  o.turns.seconds /= static_cast<double>(o.batches.size());
  for (const int batch : o.batches) {
    for (TrainSide& each : contenders) each.block(batch, 2);
    o.turns.what = fmt::format("batch {}, round", batch);
    by_turns(o.turns, contenders, [&](TrainSide& each) {
      return each.rates[batch].emplace_back(each.block(batch, o.steps));
    });
    for (TrainSide& each : contenders) each.ranks.check_idle();
  }
  for (TrainSide& each : contenders) each.ranks.finish();
  report_of(contenders, o, parameters).publish(output);
}

}  // namespace

int train_main(int argc, char** argv) {
  TrainOptions o{.model = small_gpt()};
  bool python = true, cached = false, met = false;
  Options options("Training a small GPT on the CPU, one thread per rank, beside PyTorch's DDP");
  options.number("--ranks", o.ranks, 1, 64, "processes");
  options.number("--batches", o.batches, 1, 4096, "sequences per rank");
  options.number("--steps", o.steps, 1, 100000, "per block");
  options.number("--rounds", o.turns.rounds, 3, 100000,
                 "blocks of each contender and batch size, at most");
  options.positive("--seconds", o.turns.seconds, "of measuring, for all batch sizes together");
  options.number("--layers", o.model.n_layer, 1, 1000, "blocks of the model");
  options.number("--width", o.model.n_embd, 4, 16384, "a multiple of 4");
  options.number("--vocab", o.model.classes, 2, 1e6, "size of the vocabulary");
  options.number("--tokens", o.model.sequence_length, 1, 65536, "per sequence");
  options.flag("!--no-python", python, "leave out the PyTorch peer");
  options.flag("--cached", cached,
               "also ranks that do not communicate, but cache CPU memory as ours do");
  options.flag("--met", met,
               "also ranks that cache CPU memory and have a barrier after every step, but exchange "
               "no data");
  options.text("--corrupt", o.corrupt,
               "let this contender train differently, to see that it is refused",
               {kOurs, kAloneRanks, kCached, kMet, kPython});
  if (const auto code = options.parse(argc, argv)) return *code;
  if (cached) o.contenders.emplace_back(kCached);
  if (met) o.contenders.emplace_back(kMet);
  if (python) o.contenders.emplace_back(kPython);
  if (o.model.n_embd % o.model.n_head != 0)
    throw UsageError("bench", "--width {} is not a multiple of {}, the number of heads.",
                     o.model.n_embd, o.model.n_head);
  if (!python && o.corrupt == kPython)
    throw UsageError("bench", "PyTorch's side is asked for and skipped. Drop --no-python.");
  train(std::move(o), options);
  return 0;
}

}  // namespace lockstep::bench
