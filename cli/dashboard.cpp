// `lockstep dashboard`: the dashboard's page of a recorded run, even after its end.
#include <fmt/format.h>
#include <signal.h>

#include <cstdio>
#include <utility>

#include "cli/commands.h"
#include "cli/flags.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "observe/dashboard/http_server.h"
#include "observe/report/run_report.h"

namespace lockstep::cli {
namespace {

constexpr const char* kDashboardHelp =
    "usage: lockstep dashboard [--listen WHERE] [RUN_DIR]\n\n"
    "Serves the page of `lockstep run --dashboard` for a run that was recorded: while it lasts,\n"
    "and after it has ended or failed. RUN_DIR is an output_dir of the Trainer, the directory of\n"
    "a RunLog, or the DIR of `lockstep run --record DIR` (default: the current directory). Ends\n"
    "with Ctrl-C.\n\n"
    "  --listen WHERE   a port, or a numeric address and a port (a free port of 127.0.0.1)\n";

struct DashboardRequest {
  std::string listen;
  std::string directory = ".";
};

DashboardRequest parse_dashboard(const Args& args) {
  DashboardRequest request;
  Flags flags("dashboard");
  flags.text("--listen", request.listen, "a port, or an address and a port");
  const Args names = flags.read(args);
  if (names.size() > 1)
    throw UsageError("dashboard", "one run is shown, and '{}' is another one.", names[1]);
  if (!names.empty()) request.directory = names[0];
  return request;
}

// A record that will not change any more is read only once.
class RecordSource {
 public:
  explicit RecordSource(std::string directory) : directory_(std::move(directory)) { read(); }

  std::string snapshot_json() {
    if (!over_) read();
    return json_;
  }

 private:
  void read() {
    monitor::RunView run = monitor::read_run_view(directory_);
    over_ = run.state != "running";
    if (over_) {
      run = monitor::read_run_view(directory_, monitor::Detail::kAll);
      run.tables = report::run_tables(run);
    }
    json_ = monitor::snapshot_json(run);
  }

  const std::string directory_;
  bool over_ = false;
  std::string json_;
};

}  // namespace

int dashboard_command(const Args& args) {
  if (print_help(args, kDashboardHelp)) return 0;
  const DashboardRequest request = parse_dashboard(args);
  RecordSource source(request.directory);
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
      dashboard::http_listen(request.listen, "--listen"),
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
