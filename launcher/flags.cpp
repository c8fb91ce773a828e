#include "launcher/flags.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <random>
#include <utility>

#include "launcher/process.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/text.h"
#include "lockstep/rendezvous/rank_env.h"

namespace lockstep::launch {

namespace {

constexpr int kMaxPort = 65535;
constexpr int kMultiNodePort = 29500;  // torchrun's default
constexpr int kYear_s = 365 * 24 * 3600;
constexpr int kMaxRestarts = 1'000'000;
constexpr int kMaxRanksOfHost = 4096;  // more is a typing error that would block the host

void refuse_and_note(const Values& values, std::vector<std::string>& notes) {
  for (const FlagSpec& flag : flag_table()) {
    const Given* given = values.find(std::string(flag.name));
    if (given == nullptr || flag.treatment == Treatment::kHonoured) continue;
    if (flag.treatment == Treatment::kRefused)
      throw UsageError("run", "{} is not supported: {}.", given->origin, flag.help);
    const auto choices = split(flag.value_name, '|');
    if (choices.size() > 1 && std::ranges::find(choices, given->text) == choices.end())
      throw UsageError("run", "{}='{}' is not {}.", given->origin, given->text,
                       fmt::join(choices, ", "));
    notes.push_back(fmt::format("{} is ignored: {}.", given->origin, flag.help));
  }
}

StreamMap parse_streams(const Values& values, const std::string& name) {
  StreamMap map;
  const Given* given = values.find(name);
  if (given == nullptr) return map;
  const auto stream_of = [&](const std::string& text) {
    const auto value = to_int(text);
    if (!value || *value < 0 || *value > 3) {
      throw UsageError("run",
                       "{}='{}': '{}' is not 0 (none), 1 (stdout), 2 (stderr) or 3 (both). Use one "
                       "of these, or one per local rank such as 0:3,1:1.",
                       given->origin, given->text, text);
    }
    return static_cast<Streams>(*value);
  };
  if (given->text.find(':') == std::string::npos) {
    map.all = stream_of(trim(given->text));
    return map;
  }
  for (const std::string& part : split(given->text, ',')) {
    const auto colon = part.find(':');
    const auto rank = to_int(trim(part.substr(0, colon)));
    if (colon == std::string::npos || !rank || *rank < 0) {
      throw UsageError("run", "{}='{}': '{}' is not <local rank>:<streams>, such as 0:3.",
                       given->origin, given->text, part);
    }
    map.by_local_rank[*rank] = stream_of(trim(part.substr(colon + 1)));
  }
  return map;
}

std::vector<std::string> parse_filters(const std::string& text) {
  std::vector<std::string> filters(1);
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != ',') {
      filters.back() += text[i];
    } else if (i + 1 < text.size() && text[i + 1] == ',') {
      filters.back() += text[i++];
    } else {
      filters.emplace_back();
    }
  }
  filters.erase(std::remove(filters.begin(), filters.end(), ""), filters.end());
  return filters;
}

std::vector<int> parse_signals(const Given& given) {
  std::vector<int> signals;
  for (const std::string& part : split(given.text, ',')) {
    const std::string name = trim(part);
    const auto number = signal_number(name);
    if (!number) {
      std::vector<std::string> names;
      for (int n = 1; n < 32; ++n) names.push_back(signal_name(n));
      throw UsageError("run", "{}: '{}' is not a signal.{} Write names such as SIGTERM,SIGUSR1.",
                       given.origin, name, did_you_mean(name, names));
    }
    if (*number == SIGKILL || *number == SIGSTOP || *number == SIGCHLD) {
      throw UsageError("run", "{}: {} cannot be handled and forwarded. Leave it out.", given.origin,
                       signal_name(*number));
    }
    if (std::ranges::find(signals, *number) == signals.end()) signals.push_back(*number);
  }
  return signals;
}

std::set<int> parse_ranks(const Given& given) {
  std::set<int> ranks;
  for (const std::string& part : split(given.text, ',')) {
    const auto rank = to_int(trim(part));
    if (!rank || *rank < 0) {
      throw UsageError("run", "{}='{}': '{}' is not a local rank. Write numbers such as 0,1,2.",
                       given.origin, given.text, part);
    }
    ranks.insert(*rank);
  }
  return ranks;
}

// Parses one of several words, each with its value.
template <typename T>
T choice(const Given& given, const std::vector<std::pair<std::string, T>>& choices) {
  std::vector<std::string> names;
  for (const auto& [name, value] : choices) {
    if (name == given.text) return value;
    names.push_back(name);
  }
  throw UsageError("run", "{}='{}' is not {}.{}", given.origin, given.text, listed(names),
                   did_you_mean(given.text, names));
}

// "2", or "2:2" as torchrun's elastic flags have it. `words`: what else the flag takes, for the
// message.
int parse_count(const Given& given, std::string_view things, int most, std::string_view words) {
  const auto parts = split(given.text, ':');
  const auto min = to_int(trim(parts.front()));
  const auto max = to_int(trim(parts.back()));
  if (parts.size() > 2 || !min || !max || *min < 1 || *max < *min || *max > most)
    throw UsageError("run",
                     "{}='{}' is not a number of {} from 1 to {}{}. Write one number, such as 2.",
                     given.origin, given.text, things, most, words);
  if (*min != *max)
    throw UsageError("run",
                     "{}={} asks for a world that changes its size, which is not supported. Choose "
                     "one number, e.g. {}={}.",
                     given.origin, given.text, given.origin, *max);
  return *max;
}

// Adds the file's values for flags that were given neither on the command line nor as variables.
// With --standalone, the file's rendezvous is ignored.
void fill_from_file(Values& values, const LaunchContext& context, ParsedFlags& parsed) {
  const Given* file = values.find("config-file");
  if (file == nullptr) return;
  AccelerateLaunch launch = load_accelerate_config(file->text, context.training_keys);
  // LOCKSTEP_DEVICE=cpu in the environment takes precedence over the file.
  if (!launch.gpu_key.empty() && context.variable("LOCKSTEP_DEVICE").value_or("") != "cpu") {
    if (const Gpus gpus = context.gpus(); gpus.count == 0)
      throw UsageError("config",
                       "{}, but there is no GPU: {}. Check CUDA_VISIBLE_DEVICES and nvidia-smi, or "
                       "write MULTI_CPU.",
                       launch.gpu_key, gpus.reason);
  }
  parsed.plan.environment = std::move(launch.environment);
  parsed.notes = std::move(launch.notes);
  const Values read = read_arguments(launch.flags).values;
  const bool standalone = values.is_on("standalone");
  const std::set<std::string_view> rendezvous_flags = {"nnodes", "node-rank", "rdzv-backend",
                                                       "master-addr", "master-port"};
  for (const FlagSpec& flag : flag_table()) {
    const std::string name(flag.name);
    const Given* given = read.find(name);
    if (given == nullptr || values.has(name) || (standalone && rendezvous_flags.count(name) != 0))
      continue;
    values.set(flag, given->text, fmt::format("{} ({})", given->origin, file->text));
  }
}

// Limits the driver's count to the file's gpu_ids, which are not in its environment yet.
int chosen_gpus(const LaunchPlan& plan, const LaunchContext& context, int count) {
  const auto ids = plan.environment.find("CUDA_VISIBLE_DEVICES");
  const auto set = context.variable("CUDA_VISIBLE_DEVICES");
  if (ids == plan.environment.end() || (set && !set->empty())) return count;
  return std::min(count, static_cast<int>(split(ids->second, ',').size()));
}

int parse_nproc(const Values& values, const LaunchContext& context, const LaunchPlan& plan) {
  const Given* given = values.find("nproc-per-node");
  if (given == nullptr) return 1;
  if (given->text == "cpu") return context.cores();
  if (given->text == "auto" || given->text == "gpu") {
    const Gpus gpus = context.gpus();
    if (gpus.count > 0) return chosen_gpus(plan, context, gpus.count);
    if (given->text == "auto") return context.cores();
    throw UsageError("run",
                     "{}=gpu, but there is no GPU: {}. Check CUDA_VISIBLE_DEVICES and nvidia-smi, "
                     "or use a number, auto or cpu.",
                     given->origin, gpus.reason);
  }
  if (given->text == "xpu") {
    throw UsageError("run", "{}=xpu is not supported: only CUDA devices are counted. Use a number.",
                     given->origin);
  }
  return parse_count(*given, "ranks", kMaxRanksOfHost, ", auto, cpu or gpu");
}

// A version 4 UUID, as torchrun makes them.
std::string random_run_id() {
  std::random_device random;
  return fmt::format("{:08x}-{:04x}-4{:03x}-{:04x}-{:04x}{:08x}", random(), random() & 0xffff,
                     random() & 0xfff, 0x8000 | (random() & 0x3fff), random() & 0xffff, random());
}

struct Endpoint {
  std::string host;
  std::optional<int> port;
};

std::string without_brackets(const std::string& host) {
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

// "host", "host:port", "[::1]:port" or a bare IPv6 address.
Endpoint parse_endpoint(const Given& given) {
  const std::string text = trim(given.text);
  const auto colon = text.rfind(':');
  const bool bare_v6 = text.find(':') != colon && text.front() != '[';
  if (colon == std::string::npos || bare_v6 || text.back() == ']')
    return {without_brackets(text), std::nullopt};
  const auto port = to_int(text.substr(colon + 1));
  if (!port || *port < 0 || *port > kMaxPort || colon == 0) {
    throw UsageError("run", "{}='{}' is not HOST:PORT with a port from 0 to {}.", given.origin,
                     given.text, kMaxPort);
  }
  return {without_brackets(text.substr(0, colon)), port};
}

void note_unused(const Values& values, std::initializer_list<const char*> names,
                 std::string_view reason, std::vector<std::string>& notes) {
  for (const char* name : names) {
    if (const Given* given = values.find(name))
      notes.push_back(fmt::format("{}={} is ignored {}.", given->origin, given->text, reason));
  }
}

void apply_conf(const Values& values, LaunchPlan& plan, std::vector<std::string>& notes) {
  plan.rendezvous_timeout = std::chrono::seconds(values.number("startup-timeout", 300, 1, kYear_s));
  const Given* given = values.find("rdzv-conf");
  if (given == nullptr || trim(given->text).empty()) return;
  // Settings of torchrun's backends that mean nothing for a fixed set of hosts.
  const std::vector<std::string> unused = split(
      "rank,last_call_timeout,close_timeout,heartbeat_timeout,heartbeat,"
      "keep_alive_interval,keep_alive_max_attempt,read_timeout,is_host,store_type,use_libuv,use_"
      "agent_store",
      ',');
  for (const std::string& part : split(given->text, ',')) {
    const auto equals = part.find('=');
    const std::string key = trim(part.substr(0, equals));
    const std::string value = equals == std::string::npos ? "" : trim(part.substr(equals + 1));
    if (key.empty() || value.empty()) {
      throw UsageError("run", "{}='{}': '{}' is not KEY=VALUE.", given->origin, given->text, part);
    }
    if (key == "timeout" || key == "join_timeout") {
      const auto seconds = to_int(value);
      if (!seconds || *seconds < 1)
        throw UsageError("run", "{}: {}='{}' is not a number of seconds of at least 1.",
                         given->origin, key, value);
      plan.rendezvous_timeout = std::chrono::seconds(*seconds);
    } else if (std::ranges::find(unused, key) != unused.end()) {
      notes.push_back(fmt::format("{}: {} is ignored: it has no meaning for a fixed set of hosts.",
                                  given->origin, key));
    } else {
      std::vector<std::string> known = unused;
      known.insert(known.end(), {"timeout", "join_timeout"});
      throw UsageError("run", "{}: there is no setting '{}'.{} timeout is the one that counts.",
                       given->origin, key, did_you_mean(key, known));
    }
  }
}

// An invalid value is an error even if another flag overrides it, as in torchrun.
void check_overridden(const Values& values) {
  values.number("node-rank", 0, 0, kMaxWorldSize);
  values.number("master-port", 0, 0, kMaxPort);
  if (const Given* endpoint = values.find("rdzv-endpoint"); endpoint && !endpoint->text.empty())
    parse_endpoint(*endpoint);
  const std::vector<std::string> backends = {"static", "c10d", "etcd", "etcd-v2"};
  const Given* backend = values.find("rdzv-backend");
  if (backend != nullptr && std::ranges::find(backends, backend->text) == backends.end())
    throw UsageError("run",
                     "{}='{}' is not a rendezvous backend.{} Use static (or c10d on one host).",
                     backend->origin, backend->text, did_you_mean(backend->text, backends));
}

void apply_standalone(const Values& values, LaunchPlan& plan, std::vector<std::string>& notes) {
  if (plan.nnodes > 1) {
    throw UsageError(
        "run",
        "--standalone is for one host, but {}={}. Drop one of them; several hosts need "
        "--node-rank and --master-addr.",
        values.find("nnodes")->origin, plan.nnodes);
  }
  plan.rdzv_backend = "c10d";
  note_unused(
      values,
      {"rdzv-backend", "rdzv-endpoint", "rdzv-id", "node-rank", "master-addr", "master-port"},
      "with --standalone", notes);
}

void apply_backend(const Values& values, LaunchPlan& plan) {
  const Given* given = values.find("rdzv-backend");
  if (given == nullptr) return;
  if (given->text == "c10d" && plan.nnodes > 1) {
    throw UsageError("run",
                     "{}=c10d is supported on one host only, and --nnodes={}. Use "
                     "--rdzv-backend=static with --node-rank, --master-addr and --master-port.",
                     given->origin, plan.nnodes);
  }
  if (given->text != "static" && given->text != "c10d") {
    throw UsageError("run", "{}='{}' is not supported. Use static (or c10d on one host).",
                     given->origin, given->text);
  }
  plan.rdzv_backend = given->text;
}

void apply_address(const Values& values, LaunchPlan& plan, std::vector<std::string>& notes) {
  std::optional<int> port;
  std::string host;
  if (const Given* endpoint = values.find("rdzv-endpoint"); endpoint && !endpoint->text.empty()) {
    const Endpoint parsed = parse_endpoint(*endpoint);
    host = parsed.host;
    port = parsed.port;
    note_unused(values, {"master-addr", "master-port"},
                fmt::format("because {} is given", endpoint->origin), notes);
  } else if (plan.rdzv_backend == "c10d") {
    note_unused(values, {"master-addr", "master-port"},
                "with the c10d backend; use --rdzv-endpoint or the static one", notes);
  } else {
    host = without_brackets(trim(values.text("master-addr", "")));
    if (values.has("master-port")) port = values.number("master-port", 0, 0, kMaxPort);
  }
  if (!host.empty()) plan.master_addr = host;
  if (plan.nnodes == 1) {
    plan.master_port = port.value_or(0);
    return;
  }
  if (port == 0) {
    throw UsageError("run",
                     "port 0 means any free one, which the other hosts cannot know (--nnodes={}). "
                     "Give all of them the same --master-port.",
                     plan.nnodes);
  }
  plan.master_port = port.value_or(kMultiNodePort);
  if (host.empty()) {
    notes.push_back(
        fmt::format("--nnodes={} without --master-addr: only launchers on this host "
                    "can reach {}.",
                    plan.nnodes, plan.master_addr));
  }
}

void apply_node_rank(const Values& values, LaunchPlan& plan, std::vector<std::string>& notes) {
  if (plan.rdzv_backend == "c10d") {
    note_unused(values, {"node-rank"}, "with the c10d backend, which is one host", notes);
    return;
  }
  plan.node_rank = values.number("node-rank", 0, 0, kMaxWorldSize);
  if (plan.node_rank >= plan.nnodes) {
    throw UsageError("run",
                     "{}={} but --nnodes={}: node ranks go from 0 to {}. Give every host the same "
                     "--nnodes and its own --node-rank.",
                     values.find("node-rank")->origin, plan.node_rank, plan.nnodes,
                     plan.nnodes - 1);
  }
  if (plan.nnodes > 1 && !values.has("node-rank"))
    notes.push_back(fmt::format("--nnodes={} without --node-rank: this is node 0.", plan.nnodes));
}

void apply_rendezvous(const Values& values, LaunchPlan& plan, std::vector<std::string>& notes) {
  if (const Given* given = values.find("nnodes"))
    plan.nnodes = parse_count(*given, "hosts", kMaxWorldSize, "");
  check_overridden(values);
  if (values.is_on("standalone")) {
    apply_standalone(values, plan, notes);
  } else {
    apply_backend(values, plan);
    apply_address(values, plan, notes);
    apply_node_rank(values, plan, notes);
    plan.run_id = values.text("rdzv-id", "");
  }
  apply_conf(values, plan, notes);
  plan.local_addr = without_brackets(values.text("local-addr", ""));
  if (plan.run_id.find('/') != std::string::npos || plan.run_id == "." || plan.run_id == "..") {
    throw UsageError("run", "{}='{}' cannot name a log directory. Leave the '/' out.",
                     values.find("rdzv-id")->origin, plan.run_id);
  }
  // Several hosts must agree on an id, so only that of one host is random.
  const bool unnamed = plan.run_id.empty() || values.is_on("standalone");
  if (unnamed) plan.run_id = plan.nnodes == 1 ? random_run_id() : "none";
}

void apply_secret(const Values& values, LaunchPlan& plan, const LaunchContext& context,
                  std::vector<std::string>& notes) {
  plan.secret_file =
      expand_home(values.text("secret-file", context.variable("LOCKSTEP_SECRET_FILE").value_or("")),
                  "--secret-file");
  if (plan.nnodes > 1) return;
  note_unused(values, {"secret-file"}, "on one host, which has no link between launchers", notes);
  plan.secret_file.clear();
}

// Without --nnodes, each task of an srun trains a separate world on its own batches, and nothing
// fails.
void note_separate_worlds(const Values& values, const LaunchPlan& plan,
                          const LaunchContext& context, std::vector<std::string>& notes) {
  const auto nodes = to_int(context.variable("SLURM_STEP_NUM_NODES").value_or(""));
  if (plan.nnodes > 1 || values.is_on("standalone") || nodes.value_or(1) <= 1) return;
  notes.push_back(fmt::format(
      "srun started this launcher on {} nodes, but --nnodes is 1: each of them trains a "
      "world of its own. For one world give --nnodes=$SLURM_STEP_NUM_NODES "
      "--node-rank=$SLURM_NODEID, --master-addr and --master-port; or --standalone, if "
      "that is meant.",
      *nodes));
}

// A launcher inside a rank, such as torchrun's program `lockstep run ./train`, is often a mistake:
// each rank trains a separate world on the same GPUs, and nothing fails.
void note_outer_launcher(const LaunchContext& context, std::vector<std::string>& notes) {
  const auto run = context.variable("TORCHELASTIC_RUN_ID");
  const auto rank = context.variable("RANK");
  if (!run || !rank || !context.variable("LOCAL_RANK")) return;
  const char* const outer = context.variable("LOCKSTEP_RUN") == run ? "lockstep run" : "torchrun";
  notes.push_back(fmt::format(
      "this launcher runs inside rank {} of {} that {} has started, and every such rank starts a "
      "world of its own. For one world, drop one of the two launchers.",
      *rank, context.variable("WORLD_SIZE").value_or("?"), outer));
}

// torch loads the backend that replaces gloo, unless autoload is off.
void note_autoload(const LaunchPlan& plan, const LaunchContext& context,
                   std::vector<std::string>& notes) {
  if (plan.replace_gloo && context.variable("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0")
    notes.push_back(
        "--replace-gloo has no effect with TORCH_DEVICE_BACKEND_AUTOLOAD=0, unless the script "
        "imports lockstep_torch. Unset that variable.");
}

void note_absent_ranks(const std::vector<int>& ranks, int nproc, std::string_view what,
                       std::vector<std::string>& notes) {
  for (const int rank : ranks) {
    if (rank < nproc) continue;
    notes.push_back(
        fmt::format("{} names local rank {}, but there are only {}.", what, rank, nproc));
    return;
  }
}

std::string directory_of(const Values& values, const std::string& name) {
  const std::string text = values.text(name, "");
  if (text.empty()) return text;
  return std::filesystem::absolute(expand_home(text, "--" + name)).lexically_normal().string();
}

void apply_output(const Values& values, LaunchPlan& plan, std::vector<std::string>& notes) {
  plan.log_dir = directory_of(values, "log-dir");
  plan.record_dir = directory_of(values, "record");
  plan.doctor = values.is_on("doctor");
  if (const Given* given = values.find("dashboard"))
    plan.dashboard = given->text == "1" ? "" : given->text;
  plan.redirects = parse_streams(values, "redirects");
  plan.tee = parse_streams(values, "tee");
  for (const auto& [name, map] : {std::pair("redirects", &plan.redirects), {"tee", &plan.tee}}) {
    std::vector<int> ranks;
    for (const auto& [rank, streams] : map->by_local_rank) ranks.push_back(rank);
    note_absent_ranks(ranks, plan.nproc_per_node, fmt::format("--{}", name), notes);
  }
  if (const Given* given = values.find("line-prefix"))
    plan.line_prefix = choice<LinePrefix>(
        *given,
        {{"rank", LinePrefix::kRank}, {"role", LinePrefix::kRole}, {"none", LinePrefix::kNone}});
  if (const Given* given = values.find("local-ranks-filter"); given && !given->text.empty()) {
    plan.local_ranks_filter = parse_ranks(*given);
    note_absent_ranks({plan.local_ranks_filter->begin(), plan.local_ranks_filter->end()},
                      plan.nproc_per_node, given->origin, notes);
  }
  plan.duplicate_stdout_filters = parse_filters(values.text("duplicate-stdout-filters", ""));
  plan.duplicate_stderr_filters = parse_filters(values.text("duplicate-stderr-filters", ""));
}

void apply_supervision(const Values& values, LaunchPlan& plan) {
  plan.max_restarts = values.number("max-restarts", 0, 0, kMaxRestarts);
  plan.monitor_interval = values.seconds("monitor-interval", plan.monitor_interval, 0.001);
  plan.shutdown_timeout = values.seconds("shutdown-timeout", plan.shutdown_timeout, 0);
  plan.stall_timeout = values.seconds("stall-timeout", plan.stall_timeout, 0);
  if (const Given* given = values.find("stall-action"))
    plan.stall_action =
        choice<StallAction>(*given, {{"warn", StallAction::kWarn}, {"stop", StallAction::kStop}});
  plan.timeout = std::chrono::seconds(values.number("timeout", 0, 1, kYear_s));
  plan.startup_timeout = std::chrono::seconds(values.number("startup-timeout", 0, 1, kYear_s));
  plan.virtual_local_rank = values.is_on("virtual-local-rank");
  plan.replace_gloo = values.is_on("replace-gloo");
  plan.role = values.text("role", plan.role);
  if (const Given* given = values.find("signals-to-handle"))
    plan.signals_to_handle = parse_signals(*given);
  if (const Given* found = values.find("numa-binding")) {
    Given given = *found;  // torchrun spells core-complex either way
    std::ranges::replace(given.text, '_', '-');
    plan.numa_binding = choice<NumaBinding>(given, {{"node", NumaBinding::kNode},
                                                    {"socket", NumaBinding::kSocket},
                                                    {"exclusive", NumaBinding::kExclusive},
                                                    {"core-complex", NumaBinding::kCoreComplex}});
  }
}

}  // namespace

ParsedFlags parse_flags(const std::vector<std::string>& args, const LaunchContext& context) {
  GivenArguments given = read_arguments(args);
  ParsedFlags parsed;
  parsed.help = given.help;
  if (parsed.help) return parsed;
  Values& values = given.values;
  fill_from_variables(values, context.variable);
  fill_from_file(values, context, parsed);
  refuse_and_note(values, parsed.notes);
  LaunchPlan& plan = parsed.plan;
  apply_rendezvous(values, plan, parsed.notes);
  apply_secret(values, plan, context, parsed.notes);
  note_separate_worlds(values, plan, context, parsed.notes);
  note_outer_launcher(context, parsed.notes);
  apply_supervision(values, plan);
  note_autoload(plan, context, parsed.notes);
  // Before the GPUs are counted: a misspelt program should not wait for the driver.
  plan.command = resolve_command({.args = given.program,
                                  .module = values.is_on("module"),
                                  .no_python = values.is_on("no-python"),
                                  .run_path = values.is_on("run-path")},
                                 context.variable);
  plan.nproc_per_node = parse_nproc(values, context, plan);
  if (std::int64_t{plan.nnodes} * plan.nproc_per_node > kMaxWorldSize)
    throw UsageError("run", "{} hosts with {} ranks each are more than {} ranks. Start fewer.",
                     plan.nnodes, plan.nproc_per_node, kMaxWorldSize);
  apply_output(values, plan, parsed.notes);
  return parsed;
}

}  // namespace lockstep::launch
