// `lockstep plan`: the memory and time of a training file on given GPUs, before one is rented.
#include "cli/plan.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <set>
#include <sstream>

#include "cli/commands.h"
#include "cli/local_ranks.h"
#include "cli/task_config.h"
#include "launcher/flags.h"
#include "launcher/host.h"
#include "lockstep/core/document.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"
#include "lockstep/core/json.h"
#include "lockstep/train/config.h"
#include "lockstep/train/config_keys.h"
#include "observe/plan/machine.h"
#include "observe/plan/ranking.h"
#include "observe/plan/strategy.h"

namespace lockstep::cli {
namespace {

constexpr const char* kPlanHelp =
    "usage: lockstep plan FILE [--gpus 4xH100-80GB | detected | cpu] [--tokens N]\n"
    "                     [--scale 8,64,512] [--link nvlink+ib400] [--gpus-per-node N]\n"
    "                     [--mfu SHARE | --tokens-per-second N] [--unfused] [--json]\n"
    "                     [--probe [--probe-strategies N]] [--write FILE [--strategy K]]\n"
    "                     [--KEY VALUE ...]\n\n"
    "What training as FILE says costs: parameters, memory of each GPU, whether it fits, the\n"
    "strategy, batch and accumulation for 1, 2, 3, 4, ... GPUs, step time and speed-up; and the\n"
    "fastest strategies to train with the same global batch. Reads no data and no weights. Ends\n"
    "with 1 when it does not train as it is written, and says what to change.\n\n"
    "--gpus               cards and how many; without it those of this machine\n"
    "--tokens N           time to train on so many tokens (50e9)\n"
    "--scale N,N,...      step time and efficiency on so many GPUs, with the file's global batch\n"
    "                     where it has one, otherwise with the same work on every GPU\n"
    "--link A[+B]         A inside a node: nvlink, pcie or pcie-host (no peer access); B between\n"
    "                     nodes: ib400 (a port of 400 Gbit/s for each GPU), ib1600/node,\n"
    "                     eth25/node; loopback: CPU ranks. Without it what `lockstep doctor` has\n"
    "                     measured on this machine, or what is usual for the card\n"
    "--gpus-per-node N    default 8; CPU ranks: all of them\n"
    "--mfu SHARE          of the card's peak that training reaches, in place of what follows from\n"
    "                     the model\n"
    "--tokens-per-second N   measured on one GPU with this file; wins over --mfu\n"
    "--probe              runs three steps of each of the best strategies on this machine,\n"
    "                     which replace the estimates and are kept for the next plan\n"
    "--probe-strategies N   how many of the best (4)\n"
    "--strategies N|all   how many strategies to show (8)\n"
    "--write FILE         a new training file with the settings of the fastest, or of K\n"
    "--unfused            a language model of ATen's operations, which needs more memory\n"
    "docs/plan.md says how the figures are made and how far they can be trusted.\n";

double parse_number(const std::string& text, const std::string& flag, double min, double max) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !(value >= min) ||
      !(value <= max))
    throw UsageError("plan", "{} needs a number from {} to {}, and got '{}'.", flag, min, max,
                     text);
  return value;
}

std::vector<int> parse_counts(const std::string& text) {
  std::vector<int> counts;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');)
    counts.push_back(static_cast<int>(env::parse_int(part, "--scale", 1, 1'000'000)));
  if (counts.empty()) throw UsageError("plan", "--scale needs counts of GPUs: --scale 8,64,512.");
  return counts;
}

PlanRequest parse_plan(const Args& args) {
  PlanRequest request;
  Flags flags("plan");
  const auto number = [&](const char* name, double min, double max, auto& to) {
    flags.value(
        name, [=, &to](const std::string& text) { to = parse_number(text, name, min, max); },
        "a value. `lockstep plan --help` has examples");
  };
  flags.toggle("--json", request.json);
  flags.toggle("--unfused", request.unfused);
  flags.toggle("--probe", request.probe);
  flags.integer("--probe-strategies", request.probe_strategies, 1, 100);
  flags.text("--gpus", request.gpus, "a value. `lockstep plan --help` has examples");
  number("--tokens", 1, 1e18, request.tokens);
  flags.value("--scale", [&](const std::string& text) { request.scale = parse_counts(text); });
  flags.text("--link", request.link);
  flags.value("--world-size,--world_size", [](const std::string& ranks) {
    throw UsageError("plan",
                     "there is no flag --world-size here: the cards and their number are one flag. "
                     "Write --gpus {}xH100-80GB, or another card.",
                     ranks);
  });
  flags.integer("--gpus-per-node", request.per_node, 1, 1024);
  flags.text("--write", request.write);
  flags.integer("--strategy", request.strategy, 1, 1000);
  flags.value("--strategies", [&](const std::string& text) {
    request.strategies =
        text == "all" ? SIZE_MAX
                      : static_cast<std::size_t>(env::parse_int(text, "--strategies", 1, 1000));
  });
  number("--mfu", 0.001, 1, request.speed.utilisation);
  number("--tokens-per-second", 1e-3, 1e12, request.speed.tokens_per_second);
  request.flags = flags.read(args, /*keys=*/true);
  const Args names = train::take_names(request.flags);
  if (names.size() != 1) throw UsageError("plan", "which training file? Write lockstep plan FILE.");
  request.file = names[0];
  if ((request.probe || !request.write.empty()) && !request.flags.empty())
    throw UsageError("plan",
                     "{} does not {} keys that are given as flags ({}). Set them in {} first.",
                     request.probe ? "--probe" : "--write FILE", request.probe ? "run" : "write",
                     request.flags.front(), request.file);
  if (!request.write.empty() &&
      std::filesystem::exists(std::filesystem::symlink_status(request.write)))
    throw UsageError(
        "plan",
        "--write makes a new file, and {} is there already. Give another path: --write "
        "planned.yaml.",
        request.write);
  if (request.strategy && request.write.empty())
    throw UsageError("plan", "--strategy {} chooses what --write FILE writes. Give that, too.",
                     *request.strategy);
  return request;
}

// ---------------------------------------------------------------- the plan

// 1, 2, 3, 4, then powers of two, and the count itself.
std::vector<int> counts_up_to(int count) {
  std::vector<int> counts;
  for (int n = 1; n < count; n = n < 4 ? n + 1 : 2 * n) counts.push_back(n);
  counts.push_back(count);
  return counts;
}

// How fast a CPU is is not known, and an assumption is good enough to tell strategies apart.
plan::Machine machine_to_rank(const PlanReport& report) {
  plan::Machine machine = report.machine;
  if (machine.card.cpu && !machine.speed.tokens_per_second)
    machine.card = plan::assumed_cpu(machine.card, machine.cluster.cores);
  return machine;
}

// The file's own strategy where that fits, and otherwise the fastest that computes as the file
// does: where it has all devices, the first such strategy of the table.
PlanRow row_of(const PlanReport& report, int gpus) {
  const plan::Training& t = report.training;
  const plan::Machine& machine = report.machine;
  const PlanRow usual{plan::timed(t, machine, gpus)};
  const plan::Choice& c = usual.choice;
  const plan::Parts own = plan::as_written(t, machine.card, gpus);
  if (c.fits && (c.as_written || own == c)) return usual;
  const bool in_table = gpus == report.devices.count && !report.strategies.empty();
  const std::vector<plan::Strategy> strategies =
      in_table ? report.strategies : plan::rank_strategies(t, machine_to_rank(report), gpus);
  const auto strategy = std::ranges::find_if(strategies, [&](const plan::Strategy& one) {
    return one.choice.gpus == gpus && one.checkpointing == t.checkpointing && one.half == t.half &&
           one.fp8 == t.fp8;
  });
  if (strategy == strategies.end()) return usual;
  PlanRow row{*strategy, 0, strategy->settings};
  if (in_table) row.number = 1 + static_cast<std::size_t>(strategy - strategies.begin());
  if (!plan::timed(t, machine, row.choice).step) row.step.reset();
  return row;
}

// The settings to change before `lockstep train` does what a row shows; empty: none.
std::string written_note(const PlanReport& report, const PlanRow& row) {
  const plan::Training& t = report.training;
  const plan::Choice& c = row.choice;
  const std::string devices = report.devices_text(c.gpus);
  if (!c.fits) return "";
  if (!row.settings.empty())
    return fmt::format(
        "{} do not hold this as it is written. The fastest that computes as the file does is {}{}: "
        "set {}{}",
        devices, row.number > 0 ? fmt::format("strategy {}, ", row.number) : "",
        report.strategy_text(c), settings_text(row.settings),
        c.distribution == plan::Distribution::kSplit
            ? " and start one rank (lockstep train FILE, without --nproc-per-node)"
            : "");
  if (!c.smaller_batch) return "";
  return fmt::format(
      "per_device_train_batch_size {} does not fit {}; {}. {}", t.batch, devices,
      t.global_batch
          ? fmt::format("{} keeps the global batch of {} with accumulation {}", c.batch,
                        c.global_batch, c.accumulation)
          : fmt::format("{} with gradient_accumulation_steps {} keeps the global batch of {}",
                        c.batch, c.accumulation, c.global_batch),
      t.pipeline * t.tensor > 1
          ? "Set it in the file"
          : (t.adapts.empty() ? "lockstep train --elastic_gpu" : t.adapts) + " sets it");
}

// The most devices first; rows that need the same batch share a note.
void note_written(PlanReport& report) {
  std::vector<std::int64_t> batches;
  for (auto row = report.rows.rbegin(); row != report.rows.rend(); ++row) {
    const plan::Choice& c = row->choice;
    std::string text = written_note(report, *row);
    const bool asked = row == report.rows.rbegin();
    const bool trains =
        c.same_global_batch && c.gpus % (report.training.pipeline * report.training.tensor) == 0;
    if (text.empty() || (!asked && (!trains || !row->settings.empty()))) continue;
    if (row->settings.empty()) {
      if (c.smaller_batch && std::ranges::find(batches, c.batch) != batches.end()) continue;
      batches.push_back(c.batch);
    }
    report.note(std::move(text));
  }
}

// Why `lockstep train` does not take the file on the devices that were asked for, and on others
// that cannot share the global batch.
void note_refusals(PlanReport& report, const plan::Choice& choice, bool asked = false) {
  if (choice.same_global_batch && !asked) return;
  for (std::string& text : plan::refusals(report.training, report.devices.card, choice))
    report.note(std::move(text));
}

void add_rows(PlanReport& report) {
  for (const int gpus : counts_up_to(report.devices.count)) {
    const int copies = plan::written_copies(report.training, report.devices.card, gpus);
    if (report.training.global_batch && *report.training.global_batch < copies) {
      report.note(fmt::format(
          "the global batch of {} samples is less than one for each of {}: more {}s do not help",
          *report.training.global_batch, report.devices_text(gpus), report.device_text()));
      break;
    }
    report.rows.push_back(row_of(report, gpus));
    note_refusals(report, report.rows.back().choice);
  }
  const auto first =
      std::ranges::find_if(report.rows, [](const PlanRow& r) { return r.step.has_value(); });
  for (auto row = first; row != report.rows.end(); ++row)
    if (row->step) row->speedup = row->tokens_per_second / first->tokens_per_second;
  if (first != report.rows.end() && first != report.rows.begin())
    report.note(fmt::format("the speed-up is over {}, the fewest that hold this",
                            report.devices_text(first->choice.gpus)));
  note_refusals(report, report.rows.back().choice, /*asked=*/true);
  note_written(report);
  if (!report.training.global_batch && (report.devices.count > 1 || !report.request.scale.empty()))
    report.note(
        fmt::format("the global batch grows with the {}s; global_batch_size (or "
                    "tokens_per_update) in the file holds it",
                    report.device_text()));
}

void add_scale(PlanReport& report) {
  if (report.request.scale.empty()) return;
  report.points = plan::scale(report.training, report.machine, report.request.scale);
  if (report.points.empty())
    throw UsageError("plan",
                     "how fast {} computes is not known. Measure, and give --tokens-per-second.",
                     report.devices.card.name);
  report.stops_at = plan::stops_at(report.training, report.machine, kPlanFloor);
  for (const plan::ScalePoint& point : report.points) {
    const int gpus = point.choice.gpus;
    if (report.training.global_batch && *report.training.global_batch < gpus)
      report.note(fmt::format(
          "{} are more than the global batch of {} samples: with one sample each it is {}",
          report.devices_text(gpus), *report.training.global_batch, point.choice.global_batch));
    else
      note_refusals(report, point.choice);
  }
}

// bf16 where the card has no tensor cores for it.
void note_type(PlanReport& report) {
  const plan::Card& card = report.devices.card;
  if (!report.training.half || !report.training.bf16 || card.bfloat16 || card.cpu) return;
  report.note(fmt::format(
      "{} has no tensor cores for bfloat16: planned at its float32 rate of {:.1f} TFLOP/s. fp16: "
      "true computes at {:.0f}",
      card.name, card.float_flops / 1e12, card.flops / 1e12));
}

// Ranked by estimates, and by what was measured on this machine. How fast a CPU is is not known
// before that, and the estimates of its strategies are good for their order only.
void add_strategies(PlanReport& report, bool here) {
  const PlanRequest& request = report.request;
  if (request.probe && !here)
    throw UsageError("plan",
                     "--probe runs on this machine, and --gpus {} may be elsewhere. Use "
                     "--gpus detected or cpu.",
                     request.gpus);
  const bool cpu = report.devices.card.cpu;
  const std::string key = training_key(report.training, cpu ? "cpu" : "gpu", report.devices.count);
  std::vector<plan::Measurement> known;
  if (here && !request.speed.tokens_per_second && !request.speed.utilisation)
    known = saved_strategies(key);
  const bool times = request.probe || !known.empty();
  report.strategies = plan::rank_strategies(
      report.training, times ? machine_to_rank(report) : report.machine, report.devices.count);
  // Each measurement may change the ranking; the loop ends when the first strategies are measured.
  std::vector<plan::Measurement> fresh;
  for (int runs = 0; request.probe && runs < 2 * request.probe_strategies; ++runs) {
    plan::use_measurements(report.strategies, report.training, fresh);
    const auto end =
        report.strategies.begin() +
        static_cast<std::ptrdiff_t>(
            std::min(report.strategies.size(), static_cast<std::size_t>(request.probe_strategies)));
    const auto next =
        std::find_if(report.strategies.begin(), end,
                     [](const plan::Strategy& strategy) { return !strategy.measured; });
    if (next == end) break;
    if (const auto seen = probe_strategy(request.file, *next, cpu)) {
      fresh.push_back(*seen);
      save_strategies(key, {*seen});  // at once: the next one may be interrupted
    } else {
      report.strategies.erase(next);
    }
  }
  for (const plan::Measurement& one : known)
    if (std::ranges::none_of(fresh, [&](const auto& other) { return one.is_like(other); }))
      fresh.push_back(one);
  plan::use_measurements(report.strategies, report.training, fresh);
  if (const auto strategy = std::ranges::find_if(
          report.strategies, [](const plan::Strategy& one) { return !one.disturbance.empty(); });
      strategy != report.strategies.end())
    report.note(
        fmt::format("a strategy was measured while {}: measure again on an idle machine (--probe)",
                    strategy->disturbance));
}

// The data are not read, so the lengths of their samples are not known here.
void note_length(PlanReport& report, const DataConfig& data) {
  if (data.name == "instructions" && data.padding == "longest")
    report.note(fmt::format(
        "planned with {} tokens in each sample; rows end with the longest sample of their batch, "
        "so a step may take less. --probe measures",
        report.training.model.length));
}

PlanReport make_report(const PlanRequest& request) {
  const train::Config config =
      train::load_config(request.file, request.flags, launch::launcher_keys());
  const TaskConfig task = read_task(config.arguments, TaskFiles::kUnread);
  const Here here = devices_here(request.gpus);
  const int per_node = request.per_node.value_or(here.devices.card.cpu ? here.devices.count : 8);
  PlanReport report{.request = request,
                    .training = training_of(config, task),
                    .devices = here.devices,
                    .machine = {},
                    .parameters = {}};
  report.training.unfused = request.unfused;
  report.training.node_gpus = per_node;
  // Ranks that share memory shard the optimizer where the file leaves it open.
  if (here.devices.card.cpu) report.training.sharded_optimizer = report.training.may_shard;
  report.machine = {report.devices.card, cluster_of(request.link, per_node, here), request.speed};
  report.parameters = plan::parameters_of(report.training.model);
  note_type(report);
  note_length(report, task.data);
  if (report.training.offload && !here.devices.card.cpu)
    report.note("offload: the host's memory and the time of copies from and to it are not planned");
  add_strategies(report, !here.name.empty());
  add_rows(report);
  add_scale(report);
  if (!report.fits() && !report.refused()) {
    const int gpus = report.rows.back().choice.gpus;
    report.changes = plan::changes(report.training, report.devices.card, gpus);
    report.written_bytes =
        plan::as_written(report.training, report.devices.card, gpus).memory.total();
  }
  return report;
}

// ---------------------------------------------------------------- --write

void write_strategy(const PlanReport& r) {
  const PlanRequest& request = r.request;
  if (request.write.empty()) return;
  if (r.strategies.empty())
    throw UsageError(
        "plan", "nothing is written to {}: {}.", request.write,
        r.rows.back().step ? "no strategy keeps the global batch"
        : r.rows.back().choice.fits
            ? "how fast the device computes is not known (--probe or --tokens-per-second)"
            : "nothing fits");
  const auto number = static_cast<std::size_t>(request.strategy.value_or(1));
  if (number > r.strategies.size())
    throw UsageError("plan", "--strategy {}: there are {} strategies.", number,
                     r.strategies.size());
  const plan::Strategy& strategy = r.strategies[number - 1];
  write_file_atomically(request.write,
                        planned_text(load_document(request.file), request.file, strategy.settings));
  const int ranks =
      strategy.choice.distribution == plan::Distribution::kSplit ? 1 : strategy.choice.gpus;
  print_text(stderr, "written to {}: {}. Start it with `{}lockstep train {}`.\n", request.write,
             settings_text(strategy.settings),
             ranks > 1 ? fmt::format("lockstep run --nproc-per-node={} ", ranks) : "",
             request.write);
}

// ---------------------------------------------------------------- devices

std::uint64_t host_memory() {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long size = ::sysconf(_SC_PAGESIZE);
  return pages > 0 && size > 0
             ? static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(size)
             : 0;
}

}  // namespace

Here devices_here(const std::string& gpus_text) {
  std::string text = gpus_text;
  if (text.empty() || text == "detected") {
    const bool cpu = text.empty() && env::get("LOCKSTEP_DEVICE") == "cpu";
    const launch::Gpus gpus = cpu ? launch::Gpus{} : launch::find_gpus();
    if (gpus.count > 0 || text == "detected")
      return {found_cards(gpus), gpus.models.empty() ? "" : gpus.models.front().name};
    text = "cpu";
  }
  plan::Devices devices = plan::parse_devices(text);
  if (!devices.card.cpu) return {devices, ""};
  devices.card.memory_bytes = host_memory() / static_cast<std::uint64_t>(devices.count);
  return {devices, "cpu"};
}

plan::Cluster cluster_of(const std::string& link, int per_node, const Here& here) {
  const plan::Card& card = here.devices.card;
  const char* usual = card.cpu          ? "loopback"
                      : card.nvlink > 0 ? "nvlink+ib400"
                      : card.peers      ? "pcie+eth100/node"
                                        : "pcie-host+eth100/node";
  plan::Cluster cluster = plan::parse_link(link.empty() ? usual : link, card, per_node);
  if (card.cpu) cluster.cores = allowed_cores();
  if (link.empty() && !here.name.empty())
    if (const auto measured = saved_link(here.name, here.devices.count))
      plan::use_measured(cluster, *measured);
  return cluster;
}

// ---------------------------------------------------------------- --probe

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

// ---------------------------------------------------------------- the command

int plan_command(const Args& args) {
  if (print_help(args, kPlanHelp)) return 0;
  if (args.empty()) {
    print_text(stderr, "{}", kPlanHelp);
    return 2;
  }
  const PlanReport report = make_report(parse_plan(args));
  if (report.request.json) {
    print_text("{}\n", to_json(plan_node(report)));
  } else {
    for (const std::string& note : report.notes) print_text(stderr, "note: {}\n", note);
    print_text("{}", plan_text(report));
  }
  write_strategy(report);
  return report.fits() || !report.request.write.empty() ? 0 : 1;
}

}  // namespace lockstep::cli
