// `lockstep doctor --run DIR`: where the time of a recorded run went, and what to change.
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/flags.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/text.h"
#include "lockstep/monitor/run_figures.h"
#include "lockstep/monitor/run_view.h"

namespace lockstep::cli {
namespace {

constexpr const char* kDoctorRunHelp =
    "usage: lockstep doctor --run DIR [--json]\n\n"
    "Where the time of a recorded run went, rank by rank, and what to change: each finding with\n"
    "its evidence, the flag or key, and the expected gain; the most valuable first. DIR is the\n"
    "output_dir of a Trainer, or what `lockstep run --record DIR` wrote; the run may still last.\n"
    "Ends with 0 when nothing was found, with 1 when something was, and with 2 for a mistake in "
    "the\n"
    "command. docs/doctor.md describes the rules.\n\n"
    "  --json   the same as one JSON object\n";

// ------------------------------------------------------------------ text

std::string run_head_text(const std::string& directory, const monitor::RunFacts& facts) {
  std::string text =
      fmt::format("{}: {} rank{}", directory, facts.world_size, facts.world_size == 1 ? "" : "s");
  if (!facts.device.empty()) text += " on " + facts.device;
  if (!facts.backend.empty()) text += " over " + facts.backend;
  if (!facts.optimizer.empty()) text += ", " + facts.optimizer;
  return printable(text) + "\n\n";
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
                          figure(gpu.memory_bytes, 1u << 30, "GiB"), figure(gpu.power_w, 1, "W"));
    if (host.samples.size() > 0)
      text += fmt::format("host {}: all GPUs busy at once in {:.0f} % of {} samples\n", host.host,
                          100 * busy_together_share(host), host.samples.size());
  }
  return text.empty() ? text : text + "\n";
}

std::string findings_text(const monitor::RunRecord& run,
                          const std::vector<monitor::Finding>& findings) {
  std::string text;
  if (findings.empty()) {
    text = nothing_found_text(run) + "\n";
  } else if (const std::string missing = missing_ranks_text(run); !missing.empty()) {
    text = missing + "\n\n";
  }
  for (std::size_t i = 0; i < findings.size(); ++i)
    text += fmt::format("{}. {}\n", i + 1, finding_text(findings[i]));
  return text;
}

// ------------------------------------------------------------------ JSON

// Unknown values are omitted.
Node budget_node(const monitor::BudgetRow& row) {
  NodeMembers members = {{"rank", integer_node(row.rank)},
                         {"steps", integer_node(row.budget.steps)}};
  if (row.budget.steps > 0) {
    NodeMembers shares;
    for (const auto& [part, share] : row.shares) shares.emplace_back(part, real_node(share));
    members.emplace_back("step_s", real_node(row.budget.step_s()));
    members.emplace_back("shares", map_node(std::move(shares)));
  }
  if (row.collective_share)
    members.emplace_back("collective_share", real_node(*row.collective_share));
  members.emplace_back("cores", real_node(row.process() ? row.process()->cores : 0));
  members.emplace_back("resident_bytes",
                       integer_node(static_cast<std::int64_t>(row.all.resident_bytes)));
  return map_node(std::move(members));
}

Node gpus_node(const std::vector<monitor::HostGpus>& hosts) {
  const auto known = [](const std::optional<double>& v) { return v ? real_node(*v) : Node{}; };
  std::vector<Node> items;
  for (const monitor::HostGpus& host : hosts) {
    std::vector<Node> gpus;
    for (const monitor::GpuFigures& gpu : gpu_figures(host))
      gpus.push_back(map_node({{"index", integer_node(gpu.index)},
                               {"utilisation_percent", known(gpu.utilisation_percent)},
                               {"memory_bytes", known(gpu.memory_bytes)},
                               {"memory_share", known(gpu.memory_share)},
                               {"power_w", known(gpu.power_w)},
                               {"throttled_share", real_node(gpu.throttled_share)}}));
    items.push_back(
        map_node({{"host", integer_node(host.host)},
                  {"samples", integer_node(static_cast<std::int64_t>(host.samples.size()))},
                  {"busy_together_share", real_node(busy_together_share(host))},
                  {"gpus", list_node(std::move(gpus))}}));
  }
  return list_node(std::move(items));
}

Node diagnosis_node(const monitor::RunRecord& run, const std::vector<monitor::BudgetRow>& rows,
                    const std::vector<monitor::Finding>& findings) {
  std::vector<Node> ranks;
  for (const monitor::BudgetRow& row : rows) ranks.push_back(budget_node(row));
  return map_node({{"healthy", bool_node(findings.empty() && enough_to_judge(run))},
                   {"world_size", integer_node(run.facts.world_size)},
                   {"all_ranks_recorded", bool_node(is_complete(run))},
                   {"ranks", list_node(std::move(ranks))},
                   {"hosts", gpus_node(run.gpus)},
                   {"findings", findings_node(findings)}});
}

}  // namespace

int doctor_run_command(const Args& args) {
  if (print_help(args, kDoctorRunHelp)) return 0;
  std::string directory;
  bool json = false;
  Flags flags("doctor");
  flags.toggle("--json", json);
  flags.text("--run", directory, "DIR: which run? Write lockstep doctor --run DIR");
  for (const std::string& other : flags.read(args, /*keys=*/true))
    throw UsageError("doctor",
                     "'{}' does not go with --run; --json alone does. 'lockstep doctor --help'.",
                     other);
  if (directory.empty()) throw UsageError("doctor", "which run? Write lockstep doctor --run DIR.");
  const monitor::RunView view = monitor::read_run_view(directory);
  const monitor::RunRecord& run = *view.record;
  const auto& findings = view.findings;
  const auto rows = monitor::budget_rows(run);
  if (json)
    print_text("{}\n", to_json(diagnosis_node(run, rows, findings)));
  else
    print_text("{}{}\n\n{}{}", run_head_text(directory, run.facts),
               table_text(monitor::budget_table(rows)), gpus_text(run.gpus),
               findings_text(run, findings));
  return findings.empty() ? 0 : 1;
}

}  // namespace lockstep::cli
