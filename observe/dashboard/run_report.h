// Reports for the page: a finished run's state with tables and charts; how two runs differ.
//
//   const RunView run = monitor::read_run_view("out", monitor::Detail::kAll);
//   write_file_atomically("out/report.html", page_file(report_state(run)));
//
// Pure functions of the data that were read; call them from any thread.
#pragma once

#include <string>
#include <vector>

#include "observe/dashboard/page.h"
#include "observe/dashboard/run_summary.h"

namespace lockstep::dashboard {

// The states that the page draws (docs/dashboard.md).
Node report_state(const RunView& run);
Node comparison_state(const RunView& a, const RunView& b);

// The tables of the report; below, its charts.
std::vector<monitor::Table> run_tables(const RunView& run);
// Over the seconds since the start: load of each GPU, cores of each rank, phases of each rank.
std::vector<Chart> charts_of(const monitor::RunRecord& run);

struct NamedRun {
  std::string name{};
  const RunView* run = nullptr;
};
// The members `findings`, each with its run's name, and `verdict`, for runs without findings.
NodeMembers named_findings(const std::vector<NamedRun>& runs);
// A row of `budgets`: milliseconds of a step, and the shares of its phases.
Node budget_entry(const std::string& name, const monitor::Interval& budget);

}  // namespace lockstep::dashboard
