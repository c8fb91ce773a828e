// lockstep bench recipes: the training files of examples/configs as `lockstep train` runs them,
// beside the step benchmark and PyTorch on the same shapes. What a user gets is measured here, not
// the parts that it is made of.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>

#include "bench/bench.h"
#include "bench/crew.h"
#include "bench/harness.h"
#include "bench/models.h"
#include "bench/train_runs.h"
#include "lockstep/comm/device.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;

constexpr const char* kTrain = "lockstep train";
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

struct RecipeOptions {
  std::vector<std::string> recipes;
  std::vector<std::string> peers;
  std::vector<std::string> flags;  // for lockstep train
  std::int64_t accumulation = 0;
  int rounds = 3;
  std::string configs;
};

// `lockstep train`, the step benchmark, or PyTorch in one mode.
struct RecipeSide {
  std::string name;
  std::unique_ptr<Crew> crew{};  // none: lockstep train
  std::vector<double> ms{};      // per update, a median for each round
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
std::vector<std::string> train_flags(const Recipe& recipe, const RecipeOptions& options,
                                     std::int64_t accumulation, const Scratch& scratch) {
  std::vector<std::string> flags = short_run(recipe.updates, recipe.updates / 4);
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

std::int64_t accumulation_of(const Recipe& recipe, const RecipeOptions& options) {
  return options.accumulation > 0 ? options.accumulation
                                  : std::min<std::int64_t>(recipe.accumulation, 8);
}

std::vector<RecipeSide> start_sides(const Recipe& recipe, const RecipeOptions& options,
                                    const Scratch& scratch) {
  ModelSettings settings = settings_of(recipe, accumulation_of(recipe, options));
  // Where PyTorch finds our initial weights.
  if (!options.peers.empty()) settings.start = scratch.file("start");
  auto step =
      std::make_unique<Crew>(CrewOptions{.name = kStep, .rank = "model", .settings = settings});
  if (!options.peers.empty()) step->ask({{"do", "write"}});
  std::vector<RecipeSide> sides;
  sides.push_back({.name = kTrain});
  // Our step benchmark takes one batch per step.
  if (settings.accumulation == 1) sides.push_back({.name = kStep, .crew = std::move(step)});
  step.reset();
  for (const std::string& mode : options.peers)
    sides.push_back({.name = mode,
                     .crew = std::make_unique<Crew>(CrewOptions{
                         .name = mode, .rank = settings.kind + "_peer.py", .settings = settings})});
  for (RecipeSide& side : sides) {
    const std::string ours = on_gpu() ? "captured" : "eager";
    if (side.crew)
      side.crew->ask(new_order(side.name == kStep ? ours : side.name, 1e-4, true, "bf16", true));
  }
  return sides;
}

std::vector<RecipeSide> run_recipe(const Recipe& recipe, const RecipeOptions& options) {
  const Scratch scratch;
  const std::int64_t accumulation = accumulation_of(recipe, options);
  std::vector<RecipeSide> sides = start_sides(recipe, options, scratch);
  const TrainJob job{.name = recipe.name,
                     .file = fmt::format("{}/{}.yaml", options.configs, recipe.name),
                     .flags = train_flags(recipe, options, accumulation, scratch)};
  const auto samples = static_cast<double>(recipe.batch_size * accumulation);
  const json order{{"do", "time"}, {"warmup", 3}, {"steps", std::max(4, recipe.updates / 2)}};
  by_turns({.rounds = options.rounds,
            .unit = "ms an update",
            .what = fmt::format("{}, round", recipe.name)},
           sides, [&](RecipeSide& side) {
             return side.ms.emplace_back(
                 side.crew ? median(side.crew->ask(order).at("ms").get<std::vector<double>>())
                           : 1e3 * samples / run_train(job, scratch.file("out")).settled_rate());
           });
  for (RecipeSide& side : sides)
    if (side.crew) side.crew->finish();
  return sides;
}

std::vector<std::string> recipe_names() {
  std::vector<std::string> names;
  for (const Recipe& recipe : kRecipes) names.emplace_back(recipe.name);
  if (on_gpu()) names.pop_back();
  return names;
}

}  // namespace

int recipes_main(int argc, char** argv) {
  RecipeOptions o;
  std::string require;
  o.recipes = on_gpu() ? recipe_names() : std::vector<std::string>{"tiny"};
  o.peers = {on_gpu() ? "compile" : "eager"};
  o.configs = program_beside("../../examples/configs");
  Options options(
      "The training files of examples/configs through `lockstep train`, beside PyTorch on the same "
      "vocabulary and shapes, for a machine with a GPU. Data are random tokens. Ratios are of "
      "updates a second, ours over the other, medians over the rounds.");
  options.list("--recipe", o.recipes, "which of them", recipe_names());
  options.list("--peer-modes", o.peers, "of PyTorch: eager, compile, graphs; none: \"\"");
  options.number("--accumulation", o.accumulation, 0, 1024,
                 "batches of an update, on all sides; 0: as the file has it, at most 8. With 1 our "
                 "step benchmark is measured too");
  options.number("--rounds", o.rounds, 1, 100, "runs of each side");
  options.app().add_option("--flag", o.flags, "for lockstep train: --flag=--residual_in_fp32=true");
  options.text("--configs", o.configs, "the folder of the training files");
  options.text("--require", require, "SIDE:RATIO,...: fail when a recipe is below");
  if (const auto code = options.parse(argc, argv)) return *code;
  std::erase(o.peers, "");
  std::vector<std::string> measured = o.peers;
  if (o.accumulation == 1) measured.emplace_back(kStep);
  const auto wanted = parse_goals(require, measured,
                                  {"SIDE", "compile:1.15,step:0.97", "",
                                   "Add it to --peer-modes; step needs --accumulation 1."});
  Report report("recipes", "recipe");
  Goals goals("recipes");
  for (const Recipe& recipe : kRecipes) {
    if (std::find(o.recipes.begin(), o.recipes.end(), recipe.name) == o.recipes.end()) continue;
    const std::vector<RecipeSide> sides = run_recipe(recipe, o);
    const std::int64_t accumulation = accumulation_of(recipe, o);
    const auto tokens =
        static_cast<double>(recipe.batch_size * recipe.sequence_length * accumulation);
    for (const RecipeSide& side : sides) {
      const double ratio = over(side.ms, sides.front().ms).p50;
      report.row(recipe.name)
          .text("side", side.name == kTrain  ? side.name
                        : side.name == kStep ? "our step benchmark"
                                             : "PyTorch, DDP, " + side.name)
          .value("side", side.name)
          .number("batches", static_cast<double>(accumulation))
          .spread("ms", side.ms, 2, "min p50 max")
          .number("tokens/s", 1e3 * tokens / median(side.ms), 0, "tokens_per_s")
          .number("ours / this", ratio, 3, "ours_times_this");
      if (const auto found = wanted.find(side.name); found != wanted.end())
        goals.at_least(fmt::format("{}: ours / {}", recipe.name, side.name), ratio, found->second);
    }
  }
  report.publish(options);
  return goals.exit_code();
}

}  // namespace lockstep::bench
