// `lockstep doctor`: is this machine ready for a run? Reads what the kernel and the drivers say,
// then starts ranks that compute and communicate for a moment (doctor_gpu.cpp). With --run DIR:
// where the time of a recorded run went, and what to change.

#include <fmt/format.h>
#include <signal.h>
#include <sys/klog.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>

#include "cli/commands.h"
#include "cli/doctor_checks.h"
#include "lockstep/core/device_rule.h"
#include "lockstep/core/document.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/log.h"
#include "lockstep/core/text.h"
#include "lockstep/monitor/run_figures.h"
#include "lockstep/monitor/run_view.h"
#include "lockstep/version.h"

namespace lockstep::cli {

namespace {

constexpr const char* kDoctorHelp =
    "usage: lockstep doctor [flags]\n"
    "       lockstep doctor --run DIR [--json]\n\n"
    "Checks this machine before a run: devices and driver, versions, cores, threads, memory,\n"
    "limits, ports, the way to the master, then GPU copies and an all-reduce between ranks. Each\n"
    "line is ok, warn, fail or skip, with what was measured and what to change. Exit code: 0\n"
    "without a fail, 1 with one, 2 for a mistake in the command.\n"
    "--run explains a run that was recorded, and takes --json beside it, nothing else. Exit code:\n"
    "0 when nothing was found, 1 when something was, 2 for a mistake in the command.\n\n"
    "  --nproc-per-node N   ranks on this host (auto: one per GPU; two without GPUs)\n"
    "  --master-addr A      the master of several hosts: does it resolve, which interface leads\n"
    "                       there, is its clock ours\n"
    "  --master-port P      can it be listened on\n"
    "  --output-dir DIR     is there room\n"
    "  --no-probe           start no ranks\n"
    "  --probe-timeout S    seconds that they may take (30)\n"
    "  --json               one line of JSON\n";

// ------------------------------------------------------------------ flags

DoctorRequest parse_doctor(const Args& args) {
  DoctorRequest request;
  Flags flags("doctor");
  bool no_probe = false;
  flags.toggle("--json", request.json);
  flags.toggle("--no-probe,--no_probe", no_probe);
  flags.value("--nproc-per-node,--nproc_per_node", [&](const std::string& text) {
    request.ranks.reset();
    if (text != "auto" && text != "gpu")
      request.ranks = static_cast<int>(env::parse_int(text, "--nproc-per-node", 1, 4096));
  });
  flags.text("--master-addr,--master_addr", request.master_addr);
  flags.integer("--master-port,--master_port", request.master_port, 1, 65535);
  flags.text("--output-dir,--output_dir", request.output_dir);
  flags.integer("--probe-timeout,--probe_timeout", request.probe_timeout_s, 1, 3600);
  for (const std::string& name : flags.read(args))
    throw UsageError("doctor", "'{}' is no flag. 'lockstep doctor --help' lists them.", name);
  request.probe = !no_probe;
  return request;
}

// ------------------------------------------------------------------ the machine

std::uint64_t limit_of(rlim_t value) {
  return value == RLIM_INFINITY ? kUnlimited : value;
}

void read_limits(Machine& machine) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    machine.open_files = limit_of(limit.rlim_cur);
    machine.open_files_max = limit_of(limit.rlim_max);
  }
  if (::getrlimit(RLIMIT_NPROC, &limit) == 0) machine.processes = limit_of(limit.rlim_cur);
  if (::getrlimit(RLIMIT_AS, &limit) == 0) machine.address_space = limit_of(limit.rlim_cur);
  machine.root = ::geteuid() == 0;
}

std::string kernel_log() {
  const int size = ::klogctl(10 /* SYSLOG_ACTION_SIZE_BUFFER */, nullptr, 0);
  if (size <= 0) return "";
  std::string text(static_cast<std::size_t>(size), '\0');
  const int n = ::klogctl(3 /* SYSLOG_ACTION_READ_ALL */, text.data(), size);
  text.resize(static_cast<std::size_t>(std::max(0, n)));
  return text;
}

int default_ranks(const Machine& machine) {
  if (machine.on_gpu) return machine.gpus.count;
  return std::min(2, static_cast<int>(machine.cores()));
}

// ------------------------------------------------------------------ output

std::int64_t count(const std::vector<Check>& checks, Status status) {
  return std::ranges::count(checks, status, &Check::status);
}

std::string checks_text(const std::vector<Check>& checks) {
  std::string text;
  for (const Check& check : checks) {
    text += fmt::format("{:<5} {:<14} {}\n", name(check.status), check.name, check.value);
    for (const std::string& line : check.lines) text += fmt::format("{:21}| {}\n", "", line);
    if (!check.remedy.empty()) text += fmt::format("{:21}-> {}\n", "", check.remedy);
  }
  return text + fmt::format("{} ok, {} to look at (warn), {} to mend first (fail), {} skipped\n",
                            count(checks, Status::kOk), count(checks, Status::kWarn),
                            count(checks, Status::kFail), count(checks, Status::kSkip));
}

std::string checks_json(const Machine& machine, const std::vector<Check>& checks, int code) {
  std::vector<Node> list;
  for (const Check& check : checks)
    list.push_back(map_node({{"name", text_node(check.name)},
                             {"status", text_node(name(check.status))},
                             {"value", text_node(check.value)},
                             {"remedy", text_node(check.remedy)},
                             {"data", map_node(check.data)},
                             {"lines", texts_node(check.lines)}}));
  NodeMembers counts;
  for (const Status status : {Status::kOk, Status::kWarn, Status::kFail, Status::kSkip})
    counts.emplace_back(name(status), integer_node(count(checks, status)));
  return to_json(map_node({{"version", text_node(LOCKSTEP_VERSION)},
                           {"host", text_node(host_name())},
                           {"ranks", integer_node(machine.ranks)},
                           {"device", text_node(machine.on_gpu ? "cuda" : "cpu")},
                           {"checks", list_node(std::move(list))},
                           {"counts", map_node(std::move(counts))},
                           {"exit_code", integer_node(code)}})) +
         '\n';
}

std::vector<Check> all_checks(const Machine& machine) {
  std::vector<Check> checks = {
      check_devices(machine),      check_driver(machine),     check_gpu_errors(machine),
      check_xid(machine),          check_throttling(machine), check_gpu_memory(machine),
      check_gpu_per_rank(machine), check_cudnn(machine),      check_cores(machine),
      check_threads(machine),      check_memory(machine),     check_shm(machine),
      check_open_files(machine),   check_processes(machine),  check_disk(machine)};
  const auto add = [&](std::vector<Check> more) {
    for (Check& check : more) {
      // The libraries that ranks have loaded are better evidence than the paths.
      const auto same = std::ranges::find(checks, check.name, &Check::name);
      if (same == checks.end())
        checks.push_back(std::move(check));
      else
        *same = std::move(check);
    }
  };
  {
    const Progress progress("looking for the way to the master");
    add(network_checks(machine));
  }
  add(probe_checks(machine));
  return checks;
}

}  // namespace

Machine look_at(const DoctorRequest& request) {
  Machine machine{.request = request};
  {
    const Progress progress("asking the CUDA driver");
    machine.gpus = launch::find_gpus();  // forks, and so comes before the sampler's thread
  }
  machine.on_gpu = apply_device_rule(
                       {.local_rank = 0, .visible_gpus = [&machine] { return machine.gpus.count; }})
                       .gpu >= 0;
  machine.cpus = allowed_cpus();
  machine.quota = cgroup_quota_cores();
  machine.ranks = request.ranks.value_or(default_ranks(machine));
  machine.kernel_log = kernel_log();
  read_limits(machine);
  const Progress progress("asking NVIDIA's management library");
  const monitor::GpuSampler sampler;
  sampler.wait_for_samples(1);
  machine.nvml = sampler.snapshot();
  return machine;
}

namespace {

// ------------------------------------------------------------------ --run DIR: a recorded run

constexpr const char* kDoctorRunHelp =
    "usage: lockstep doctor --run DIR [--json]\n\n"
    "Where the time of a recorded run went, rank by rank, and what to change: each finding with\n"
    "its evidence, the flag or key, and the expected gain; the most valuable first. DIR is the\n"
    "output_dir of a Trainer, or what `lockstep run --record DIR` wrote; the run may still last.\n"
    "Ends with 0 when nothing was found, with 1 when something was, and with 2 for a mistake in "
    "the\n"
    "command. docs/doctor.md describes the rules.\n\n"
    "  --json   the same as one JSON object\n";

std::string run_head_text(const std::string& directory, const monitor::RunFacts& facts) {
  std::string text =
      fmt::format("{}: {} rank{}", directory, facts.world_size, facts.world_size == 1 ? "" : "s");
  if (!facts.device.empty()) text += " on " + facts.device;
  if (!facts.backend.empty()) text += " over " + facts.backend;
  if (!facts.optimizer.empty()) text += ", " + facts.optimizer;
  return printable(text) + "\n\n";
}

std::string figure(const std::optional<double>& value, double unit, const char* name) {
  return value ? fmt::format("{:.0f} {}", *value / unit, name) : "-";
}

std::string gpus_text(const std::vector<monitor::HostGpus>& hosts) {
  std::string text;
  for (const monitor::HostGpus& host : hosts) {
    for (const monitor::GpuFigures& gpu : gpu_figures(host))
      text += fmt::format("host {} GPU {}: {} busy, {} of memory, {}\n", host.host, gpu.index,
                          figure(gpu.utilisation_percent, 1, "%"),
                          figure(gpu.memory_bytes, 1u << 30, "GiB"), figure(gpu.power_w, 1, "W"));
    if (host.samples.size() > 0)
      text += fmt::format("host {}: all GPUs busy at once in {:.0f} % of {} samples\n", host.host,
                          100 * busy_together_share(host), host.samples.size());
  }
  return text.empty() ? text : text + "\n";
}

std::string findings_text(const monitor::RunRecord& run,
                          const std::vector<monitor::Finding>& findings) {
  std::string text;
  if (findings.empty()) {
    text = nothing_found_text(run) + "\n";
  } else if (const std::string missing = missing_ranks_text(run); !missing.empty()) {
    text = missing + "\n\n";
  }
  for (std::size_t i = 0; i < findings.size(); ++i)
    text += fmt::format("{}. {}\n", i + 1, finding_text(findings[i]));
  return text;
}

// Unknown values are omitted.
Node budget_node(const monitor::BudgetRow& row) {
  NodeMembers members = {{"rank", integer_node(row.rank)},
                         {"steps", integer_node(row.budget.steps)}};
  if (row.budget.steps > 0) {
    NodeMembers shares;
    for (const auto& [part, share] : row.shares) shares.emplace_back(part, real_node(share));
    members.emplace_back("step_s", real_node(row.budget.step_s()));
    members.emplace_back("shares", map_node(std::move(shares)));
  }
  if (row.collective_share)
    members.emplace_back("collective_share", real_node(*row.collective_share));
  members.emplace_back("cores", real_node(row.process() ? row.process()->cores : 0));
  members.emplace_back("resident_bytes",
                       integer_node(static_cast<std::int64_t>(row.all.resident_bytes)));
  return map_node(std::move(members));
}

Node gpus_node(const std::vector<monitor::HostGpus>& hosts) {
  const auto known = [](const std::optional<double>& v) { return v ? real_node(*v) : Node{}; };
  std::vector<Node> items;
  for (const monitor::HostGpus& host : hosts) {
    std::vector<Node> gpus;
    for (const monitor::GpuFigures& gpu : gpu_figures(host))
      gpus.push_back(map_node({{"index", integer_node(gpu.index)},
                               {"utilisation_percent", known(gpu.utilisation_percent)},
                               {"memory_bytes", known(gpu.memory_bytes)},
                               {"memory_share", known(gpu.memory_share)},
                               {"power_w", known(gpu.power_w)},
                               {"throttled_share", real_node(gpu.throttled_share)}}));
    items.push_back(
        map_node({{"host", integer_node(host.host)},
                  {"samples", integer_node(static_cast<std::int64_t>(host.samples.size()))},
                  {"busy_together_share", real_node(busy_together_share(host))},
                  {"gpus", list_node(std::move(gpus))}}));
  }
  return list_node(std::move(items));
}

Node diagnosis_node(const monitor::RunRecord& run, const std::vector<monitor::BudgetRow>& rows,
                    const std::vector<monitor::Finding>& findings) {
  std::vector<Node> ranks;
  for (const monitor::BudgetRow& row : rows) ranks.push_back(budget_node(row));
  return map_node({{"healthy", bool_node(findings.empty() && enough_to_judge(run))},
                   {"world_size", integer_node(run.facts.world_size)},
                   {"all_ranks_recorded", bool_node(is_complete(run))},
                   {"ranks", list_node(std::move(ranks))},
                   {"hosts", gpus_node(run.gpus)},
                   {"findings", findings_node(findings)}});
}

int doctor_run(const Args& args) {
  if (print_help(args, kDoctorRunHelp)) return 0;
  std::string directory;
  bool json = false;
  Flags flags("doctor");
  flags.toggle("--json", json);
  flags.text("--run", directory, "DIR: which run? Write lockstep doctor --run DIR");
  for (const std::string& other : flags.read(args, /*keys=*/true))
    throw UsageError("doctor",
                     "'{}' does not go with --run; --json alone does. 'lockstep doctor --help'.",
                     other);
  if (directory.empty()) throw UsageError("doctor", "which run? Write lockstep doctor --run DIR.");
  const monitor::RunView view = monitor::read_run_view(directory);
  const monitor::RunRecord& run = *view.record;
  const auto& findings = view.findings;
  const auto rows = monitor::budget_rows(run);
  if (json)
    print_text("{}\n", to_json(diagnosis_node(run, rows, findings)));
  else
    print_text("{}{}\n\n{}{}", run_head_text(directory, run.facts),
               table_text(monitor::budget_table(rows)), gpus_text(run.gpus),
               findings_text(run, findings));
  return findings.empty() ? 0 : 1;
}

}  // namespace

int doctor_command(const Args& args) {
  const auto has = [&](std::string_view flag) {
    return std::ranges::any_of(args, [&](const std::string& arg) {
      return arg == flag || arg.starts_with(std::string(flag) + "=");
    });
  };
  if (has("--run")) return doctor_run(args);
  if (print_help(args, kDoctorHelp)) return 0;
  const DoctorRequest request = parse_doctor(args);
  log::set_level(log::Level::kError);  // what the sampler would warn of becomes a line below
  const Machine machine = look_at(request);
  const std::vector<Check> checks = all_checks(machine);
  const int code = count(checks, Status::kFail) > 0 ? 1 : 0;
  print_text("{}", request.json ? checks_json(machine, checks, code) : checks_text(checks));
  return code;
}

// ------------------------------------------------------------------ progress

// A timer's signal reports what takes long, not a thread: the doctor forks to ask drivers.
namespace {

constexpr int kFirst_s = 2;
constexpr int kEvery_s = 5;

std::atomic<const char*> under_way{nullptr};
std::atomic<int> said{0};  // lines written so far

// Called by a signal handler: in a fixed place fmt neither allocates nor locks.
void say_progress(int) {
  const int error = errno;
  if (const char* what = under_way.load()) {
    char text[200];
    const int before = said++;
    const auto made = before == 0
                          ? fmt::format_to_n(text, sizeof text, "lockstep doctor: {} ...\n", what)
                          : fmt::format_to_n(text, sizeof text, "lockstep doctor: {} ... {} s\n",
                                             what, kFirst_s + before * kEvery_s);
    [[maybe_unused]] const ssize_t n =
        ::write(STDERR_FILENO, text, std::min(made.size, sizeof text));
  }
  errno = error;
}

void set_timer(int first_s, int interval_s) {
  itimerval timer{};
  timer.it_value.tv_sec = first_s;
  timer.it_interval.tv_sec = interval_s;
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

}  // namespace

Progress::Progress(const char* what) {
  said = 0;
  under_way = what;
  struct sigaction action {};
  action.sa_handler = say_progress;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGALRM, &action, nullptr);
  set_timer(kFirst_s, kEvery_s);
}

Progress::~Progress() {
  set_timer(0, 0);
  under_way = nullptr;
}

}  // namespace lockstep::cli
