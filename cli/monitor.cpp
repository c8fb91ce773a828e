// `lockstep monitor`: a run in the terminal, from its dashboard or from its record.
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "cli/commands.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/terminal.h"
#include "lockstep/dashboard/http_client.h"
#include "lockstep/dashboard/http_rules.h"
#include "lockstep/dashboard/record_view.h"
#include "lockstep/dashboard/terminal_view.h"

namespace lockstep::cli {
namespace {

using dashboard::HttpStream;

constexpr auto kConnectLimit = std::chrono::seconds(10);
constexpr auto kSilenceLimit = std::chrono::seconds(30);  // states come once a second
constexpr auto kInterval = std::chrono::seconds(1);
constexpr const char* kMonitorHelp =
    "usage: lockstep monitor [--once] [--json] [URL|RUN_DIR]\n\n"
    "Shows a run: the state of each rank, where its time goes, its resources and last collective,\n"
    "curves, what slows it down, and its newest output. URL is what `lockstep run --dashboard`\n"
    "printed (in quotes, for the token); RUN_DIR is an output_dir of the Trainer, or the DIR of\n"
    "`lockstep run --record DIR` (default: the current directory). On a terminal the screen is\n"
    "drawn again each second until the run is over or Ctrl-C; elsewhere a line is printed each\n"
    "second.\n\n"
    "  --once   show it once\n"
    "  --json   the state as JSON, one line for each second (docs/dashboard.md)\n\n"
    "Ends with 0 after a run that ended, 1 after one that failed or was lost. The record of a\n"
    "Trainer does not say whether it failed.\n";

struct Request {
  bool once = false;
  bool json = false;
  std::string where = ".";
};

Request parse(const Args& args) {
  Request request;
  bool given = false;
  for (const std::string& arg : args) {
    if (arg == "--once") {
      request.once = true;
    } else if (arg == "--json") {
      request.json = true;
    } else if (arg.starts_with("-")) {
      throw UsageError("monitor", "there is no flag {}. 'lockstep monitor --help' lists them.",
                       arg);
    } else if (given) {
      throw UsageError("monitor", "one URL or directory is shown, and '{}' is another one.", arg);
    } else {
      request.where = arg;
      given = true;
    }
  }
  return request;
}

class Output {
 public:
  explicit Output(const Request& request)
      : request_(request), screen_(::isatty(STDOUT_FILENO) != 0 && !request.once) {}

  void show(const std::string& json) {
    const Node snapshot = dashboard::parse_snapshot(json);
    state_ = dashboard::run_state(snapshot);
    if (request_.json) {
      fmt::print("{}\n", json);
    } else if (screen_) {
      draw(snapshot);
    } else if (request_.once) {
      const int columns = terminal::columns(STDOUT_FILENO);
      fmt::print("{}",
                 dashboard::terminal_view(snapshot, {.columns = columns > 0 ? columns : 160,
                                                     .colour = ::isatty(STDOUT_FILENO) != 0}));
    } else {
      fmt::print("{}\n", dashboard::status_line(snapshot));
    }
    std::fflush(stdout);
  }

  bool over() const { return request_.once || state_ == "ended" || state_ == "failed"; }
  int code() const { return state_ == "failed" && !request_.once ? 1 : 0; }

 private:
  // Each line erases what was behind it, so that nothing flickers.
  void draw(const Node& snapshot) {
    winsize size{};
    ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    const std::string text =
        dashboard::terminal_view(snapshot, {.columns = std::max<int>(size.ws_col, 20),
                                            .rows = std::max<int>(size.ws_row, 6) - 1,
                                            .colour = true});
    std::string frame = first_ ? "\033[2J\033[H" : "\033[H";
    first_ = false;
    for (const char c : text) {
      if (c == '\n') frame += "\033[K";
      frame += c;
    }
    fmt::print("{}\033[J", frame);
  }

  const Request& request_;
  const bool screen_;
  bool first_ = true;
  std::string state_;
};

int watch_url(const Request& request) {
  auto url = dashboard::parse_dashboard_url(request.where);
  // Other users of the host see command lines, and with them a token in an address.
  if (const auto file = env::get("LOCKSTEP_DASHBOARD_TOKEN_FILE"); file && url.token.empty())
    url.token = dashboard::read_token_file(*file);
  Output output(request);
  HttpStream events(url, "/events", Deadline::after(kConnectLimit));
  while (const auto state = events.next_event(Deadline::after(kSilenceLimit))) {
    output.show(*state);
    if (request.once) return 0;
  }
  if (events.ended() || output.over()) return output.code();
  throw CommError("monitor",
                  "the dashboard closed the connection in the middle of the run. Its launcher was "
                  "probably killed.");
}

int watch_record(const Request& request) {
  Output output(request);
  while (true) {
    output.show(dashboard::live_snapshot_json(dashboard::view_of_record(request.where)));
    if (output.over()) return output.code();
    std::this_thread::sleep_for(kInterval);
  }
}

}  // namespace

int monitor_command(const Args& args) {
  if (std::ranges::any_of(args, [](const auto& arg) { return arg == "--help" || arg == "-h"; })) {
    fmt::print("{}", kMonitorHelp);
    return 0;
  }
  const Request request = parse(args);
  if (request.where.find("://") != std::string::npos) return watch_url(request);
  return watch_record(request);
}

}  // namespace lockstep::cli
