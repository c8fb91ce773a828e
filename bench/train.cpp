// lockstep bench train: a small language model on the CPU, beside ranks that do not communicate and
// PyTorch's DDP over gloo. The ranks of all contenders (models.h) stay alive for the whole run and
// take turns in blocks of steps. And lockstep bench recipes: training files as `lockstep train`
// runs them, beside PyTorch on the same model and shapes, and beside our training step alone; the
// speed that a user gets, not that of the parts.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <deque>
#include <filesystem>
#include <random>

#include "bench/harness.h"
#include "bench/models.h"
#include "bench/processes.h"
#include "cli/task_config.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/data/shard_format.h"
#include "lockstep/train/config.h"
#include "lockstep/train/effective_batch.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;

constexpr const char* kOurs = "ours";         // Shard::kState on shm
constexpr const char* kAloneRanks = "alone";  // ranks that do not communicate
constexpr const char* kCached = "cached";     // as alone, with the memory cache of run()
constexpr const char* kMet = "met";           // as cached, with a barrier after every step
constexpr const char* kPython = "python";     // PyTorch's DDP over gloo

constexpr int kFirstSteps = 4;
// Both sides call the same kernels, so losses mostly agree in every bit; gloo adds over more than
// two ranks in another order. Twice the learning rate shows as 1e-3.
constexpr double kLossTolerance = 1e-4;

void append_losses(const json& answer, std::vector<double>& losses) {
  for (const json& loss : answer.at("losses"))
    losses.push_back(loss.is_number() ? loss.get<double>() : NAN);  // JSON has no NaN
}

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
    if (name == kOurs) return "Lockstep: the optimizer's state sharded, on shm";
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
      append_losses(answer, all);
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

// ---------------------------------------------------------------- lockstep bench recipes

namespace {

constexpr const char* kTrain = "lockstep train";
constexpr const char* kStep = "step";  // our training step alone
constexpr std::int64_t kMostBatches = 8;
// Relative tolerances for fp32 losses: sums in another order, then AdamW steps on gradients that
// differ by as much. Twice the learning rate shows as 6e-4 in the second step of a tiny GPT, and as
// more in larger ones.
constexpr double kFirstTolerance = 1e-4, kLaterTolerance = 3e-4;
constexpr double kVerifiedRate = 3e-4;

struct RecipeOptions {
  std::vector<std::string> files;
  std::vector<std::string> peers;
  std::vector<std::string> flags;  // for lockstep train
  std::int64_t accumulation = 0;
  int updates = 16, rounds = 3;
  bool step = false;
  std::string corrupt;
};

struct Recipe {
  std::string name, file;
  TrainingArguments arguments;
  std::string data{};  // the name of its data
  ModelSettings settings{};

  double samples() const {
    return static_cast<double>(settings.batch_size * settings.accumulation);
  }
};

// `lockstep train`, our step, or PyTorch in one mode.
struct RecipeSide {
  std::string name;
  std::unique_ptr<RankProcesses> ranks{};  // none: lockstep train
  std::vector<double> ms{};                // per update, a median for each round
};

// ---------------------------------------------------------------- the training file

Recipe read_recipe(const std::string& file, const RecipeOptions& options) {
  Recipe recipe{.name = std::filesystem::path(file).stem(),
                .file = file,
                .arguments = train::load_config(file, options.flags).arguments};
  const TrainingArguments& a = recipe.arguments;
  const cli::TaskConfig task = cli::read_task(a, cli::TaskFiles::kUnread);
  if (task.model.name == "mlp")
    throw UsageError("bench",
                     "{} trains an mlp, which has no peer in PyTorch here. Give a language "
                     "model or a ResNet.",
                     file);
  if (a.fp16)
    throw UsageError("bench",
                     "{} has fp16, whose loss scaling the peers do not have. Add "
                     "--flag=--fp16=false --flag=--bf16=true.",
                     file);
  const bool images = task.model.name.starts_with("resnet");
  recipe.data = task.data.name;
  ModelSettings& s = recipe.settings;
  s.kind = images ? "resnet" : task.model.name == "gpt" && !task.lora ? "gpt" : "pretrained";
  s.file = file;
  s.flags = options.flags;
  s.device = on_cpu(a) ? "cpu" : "cuda";
  s.dtype = a.mixed_precision == "fp8" ? "fp8" : a.bf16 ? "bf16" : "fp32";
  s.batch_size = a.per_device_train_batch_size;
  s.sequence_length = images ? task.data.image_size : task.data.length;
  s.classes = images ? task.data.classes : cli::causal_lm_config(task.model).vocab_size();
  s.clip = a.max_grad_norm > 0;
  s.accumulation = options.step ? 1
                   : options.accumulation > 0
                       ? options.accumulation
                       : std::min(kMostBatches, train::accumulation_steps(a, 1));
  return recipe;
}

// ---------------------------------------------------------------- data

// Writes a shard as llm.c does, with random tokens.
void write_tokens(const std::string& folder, std::int64_t vocabulary, std::int64_t count) {
  std::filesystem::create_directories(folder);
  std::string bytes =
      data::token_header(data::TokenFormat::kLlmc16, static_cast<std::uint64_t>(count));
  std::mt19937 random(1);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto token = static_cast<std::uint16_t>(random() % vocabulary);
    bytes.append(reinterpret_cast<const char*>(&token), sizeof token);
  }
  write_file_atomically(folder + "/random_train_000000.bin", bytes);
}

// Writes answers that fill max_seq_len, so that every batch has the peers' shape.
void write_instructions(const std::string& path, std::int64_t length, std::int64_t count) {
  json records = json::array();
  for (std::int64_t i = 0; i < count; ++i)
    records.push_back({{"instruction", fmt::format("Count on from {}.", i)},
                       {"input", ""},
                       {"output", std::string(static_cast<std::size_t>(2 * length), 'a')}});
  write_file_atomically(path, records.dump());
}

// Flags that override the file: the location of the data, the duration, and no saving.
std::vector<std::string> train_flags(const Recipe& recipe, const RecipeOptions& options,
                                     const Scratch& scratch) {
  const ModelSettings& s = recipe.settings;
  std::vector<std::string> flags = short_run(options.updates, options.updates / 4);
  const std::int64_t update = s.batch_size * s.accumulation;
  if (recipe.data == "tokens") {
    const std::string folder = scratch.file("tokens-" + recipe.name);
    write_tokens(folder, s.classes, (update * options.updates + 1) * s.sequence_length + 1);
    flags.push_back("--dataset_dir=" + folder);
  } else if (recipe.data == "instructions") {
    const std::string path = scratch.file("instructions-" + recipe.name + ".json");
    write_instructions(path, s.sequence_length, update * options.updates);
    flags.push_back(fmt::format("--data={{name: instructions, path: {}}}", path));
  }
  if (recipe.arguments.tokens_per_update)
    flags.push_back(fmt::format("--tokens_per_update={}", update * s.sequence_length));
  else if (recipe.arguments.global_batch_size)
    flags.push_back(fmt::format("--global_batch_size={}", update));
  else
    flags.push_back(fmt::format("--gradient_accumulation_steps={}", s.accumulation));
  flags.insert(flags.end(), options.flags.begin(), options.flags.end());
  return flags;
}

// ---------------------------------------------------------------- one recipe

// The losses of the first steps in fp32, without dropout and with adapters that are not zero.
std::vector<double> exact_losses(RankProcesses& ranks, const ModelSettings& settings, double lr) {
  constexpr int kSteps = 3;
  json order = new_order("eager", lr, /*ddp=*/true);
  order["exact"] = true;
  ranks.ask(order);
  // A batch norm needs several samples.
  const std::int64_t batch =
      std::min<std::int64_t>(settings.batch_size, settings.kind == "resnet" ? 8 : 2);
  std::vector<double> losses;
  append_losses(ranks.ask({{"do", "train"}, {"steps", kSteps}, {"batch_size", batch}}), losses);
  ranks.ask({{"do", "drop"}});
  return losses;
}

void verify(const Recipe& recipe, RankProcesses& step, RankProcesses& peer,
            const std::string& corrupt) {
  const auto ours = exact_losses(step, recipe.settings, kVerifiedRate);
  const auto other =
      exact_losses(peer, recipe.settings, kVerifiedRate * (corrupt == peer.name ? 2 : 1));
  double worst = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const double difference = std::abs(ours[i] - other.at(i)) / std::abs(ours[i]);
    const double allowed = i == 0 ? kFirstTolerance : kLaterTolerance;
    if (!(difference <= allowed))
      throw Error(
          "bench",
          fmt::format("{}: lockstep and {} do not train the same: the loss of step {} is "
                      "{:.9g} and {:.9g}, {:.1e} apart; allowed are {:.0e}",
                      recipe.name, peer.name, i + 1, ours[i], other[i], difference, allowed));
    worst = std::max(worst, difference);
  }
  fmt::print(stderr,
             "verified: lockstep and pytorch train {} the same in fp32, losses differ by {:.1g}\n",
             recipe.name, worst);
}

std::vector<RecipeSide> start_sides(const Recipe& recipe, const RecipeOptions& options,
                                    const Scratch& scratch) {
  ModelSettings settings = recipe.settings;
  std::vector<RecipeSide> sides;
  sides.push_back({.name = kTrain});
  if (!options.step && options.peers.empty()) return sides;
  if (!options.peers.empty()) settings.start = scratch.file("start-" + recipe.name);
  auto step = std::make_unique<RankProcesses>(
      RankProcessesOptions{.name = kStep, .rank = "model", .settings = settings});
  if (!options.peers.empty()) step->ask({{"do", "write"}});
  std::vector<RecipeSide> peers;
  for (const std::string& mode : options.peers)
    peers.push_back({.name = mode,
                     .ranks = std::make_unique<RankProcesses>(RankProcessesOptions{
                         .name = mode, .rank = "model_peer.py", .settings = settings})});
  if (!peers.empty()) verify(recipe, *step, *peers.front().ranks, options.corrupt);
  if (options.step) sides.push_back({.name = kStep, .ranks = std::move(step)});
  step.reset();
  std::move(peers.begin(), peers.end(), std::back_inserter(sides));
  const bool tf32 = settings.dtype != "fp32" || recipe.arguments.tf32.value_or(false);
  const std::string ours = settings.device == "cpu" ? "eager" : "captured";
  for (RecipeSide& side : sides)
    if (side.ranks)
      side.ranks->ask(new_order(side.name == kStep ? ours : side.name, 1e-4, /*ddp=*/true,
                                settings.dtype, tf32));
  return sides;
}

double update_ms(RankProcesses& ranks, int steps) {
  const json answer = ranks.ask({{"do", "time"}, {"warmup", 3}, {"steps", steps}});
  if (!answer.at("loss").is_number())
    throw Error("bench", fmt::format("the loss of {} is not finite", ranks.name));
  return median(answer.at("ms").get<std::vector<double>>());
}

std::vector<RecipeSide> run_recipe(const Recipe& recipe, const RecipeOptions& options) {
  const Scratch scratch;
  std::vector<RecipeSide> sides = start_sides(recipe, options, scratch);
  const TrainJob job{
      .name = recipe.name, .file = recipe.file, .flags = train_flags(recipe, options, scratch)};
  by_turns({.rounds = options.rounds,
            .unit = "ms an update",
            .what = fmt::format("{}, round", recipe.name)},
           sides, [&](RecipeSide& side) {
             return side.ms.emplace_back(
                 side.ranks
                     ? update_ms(*side.ranks, std::max(4, options.updates / 2))
                     : 1e3 * recipe.samples() / run_train(job, scratch.file("out")).settled_rate());
           });
  for (RecipeSide& side : sides)
    if (side.ranks) side.ranks->finish();
  return sides;
}

void add_rows(Report& report, const Recipe& recipe, const std::vector<RecipeSide>& sides) {
  const ModelSettings& s = recipe.settings;
  for (const RecipeSide& side : sides) {
    const double rate = 1e3 * recipe.samples() / median(side.ms);
    Row& row = report.row(recipe.name)
                   .text("side", side.name == kTrain  ? side.name
                                 : side.name == kStep ? "our step alone"
                                                      : "PyTorch, DDP, " + side.name)
                   .value("side", side.name)
                   .number("batches", static_cast<double>(s.accumulation))
                   .spread("ms", side.ms, 2, "min p50 max")
                   .number("samples/s", rate, 1, "samples_per_s");
    if (s.kind != "resnet")
      row.number("tokens/s", rate * static_cast<double>(s.sequence_length), 0, "tokens_per_s");
    row.number("ours / this", over(side.ms, sides.front().ms).p50, 3, "ours_times_this");
  }
}

}  // namespace

int recipes_main(int argc, char** argv) {
  RecipeOptions o;
  o.peers = {cuda_device_count() > 0 ? "compile" : "eager"};
  Options options(
      "Training files of language models and ResNets through `lockstep train` on one rank, beside "
      "PyTorch with the same model and shapes. Tokens and instructions are random ones. Ratios are "
      "of updates a second, ours over the other, medians over the rounds.");
  options.app().add_option("file", o.files, "training files")->required();
  options.list("--peer-modes", o.peers,
               "of PyTorch: eager, compile, graphs (mode=reduce-overhead), fp8 (compiled, with "
               "linear layers by torch._scaled_mm); none: \"\"",
               {"eager", "compile", "graphs", "fp8", ""});
  options.flag("--step", o.step,
               "also our training step without the Trainer; an update has one batch then");
  options.number("--accumulation", o.accumulation, 0, 1024,
                 "batches of an update, on all sides; 0: as the file has it, at most 8");
  options.number("--updates", o.updates, 8, 100000, "of each run of lockstep train");
  options.number("--rounds", o.rounds, 1, 100, "runs of each side");
  options.app()
      .add_option("--flag", o.flags, "for lockstep train: --flag=--residual_in_fp32=true")
      ->allow_extra_args(false);
  options.text("--corrupt", o.corrupt,
               "let this peer train differently, to see that it is refused");
  if (const auto code = options.parse(argc, argv)) return *code;
  std::erase(o.peers, "");
  if (o.step && o.accumulation > 1)
    throw UsageError("bench",
                     "--step measures one batch in an update, and --accumulation is {}. "
                     "Drop one of them.",
                     o.accumulation);
  std::vector<Recipe> recipes;
  for (const std::string& file : o.files) recipes.push_back(read_recipe(file, o));
  Report report("recipes", "recipe");
  for (const Recipe& recipe : recipes) add_rows(report, recipe, run_recipe(recipe, o));
  report.publish(options);
  return 0;
}

}  // namespace lockstep::bench
