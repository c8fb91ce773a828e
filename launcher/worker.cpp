#include "launcher/worker.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <filesystem>
#include <utility>

#include "launcher/worker_env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/rendezvous/store_channel.h"

namespace lockstep::launch {

void make_directories(const std::string& path) {
  std::error_code problem;
  std::filesystem::create_directories(path, problem);
  if (problem) throw SystemError("launch", "cannot create the directory " + path, problem.value());
}

Worker::Worker(GroupSetup& setup, const GroupInfo& place, RankRecord& of)
    : record(of), setup_(setup), place_(place) {}

Worker::~Worker() {
  if (alive()) setup_.loop.forget(process.pidfd());
}

// Only rank 0 draws a progress bar, where a person sees it. The prefix takes some columns.
std::string Worker::terminal() const {
  const StreamRoute& route = out->route();
  if (record.rank != 0 || !route.console || !route.file.empty() || !route.filters.empty())
    return {};
  const int columns = terminal::columns(STDOUT_FILENO) - static_cast<int>(route.prefix.size());
  return terminal::describe_pipe(out->child_end(), columns);
}

std::vector<std::string> Worker::environment(int control_fd, int store_fd) const {
  const StoreChannel channel{store_fd, inode_of(store_fd), record.rank, setup_.layout.world_size,
                             place_.master_port};
  return process_environment(
      worker_environment(setup_.plan, {.local_rank = record.local_rank,
                                       .layout = setup_.layout,
                                       .attempt = place_.attempt,
                                       .master_addr = place_.master_addr,
                                       .master_port = place_.master_port,
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
  const auto pass_on = [this, kind](auto function) {
    return [this, kind, function](std::string_view line) {
      setup_.observed.notify(
          [&](RunObserver& observer) { (observer.*function)(record.rank, kind, line); });
    };
  };
  route.on_line = pass_on(&RunObserver::output_line);
  route.on_progress = pass_on(&RunObserver::output_progress);
  return route;
}

void Worker::start(const Fd* filtered, bool with_ledger, std::function<void()> on_exit) {
  const LaunchPlan& plan = setup_.plan;
  const std::string directory = fmt::format("{}/{}", place_.directory, record.local_rank);
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
  const Fd store = place_.store->open_channel(record.rank);
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
  // A rank that does not read has a full pipe or none; that is its own loss.
  return ::write(control_.get(), line.data(), line.size()) > 0;
}

void Worker::signal(int number) {
  record.life.move(RankLife::kAsked);
  process.signal_group(number);
  // A stopped process receives nothing but SIGKILL until it is continued.
  if (number != SIGKILL) process.signal_group(SIGCONT);
}

void Worker::let_go() {
  setup_.loop.forget(process.pidfd());
  control_.reset();
}

void Worker::make_ledger() {
  try {
    ledger = std::make_shared<lockstep::ledger::File>(
        lockstep::ledger::File::create({record.rank, setup_.layout.world_size, place_.attempt}));
  } catch (const SystemError& error) {  // the run needs none
    setup_.console.say(fmt::format("[launch] stalls of rank {} will not be explained: {}",
                                   record.rank, error.what()));
  }
}

void Worker::save_ledger() const {
  if (!ledger || !ledger->opened()) return;
  try {
    ledger->save(
        fmt::format("{}/{}/{}", place_.directory, record.local_rank, lockstep::ledger::kFileName));
  } catch (const std::exception& error) {
    setup_.console.say(
        fmt::format("[launch] the ledger of rank {} is lost: {}", record.rank, error.what()));
  }
}

}  // namespace lockstep::launch
