#include "launcher/worker.h"

#include <signal.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <filesystem>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/text.h"
#include "lockstep/rendezvous/store_client.h"

namespace lockstep::launch {

void make_directories(const std::string& path) {
  std::error_code problem;
  std::filesystem::create_directories(path, problem);
  if (problem) throw SystemError("launch", "cannot create the directory " + path, problem.value());
}

Worker::Worker(GroupSetup& setup, const GroupInfo& group, RankRecord& of)
    : record(of), setup_(setup), group_(group) {}

Worker::~Worker() {
  if (alive()) setup_.loop.forget(process.pidfd());
}

// LOCKSTEP_TERMINAL: only rank 0 draws a progress bar, if its output goes to a terminal, whose
// width the prefix reduces.
std::string Worker::terminal() const {
  const StreamRoute& route = out->route();
  if (record.rank != 0 || !route.console || !route.file.empty() || !route.filters.empty())
    return {};
  const int columns = terminal::columns(STDOUT_FILENO) - static_cast<int>(route.prefix.size());
  return terminal::describe_pipe(out->child_end(), columns);
}

std::vector<std::string> Worker::environment(int control_fd, int store_fd) const {
  const StoreChannel channel{store_fd, inode_of(store_fd), record.rank, setup_.layout.world_size,
                             group_.master_port};
  return process_environment(
      worker_environment(setup_.plan, {.local_rank = record.local_rank,
                                       .layout = setup_.layout,
                                       .attempt = group_.attempt,
                                       .master_addr = group_.master_addr,
                                       .master_port = group_.master_port,
                                       .error_file = record.error_file,
                                       .control_fd = control_fd,
                                       .store_channel = channel.text(),
                                       .interface = setup_.interface,
                                       .threads = setup_.threads,
                                       .ledger = ledger ? ledger->variable() : "",
                                       .terminal = terminal()}));
}

StreamRoute Worker::route(OutputKind kind, const std::string& directory, int filtered_fd) {
  const LaunchPlan& plan = setup_.plan;
  const bool is_out = kind == OutputKind::kOut;
  StreamRoute route =
      route_for(plan, record.rank, record.local_rank, is_out ? Streams::kOut : Streams::kErr,
                directory + (is_out ? "/stdout.log" : "/stderr.log"));
  route.filters = is_out ? plan.duplicate_stdout_filters : plan.duplicate_stderr_filters;
  route.filtered_fd = filtered_fd;
  if (!setup_.observed) return route;
  const auto notify_observer = [this, kind](auto function) {
    return [this, kind, function](std::string_view line) {
      setup_.observed.notify(
          [&](RunObserver& observer) { (observer.*function)(record.rank, kind, line); });
    };
  };
  route.on_line = notify_observer(&RunObserver::output_line);
  route.on_progress = notify_observer(&RunObserver::output_progress);
  return route;
}

void Worker::start(const Fd* filtered, bool with_ledger, std::function<void()> on_exit) {
  const LaunchPlan& plan = setup_.plan;
  const std::string directory = fmt::format("{}/{}", group_.directory, record.local_rank);
  make_directories(directory);
  record.error_file = directory + "/error.json";
  const auto open = [&](std::optional<OutputStream>& stream, OutputKind kind, int index) {
    stream.emplace(
        setup_.loop, setup_.console,
        OutputStream::Options{static_cast<Console::Target>(index), 2 * record.local_rank + index,
                              route(kind, directory, filtered[index].get())});
  };
  open(out, OutputKind::kOut, Console::kOut);
  open(err, OutputKind::kErr, Console::kErr);
  Pipe control = make_pipe();
  set_nonblocking(control.write.get());
  const Fd store = group_.store->open_channel(record.rank);
  if (with_ledger) make_ledger();
  ProcessRequest request;
  request.argv = plan.command;
  request.environment = environment(control.read.get(), store.get());
  request.stdout_fd = out->child_end();
  request.stderr_fd = err->child_end();
  request.pass_fds = {control.read.get(), store.get()};
  if (ledger) request.pass_fds.push_back(ledger->fd());
  if (!setup_.cpus.empty())
    request.cpus = &setup_.cpus[static_cast<std::size_t>(record.local_rank)];
  request.signal_mask = setup_.guard.callers_mask;
  request.files = setup_.guard.callers_files;
  process = start_process(request);
  record.pid = process.pid();
  record.life.move(RankLife::kRunning);
  out->close_child_end();
  err->close_child_end();
  control_ = std::move(control.write);
  if (ledger) ledger->close_fd();
  setup_.loop.watch(process.pidfd(), EPOLLIN,
                    [on_exit = std::move(on_exit)](std::uint32_t) { on_exit(); });
  setup_.observed.notify([&](RunObserver& observer) {
    observer.rank_started({record.rank, record.local_rank, record.pid, ledger, out->direct_file(),
                           err->direct_file()});
  });
}

bool Worker::notify(const std::string& line) {
  if (!alive()) return false;
  record.life.move(RankLife::kNotified);
  // Fails if the pipe is full or closed, because the rank does not read it.
  return ::write(control_.get(), line.data(), line.size()) > 0;
}

void Worker::signal(int number) {
  record.life.move(RankLife::kSignalled);
  process.signal_group(number);
  // A stopped process receives nothing but SIGKILL until it is continued.
  if (number != SIGKILL) process.signal_group(SIGCONT);
}

void Worker::release() {
  setup_.loop.forget(process.pidfd());
  control_.reset();
}

void Worker::make_ledger() {
  try {
    ledger = std::make_shared<lockstep::ledger::File>(
        lockstep::ledger::File::create({record.rank, setup_.layout.world_size, group_.attempt}));
  } catch (const SystemError& error) {  // the run continues without it
    setup_.console.say(fmt::format("[launch] stalls of rank {} will not be explained: {}",
                                   record.rank, error.what()));
  }
}

void Worker::save_ledger() const {
  if (!ledger || !ledger->opened()) return;
  try {
    ledger->save(
        fmt::format("{}/{}/{}", group_.directory, record.local_rank, lockstep::ledger::kFileName));
  } catch (const std::exception& error) {
    setup_.console.say(
        fmt::format("[launch] the ledger of rank {} is lost: {}", record.rank, error.what()));
  }
}

namespace {

using Environment = std::map<std::string, std::string>;

bool is_set(const Variables& variable, const std::string& name) {
  const auto value = variable(name);
  return value.has_value() && !value->empty();
}

std::string signals_text(const LaunchPlan& plan) {
  std::string text;
  for (const int number : stop_signals(plan))
    text += (text.empty() ? "" : ",") + signal_name(number);
  return text;
}

// The entry of CUDA_VISIBLE_DEVICES that belongs to the rank; without the variable, its own index.
std::string visible_device(const Variables& variable, int local_rank) {
  const auto list = variable("CUDA_VISIBLE_DEVICES");
  if (!list) return std::to_string(local_rank);
  std::vector<std::string> devices;
  for (const std::string& device : split(*list, ','))
    if (!trim(device).empty()) devices.push_back(trim(device));
  if (static_cast<std::size_t>(local_rank) >= devices.size()) {
    throw UsageError("run",
                     "--virtual-local-rank: local rank {} has no GPU (CUDA_VISIBLE_DEVICES='{}' "
                     "names {}). Start fewer ranks or make more devices visible.",
                     local_rank, *list, devices.size());
  }
  return devices[static_cast<std::size_t>(local_rank)];
}

void add_identity(Environment& set, const LaunchPlan& plan, const WorkerInfo& info) {
  set["RANK"] = std::to_string(info.layout.first_rank + info.local_rank);
  set["ROLE_RANK"] = std::to_string(info.layout.first_role_rank + info.local_rank);
  set["LOCAL_RANK"] = std::to_string(info.local_rank);
  set["GROUP_RANK"] = std::to_string(plan.node_rank);
  set["WORLD_SIZE"] = std::to_string(info.layout.world_size);
  set["ROLE_WORLD_SIZE"] = std::to_string(info.layout.role_world_size);
  set["LOCAL_WORLD_SIZE"] = std::to_string(plan.nproc_per_node);
  set["GROUP_WORLD_SIZE"] = std::to_string(plan.nnodes);
  set["ROLE_NAME"] = plan.role;
  set["MASTER_ADDR"] = info.master_addr;
  set["MASTER_PORT"] = std::to_string(info.master_port);
}

}  // namespace

Environment worker_environment(const LaunchPlan& plan, const WorkerInfo& info,
                               const Variables& variable) {
  Environment set;
  add_identity(set, plan, info);
  set["TORCHELASTIC_RESTART_COUNT"] = std::to_string(info.attempt);
  set["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(plan.max_restarts);
  set["TORCHELASTIC_RUN_ID"] = plan.run_id;
  set["TORCHELASTIC_ERROR_FILE"] = info.error_file;
  set["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals_text(plan);
  set["TORCHELASTIC_USE_AGENT_STORE"] = "True";  // the launcher serves the store
  if (!is_set(variable, "TORCH_NCCL_ASYNC_ERROR_HANDLING"))
    set["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1";

  // The run's id rather than "1": if a rank starts another launcher (such as torchrun), this no
  // longer equals TORCHELASTIC_RUN_ID, so the inner ranks do not use the descriptors below.
  set["LOCKSTEP_RUN"] = plan.run_id;
  set["LOCKSTEP_CONTROL_FD"] = info.control_fd >= 0 ? std::to_string(info.control_fd) : "";
  set[terminal::kVariable] = info.terminal;
  set[ledger::kVariable] = info.ledger;
  set["LOCKSTEP_STORE_CHANNEL"] = info.store_channel;

  if (plan.timeout.count() > 0) set["LOCKSTEP_TIMEOUT_S"] = std::to_string(plan.timeout.count());
  if (plan.startup_timeout.count() > 0)
    set["LOCKSTEP_STARTUP_TIMEOUT_S"] = std::to_string(plan.startup_timeout.count());

  if (plan.replace_gloo) set["LOCKSTEP_REPLACE_GLOO"] = "1";

  for (const auto& [name, value] : plan.environment) {
    if (!is_set(variable, name)) set[name] = value;
  }
  if (plan.virtual_local_rank) {
    const auto devices = [&](const std::string& name) -> std::optional<std::string> {
      const auto found = set.find(name);
      return found != set.end() ? found->second : variable(name);
    };
    set["LOCAL_RANK"] = "0";
    set["CUDA_VISIBLE_DEVICES"] = visible_device(devices, info.local_rank);
  }
  if (info.threads > 0 && !is_set(variable, "OMP_NUM_THREADS"))
    set["OMP_NUM_THREADS"] = std::to_string(info.threads);
  if (!info.interface.empty()) {
    if (!is_set(variable, "GLOO_SOCKET_IFNAME")) set["GLOO_SOCKET_IFNAME"] = info.interface;
    // NCCL takes the name as a prefix ("eth1" also matches eth10) unless it begins with '='.
    if (!is_set(variable, "NCCL_SOCKET_IFNAME")) set["NCCL_SOCKET_IFNAME"] = "=" + info.interface;
  }
  return set;
}

std::vector<std::string> process_environment(const Environment& set) {
  Environment all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string::npos) all[text.substr(0, equals)] = text.substr(equals + 1);
  }
  for (const auto& [name, value] : set) {
    if (value.empty()) {
      all.erase(name);
    } else {
      all[name] = value;
    }
  }
  std::vector<std::string> strings;
  for (const auto& [name, value] : all) strings.push_back(name + "=" + value);
  return strings;
}

}  // namespace lockstep::launch
