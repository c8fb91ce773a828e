// `lockstep report`: the dashboard's page of a run, or of two, as one file.

#include <filesystem>

#include "cli/commands.h"
#include "cli/flags.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "observe/dashboard/run_report.h"

namespace lockstep::cli {
namespace {

constexpr const char* kReportHelp =
    "usage: lockstep report DIR [-o FILE]\n"
    "       lockstep report A B [-o FILE]\n\n"
    "Writes the page that `lockstep dashboard DIR` shows of a run as one HTML file with its data\n"
    "inside, which needs no network and can be mailed: key figures, what is worth changing, "
    "curves\n"
    "over steps, the step budget and the utilisation of each rank, checkpoints, events and the\n"
    "configuration with the origin of each value. A and B are compared: figures with their "
    "ratios,\n"
    "curves in one chart, budgets, and the keys in which they differ. What a run has not recorded\n"
    "is said on the page.\n\n"
    "  -o FILE, --output FILE   default: DIR/report.html; of two runs: comparison.html\n";

}  // namespace

int report_command(const Args& args) {
  if (print_help(args, kReportHelp)) return 0;
  std::string output;
  Flags flags("report");
  flags.text("-o,--output", output, "a file");
  const Args runs = flags.read(args);
  if (runs.empty() || runs.size() > 2)
    throw UsageError("report", "{} folders were given. Give one run, or two to compare.",
                     runs.size());
  const bool two = runs.size() == 2;
  if (output.empty())
    output = two ? "comparison.html" : (std::filesystem::path(runs[0]) / "report.html").string();
  const auto read = [](const std::string& folder) {
    return monitor::read_run_view(folder, monitor::Detail::kAll);
  };
  const monitor::RunView first = read(runs[0]);
  const Node state =
      two ? dashboard::comparison_state(first, read(runs[1])) : dashboard::report_state(first);
  write_file_atomically(output, dashboard::page_file(state));
  print_text("written to {}\n", output);
  return 0;
}

}  // namespace lockstep::cli
