// The commands that show runs. The page of a recorded run, or of two, also after their end:
// `lockstep dashboard` serves it, `lockstep report` writes it to a file. `lockstep monitor`: a run
// in the terminal, from its dashboard or from its record; without one the GPUs of the machine.
// `lockstep ledger`: what the ranks did last, from the files that a failed or stalled run left.
#include <fmt/format.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <thread>
#include <utility>

#include "cli/commands.h"
#include "launcher/stall_table.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/ledger_file.h"
#include "lockstep/core/text.h"
#include "lockstep/monitor/gpu_sampler.h"
#include "lockstep/monitor/run_view.h"
#include "observe/dashboard/http.h"
#include "observe/dashboard/page.h"
#include "observe/dashboard/run_summary.h"

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

monitor::RunView whole_run(const std::string& directory) {
  return monitor::read_run_view(directory, monitor::Detail::kAll);
}

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
    if (directories_.size() == 2) {
      const monitor::RunView a = whole_run(directories_[0]), b = whole_run(directories_[1]);
      over_ = !lasts(a) && !lasts(b);
      json_ = to_json(dashboard::comparison_state(a, b));
      return;
    }
    const monitor::RunView run = monitor::read_run_view(directories_[0]);
    over_ = !lasts(run);
    json_ = over_ ? to_json(dashboard::report_state(whole_run(directories_[0])))
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
  const monitor::RunView first = whole_run(runs[0]);
  const Node state =
      two ? dashboard::comparison_state(first, whole_run(runs[1])) : dashboard::report_state(first);
  write_file_atomically(output, dashboard::page_file(state));
  print_text("written to {}\n", output);
  return 0;
}

// ---------------------------------------------------------------- lockstep monitor

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

// ---------------------------------------------------------------- lockstep ledger

namespace {

namespace fs = std::filesystem;

constexpr const char* kLedgerHelp =
    "usage: lockstep ledger [--records N] FILE|DIR...\n\n"
    "Prints where each rank was: step, phase, its last operations with their call sites, and the\n"
    "first call that differs between ranks. `lockstep run` writes a ledger for each rank that\n"
    "failed or stalled, as DIR/<run id>_<random>/attempt_<k>/<local rank>/ledger with\n"
    "--log-dir DIR, otherwise in a temporary directory, which its report of the failure calls\n"
    "`logs`. A directory stands for all ledgers below it.\n\n"
    "  --records N   how many operations of each rank (5)\n";

// The files of one attempt on one host belong together.
using Attempts = std::map<std::string, std::vector<std::string>>;

void add(Attempts& attempts, const fs::path& file) {
  attempts[file.parent_path().parent_path().string()].push_back(file.string());
}

Attempts find_ledgers(const std::vector<std::string>& paths) {
  Attempts attempts;
  for (const std::string& path : paths) {
    if (!fs::is_directory(path)) {
      add(attempts, path);
      continue;
    }
    const std::size_t before = attempts.size();
    for (const auto& entry : fs::recursive_directory_iterator(path))
      if (entry.is_regular_file() && entry.path().filename() == ledger::kFileName)
        add(attempts, entry.path());
    if (attempts.size() == before)
      throw UsageError("ledger",
                       "there is no ledger below {}. Only ranks that failed or stalled leave one: "
                       "below --log-dir where that was given, otherwise in the directory that the "
                       "report of the failure calls `logs`.",
                       path);
  }
  return attempts;
}

std::string record_line(const ledger::Snapshot& seen, const ledger::Record& record) {
  std::string text = fmt::format("{} {}", launch::operation_text(record), name(record.state));
  if (!record.under_way() && record.ended_ns >= record.posted_ns)
    text += fmt::format(" after {:.3f} ms",
                        static_cast<double>(record.ended_ns - record.posted_ns) / 1e6);
  if (record.step >= 0) text += fmt::format(", step {}", record.step);
  if (*name(record.phase) != '\0') text += fmt::format(", {}", name(record.phase));
  const std::string place = seen.place(record.call_site);
  return text + (place.empty() ? "" : ", at " + place);
}

void print_attempt(const std::string& attempt, const std::vector<std::string>& files,
                   std::size_t records) {
  std::vector<launch::RankView> ranks;
  std::uint64_t saved_ns = 0;
  for (const std::string& file : files) {
    ranks.push_back({.ledger = ledger::read(read_file(file), file)});
    saved_ns = std::max(saved_ns, ranks.back().ledger.saved_ns);
  }
  std::sort(ranks.begin(), ranks.end(),
            [](const auto& a, const auto& b) { return a.ledger.rank < b.ledger.rank; });
  print_text("{}: {} of {} ranks, attempt {}{}\n", attempt, ranks.size(),
             ranks.front().ledger.world_size, ranks.front().ledger.attempt,
             launch::ledger_table(ranks, saved_ns));
  for (const launch::RankView& rank : ranks) {
    const auto& all = rank.ledger.records;
    const std::size_t shown = std::min(records, all.size());
    if (shown == 0) continue;
    print_text("  last operations of rank {}:\n", rank.ledger.rank);
    for (std::size_t i = all.size() - shown; i < all.size(); ++i)
      print_text("    {}\n", record_line(rank.ledger, all[i]));
  }
}

}  // namespace

int ledger_command(const Args& args) {
  if (print_help(args, kLedgerHelp)) return 0;
  std::size_t records = 5;
  Flags flags("ledger");
  flags.integer("--records", records, 0, 1024, "a number");
  const Args paths = flags.read(args);
  if (paths.empty())
    throw UsageError("ledger", "no file or directory was given. Name a log directory of a run.");
  for (const auto& [attempt, files] : find_ledgers(paths)) print_attempt(attempt, files, records);
  return 0;
}

}  // namespace lockstep::cli
