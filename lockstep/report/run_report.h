// The HTML report of a run, and of two runs side by side.
//
//   const RunFolder run = read_run_folder("out");
//   write_file_atomically("out/report.html", run_report(run, monitor::diagnose));
//
// Pure functions of what was read; call them from any thread.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/monitor/diagnosis.h"
#include "lockstep/report/run_folder.h"

namespace lockstep::report {

// What rules say of a record; an empty function: nobody was asked.
using Diagnose = std::function<std::vector<monitor::Finding>(const monitor::RunRecord&)>;

std::string run_report(const RunFolder& run, const Diagnose& diagnose);
std::string comparison_report(const RunFolder& a, const RunFolder& b, const Diagnose& diagnose);

// The findings as a section's content: one entry each, or that there are none, or no judge.
std::string findings_html(const RunFolder& run, const Diagnose& diagnose);

}  // namespace lockstep::report
