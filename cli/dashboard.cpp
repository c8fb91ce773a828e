// `lockstep dashboard`: the dashboard's page of a recorded run, even after its end, or of two.
#include <fmt/format.h>
#include <signal.h>

#include <cstdio>
#include <utility>

#include "cli/commands.h"
#include "cli/flags.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "observe/dashboard/http_server.h"
#include "observe/dashboard/run_report.h"

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

}  // namespace lockstep::cli
