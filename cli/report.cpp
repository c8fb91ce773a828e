// `lockstep report`: what a run has recorded, as a page to read.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "cli/commands.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/report/run_report.h"

namespace lockstep::cli {
namespace {

constexpr const char* kHelp =
    "usage: lockstep report DIR [-o FILE]\n"
    "       lockstep report A B [-o FILE]\n\n"
    "Writes the report of a run, whose output_dir is DIR, as one HTML file without scripts and\n"
    "without anything to load: loss, learning rate, gradient norm and throughput over steps, the\n"
    "step budget and the utilisation of each rank, checkpoints, events, the configuration with\n"
    "the origin of each value, and what is worth changing. A and B are compared: figures with\n"
    "their ratios, curves in one chart, budgets, and the keys in which they differ. What a run\n"
    "has not recorded is said in the report.\n\n"
    "  -o FILE, --output FILE   default: DIR/report.html; of two runs: comparison.html\n";

struct Request {
  std::vector<std::string> runs;
  std::string output;
};

Request parse(const Args& args) {
  Request request;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "-o" || arg == "--output" || arg.starts_with("--output=")) {
      const bool apart = !arg.starts_with("--output=");
      if (apart && i + 1 == args.size()) throw UsageError("report", "{} needs a file.", arg);
      request.output = apart ? args[++i] : arg.substr(arg.find('=') + 1);
      if (request.output.empty()) throw UsageError("report", "--output needs a file.");
    } else if (arg.starts_with("-")) {
      throw UsageError("report", "there is no flag {}. 'lockstep report --help' lists them.", arg);
    } else {
      request.runs.push_back(arg);
    }
  }
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
  if (std::ranges::any_of(args, [](const auto& arg) { return arg == "--help" || arg == "-h"; })) {
    fmt::print("{}", kHelp);
    return 0;
  }
  const Request request = parse(args);
  const monitor::RunView first = monitor::read_run_view(request.runs[0], monitor::Detail::kAll);
  const std::string page =
      request.runs.size() == 1
          ? report::run_report(first)
          : report::comparison_report(
                first, monitor::read_run_view(request.runs[1], monitor::Detail::kAll));
  write_file_atomically(request.output, page);
  fmt::print("written to {}\n", request.output);
  return 0;
}

}  // namespace lockstep::cli
