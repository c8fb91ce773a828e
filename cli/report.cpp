// `lockstep report`: what a run has recorded, as a page to read.

#include <cstdio>
#include <filesystem>

#include "cli/commands.h"
#include "cli/flags.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "observe/report/run_report.h"

namespace lockstep::cli {
namespace {

constexpr const char* kReportHelp =
    "usage: lockstep report DIR [-o FILE]\n"
    "       lockstep report A B [-o FILE]\n\n"
    "Writes the report of a run, whose output_dir is DIR, as one HTML file without scripts and\n"
    "without anything to load: loss, learning rate, gradient norm and throughput over steps, the\n"
    "step budget and the utilisation of each rank, checkpoints, events, the configuration with\n"
    "the origin of each value, and what is worth changing. A and B are compared: figures with\n"
    "their ratios, curves in one chart, budgets, and the keys in which they differ. What a run\n"
    "has not recorded is said in the report.\n\n"
    "  -o FILE, --output FILE   default: DIR/report.html; of two runs: comparison.html\n";

struct ReportRequest {
  std::vector<std::string> runs;
  std::string output;
};

ReportRequest parse_report(const Args& args) {
  ReportRequest request;
  Flags flags("report");
  flags.text("-o,--output", request.output, "a file");
  request.runs = flags.read(args);
  if (request.runs.empty() || request.runs.size() > 2)
    throw UsageError("report", "{} folders were given. Give one run, or two to compare.",
                     request.runs.size());
  if (request.output.empty())
    request.output = request.runs.size() == 2
                         ? "comparison.html"
                         : (std::filesystem::path(request.runs[0]) / "report.html").string();
  return request;
}

}  // namespace

int report_command(const Args& args) {
  if (print_help(args, kReportHelp)) return 0;
  const ReportRequest request = parse_report(args);
  const monitor::RunView first = monitor::read_run_view(request.runs[0], monitor::Detail::kAll);
  const std::string page =
      request.runs.size() == 1
          ? report::run_report(first)
          : report::comparison_report(
                first, monitor::read_run_view(request.runs[1], monitor::Detail::kAll));
  write_file_atomically(request.output, page);
  print_text("written to {}\n", request.output);
  return 0;
}

}  // namespace lockstep::cli
