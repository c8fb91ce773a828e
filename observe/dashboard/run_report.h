// What a run has left, for the page: its state with tables and charts; of two runs what differs.
//
//   const RunView run = monitor::read_run_view("out", monitor::Detail::kAll);
//   write_file_atomically("out/report.html", page_file(report_state(run)));
//
// Pure functions of what was read; call them from any thread.
#pragma once

#include <string>
#include <vector>

#include "observe/dashboard/page.h"
#include "observe/dashboard/run_summary.h"

namespace lockstep::dashboard {

// The state that the page draws (docs/dashboard.md).
Node report_state(const RunView& run);
Node comparison_state(const RunView& a, const RunView& b);

// Its tables and charts.
std::vector<monitor::Table> run_tables(const RunView& run);
// Over the seconds since the start: load of each GPU, cores of each rank, phases of each rank.
std::vector<Chart> charts_of(const monitor::RunRecord& run);

struct NamedRun {
  std::string name{};
  const RunView* run = nullptr;
};
// Members `findings`, each with the name of its run, and `verdict`, of the runs without any.
NodeMembers named_findings(const std::vector<NamedRun>& runs);
// A row of `budgets`: milliseconds of a step, and the shares of its phases.
Node budget_entry(const std::string& name, const monitor::Interval& budget);

}  // namespace lockstep::dashboard
