#include "observe/dashboard/run_metrics.h"

#include "lockstep/monitor/resource_metrics.h"

namespace lockstep::dashboard {
namespace {

using monitor::Prometheus;
using monitor::RankStatus;

void publish(Prometheus& page, const monitor::RankState& rank) {
  const monitor::Labels labels = {{"rank", std::to_string(rank.rank)}};
  page.set({"lockstep_rank_up", "1 while the rank runs."}, labels,
           rank.status == RankStatus::kRunning ? 1 : 0);
  page.set({"lockstep_rank_failed", "1 after the rank has failed."}, labels,
           rank.status == RankStatus::kFailed ? 1 : 0);
  if (rank.step >= 0)
    page.set({"lockstep_step", "Optimizer steps that the rank has done."}, labels,
             static_cast<double>(rank.step));
  if (rank.step_ms > 0)
    page.set({"lockstep_step_seconds", "Time of a step, the mean of about the last 5 s."}, labels,
             rank.step_ms / 1e3);
  if (rank.newest && rank.newest->seconds > 0) {
    const monitor::PhaseSeconds spent = monitor::spent_s(*rank.newest);
    for (std::size_t i = 0; i < ledger::kPhases; ++i) {
      monitor::Labels both = labels;
      both.emplace_back("phase", monitor::phase_key(static_cast<ledger::Phase>(i)));
      page.set(
          {"lockstep_phase_ratio", "Share of the last interval that the rank spent in a phase."},
          both, spent[i] / rank.newest->seconds);
    }
  }
  if (rank.position)
    page.set({"lockstep_collective_sequence",
              "Number of the rank's collective: the oldest under way, else its newest."},
             labels, static_cast<double>(rank.position->sequence));
  if (rank.process) monitor::publish(page, rank.rank, *rank.process);
  monitor::publish(page, rank.rank, rank.cgroup);
}

}  // namespace

std::string RunMetrics::text(const monitor::RunView& view) {
  Prometheus page;
  for (const char* state : {"starting", "running", "ended", "failed"})
    page.set({"lockstep_run_state", "1 for the state that the run is in."}, {{"state", state}},
             view.state == state ? 1 : 0);
  page.set({"lockstep_stall_seconds", "How long no rank has moved; 0 while they do."}, {},
           view.stall ? view.stall->seconds : 0);
  page.set({"lockstep_world_size", "Ranks of the run, on all hosts."}, {}, view.facts().world_size);
  page.set({"lockstep_run_attempt", "How often all ranks were started again."}, {}, view.attempt);
  page.set({"lockstep_run_start_time_seconds", "When the run began, since the epoch."}, {},
           view.started_s);
  if (view.facts().total_steps > 0)
    page.set({"lockstep_total_steps", "Optimizer steps that the run will have done at its end."},
             {}, static_cast<double>(view.facts().total_steps));
  if (const auto left = seconds_left(view))
    page.set({"lockstep_left_seconds", "Until the last step, as the run went so far."}, {}, *left);
  if (const auto loss = newest_logged(view, "loss"))
    page.set({"lockstep_loss", "Training loss that was logged last."}, {}, *loss);
  if (const auto rate = newest_logged(view, "tokens_per_second"))
    page.set({"lockstep_tokens_per_second", "Tokens per second of all ranks, as logged last."}, {},
             *rate);
  for (const std::string& name : monitor::metric_names(view.metrics))
    page.set({"lockstep_logged", "What the program logged last, by its name."}, {{"name", name}},
             *newest_logged(view, name));
  for (const monitor::Finding& finding : view.findings) rules_.insert(finding.rule);
  for (const std::string& rule : rules_) {
    double count = 0;
    for (const monitor::Finding& finding : view.findings) count += finding.rule == rule ? 1 : 0;
    page.set({"lockstep_findings", "What slows the run down now, by rule."}, {{"rule", rule}},
             count);
  }
  for (const monitor::RankState& rank : view.ranks) publish(page, rank);
  if (view.gpus.newest) monitor::publish(page, view.gpus);
  return page.text();
}

}  // namespace lockstep::dashboard
