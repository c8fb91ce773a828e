// `lockstep doctor --run DIR`: where the time of a recorded run went, and what to change.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "cli/commands.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/printable.h"
#include "lockstep/monitor/diagnosis.h"
#include "lockstep/monitor/gpu_figures.h"

namespace lockstep::cli {
namespace {

using ledger::index;
using ledger::Phase;
using monitor::Budget;

constexpr double kGiB = 1u << 30;
constexpr const char* kHelp =
    "usage: lockstep doctor --run DIR [--json]\n\n"
    "Where the time of a recorded run went, rank by rank, and what to change: each finding with\n"
    "its evidence, the flag or key, and the expected gain; the most valuable first. DIR is the\n"
    "output_dir of a Trainer, or what `lockstep run --record DIR` wrote; the run may still last.\n"
    "Ends with 0 when nothing was found, with 1 otherwise. docs/doctor.md describes the rules.\n\n"
    "  --json   the same as one JSON object\n";

// What a step is made of, in its order. The rest is "other".
constexpr Phase kParts[] = {Phase::kData,          Phase::kForward,   Phase::kBackward,
                            Phase::kCommunication, Phase::kOptimizer, Phase::kEvaluation,
                            Phase::kLogging,       Phase::kSaving};

struct Request {
  std::string directory{};
  bool json = false;
};

Request parse(const Args& args) {
  Request request;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "--json") {
      request.json = true;
    } else if (arg == "--run" && i + 1 < args.size()) {
      request.directory = args[++i];
    } else if (arg.starts_with("--run=")) {
      request.directory = arg.substr(arg.find('=') + 1);
    } else if (arg != "--run") {
      throw UsageError(
          "doctor", "'{}' does not go with --run. 'lockstep doctor --help' lists what does.", arg);
    }
  }
  if (request.directory.empty())
    throw UsageError("doctor", "which run? Write lockstep doctor --run DIR.");
  return request;
}

// ------------------------------------------------------------------ figures

struct Row {
  int rank = 0;
  Budget budget{};
  std::vector<double> shares{};  // of kParts, then the rest
  double cores = 0;
  std::uint64_t resident_bytes = 0;
};

// By the device's clock where it is there: a host that only enqueues is fast in every phase.
double part_s(const Budget& budget, Phase phase) {
  const bool on_device = std::ranges::any_of(budget.device_s, [](double s) { return s > 0; });
  const bool of_device = phase == Phase::kForward || phase == Phase::kBackward ||
                         phase == Phase::kCommunication || phase == Phase::kOptimizer;
  return on_device && of_device ? budget.device_s[index(phase)] : budget.host_s[index(phase)];
}

Row row_of(const monitor::RankRecord& rank, double from_unix_s) {
  Row row{.rank = rank.rank, .budget = budget_of(rank, 0, from_unix_s)};
  double rest = 1;
  for (const Phase phase : kParts) {
    row.shares.push_back(row.budget.seconds > 0 ? part_s(row.budget, phase) / row.budget.seconds
                                                : 0);
    rest -= row.shares.back();
  }
  row.shares.push_back(row.budget.seconds > 0 ? std::max(rest, 0.0) : 0);
  double seconds = 0;
  for (const monitor::Interval& interval : rank.intervals) {
    if (interval.unix_time_s < from_unix_s) continue;
    row.resident_bytes = std::max(row.resident_bytes, interval.resident_bytes);
    if (!interval.process || interval.steps == 0) continue;
    row.cores += interval.process->cores * interval.seconds;
    seconds += interval.seconds;
  }
  if (seconds > 0) row.cores /= seconds;
  return row;
}

std::string part_name(std::size_t part) {
  return part < std::size(kParts) ? ledger::name(kParts[part]) : "other";
}

// ------------------------------------------------------------------ text

std::string head_text(const Request& request, const monitor::RunFacts& facts) {
  std::string text = fmt::format("{}: {} rank{}", request.directory, facts.world_size,
                                 facts.world_size == 1 ? "" : "s");
  if (!facts.device.empty()) text += " on " + facts.device;
  if (!facts.backend.empty()) text += " over " + facts.backend;
  if (!facts.optimizer.empty()) text += ", " + facts.optimizer;
  return printable(text) + "\n\n";
}

std::string rows_text(const std::vector<Row>& rows) {
  std::string text = "rank    steps    step ms";
  for (std::size_t part = 0; part <= std::size(kParts); ++part)
    text += fmt::format("  {:>6}", part_name(part));
  text += "   cores      memory\n";
  for (const Row& row : rows) {
    text +=
        fmt::format("{:>4} {:>8} {:>10.2f}", row.rank, row.budget.steps, 1e3 * row.budget.step_s());
    for (std::size_t part = 0; part < row.shares.size(); ++part)
      text += fmt::format("  {:>{}.1f} %", 100 * row.shares[part],
                          std::max<std::size_t>(part_name(part).size(), 6) - 2);
    text += fmt::format("  {:>6.2f}  {:>6.2f} GiB\n", row.cores,
                        static_cast<double>(row.resident_bytes) / kGiB);
  }
  return text + "\n";
}

std::string figure(const std::optional<double>& value, double unit, const char* name) {
  return value ? fmt::format("{:.0f} {}", *value / unit, name) : "-";
}

std::string gpus_text(const std::vector<monitor::HostGpus>& hosts) {
  std::string text;
  for (const monitor::HostGpus& host : hosts) {
    for (const monitor::GpuFigures& gpu : gpu_figures(host))
      text += fmt::format("host {} GPU {}: {} busy, {} of memory, {}\n", host.host, gpu.index,
                          figure(gpu.utilisation_percent, 1, "%"),
                          figure(gpu.memory_bytes, kGiB, "GiB"), figure(gpu.power_w, 1, "W"));
    if (host.samples.size() > 0)
      text += fmt::format("host {}: all GPUs busy at once in {:.0f} % of {} samples\n", host.host,
                          100 * busy_together_share(host), host.samples.size());
  }
  return text.empty() ? text : text + "\n";
}

std::string findings_text(const monitor::RunRecord& run,
                          const std::vector<monitor::Finding>& findings) {
  if (findings.empty())
    return enough_to_judge(run) ? "healthy: no rule has found anything to change.\n"
                                : "nothing found, and too few steps to judge the run.\n";
  std::string text;
  for (std::size_t i = 0; i < findings.size(); ++i)
    text += fmt::format("{}. {}\n", i + 1, finding_text(findings[i]));
  return text;
}

// ------------------------------------------------------------------ JSON

Node optional_node(const std::optional<double>& value) {
  return value ? real_node(*value) : Node{};
}

Node row_node(const Row& row) {
  NodeMembers shares;
  for (std::size_t part = 0; part < row.shares.size(); ++part)
    shares.emplace_back(part_name(part), real_node(row.shares[part]));
  return map_node(
      {{"rank", integer_node(row.rank)},
       {"steps", integer_node(row.budget.steps)},
       {"step_s", real_node(row.budget.step_s())},
       {"shares", map_node(std::move(shares))},
       {"cores", real_node(row.cores)},
       {"resident_bytes", integer_node(static_cast<std::int64_t>(row.resident_bytes))}});
}

Node gpus_node(const std::vector<monitor::HostGpus>& hosts) {
  std::vector<Node> items;
  for (const monitor::HostGpus& host : hosts) {
    std::vector<Node> gpus;
    for (const monitor::GpuFigures& gpu : gpu_figures(host))
      gpus.push_back(map_node({{"index", integer_node(gpu.index)},
                               {"utilisation_percent", optional_node(gpu.utilisation_percent)},
                               {"memory_bytes", optional_node(gpu.memory_bytes)},
                               {"memory_share", optional_node(gpu.memory_share)},
                               {"power_w", optional_node(gpu.power_w)},
                               {"throttled_share", real_node(gpu.throttled_share)}}));
    items.push_back(
        map_node({{"host", integer_node(host.host)},
                  {"samples", integer_node(static_cast<std::int64_t>(host.samples.size()))},
                  {"busy_together_share", real_node(busy_together_share(host))},
                  {"gpus", list_node(std::move(gpus))}}));
  }
  return list_node(std::move(items));
}

Node report_node(const monitor::RunRecord& run, const std::vector<Row>& rows,
                 const std::vector<monitor::Finding>& findings) {
  std::vector<Node> ranks;
  for (const Row& row : rows) ranks.push_back(row_node(row));
  return map_node({{"healthy", bool_node(findings.empty() && enough_to_judge(run))},
                   {"world_size", integer_node(run.facts.world_size)},
                   {"ranks", list_node(std::move(ranks))},
                   {"hosts", gpus_node(run.gpus)},
                   {"findings", findings_node(findings)}});
}

}  // namespace

int doctor_run_command(const Args& args) {
  if (std::ranges::any_of(args, [](const auto& arg) { return arg == "--help" || arg == "-h"; })) {
    fmt::print("{}", kHelp);
    return 0;
  }
  const Request request = parse(args);
  const monitor::RunRecord run = monitor::read_run(request.directory);
  std::vector<Row> rows;
  for (const monitor::RankRecord& rank : run.ranks)
    rows.push_back(row_of(rank, run.facts.started_unix_s));
  const auto findings = monitor::diagnose(run);
  if (request.json)
    fmt::print("{}\n", to_json(report_node(run, rows, findings)));
  else
    fmt::print("{}{}{}{}", head_text(request, run.facts), rows_text(rows), gpus_text(run.gpus),
               findings_text(run, findings));
  return findings.empty() ? 0 : 1;
}

}  // namespace lockstep::cli
