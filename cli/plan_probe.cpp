// `lockstep plan --probe` and `--write`.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>

#include "cli/commands.h"
#include "cli/local_ranks.h"
#include "cli/plan.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/core/json.h"
#include "lockstep/train/config_keys.h"

namespace lockstep::cli {
namespace {

constexpr int kSteps = 3;
// On a GPU the first steps load kernels, and a step is captured after a few.
constexpr int kFirstGpu = 8;
constexpr int kFirstCpu = 1;
constexpr int kTimeout_s = 300;

struct SeenRanks {
  double step_s = 0;
  double longest_s = 0;  // of the steps that count
  double tokens = 0;     // of a sample
  std::uint64_t memory_bytes = 0;
};

// The time of the slowest rank, and the memory of the one that has the most.
std::optional<SeenRanks> read_ranks(const std::string& folder, int ranks) {
  SeenRanks all;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string path = fmt::format("{}/rank_{}.json", folder, rank);
    if (!std::filesystem::exists(path)) return std::nullopt;
    const Node node = parse_json(read_file(path), path);
    std::vector<double> steps;
    for (const Node& step : node.at("step_s").items) steps.push_back(step.real);
    if (steps.size() < kSteps) return std::nullopt;
    const auto [least, most] = std::minmax_element(steps.end() - kSteps, steps.end());
    all.step_s = std::max(all.step_s, *least);
    all.longest_s = std::max(all.longest_s, *most);
    all.tokens = std::max(all.tokens, node.at("tokens_per_sample").real);
    all.memory_bytes =
        std::max(all.memory_bytes, static_cast<std::uint64_t>(node.at("memory_bytes").integer));
  }
  return all;
}

// ---------------------------------------------------------------- --write

constexpr std::string_view kModel = "model.";
constexpr std::string_view kEmpty = "\"\"";

std::string yaml_string(const std::string& text) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./~-";
  const bool plain = text.find_first_not_of(kPlain) == text.npos && !text.starts_with('-') &&
                     plain_scalar(text, {}).is(NodeKind::kString);
  return plain ? text : json_quote(text);
}

// YAML on one line.
std::string yaml_value(const Node& node) {
  std::string text;
  if (node.is(NodeKind::kMap)) {
    for (const Entry& entry : node.entries)
      text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", yaml_string(entry.key),
                          yaml_value(entry.value));
    return "{" + text + "}";
  }
  if (node.is(NodeKind::kList)) {
    for (const Node& item : node.items)
      text += fmt::format("{}{}", text.empty() ? "" : ", ", yaml_value(item));
    return "[" + text + "]";
  }
  if (node.is(NodeKind::kNull)) return "null";
  return node.is(NodeKind::kString) ? yaml_string(node.text) : node.text;
}

// The file's model with one more key. `gpt` is short for {name: gpt}.
std::string model_text(const Entry* written, std::string_view key, const std::string& value) {
  Node model = written != nullptr ? written->value : map_node({});
  if (!model.is(NodeKind::kMap)) model = map_node({{"name", std::move(model)}});
  model.entries.push_back({std::string(key), {}, text_node(value)});
  return yaml_value(model);
}

}  // namespace

std::string planned_text(const Node& file, const std::string& name,
                         const std::vector<plan::Setting>& settings) {
  std::string text;
  std::set<std::string_view> chosen;
  for (const plan::Setting& setting : settings) {
    const bool inside = setting.key.starts_with(kModel);
    const std::string_view key = inside ? "model" : std::string_view(setting.key);
    const Entry* written = file.find(key);
    const std::string value =
        inside ? model_text(written, setting.key.substr(kModel.size()), setting.value)
               : setting.value;
    text += fmt::format(
        "# {}{}\n{}: {}\n", train::find_key(key)->help,
        written == nullptr ? "" : fmt::format("; it was {}", yaml_value(written->value)), key,
        value);
    chosen.insert(key);
    if (key == "fsdp" && value == kEmpty) chosen.insert("fsdp_config");
  }
  std::string others;
  for (const Entry& entry : file.entries)
    if (!chosen.contains(entry.key))
      others += fmt::format("{}: {}\n", yaml_string(entry.key), yaml_value(entry.value));
  if (!text.empty()) text = fmt::format("# Chosen by `lockstep plan {}`:\n{}\n", name, text);
  return fmt::format("{}# As in {}:\n{}", text, name, others);
}

std::optional<plan::Measurement> probe_strategy(const std::string& file,
                                                const plan::Strategy& strategy, bool cpu) {
  if (train_program().empty())
    throw UsageError("plan",
                     "--probe runs steps, and libexec/lockstep-train is not there: this build has "
                     "no LibTorch.");
  const ScratchFolder folder("plan");
  const std::string planned = folder.path() + "/planned.yaml";
  write_file_atomically(planned, planned_text(load_document(file), file, strategy.settings));
  const int steps = kSteps + (cpu ? kFirstCpu : kFirstGpu);
  std::vector<std::string> arguments{"plan-probe",
                                     folder.path(),
                                     planned,
                                     fmt::format("--max_steps={}", steps),
                                     fmt::format("--logging_steps={}", steps),
                                     "--output_dir=" + folder.path() + "/out"};
  for (const char* off :
       {"save_strategy=no", "eval_strategy=no", "eval_on_start=false", "logging_strategy=steps",
        "load_best_model_at_end=false", "report_to=none", "record_run=false", "disable_tqdm=true",
        "elastic_gpu=false", "auto_find_batch_size=false", "resume_from_checkpoint=never",
        "early_stopping_patience=none"})
    arguments.push_back(std::string("--") + off);
  // `auto` may shard where the strategy does not.
  if (strategy.choice.distribution == plan::Distribution::kDdp)
    arguments.emplace_back("--shard_optimizer=false");
  if (cpu) arguments.emplace_back("--use_cpu=true");
  const plan::Choice& c = strategy.choice;
  const std::string what =
      fmt::format("{} x {}, {} x {}{}{}", c.gpus, parts_text(c, cpu), c.batch, c.accumulation,
                  strategy.checkpointing ? ", gradient checkpointing" : "",
                  strategy.fp8    ? ", 8 bits"
                  : strategy.half ? ", 16 bits"
                                  : "");
  const int ranks = c.distribution == plan::Distribution::kSplit ? 1 : c.gpus;
  const OtherPrograms others;
  const RanksOutcome end = run_ranks(
      {.ranks = ranks, .timeout_s = kTimeout_s, .arguments = std::move(arguments)}, folder.path());
  const auto seen = end.ok() ? read_ranks(folder.path(), ranks) : std::nullopt;
  if (!seen) {
    print_text(stderr, "probe: {}: {}\n", what,
               !end.in_time      ? fmt::format("not done after {} s", kTimeout_s)
               : end.ending.ok() ? fmt::format("the data ends before {} steps", steps)
                                 : "the ranks failed");
    if (!end.ok())
      for (const std::string& line : tail(end.output)) print_text(stderr, "  {}\n", line);
    return std::nullopt;
  }
  // What the allocator does not see is as planned.
  const std::uint64_t memory = seen->memory_bytes + c.memory.workspace + c.memory.context;
  plan::Measurement measured = measurement_of(strategy, seen->step_s, memory);
  measured.tokens = seen->tokens;
  measured.disturbance = others.text();
  print_text(stderr, "probe: {}: {:.1f} ms a step (the slowest of {}: {:.1f}), {:.2f} GiB{}\n",
             what, 1e3 * seen->step_s, kSteps, 1e3 * seen->longest_s,
             static_cast<double>(memory) / (1u << 30),
             measured.disturbance.empty() ? "" : "; " + measured.disturbance);
  return measured;
}

}  // namespace lockstep::cli
