// `lockstep monitor`: a run in the terminal, from its dashboard or from its record; without one the
// GPUs of the machine.
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "cli/commands.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"
#include "lockstep/monitor/gpu_sampler.h"
#include "lockstep/monitor/run_view.h"
#include "observe/dashboard/http.h"
#include "observe/dashboard/terminal_view.h"

namespace lockstep::cli {
namespace {

using dashboard::HttpStream;

constexpr auto kConnectLimit = std::chrono::seconds(10);
constexpr auto kSilenceLimit = std::chrono::seconds(30);  // states come once a second
constexpr auto kInterval = std::chrono::seconds(1);
constexpr const char* kMonitorHelp =
    "usage: lockstep monitor [--once] [--json] [URL|RUN_DIR]\n\n"
    "Without a run: every GPU of this machine, and the processes on it, whoever started them.\n"
    "(In a directory with the record of a run, that run; `lockstep monitor .` demands it.)\n\n"
    "Shows a run: the state of each rank, where its time goes, its resources and last collective,\n"
    "curves, what slows it down, and its newest output. URL is what `lockstep run --dashboard`\n"
    "printed (in quotes, for the token); RUN_DIR is an output_dir of the Trainer, or the DIR of\n"
    "`lockstep run --record DIR`. On a terminal the screen is drawn again each second until the\n"
    "run is over or Ctrl-C; elsewhere a line is printed each second.\n\n"
    "  --once   show it once\n"
    "  --json   the state as JSON, one line for each second (docs/dashboard.md)\n\n"
    "Ends with 1 after a run that failed, was killed or was lost, and otherwise with 0.\n";

struct MonitorRequest {
  bool once = false;
  bool json = false;
  std::string where{};  // empty: no run
};

MonitorRequest parse_monitor(const Args& args) {
  MonitorRequest request;
  Flags flags("monitor");
  flags.toggle("--once", request.once);
  flags.toggle("--json", request.json);
  const Args names = flags.read(args);
  if (names.size() > 1)
    throw UsageError("monitor", "one URL or directory is shown, and '{}' is another one.",
                     names[1]);
  const bool recorded = std::filesystem::exists("monitor/run.json");
  request.where = !names.empty() ? names[0] : recorded ? "." : "";
  return request;
}

// A terminal on which a text is drawn over the one before it.
class Screen {
 public:
  struct Size {
    int columns;
    int rows;
  };
  static Size size() {
    winsize found{};
    ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &found);
    return {std::max<int>(found.ws_col, 20), std::max<int>(found.ws_row, 6) - 1};
  }

  // Each line erases the rest of the old one, so that nothing flickers.
  void draw(const std::string& text) {
    std::string frame = first_ ? "\033[2J\033[H" : "\033[H";
    first_ = false;
    for (const char c : text) {
      if (c == '\n') frame += "\033[K";
      frame += c;
    }
    fmt::print("{}\033[J", frame);
  }

 private:
  bool first_ = true;
};

class Output {
 public:
  explicit Output(const MonitorRequest& request)
      : request_(request), screen_(::isatty(STDOUT_FILENO) != 0 && !request.once) {}

  void show(const std::string& json) {
    const Node snapshot = dashboard::parse_snapshot(json);
    state_ = dashboard::run_state(snapshot);
    if (request_.json) {
      print_text("{}\n", json);
    } else if (screen_) {
      draw(snapshot);
    } else if (request_.once) {
      const int columns = terminal::columns(STDOUT_FILENO);
      fmt::print("{}",
                 dashboard::terminal_view(snapshot, {.columns = columns > 0 ? columns : 160,
                                                     .colour = ::isatty(STDOUT_FILENO) != 0}));
    } else {
      print_text("{}\n", dashboard::status_line(snapshot));
    }
    std::fflush(stdout);
  }

  bool over() const { return request_.once || state_ == "ended" || bad(); }
  int code() const { return bad() ? 1 : 0; }

 private:
  bool bad() const { return state_ == "failed" || state_ == "killed"; }

  void draw(const Node& snapshot) {
    const auto [columns, rows] = Screen::size();
    terminal_.draw(
        dashboard::terminal_view(snapshot, {.columns = columns, .rows = rows, .colour = true}));
  }

  const MonitorRequest& request_;
  const bool screen_;
  Screen terminal_;
  std::string state_;
};

int watch_url(const MonitorRequest& request) {
  auto url = dashboard::parse_dashboard_url(request.where);
  // Other users of the host see command lines, and with them a token in an address.
  if (const auto file = env::get("LOCKSTEP_DASHBOARD_TOKEN_FILE"); file && url.token.empty())
    url.token = dashboard::read_token_file(*file);
  Output output(request);
  HttpStream events(url, "/events", Deadline::after(kConnectLimit));
  while (const auto state = events.next_event(Deadline::after(kSilenceLimit))) {
    output.show(*state);
    if (request.once) return output.code();
  }
  if (events.ended() || output.over()) return output.code();
  throw CommError("monitor",
                  "the dashboard closed the connection in the middle of the run. Its launcher was "
                  "probably killed.");
}

int watch_record(const MonitorRequest& request) {
  Output output(request);
  while (true) {
    output.show(monitor::snapshot_json(monitor::read_run_view(request.where)));
    if (output.over()) return output.code();
    std::this_thread::sleep_for(kInterval);
  }
}

// ---------------------------------------------------------------- the machine

// Outside of the first namespace of PIDs the driver's numbers are other processes' here.
bool has_hosts_pids() {
  struct stat space {};
  constexpr ino_t kFirst = 0xEFFFFFFC;
  return ::stat("/proc/self/ns/pid", &space) == 0 && space.st_ino == kFirst;
}

std::string command_of(std::int64_t pid) {
  std::string text;
  try {
    text = read_file(fmt::format("/proc/{}/cmdline", pid));
  } catch (const Error&) {
    return "";  // it has ended, or is hidden
  }
  std::replace(text.begin(), text.end(), '\0', ' ');
  return printable(text);
}

std::string gpu_screen(const monitor::GpuSnapshot& now) {
  const bool named = has_hosts_pids();
  std::string text = fmt::format("{} GPU{}, driver {}\n", now.gpus.size(),
                                 now.gpus.size() == 1 ? "" : "s", now.driver_version);
  if (!now.problem.empty()) text += now.problem + "\n";
  for (const monitor::GpuIdentity& gpu : now.gpus) {
    const auto& reading = now.newest->gpus.at(static_cast<std::size_t>(gpu.index));
    text += fmt::format("\nGPU {}  {} at {}: {}\n", gpu.index, gpu.name, gpu.pci_bus_id,
                        monitor::reading_text(reading));
    for (const monitor::GpuProcess& process : reading.processes)
      text += fmt::format(
          "  process {:<9}{:>10}  {}\n", process.pid,
          process.memory_bytes
              ? fmt::format("{:.1f} GiB", static_cast<double>(*process.memory_bytes) / (1u << 30))
              : "-",
          named ? command_of(process.pid) : "");
    if (reading.problem.empty() && reading.processes.empty()) text += "  no process\n";
  }
  return text;
}

int watch_gpus(const MonitorRequest& request) {
  const bool screen = ::isatty(STDOUT_FILENO) != 0 && !request.once && !request.json;
  Screen terminal;
  const monitor::GpuSampler sampler;
  sampler.wait_for_samples(1);
  while (true) {
    const monitor::GpuSnapshot now = sampler.snapshot();
    if (!now.newest)
      throw UsageError("monitor",
                       "no run was named, and the GPUs of this machine cannot be shown: {}. Give a "
                       "run's output_dir, or the URL of its dashboard.",
                       now.problem.empty()
                           ? "the driver does not answer"
                           : now.problem.substr(0, now.problem.find_last_not_of('.') + 1));
    if (request.json)
      print_text("{}\n", to_json(monitor::gpu_node(now)));
    else if (screen)
      terminal.draw(gpu_screen(now));
    else
      print_text("{}{}", request.once ? gpu_screen(now) : monitor::gpu_line(now),
                 request.once ? "" : "\n");
    std::fflush(stdout);
    if (request.once) return 0;
    std::this_thread::sleep_for(kInterval);
  }
}

}  // namespace

int monitor_command(const Args& args) {
  if (print_help(args, kMonitorHelp)) return 0;
  const MonitorRequest request = parse_monitor(args);
  if (request.where.empty()) return watch_gpus(request);
  if (request.where.find("://") != std::string::npos) return watch_url(request);
  return watch_record(request);
}

}  // namespace lockstep::cli
