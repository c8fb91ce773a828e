// The page of a recorded run, or of two, also after their end: `lockstep dashboard` serves it,
// `lockstep report` writes it to a file.
#include <fmt/format.h>
#include <signal.h>

#include <cstdio>
#include <filesystem>
#include <utility>

#include "cli/commands.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "observe/dashboard/http_server.h"
#include "observe/dashboard/page.h"

namespace lockstep::cli {
namespace {

constexpr const char* kDashboardHelp =
    "usage: lockstep dashboard [--listen WHERE] [RUN_DIR [OTHER_DIR]]\n\n"
    "Serves the page of `lockstep run --dashboard` for a run that was recorded: while it lasts,\n"
    "and after it has ended or failed. RUN_DIR is an output_dir of the Trainer, the directory of\n"
    "a RunLog, or the DIR of `lockstep run --record DIR` (default: the current directory). With\n"
    "OTHER_DIR the page compares two runs. Ends with Ctrl-C; `lockstep report` writes the page to\n"
    "a file.\n\n"
    "  --listen WHERE   a port, or a numeric address and a port (a free port of 127.0.0.1)\n";

// Records that will not change any more are read only once.
class RecordSource {
 public:
  explicit RecordSource(Args directories) : directories_(std::move(directories)) { read(); }

  std::string snapshot_json() {
    if (!over_) read();
    return json_;
  }

 private:
  static bool lasts(const monitor::RunView& run) { return run.state == "running"; }

  void read() {
    const auto all = [](const std::string& directory) {
      return monitor::read_run_view(directory, monitor::Detail::kAll);
    };
    if (directories_.size() == 2) {
      const monitor::RunView a = all(directories_[0]), b = all(directories_[1]);
      over_ = !lasts(a) && !lasts(b);
      json_ = to_json(dashboard::comparison_state(a, b));
      return;
    }
    const monitor::RunView run = monitor::read_run_view(directories_[0]);
    over_ = !lasts(run);
    json_ = over_ ? to_json(dashboard::report_state(all(directories_[0])))
                  : monitor::snapshot_json(run);
  }

  const Args directories_;
  bool over_ = false;
  std::string json_;
};

}  // namespace

int dashboard_command(const Args& args) {
  if (print_help(args, kDashboardHelp)) return 0;
  std::string listen;
  Flags flags("dashboard");
  flags.text("--listen", listen, "a port, or an address and a port");
  Args directories = flags.read(args);
  if (directories.size() > 2)
    throw UsageError("dashboard", "two runs are shown, and '{}' is a third one.", directories[2]);
  if (directories.empty()) directories = {"."};
  RecordSource source(std::move(directories));
  dashboard::HttpOptions options;
  if (const auto file = env::get("LOCKSTEP_DASHBOARD_TOKEN_FILE"))
    options.token = dashboard::read_token_file(*file);
  // Blocked before there are threads, which then take none of these; pages see the end of the
  // stream.
  sigset_t stop;
  ::sigemptyset(&stop);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&stop, signal);
  ::pthread_sigmask(SIG_BLOCK, &stop, nullptr);
  const dashboard::HttpServer server(
      dashboard::http_listen(listen, "--listen"),
      {.snapshot_json = [&] { return source.snapshot_json(); }, .metrics_text = {}, .ready = {}},
      options);
  const std::string url = server.url();
  fmt::print("[dashboard] {}\n", options.token.empty() ? url : url.substr(0, url.find('?')));
  std::fflush(stdout);
  int received = 0;
  ::sigwait(&stop, &received);
  return 0;
}

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
