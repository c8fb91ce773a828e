// The HTML report of a run, and of two runs side by side.
//
//   const monitor::RunView run = monitor::read_run_view("out", monitor::Detail::kAll);
//   write_file_atomically("out/report.html", run_report(run));
//
// Pure functions of what was read; call them from any thread.
#pragma once

#include <string>
#include <vector>

#include "lockstep/monitor/run_view.h"

namespace lockstep::report {

std::string run_report(const monitor::RunView& run);
std::string comparison_report(const monitor::RunView& a, const monitor::RunView& b);

// What the report lists, for the page of a run that is over (RunView::tables).
std::vector<monitor::Table> run_tables(const monitor::RunView& run);

// The findings as a section's content: one entry each, or that there are none, or no record.
std::string findings_html(const monitor::RunView& run);

}  // namespace lockstep::report
