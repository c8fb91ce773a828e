// lockstep bench recipes: the training files of examples/configs as `lockstep train` runs them,
// beside the step benchmark and PyTorch on the same shapes. What a user gets is measured here, not
// the parts that it is made of.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/goals.h"
#include "bench/models.h"
#include "bench/scratch.h"
#include "bench/stats.h"
#include "bench/train_runs.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;
using std::chrono::minutes;

constexpr const char* kStep = "step";  // our step benchmark, without the Trainer

struct Recipe {
  const char* name;  // the file's, without .yaml
  const char* kind;  // one of the kinds of models.h
  const char* model;
  std::int64_t vocabulary, batch_size, sequence_length, accumulation;
  int updates;  // in a timed run
};
constexpr Recipe kRecipes[] = {{"gpt2_124m", "gpt", "124m", 50257, 64, 1024, 8, 16},
                               {"gpt_1.3b", "gpt", "1.3b", 50257, 4, 2048, 64, 12},
                               {"phi3_lora_170k", "lora", "phi3-mini", 0, 4, 512, 4, 20},
                               {"tiny", "gpt", "tiny", 128, 4, 32, 2, 8}};  // on a CPU, for tests

struct Options {
  std::vector<std::string> recipes;
  std::vector<std::string> peers;
  std::vector<std::string> flags;  // for lockstep train
  std::int64_t accumulation = 0;
  int rounds = 3;
  std::string configs, require, csv;
};

// One side that takes orders: the step benchmark, or PyTorch in one mode.
struct Side {
  Side(const CrewOptions& crew_options, const std::string& socket)
      : name(crew_options.name), crew(crew_options, socket) {}
  json ask(const json& order, minutes limit) {
    const json answer = json::parse(crew.request(order.dump(), limit).at(0));
    if (answer.contains("error"))
      throw Error("bench", fmt::format("{}: {}", name, answer["error"].get<std::string>()));
    return answer;
  }
  std::string name;
  Crew crew;
  std::vector<double> ms;  // per update, a median for each round
};

bool on_gpu() {
  return cuda_device_count() > 0;
}

// ---------------------------------------------------------------- data

// Writes a shard as llm.c does, with random tokens.
void write_tokens(const std::string& folder, std::int64_t vocabulary, std::int64_t count) {
  std::filesystem::create_directories(folder);
  std::vector<std::int32_t> header(256, 0);
  header[0] = 20240520, header[1] = 1, header[2] = static_cast<std::int32_t>(count);
  std::mt19937 random(1);
  std::vector<std::uint16_t> tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) token = static_cast<std::uint16_t>(random() % vocabulary);
  std::ofstream file(folder + "/random_train_000000.bin", std::ios::binary);
  file.write(reinterpret_cast<const char*>(header.data()), 1024);
  file.write(reinterpret_cast<const char*>(tokens.data()), 2 * count);
  if (!file.flush()) throw SystemError("bench", "cannot write token shards", errno);
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

// ---------------------------------------------------------------- one recipe

ModelSettings settings_of(const Recipe& recipe, std::int64_t accumulation) {
  ModelSettings settings;
  settings.kind = recipe.kind;
  settings.model = recipe.model;
  settings.device = on_gpu() ? "cuda" : "cpu";
  settings.batch_size = recipe.batch_size;
  settings.sequence_length = recipe.sequence_length;
  settings.accumulation = accumulation;
  return settings;
}

// What differs from the file: where the data is, how long it runs, and that it saves nothing.
std::vector<std::string> train_flags(const Recipe& recipe, const Options& options,
                                     std::int64_t accumulation, const Scratch& scratch) {
  std::vector<std::string> flags{fmt::format("--max_steps={}", recipe.updates),
                                 fmt::format("--logging_steps={}", std::max(1, recipe.updates / 4)),
                                 "--save_strategy=no",
                                 "--enable_jit_checkpoint=false",
                                 "--eval_strategy=no",
                                 "--report_to=none",
                                 "--disable_tqdm=true",
                                 "--warmup_steps=0"};
  const std::int64_t samples = recipe.batch_size * accumulation * recipe.updates;
  if (std::string(recipe.kind) == "gpt") {
    const std::string folder = scratch.file(std::string("tokens-") + recipe.name);
    write_tokens(folder, recipe.vocabulary, (samples + 1) * recipe.sequence_length + 1);
    flags.push_back("--dataset_dir=" + folder);
    flags.push_back(fmt::format("--tokens_per_update={}",
                                accumulation * recipe.batch_size * recipe.sequence_length));
  } else {
    const std::string path = scratch.file("instructions.json");
    write_instructions(path, recipe.sequence_length, samples);
    flags.push_back(fmt::format("--data={{name: instructions, path: {}}}", path));
    flags.push_back(fmt::format("--gradient_accumulation_steps={}", accumulation));
  }
  flags.insert(flags.end(), options.flags.begin(), options.flags.end());
  return flags;
}

std::int64_t tokens_of_update(const Recipe& recipe, std::int64_t accumulation) {
  return recipe.batch_size * recipe.sequence_length * accumulation;
}

// Milliseconds per update: the median of the intervals between logs except the first, which holds
// the start and the recording of graphs.
double train_ms(const Recipe& recipe, const TrainFigures& figures, std::int64_t accumulation) {
  std::vector<double> ms;
  const auto samples = static_cast<double>(recipe.batch_size * accumulation);
  for (std::size_t i = 1; i < figures.samples_per_second.size(); ++i)
    ms.push_back(1e3 * samples / figures.samples_per_second[i]);
  if (ms.empty()) throw Error("bench", fmt::format("{} logged no rate", recipe.name));
  return median(ms);
}

struct Outcome {
  std::string recipe;
  std::vector<double> trainer_ms{};
  std::map<std::string, std::vector<double>> others_ms{};
  std::int64_t tokens = 0;  // per update
  std::int64_t accumulation = 1;
};

Outcome run_recipe(const Recipe& recipe, const Options& options) {
  const Scratch scratch;
  const std::int64_t accumulation = options.accumulation > 0
                                        ? options.accumulation
                                        : std::min<std::int64_t>(recipe.accumulation, 8);
  ModelSettings settings = settings_of(recipe, accumulation);
  // Where PyTorch finds our initial weights.
  if (!options.peers.empty()) settings.start = scratch.file("start");
  write_file_atomically(scratch.file("settings"), json(settings).dump());
  std::deque<Side> sides;
  const auto start = [&](const std::string& name, std::vector<std::string> command) {
    command.insert(command.end(), {"--settings", scratch.file("settings")});
    sides.emplace_back(CrewOptions{name, 1, std::move(command)}, scratch.file("orders-" + name));
    sides.back().crew.wait_ready(minutes(5));
  };
  start(kStep, {program_beside("lockstep-bench"), "_model-rank"});
  if (!options.peers.empty()) sides.front().ask({{"do", "write"}}, minutes(10));
  for (const std::string& mode : options.peers)
    start(mode, {env::get("LOCKSTEP_PYTHON").value_or(default_python()),
                 peer(settings.kind + "_peer.py")});
  // Our step benchmark takes one batch per step.
  if (accumulation > 1) sides.pop_front();
  for (Side& side : sides)
    side.ask({{"do", "new"},
              {"dtype", "bf16"},
              {"tf32", true},
              {"mode", side.name != kStep ? side.name
                       : on_gpu()         ? "captured"
                                          : "eager"},
              {"lr", 1e-4},
              {"ddp", true},
              {"exact", false}},
             minutes(10));
  Outcome outcome{.recipe = recipe.name,
                  .tokens = tokens_of_update(recipe, accumulation),
                  .accumulation = accumulation};
  const TrainJob job{.name = recipe.name,
                     .file = fmt::format("{}/{}.yaml", options.configs, recipe.name),
                     .flags = train_flags(recipe, options, accumulation, scratch)};
  for (int round = 0; round < options.rounds; ++round) {
    outcome.trainer_ms.push_back(
        train_ms(recipe, run_train(job, scratch.file("out")), accumulation));
    std::string shown = fmt::format(" lockstep train {:.1f}", outcome.trainer_ms.back());
    for (Side& side : sides) {
      const json answer = side.ask(
          {{"do", "time"}, {"warmup", 3}, {"steps", std::max(4, recipe.updates / 2)}}, minutes(30));
      outcome.others_ms[side.name].push_back(median(answer.at("ms").get<std::vector<double>>()));
      shown += fmt::format(", {} {:.1f}", side.name, outcome.others_ms[side.name].back());
    }
    fmt::print(stderr, "{}, round {}/{}:{} ms an update\n", recipe.name, round + 1, options.rounds,
               shown);
  }
  for (Side& side : sides) side.crew.finish();
  return outcome;
}

// ---------------------------------------------------------------- results

// How many times faster ours is, round by round.
double ratio_of(const Outcome& outcome, const std::string& other) {
  std::vector<double> ratios;
  const auto& theirs = outcome.others_ms.at(other);
  for (std::size_t i = 0; i < theirs.size(); ++i)
    ratios.push_back(theirs[i] / outcome.trainer_ms[i]);
  return median(ratios);
}

void add_rows(Table& table, const Outcome& outcome) {
  const auto add = [&](const std::string& side, const std::vector<double>& ms, double ratio) {
    const Summary all = summarize(ms);
    table.add({outcome.recipe, side, fmt::format("{}", outcome.accumulation),
               fmt::format("{:.2f}", all.min), fmt::format("{:.2f}", all.p50),
               fmt::format("{:.2f}", all.max),
               fmt::format("{:.0f}", 1e3 * static_cast<double>(outcome.tokens) / all.p50),
               fmt::format("{:.3f}", ratio)});
  };
  add("lockstep train", outcome.trainer_ms, 1);
  for (const auto& [name, ms] : outcome.others_ms)
    add(name == kStep ? "our step benchmark" : "PyTorch, DDP, " + name, ms,
        ratio_of(outcome, name));
}

// "compile:1.15,step:0.97", for every recipe that runs.
std::map<std::string, double> parse_wanted(const std::string& text) {
  std::map<std::string, double> wanted;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    const auto colon = part.find(':');
    const std::string ratio = colon == std::string::npos ? "" : part.substr(colon + 1);
    if (!positive_problem(ratio).empty())
      throw UsageError("bench", "'{}' is not SIDE:RATIO. Write compile:1.15,step:0.97.", part);
    wanted[part.substr(0, colon)] = std::stod(ratio);
  }
  return wanted;
}

std::vector<std::string> recipe_names() {
  std::vector<std::string> names;
  for (const Recipe& recipe : kRecipes) names.emplace_back(recipe.name);
  if (on_gpu()) names.pop_back();
  return names;
}

}  // namespace

int recipes_main(int argc, char** argv) {
  Options options;
  options.recipes = on_gpu() ? recipe_names() : std::vector<std::string>{"tiny"};
  options.peers = {on_gpu() ? "compile" : "eager"};
  options.configs = program_beside("../../examples/configs");
  CLI::App app{
      "The training files of examples/configs through `lockstep train`, beside PyTorch on the same "
      "vocabulary and shapes, for a machine with a GPU. Data are random tokens. Ratios are of "
      "updates a second, "
      "ours over the other, medians over the rounds."};
  app.add_option("--recipe", options.recipes, "which of them")
      ->delimiter(',')
      ->check(CLI::IsMember(recipe_names()));
  app.add_option("--peer-modes", options.peers, "of PyTorch: eager, compile, graphs; none: \"\"")
      ->delimiter(',');
  app.add_option("--accumulation", options.accumulation,
                 "batches of an update, on all sides; 0: as the file has it, at most 8. With 1 our "
                 "step benchmark is measured too")
      ->check(CLI::Range(0, 1024));
  app.add_option("--rounds", options.rounds, "runs of each side")->check(CLI::Range(1, 100));
  app.add_option("--flag", options.flags, "for lockstep train: --flag=--residual_in_fp32=true");
  app.add_option("--configs", options.configs, "the folder of the training files");
  app.add_option("--require", options.require, "SIDE:RATIO,...: fail when a recipe is below");
  app.add_option("--csv", options.csv, "also write the table to this file");
  if (const auto code = parse_arguments(app, argc, argv)) return *code;
  std::erase(options.peers, "");
  const auto wanted = parse_wanted(options.require);
  Table table(
      {"recipe", "side", "batches", "min ms", "p50 ms", "max ms", "tokens/s", "ours / this"});
  Goals goals("recipes");
  for (const Recipe& recipe : kRecipes) {
    const auto& chosen = options.recipes;
    if (std::find(chosen.begin(), chosen.end(), recipe.name) == chosen.end()) continue;
    const Outcome outcome = run_recipe(recipe, options);
    add_rows(table, outcome);
    for (const auto& [side, ratio] : wanted) {
      if (!outcome.others_ms.contains(side))
        throw UsageError("bench",
                         "{} is required but not measured. Add it to --peer-modes; step needs "
                         "--accumulation 1.",
                         side);
      goals.at_least(fmt::format("{}: ours / {}", recipe.name, side), ratio_of(outcome, side),
                     ratio);
    }
  }
  publish(table, options.csv);
  return goals.exit_code();
}

}  // namespace lockstep::bench
