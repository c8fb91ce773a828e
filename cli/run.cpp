// `lockstep run`: parses the arguments into a plan (launcher/flags.h) and runs it
// (launcher/plan.h). `lockstep train` with flags of `lockstep run` starts its ranks
// the same way.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "cli/commands.h"
#include "launcher/flags.h"
#include "launcher/plan.h"
#include "launcher/process.h"
#include "launcher/worker.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/train/config_keys.h"
#include "observe/dashboard/http.h"
#include "observe/dashboard/live_run.h"
#include "observe/dashboard/run_summary.h"

namespace lockstep::cli {
namespace {

constexpr std::chrono::seconds kAskLimit{10};

// The launcher's flag that `arg` is, or is a unique prefix of, unless a key has that name or the
// flag says what to start. UsageError for a flag of another launcher.
const launch::FlagSpec* launcher_flag(const std::string& arg) {
  if (!arg.starts_with("--")) return nullptr;
  const std::string given = arg.substr(0, arg.find('='));
  std::string key = given.substr(2), name = key;
  std::replace(key.begin(), key.end(), '-', '_');
  std::replace(name.begin(), name.end(), '_', '-');
  if (train::find_key(key) != nullptr) return nullptr;
  const auto found = launch::flags_named(name);
  // The beginning of a key is a mistake in a key.
  const auto begins = [&](const std::string& longer) { return longer.starts_with(key); };
  if (found.size() == 1 &&
      (found.front()->name == name || std::ranges::none_of(train::training_keys(), begins))) {
    const std::string_view full = found.front()->name;
    const bool starts = full == "module" || full == "no-python" || full == "run-path";
    return starts ? nullptr : found.front();
  }
  if (const auto hint = launch::hint_for_flag(name); !hint.empty())
    throw UsageError("train", "there is no flag {}. {}", given, hint);
  return nullptr;
}

// Whether any variable sets a key.
bool configured() {
  return std::ranges::any_of(train::key_table(), [](const train::KeySpec& key) {
    return env::get(key.variable()).has_value();
  });
}

void refuse_in_a_rank(const std::string& flag) {
  const RankEnv env = read_rank_env();
  if (env.source == "alone") return;
  throw UsageError("train",
                   "{} starts ranks, but this process is rank {} of {} already (started by {}). "
                   "Give it to that launcher, or start `lockstep train` by itself.",
                   flag.substr(0, flag.find('=')), env.rank, env.world_size, env.source);
}

// The exit code of a few lines of Python; nothing where it cannot be asked.
std::optional<int> ask_python(const std::string& python, const char* lines) {
  try {
    const Fd nowhere(::open("/dev/null", O_WRONLY | O_CLOEXEC));
    launch::Process asked = launch::start_process({.argv = {python, "-c", lines},
                                                   .environment = launch::process_environment({}),
                                                   .stdout_fd = nowhere.get(),
                                                   .stderr_fd = nowhere.get()});
    if (!asked.wait_for(kAskLimit)) asked.signal_group(SIGKILL);
    const auto ending = asked.reap();
    return ending ? std::optional(ending->exit_code()) : std::nullopt;
  } catch (const Error&) {
    return std::nullopt;
  }
}

// First scripts often fail this way: the python3 in PATH is not the one that has torch.
void say_what_python_lacks(const launch::LaunchPlan& plan) {
  constexpr const char* kAsk =
      "import importlib.util, sys\nsys.exit(77 if importlib.util.find_spec('torch') is None else "
      "0)";
  if (!launch::runs_python(plan.command)) return;
  const std::string& python = plan.command.front();
  if (ask_python(python, kAsk) != 77) return;
  log::warning("run",
               "{}, which ran the script, has no module torch. If the script needs it, name the "
               "interpreter that has it: export PYTHON_EXEC=/path/to/python3.",
               python);
}

// Torch itself loads the replacement for gloo if an installed package registers one, which only the
// interpreter knows. Says nothing where it cannot be asked.
void warn_of_gloo(const launch::LaunchPlan& plan) {
  constexpr const char* kAsk =
      "import importlib.metadata as m, sys\n"
      "sys.exit(0 if any(e.group == 'torch.backends' and e.value.startswith('lockstep_torch')\n"
      "                  for d in m.distributions() for e in d.entry_points) else 77)\n";
  if (!plan.replace_gloo || env::get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" ||
      !launch::runs_python(plan.command))
    return;
  const std::string& python = plan.command.front();
  if (ask_python(python, kAsk) != 77) return;
  log::warning("run",
               "--replace-gloo has no effect: lockstep_torch is not installed for {}, so groups "
               "that ask for gloo stay gloo. Install it there ({} -m pip install ./python, from "
               "Lockstep's sources), or import lockstep_torch in the script.",
               python, python);
}

// Listens before anything is started. The server runs in the supervising process, where the run is.
dashboard::Companion dashboard_of(const launch::LaunchPlan& plan) {
  const auto endpoint = std::make_shared<dashboard::HttpEndpoint>(
      dashboard::http_listen(*plan.dashboard, "--dashboard"));
  dashboard::HttpOptions options;
  if (const auto file = env::get("LOCKSTEP_DASHBOARD_TOKEN_FILE"))
    options.token = dashboard::read_token_file(*file);
  return [endpoint, options](dashboard::LiveRun& run) {
    const auto metrics = std::make_shared<dashboard::RunMetrics>();
    const auto server = std::make_shared<dashboard::HttpServer>(
        std::move(*endpoint),
        dashboard::DashboardSource{
            .snapshot_json = [&run] { return run.snapshot_json(); },
            .metrics_text = [&run, metrics] { return metrics->text(run.view()); },
            .ready = [&run] { return run.ready(); }},
        options);
    // A token that outlives the run does not belong in its log.
    const std::string url = server->url();
    fmt::print(stderr, "[dashboard] {}\n",
               options.token.empty() ? url : url.substr(0, url.find('?')));
    return server;
  };
}

// Runs the plan with everything that observes it.
int supervised(const launch::LaunchPlan& plan) {
  if (!plan.doctor && plan.record_dir.empty() && !plan.dashboard) return launch::supervise(plan);
  dashboard::LiveRunOptions options{.doctor = plan.doctor, .record_dir = plan.record_dir};
  if (plan.dashboard) options.companions.push_back(dashboard_of(plan));
  dashboard::LiveRun live(std::move(options));
  return launch::supervise(plan, &live);
}

}  // namespace

int run_command(const Args& args) {
  const launch::ParsedFlags parsed =
      launch::parse_flags(args, {.training_keys = train::training_keys()});
  if (parsed.help) {
    fmt::print("{}", launch::run_help());
    return 0;
  }
  for (const std::string& note : parsed.notes) log::warning("run", "{}", note);
  for (const std::string& line : unread_variables()) log::warning("run", "{}", line);
  const launch::LaunchPlan& plan = parsed.plan;
  warn_of_gloo(plan);
  const int code = supervised(plan);
  if (code == 1) say_what_python_lacks(plan);
  return code;
}

int train_command(const Args& args) {
  Args launcher;
  Args own{"train"};
  const auto asks_for_help = [](const std::string& arg) { return arg == "--help" || arg == "-h"; };
  if (std::ranges::any_of(args, asks_for_help))
    return execute("lockstep-train", {"train", "--help"});
  for (std::size_t i = 0; i < args.size(); ++i) {
    const launch::FlagSpec* flag = launcher_flag(args[i]);
    (flag != nullptr ? launcher : own).push_back(args[i]);
    if (flag == nullptr) continue;
    const bool separate = !flag->is_switch() && args[i].find('=') == std::string::npos;
    if (separate && i + 1 < args.size()) launcher.push_back(args[++i]);
  }
  if (own.size() == 1 && !configured())
    throw UsageError("train",
                     "what shall be trained? Give a training file, `lockstep train FILE`, or at "
                     "least one key, as --output_dir=DIR. examples/configs has files.");
  if (launcher.empty()) return execute("lockstep-train", own);
  refuse_in_a_rank(launcher.front());
  launcher.push_back(std::filesystem::read_symlink("/proc/self/exe"));
  launcher.insert(launcher.end(), own.begin(), own.end());
  return run_command(launcher);
}

}  // namespace lockstep::cli
