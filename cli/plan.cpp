// `lockstep plan`: what a training file costs on given GPUs, before a GPU is booked.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <span>
#include <sstream>

#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/plan_machine.h"
#include "cli/plan_probe.h"
#include "cli/plan_record.h"
#include "cli/plan_training.h"
#include "cli/plan_write.h"
#include "cli/print.h"
#include "cli/task_config.h"
#include "launcher/accelerate_config.h"
#include "lockstep/core/document.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/train/config.h"
#include "observe/plan/cards.h"
#include "observe/plan/ranking.h"
#include "observe/plan/scaling.h"
#include "observe/plan/strategy.h"

namespace lockstep::cli {
namespace {

constexpr const char* kPlanHelp =
    "usage: lockstep plan FILE [--gpus 4xH100-80GB | detected | cpu] [--tokens N]\n"
    "                     [--scale 8,64,512] [--link nvlink+ib400] [--gpus-per-node N]\n"
    "                     [--mfu SHARE | --tokens-per-second N] [--unfused] [--json]\n"
    "                     [--probe [--probe-ways N]] [--write FILE [--way K]] [--KEY VALUE ...]"
    "\n\n"
    "What training as FILE says costs: parameters, memory of each GPU, whether it fits, the\n"
    "strategy, batch and accumulation for 1, 2, 3, 4, ... GPUs, step time and speed-up; and the\n"
    "fastest ways to train with the same global batch. Reads no data and no weights. Ends with 1\n"
    "when it does not train as it is written, and says what to change.\n\n"
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
    "--probe              runs three steps of each of the best ways on this machine, which "
    "replace\n"
    "                     the estimates and are kept for the next plan\n"
    "--probe-ways N       how many of the best (4)\n"
    "--ways N|all         how many ways to show (8)\n"
    "--write FILE         the training file with the settings of the fastest way, or of way K\n"
    "--unfused            a language model of ATen's operations, which needs more memory\n"
    "docs/plan.md says how the figures are made and how far they can be trusted.\n";

constexpr double kFloor = 0.8;  // below this efficiency a run counts as one that stops scaling

struct PlanRequest {
  std::string file{};
  Args flags{};
  std::string gpus{};
  std::optional<double> tokens{};
  std::vector<int> scale{};
  std::string link{};
  std::optional<int> per_node{};
  plan::Speed speed{};
  bool unfused = false;
  bool json = false;
  std::string write{};
  std::optional<int> way{};
  std::size_t ways = 8;
  bool probe = false;
  int probe_ways = 4;
};

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
  flags.integer("--probe-ways", request.probe_ways, 1, 100);
  flags.text("--gpus", request.gpus, "a value. `lockstep plan --help` has examples");
  number("--tokens", 1, 1e18, request.tokens);
  flags.value("--scale", [&](const std::string& text) { request.scale = parse_counts(text); });
  flags.text("--link", request.link);
  flags.integer("--gpus-per-node", request.per_node, 1, 1024);
  flags.text("--write", request.write);
  flags.integer("--way", request.way, 1, 1000);
  flags.value("--ways", [&](const std::string& text) {
    request.ways = text == "all"
                       ? SIZE_MAX
                       : static_cast<std::size_t>(env::parse_int(text, "--ways", 1, 1000));
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
  std::error_code absent;  // what is not there is another file
  if (std::filesystem::equivalent(request.file, request.write, absent))
    throw UsageError("plan",
                     "--write {} would change the file that is planned. Give another path: --write "
                     "planned.yaml.",
                     request.write);
  if (request.way && request.write.empty())
    throw UsageError("plan", "--way {} chooses what --write FILE writes. Give that, too.",
                     *request.way);
  return request;
}

// ---------------------------------------------------------------- the plan

struct Row : plan::Timed {
  double speedup = 0;
};

struct Report {
  PlanRequest request;
  plan::Training training;
  plan::Devices devices;
  plan::Machine machine;
  plan::Parameters parameters;
  std::vector<std::string> notes{};
  std::vector<Row> rows{};
  std::vector<plan::ScalePoint> points{};
  int stops_at = 0;
  std::vector<plan::Change> changes{};
  std::uint64_t written_bytes = 0;  // what they are changes of
  std::vector<plan::Way> ways{};

  const char* device_text() const { return devices.card.cpu ? "rank" : "GPU"; }
  std::string devices_text(int count) const {
    return fmt::format("{} {}{}", count, device_text(), count == 1 ? "" : "s");
  }
  double utilisation() const {
    return request.speed.utilisation.value_or(plan::utilisation_of(training, devices.card));
  }
  bool fits() const { return rows.back().choice.as_written; }
  // It has room, and `lockstep train` does not take it: notes say why.
  bool refused() const {
    const plan::Choice& asked = rows.back().choice;
    return asked.fits && !plan::refusals(training, devices.card, asked).empty();
  }
  void note(std::string text) {
    if (std::ranges::find(notes, text) == notes.end()) notes.push_back(std::move(text));
  }
  std::string strategy(const plan::Choice& choice) const {
    return plan::parts_text(choice, devices.card.cpu);
  }
  const char* unit() const { return training.model.causal_lm() != nullptr ? "token" : "sample"; }
};

// 1, 2, 3, 4, then powers of two, and the count itself.
std::vector<int> counts_up_to(int count) {
  std::vector<int> counts;
  for (int n = 1; n < count; n = n < 4 ? n + 1 : 2 * n) counts.push_back(n);
  counts.push_back(count);
  return counts;
}

// What must be changed before `lockstep train` does what a row shows; empty: nothing.
std::string written_note(const Report& report, const plan::Choice& c) {
  const plan::Training& t = report.training;
  const std::string devices = report.devices_text(c.gpus);
  if (!c.fits) return "";
  if (c.strategy == plan::Strategy::kSplit && !t.device_map)
    return fmt::format(
        "{} hold this as the file computes it only when they split it: set model.device_map: "
        "balanced and start one rank (lockstep train FILE, without --nproc-per-node)",
        devices);
  if (c.strategy == plan::Strategy::kShardedOptimizer && !t.may_shard)
    return fmt::format(
        "{} hold this only with a sharded optimizer, and the file says shard_optimizer: false",
        devices);
  if (!fsdp_word(c.strategy).empty() && c.strategy != t.fsdp && !c.as_written)
    return fmt::format("{} hold this only when it is fully sharded: set fsdp: {}", devices,
                       fsdp_word(c.strategy));
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
void note_written(Report& report) {
  std::vector<std::int64_t> batches;
  for (auto row = report.rows.rbegin(); row != report.rows.rend(); ++row) {
    const plan::Choice& c = row->choice;
    std::string text = written_note(report, c);
    const bool asked = row == report.rows.rbegin();
    const bool trains =
        c.same_global_batch && c.gpus % (report.training.pipeline * report.training.tensor) == 0;
    if (text.empty() || (!asked && !trains)) continue;
    if (c.smaller_batch && std::ranges::find(batches, c.batch) != batches.end()) continue;
    batches.push_back(c.batch);
    report.note(std::move(text));
  }
}

// Why `lockstep train` does not take the file on the devices that were asked for, and on others
// that cannot share the global batch.
void note_refusals(Report& report, const plan::Choice& choice, bool asked = false) {
  if (choice.same_global_batch && !asked) return;
  for (std::string& text : plan::refusals(report.training, report.devices.card, choice))
    report.note(std::move(text));
}

void add_rows(Report& report) {
  for (const int gpus : counts_up_to(report.devices.count)) {
    const int copies = plan::written_copies(report.training, report.devices.card, gpus);
    if (report.training.global_batch && *report.training.global_batch < copies) {
      report.note(
          fmt::format("the global batch of {} samples has not one for each of {}: more do not help",
                      *report.training.global_batch, report.devices_text(gpus)));
      break;
    }
    report.rows.push_back({plan::timed(report.training, report.machine, gpus)});
    note_refusals(report, report.rows.back().choice);
  }
  const auto first =
      std::ranges::find_if(report.rows, [](const Row& r) { return r.step.has_value(); });
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

void add_scale(Report& report) {
  if (report.request.scale.empty()) return;
  report.points = plan::scale(report.training, report.machine, report.request.scale);
  if (report.points.empty())
    throw UsageError("plan",
                     "how fast {} computes is not known. Measure, and give --tokens-per-second.",
                     report.devices.card.name);
  report.stops_at = plan::stops_at(report.training, report.machine, kFloor);
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
void note_type(Report& report) {
  const plan::Card& card = report.devices.card;
  if (!report.training.half || !report.training.bf16 || card.bfloat16 || card.cpu) return;
  report.note(fmt::format(
      "{} has no tensor cores for bfloat16: planned at its float32 rate of {:.1f} TFLOP/s. fp16: "
      "true computes at {:.0f}",
      card.name, card.float_flops / 1e12, card.flops / 1e12));
}

// Ranked by estimates, and by what was measured on this machine. How fast a CPU is is not known
// before that, and the estimates of its ways are good for their order only.
void add_ways(Report& report, bool here) {
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
    known = saved_ways(key);
  plan::Machine machine = report.machine;
  if (cpu && !machine.speed.tokens_per_second && (request.probe || !known.empty()))
    machine.card = plan::assumed_cpu(machine.card, machine.cluster.cores);
  report.ways = plan::rank_ways(report.training, machine, report.devices.count);
  // With each measurement others may come to the front; in the end the first ones are measured.
  std::vector<plan::Measurement> fresh;
  for (int runs = 0; request.probe && runs < 2 * request.probe_ways; ++runs) {
    plan::use_measurements(report.ways, report.training, fresh);
    const auto end = report.ways.begin() +
                     static_cast<std::ptrdiff_t>(std::min(
                         report.ways.size(), static_cast<std::size_t>(request.probe_ways)));
    const auto next =
        std::find_if(report.ways.begin(), end, [](const plan::Way& way) { return !way.measured; });
    if (next == end) break;
    if (const auto seen = probe_way(request.file, *next, {.cpu = cpu})) {
      fresh.push_back(*seen);
      save_ways(key, {*seen});  // at once: the next one may be interrupted
    } else {
      report.ways.erase(next);
    }
  }
  for (const plan::Measurement& one : known)
    if (std::ranges::none_of(fresh, [&](const auto& other) { return one.is_like(other); }))
      fresh.push_back(one);
  plan::use_measurements(report.ways, report.training, fresh);
  if (const auto way = std::ranges::find_if(
          report.ways, [](const plan::Way& one) { return !one.disturbance.empty(); });
      way != report.ways.end())
    report.note(
        fmt::format("a way was measured while {}: measure again on an idle machine (--probe)",
                    way->disturbance));
}

// The data are not read, so the lengths of their samples are not known here.
void note_length(Report& report, const DataConfig& data) {
  if (data.name == "instructions" && data.padding == "longest")
    report.note(fmt::format(
        "planned with {} tokens in each sample; rows end with the longest sample of their batch, "
        "so a step may take less. --probe measures",
        report.training.model.length));
}

Report make_report(const PlanRequest& request) {
  const train::Config config =
      train::load_config(request.file, request.flags, launch::launcher_keys());
  const TaskConfig task = read_task(config.arguments, TaskFiles::kUnread);
  const Here here = devices_here(request.gpus);
  const int per_node = request.per_node.value_or(here.devices.card.cpu ? here.devices.count : 8);
  Report report{.request = request,
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
  add_rows(report);
  add_scale(report);
  add_ways(report, !here.name.empty());
  if (!report.fits() && !report.refused()) {
    const int gpus = report.rows.back().choice.gpus;
    report.changes = plan::changes(report.training, report.devices.card, gpus);
    report.written_bytes =
        plan::as_written(report.training, report.devices.card, gpus).memory.total();
  }
  return report;
}

// ---------------------------------------------------------------- text

std::string gib(std::uint64_t bytes) {
  return fmt::format("{:.2f}", static_cast<double>(bytes) / (1u << 30));
}

std::string duration(double seconds) {
  if (seconds < 120) return fmt::format("{:.1f} s", seconds);
  if (seconds < 2 * 3600) return fmt::format("{:.0f} min", seconds / 60);
  if (seconds < 48 * 3600) return fmt::format("{:.1f} h", seconds / 3600);
  return fmt::format("{:.1f} days", seconds / 86400);
}

std::string large(double value) {
  if (value >= 1e9) return fmt::format("{:.2f} B", value / 1e9);
  if (value >= 1e6) return fmt::format("{:.1f} M", value / 1e6);
  return fmt::format("{:.0f}", value);
}

std::string plan_head_text(const Report& r) {
  const plan::Training& t = r.training;
  const plan::Card& card = r.devices.card;
  const auto total = static_cast<double>(r.parameters.total());
  std::string text = fmt::format(
      "model     {} parameters, {} trained{}; {:.3g} GFLOP a {}\n", large(total),
      r.parameters.frozen == 0 ? "all" : large(static_cast<double>(r.parameters.trainable)),
      r.parameters.unused == 0
          ? ""
          : fmt::format(", {} used by a token",
                        large(total - static_cast<double>(r.parameters.unused))),
      plan::flops_per_token(t.model) / 1e9, r.unit());
  const char* logits = t.model.causal_lm() == nullptr ? ""
                       : t.unfused || card.cpu        ? ", logits as a whole"
                                                      : ", fused, logits in chunks";
  const bool captured = t.captured && !card.cpu && !t.fsdp && t.pipeline * t.tensor == 1;
  text += fmt::format("training  {}{}, gradient checkpointing {}{}{}\n",
                      t.model.length > 1 ? fmt::format("{} tokens a sample, ", t.model.length) : "",
                      t.fp8    ? "fp8 and 16-bit autocast"
                      : t.half ? "16-bit autocast"
                               : "float32",
                      t.checkpointing ? "on" : "off", logits, captured ? ", one CUDA graph" : "");
  text += fmt::format("devices   {} x {}, {} GiB each\n", r.devices.count, card.name,
                      card.memory_bytes > 0 ? gib(card.memory_bytes) : "unknown");
  std::string speed = std::ranges::any_of(r.ways, &plan::Way::measured)
                          ? "speed as measured"
                          : "speed not known: use --probe, or give --tokens-per-second";
  if (r.request.speed.tokens_per_second)
    speed =
        fmt::format("{:.0f} {}s/s measured on one", *r.request.speed.tokens_per_second, r.unit());
  else if (plan::peak_flops(t, card) > 0)
    speed = fmt::format("{:.0f} % of {:.0f} TFLOP/s", 100 * r.utilisation(),
                        plan::peak_flops(t, card) / 1e12);
  return text + fmt::format("assumed   {}; {}\n", speed, r.machine.cluster.text);
}

// Of the column in which choices have their strategies.
int strategy_width(const Report& r, const auto& choices) {
  std::size_t width = 32;
  for (const auto& one : choices) width = std::max(width, r.strategy(one.choice).size() + 1);
  return static_cast<int>(width);
}

std::string rows_text(const Report& r) {
  const int width = strategy_width(r, r.rows);
  const bool timed =
      std::ranges::any_of(r.rows, [](const Row& row) { return row.step.has_value(); });
  std::string text =
      fmt::format("\n{:>5}  {:<{}}{:>14}{:>8}{:>10}  {:<5}", r.device_text() + std::string("s"),
                  "strategy", width, "batch x accum", "global", "GiB each", "fits");
  if (timed)
    text += fmt::format("{:>11}{:>12}{:>10}", "ms/step", r.unit() + std::string("s/s"), "speed-up");
  if (timed && r.request.tokens)
    text += fmt::format("{:>18}", large(*r.request.tokens) + " " + r.unit() + "s");
  text += "\n";
  for (const Row& row : r.rows) {
    const plan::Choice& c = row.choice;
    text += fmt::format("{:>5}  {:<{}}{:>14}{:>8}{:>10}  {:<5}", c.gpus, r.strategy(c), width,
                        fmt::format("{} x {}", c.batch, c.accumulation), c.global_batch,
                        gib(c.memory.total()), c.fits ? "yes" : "no");
    if (row.step)
      text += fmt::format("{:>11.1f}{:>12.0f}{:>9.2f}x", 1e3 * row.step->total_s(),
                          row.tokens_per_second, row.speedup);
    if (row.step && r.request.tokens)
      text += fmt::format("{:>18}", duration(*r.request.tokens / row.tokens_per_second));
    text += "\n";
  }
  return text;
}

std::string memory_text(const Report& r) {
  const plan::Choice& c = r.rows.back().choice;
  const plan::Memory& m = c.memory;
  std::string text = fmt::format("\nmemory of a {} at its peak ({}), {}, GiB:\n", r.device_text(),
                                 m.moment, r.devices_text(c.gpus));
  const auto line = [&](const char* name, std::uint64_t bytes) {
    const bool small = bytes > 0 && bytes < (1u << 30);
    text += fmt::format("  {:<34}{:>9}{}\n", name, gib(small ? bytes << 10 : bytes),
                        small ? " MiB" : "");
  };
  line("parameters", m.parameters);
  line("16-bit copies of weights", m.copies);
  line("gradients", m.gradients);
  line("optimizer state", m.optimizer);
  line("activations", m.activations);
  if (r.training.model.causal_lm() != nullptr) line("logits and their gradients", m.head);
  if (!r.devices.card.cpu) {
    line("workspace and fragmentation", m.workspace);
    line(c.replicas() > 1 ? "CUDA and NCCL" : "CUDA", m.context);
  }
  line("together", m.total());
  return text;
}

std::string scale_text(const Report& r) {
  if (r.points.empty()) return "";
  const bool held = r.training.global_batch.has_value();
  std::string text = fmt::format(
      "\nscaling, {}, {}:\n",
      held ? "the global batch is held" : fmt::format("the same work on every {}", r.device_text()),
      r.machine.cluster.text);
  text += fmt::format("{:>7}{:>15}{:>9}{:>11}{:>11}{:>15}{:>11}{:>12}{:>14}\n",
                      r.device_text() + std::string("s"), "batch x accum", "global", "ms/step",
                      "compute", "communication", "exposed", "efficiency",
                      r.unit() + std::string("s/s"));
  for (const plan::ScalePoint& p : r.points) {
    text += fmt::format("{:>7}{:>15}{:>9}", p.choice.gpus,
                        fmt::format("{} x {}", p.choice.batch, p.choice.accumulation),
                        p.choice.global_batch);
    text += p.choice.fits ? fmt::format("{:>11.1f}{:>11.1f}{:>15.1f}{:>11.1f}{:>11.1f}%{:>14.0f}\n",
                                        1e3 * p.step.total_s(), 1e3 * p.step.compute_s,
                                        1e3 * p.step.communication_s, 1e3 * p.step.exposed_s,
                                        100 * p.efficiency, p.tokens_per_second)
                          : "  does not fit\n";
  }
  if (std::ranges::none_of(r.points, [](const auto& p) { return p.choice.fits; })) return text;
  if (r.stops_at > 0)
    return text + fmt::format("efficiency falls below {:.0f} % at {}\n", 100 * kFloor,
                              r.devices_text(r.stops_at));
  return text + fmt::format("efficiency stays above {:.0f} % up to {}{}\n", 100 * kFloor,
                            r.devices_text(plan::most_gpus(r.training)),
                            held ? ", one for each sample of the global batch" : "");
}

std::string changes_text(const Report& r) {
  if (r.fits()) return "";
  if (r.refused())
    return fmt::format(
        "\nAs the file is written lockstep train refuses it on {}: the notes say what to change.\n",
        r.devices_text(r.rows.back().choice.gpus));
  const bool other = r.rows.back().choice.fits;  // what the table shows does
  std::string text = fmt::format("\n{} does not fit ({} GiB are usable).",
                                 other ? "As the file is written it" : "It",
                                 gib(plan::usable_bytes(r.devices.card)));
  if (!r.changes.empty())
    text += fmt::format(" What to change, cheapest first, GiB:\n  {:<58}{:>8}{:>10}  {}\n", "",
                        "alone", "together", "cost") +
            fmt::format("  {:<58}{:>7} {:>9}\n", "as the file is written", gib(r.written_bytes),
                        gib(r.written_bytes));
  for (const plan::Change& c : r.changes)
    text += fmt::format("  {:<58}{:>8}{:>10}{} {}\n", c.text,
                        gib(c.alone_bytes) + (c.alone_fits ? "*" : " "), gib(c.together_bytes),
                        c.together_fits ? "*" : " ", c.cost);
  if (!r.changes.empty() && r.changes.back().together_fits) return text + "  * fits\n";
  if (!r.ways.empty())
    return text + (r.changes.empty() ? " " : "Even together they do not suffice. ") +
           "The ways above change more.\n";
  return text + fmt::format("{}Use {}, or a smaller model.\n",
                            r.changes.empty() ? " " : "Even together they do not suffice. ",
                            r.devices.card.cpu ? "a host with more memory, fewer ranks"
                                               : "a card with more memory, more GPUs");
}

std::string settings_text(const plan::Way& way) {
  std::string text;
  for (const plan::Setting& setting : way.settings)
    text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", setting.key, setting.value);
  return text.empty() ? "as it is written" : text;
}

std::string ways_text(const Report& r) {
  if (r.ways.size() < 2) return "";
  const std::span shown(r.ways.data(), std::min(r.ways.size(), r.request.ways));
  const int width = strategy_width(r, shown);
  std::string text = fmt::format(
      "\nways to train with a global batch of {}, the fastest first{}:\n{:>4}{:>6}  {:<{}}{:>14}"
      "{:>10}{:>11}{:>12}",
      r.ways.front().choice.global_batch,
      r.ways.size() > r.request.ways
          ? fmt::format(" ({} of {}; --ways all shows all)", r.request.ways, r.ways.size())
          : "",
      "way", r.device_text() + std::string("s"), "strategy", width, "batch x accum", "GiB each",
      "ms/step", r.unit() + std::string("s/s"));
  const bool measured = std::ranges::any_of(r.ways, &plan::Way::measured);
  if (measured) text += fmt::format("{:>11}", "");
  if (r.request.tokens)
    text += fmt::format("{:>18}", large(*r.request.tokens) + " " + r.unit() + "s");
  text += "  what to set\n";
  for (std::size_t i = 0; i < shown.size(); ++i) {
    const plan::Way& way = shown[i];
    const plan::Choice& c = way.choice;
    text += fmt::format("{:>4}{:>6}  {:<{}}{:>14}{:>10}{:>11.1f}{:>12.0f}", i + 1, c.gpus,
                        r.strategy(c), width, fmt::format("{} x {}", c.batch, c.accumulation),
                        gib(way.memory_bytes()), 1e3 * way.step->total_s(), way.tokens_per_second);
    if (measured) text += fmt::format("{:>11}", way.measured ? "measured" : "estimate");
    if (r.request.tokens)
      text += fmt::format("{:>18}", duration(*r.request.tokens / way.tokens_per_second));
    text += fmt::format("  {}\n", settings_text(way));
  }
  if (const int used = r.ways.front().choice.gpus; used < r.devices.count)
    text += fmt::format("way 1 uses {} of {}\n", used, r.devices_text(r.devices.count));
  return text;
}

// ---------------------------------------------------------------- --write

void write_way(const Report& r) {
  const PlanRequest& request = r.request;
  if (request.write.empty()) return;
  if (r.ways.empty())
    throw UsageError(
        "plan", "nothing is written to {}: {}.", request.write,
        r.rows.back().step ? "no way keeps the global batch"
        : r.rows.back().choice.fits
            ? "how fast the device computes is not known (--probe or --tokens-per-second)"
            : "nothing fits");
  const auto number = static_cast<std::size_t>(request.way.value_or(1));
  if (number > r.ways.size())
    throw UsageError("plan", "--way {}: there are {} ways.", number, r.ways.size());
  const plan::Way& way = r.ways[number - 1];
  write_file_atomically(request.write,
                        with_settings(read_file(request.file), way.settings, request.file));
  const int ranks = way.choice.strategy == plan::Strategy::kSplit ? 1 : way.choice.gpus;
  print_text(stderr, "written to {}: {}. Start it with `{}lockstep train {}`.\n", request.write,
             settings_text(way),
             ranks > 1 ? fmt::format("lockstep run --nproc-per-node={} ", ranks) : "",
             request.write);
}

// ---------------------------------------------------------------- JSON

Node way_node(const Report& r, const plan::Way& way) {
  NodeMembers settings;
  for (const plan::Setting& setting : way.settings)
    settings.push_back({setting.key, plain_scalar(setting.value, {})});
  const plan::Choice& c = way.choice;
  return map_node(
      {{"gpus", integer_node(c.gpus)},
       {"strategy", text_node(r.strategy(c))},
       {"per_device_train_batch_size", integer_node(c.batch)},
       {"gradient_accumulation_steps", integer_node(c.accumulation)},
       {"global_batch", integer_node(c.global_batch)},
       {"gradient_checkpointing", bool_node(way.checkpointing)},
       {"half", bool_node(way.half)},
       {"memory_bytes", integer_node(static_cast<std::int64_t>(way.memory_bytes()))},
       {"planned_memory_bytes", integer_node(static_cast<std::int64_t>(c.memory.total()))},
       {"measured", bool_node(way.measured)},
       {"disturbance", text_node(way.disturbance)},
       {"step_s", real_node(way.step->total_s())},
       {"estimated_step_s", real_node(way.estimate.total_s())},
       {"tokens_per_second", real_node(way.tokens_per_second)},
       {"settings", map_node(std::move(settings))}});
}

Node bytes_node(std::uint64_t value) {
  return integer_node(static_cast<std::int64_t>(value));
}

Node memory_node(const plan::Memory& m) {
  return map_node({{"parameters", bytes_node(m.parameters)},
                   {"copies", bytes_node(m.copies)},
                   {"gradients", bytes_node(m.gradients)},
                   {"optimizer", bytes_node(m.optimizer)},
                   {"activations", bytes_node(m.activations)},
                   {"logits", bytes_node(m.head)},
                   {"workspace", bytes_node(m.workspace)},
                   {"context", bytes_node(m.context)},
                   {"allocated", bytes_node(m.allocated())},
                   {"total", bytes_node(m.total())}});
}

NodeMembers step_members(const plan::StepTime& step) {
  return {{"step_s", real_node(step.total_s())},
          {"compute_s", real_node(step.compute_s)},
          {"communication_s", real_node(step.communication_s)},
          {"exposed_s", real_node(step.exposed_s)},
          {"optimizer_s", real_node(step.optimizer_s)}};
}

Node choice_node(const Report& r, const Row& row) {
  const plan::Choice& c = row.choice;
  NodeMembers members{{"gpus", integer_node(c.gpus)},
                      {"strategy", text_node(r.strategy(c))},
                      {"replicas", integer_node(c.replicas())},
                      {"gpus_per_replica", integer_node(c.gpus_per_replica())},
                      {"per_device_train_batch_size", integer_node(c.batch)},
                      {"gradient_accumulation_steps", integer_node(c.accumulation)},
                      {"global_batch", integer_node(c.global_batch)},
                      {"fits", bool_node(c.fits)},
                      {"as_written", bool_node(c.as_written)},
                      {"memory_bytes", memory_node(c.memory)},
                      {"peak_at", text_node(std::string(c.memory.moment))}};
  if (row.step) {
    for (auto& member : step_members(*row.step)) members.push_back(std::move(member));
    members.push_back({"tokens_per_second", real_node(row.tokens_per_second)});
    members.push_back({"speedup", real_node(row.speedup)});
    if (r.request.tokens)
      members.push_back({"training_s", real_node(*r.request.tokens / row.tokens_per_second)});
  }
  return map_node(std::move(members));
}

Node plan_node(const Report& r) {
  std::vector<Node> rows, points, changes, ways;
  for (const plan::Way& way : r.ways) ways.push_back(way_node(r, way));
  for (const Row& row : r.rows) rows.push_back(choice_node(r, row));
  for (const plan::ScalePoint& p : r.points) {
    NodeMembers members{{"gpus", integer_node(p.choice.gpus)},
                        {"per_device_train_batch_size", integer_node(p.choice.batch)},
                        {"gradient_accumulation_steps", integer_node(p.choice.accumulation)},
                        {"global_batch", integer_node(p.choice.global_batch)},
                        {"fits", bool_node(p.choice.fits)}};
    if (p.choice.fits) {
      for (auto& member : step_members(p.step)) members.push_back(std::move(member));
      members.push_back({"efficiency", real_node(p.efficiency)});
      members.push_back({"tokens_per_second", real_node(p.tokens_per_second)});
    }
    points.push_back(map_node(std::move(members)));
  }
  for (const plan::Change& c : r.changes)
    changes.push_back(map_node({{"change", text_node(c.text)},
                                {"cost", text_node(c.cost)},
                                {"alone_bytes", bytes_node(c.alone_bytes)},
                                {"alone_fits", bool_node(c.alone_fits)},
                                {"together_bytes", bytes_node(c.together_bytes)},
                                {"together_fits", bool_node(c.together_fits)}}));
  const plan::Card& card = r.devices.card;
  return map_node(
      {{"parameters", integer_node(r.parameters.total())},
       {"trainable_parameters", integer_node(r.parameters.trainable)},
       {"parameters_used_by_a_token", integer_node(r.parameters.total() - r.parameters.unused)},
       {"flops_per_token", real_node(plan::flops_per_token(r.training.model))},
       {"card", map_node({{"name", text_node(card.name)},
                          {"count", integer_node(r.devices.count)},
                          {"memory_bytes", bytes_node(card.memory_bytes)},
                          {"usable_bytes",
                           bytes_node(card.memory_bytes > 0 ? plan::usable_bytes(card) : 0)}})},
       {"link", text_node(r.machine.cluster.text)},
       {"utilisation", real_node(r.utilisation())},
       {"fits", bool_node(r.fits())},
       {"rows", list_node(std::move(rows))},
       {"scale", list_node(std::move(points))},
       {"stops_scaling_at", integer_node(r.stops_at)},
       {"changes", list_node(std::move(changes))},
       {"ways", list_node(std::move(ways))},
       {"notes", texts_node(r.notes)}});
}

}  // namespace

int plan_command(const Args& args) {
  if (print_help(args, kPlanHelp)) return 0;
  if (args.empty()) {
    print_text(stderr, "{}", kPlanHelp);
    return 2;
  }
  const Report report = make_report(parse_plan(args));
  if (report.request.json) {
    print_text("{}\n", to_json(plan_node(report)));
  } else {
    for (const std::string& note : report.notes) print_text(stderr, "note: {}\n", note);
    print_text("{}{}{}{}{}{}", plan_head_text(report), rows_text(report), memory_text(report),
               ways_text(report), scale_text(report), changes_text(report));
  }
  write_way(report);
  return report.fits() || !report.request.write.empty() ? 0 : 1;
}

}  // namespace lockstep::cli
