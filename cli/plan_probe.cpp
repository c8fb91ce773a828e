#include "cli/plan_probe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "cli/local_ranks.h"
#include "cli/plan_write.h"
#include "cli/print.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"

namespace lockstep::cli {
namespace {

constexpr int kSteps = 3;
// On a GPU the first steps load kernels, and a step is captured after a few.
constexpr int kFirstGpu = 8;
constexpr int kFirstCpu = 1;

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

}  // namespace

std::optional<plan::Measurement> probe_way(const std::string& file, const plan::Way& way,
                                           const ProbeOptions& options) {
  if (train_program().empty())
    throw UsageError("plan",
                     "--probe runs steps, and libexec/lockstep-train is not there: this build has "
                     "no LibTorch.");
  const ScratchFolder folder("plan");
  const std::string planned = folder.path() + "/planned.yaml";
  write_file_atomically(planned, with_settings(read_file(file), way.settings, file));
  const int steps = kSteps + (options.cpu ? kFirstCpu : kFirstGpu);
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
  // `auto` may shard where the way does not.
  if (way.choice.strategy == plan::Strategy::kDdp)
    arguments.emplace_back("--shard_optimizer=false");
  if (options.cpu) arguments.emplace_back("--use_cpu=true");
  const plan::Choice& c = way.choice;
  const std::string what =
      fmt::format("{} x {}, {} x {}{}{}", c.gpus, parts_text(c, options.cpu), c.batch,
                  c.accumulation, way.checkpointing ? ", gradient checkpointing" : "",
                  way.fp8    ? ", 8 bits"
                  : way.half ? ", 16 bits"
                             : "");
  const int ranks = c.strategy == plan::Strategy::kSplit ? 1 : c.gpus;
  const OtherPrograms others;
  const RanksOutcome end =
      run_ranks({.ranks = ranks, .timeout_s = options.timeout_s, .arguments = std::move(arguments)},
                folder.path());
  const auto seen = end.ok() ? read_ranks(folder.path(), ranks) : std::nullopt;
  if (!seen) {
    print_text(stderr, "probe: {}: {}\n", what,
               !end.in_time      ? fmt::format("not done after {} s", options.timeout_s)
               : end.ending.ok() ? fmt::format("the data ends before {} steps", steps)
                                 : "the ranks failed");
    if (!end.ok())
      for (const std::string& line : tail(end.output)) print_text(stderr, "  {}\n", line);
    return std::nullopt;
  }
  // What the allocator does not see is as planned.
  const std::uint64_t memory = seen->memory_bytes + c.memory.workspace + c.memory.context;
  plan::Measurement measured = measurement_of(way, seen->step_s, memory);
  measured.tokens = seen->tokens;
  measured.disturbance = others.text();
  print_text(stderr, "probe: {}: {:.1f} ms a step (the slowest of {}: {:.1f}), {:.2f} GiB{}\n",
             what, 1e3 * seen->step_s, kSteps, 1e3 * seen->longest_s,
             static_cast<double>(memory) / (1u << 30),
             measured.disturbance.empty() ? "" : "; " + measured.disturbance);
  return measured;
}

}  // namespace lockstep::cli
