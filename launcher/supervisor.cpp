#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <memory>
#include <optional>
#include <utility>

#include "launcher/coordinator.h"
#include "launcher/event_loop.h"
#include "launcher/host.h"
#include "launcher/node_link.h"
#include "launcher/output.h"
#include "launcher/plan.h"
#include "launcher/process.h"
#include "launcher/run_observer.h"
#include "launcher/store_server.h"
#include "launcher/worker_group.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/log.h"

namespace lockstep::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kConsoleTimeout{60'000};
constexpr milliseconds kDisconnectTimeout{2000};
constexpr milliseconds kAnnounceAfter{500};
constexpr milliseconds kEcho{100};
constexpr milliseconds kPortWait{5000};
constexpr milliseconds kPortPause{20};
constexpr milliseconds kTick{200};  // how often an observer is called
constexpr int kKillAtRequest = 3;
// Schedulers send these before a time limit, and programs handle them. Their default action would
// end the launcher and all ranks before any rank could save.
constexpr int kForwarded[] = {SIGUSR1, SIGUSR2};

class Supervisor {
 public:
  Supervisor(const LaunchPlan& plan, const GuardContext& guard, RunObserver* observer);
  int run();

 private:
  void watch_signals();
  void choose_threads();
  void bind_to_cpus();
  void choose_interface();
  void choose_loopback();
  std::string rank_address() const;
  Reach asked_reach() const;
  void hold_asked_port(milliseconds waited = {});
  void look_up_local_address();
  void begin();
  void open_coordinator();
  void open_node_server();
  void open_node_client();
  void open_store(int attempt);
  void tick();

  void on_signals();
  bool is_echo(int signal);
  void on_stop_request(int signal);
  void forward(int signal);
  void on_parent_gone();
  void obey(const Message& message);
  void obey_stop(const Message& message);
  void report(Message message);
  void announce_later(const RankFailure& failure);
  void start_attempt(int attempt);
  void on_group_failed(const RankFailure& failure);
  void on_group_ended();
  void on_node_zero_lost(const std::string& why);
  void await_node_zero();
  void end(int code, std::optional<RankFailure> failure);
  void leave();

  void say(const std::string& text) { console_.say(text); }
  void inform(const std::string& text) {
    if (log::enabled(log::Level::kInfo)) say(text);
  }
  bool busy() const { return group_ != nullptr && !group_->over(); }

  const LaunchPlan& plan_;
  const GuardContext& guard_;
  EventLoop loop_;
  Console console_;
  Observed observed_;
  GroupSetup setup_;
  LogDirectory logs_;
  Fd signals_;
  std::optional<HeldPort> link_port_;         // of node 0 of several, during the whole run
  std::optional<HeldPort> port_;              // MASTER_PORT of the ranks here
  std::unique_ptr<StoreServer> store_;        // a new one for each attempt
  std::unique_ptr<Lookup> lookup_;            // of --local-addr
  std::optional<Interface> local_interface_;  // the interface with that address
  std::unique_ptr<Coordinator> coordinator_;  // node 0
  std::unique_ptr<NodeServer> node_server_;   // node 0 of several
  std::unique_ptr<NodeClient> node_client_;   // the others
  std::unique_ptr<WorkerGroup> group_;
  int attempt_ = 0;
  int requests_ = 0;
  int last_signal_ = 0;
  EventLoop::Clock::time_point last_signal_time_;
  Timer port_timer_{loop_};
  Timer announce_timer_{loop_};
  Timer tick_timer_{loop_};
  bool parent_gone_ = false;
  bool ending_ = false;
  bool in_run_ = false;  // node 0 has started an attempt and is not lost
  std::optional<Message> end_when_idle_;
  std::optional<RankFailure> node_zero_lost_;  // until this waits for it, when no rank is left here
  int code_ = 1;
};

Supervisor::Supervisor(const LaunchPlan& plan, const GuardContext& guard, RunObserver* observer)
    : plan_(plan),
      guard_(guard),
      console_(loop_, STDOUT_FILENO, STDERR_FILENO),
      observed_(observer, [this](const std::string& text) { say(text); }),
      setup_{plan, loop_, console_, guard, observed_, host_name(), {}, 0, {}, {}},
      logs_(plan) {}

int Supervisor::run() {
  watch_signals();
  choose_threads();
  bind_to_cpus();
  observed_.notify([this](RunObserver& observer) { observer.run_started(plan_); });
  tick();
  hold_asked_port();
  loop_.run();
  return code_;
}

// If a launcher is killed and started again, its old supervisor still has the port until it has
// killed its ranks.
void Supervisor::hold_asked_port(milliseconds waited) {
  if (plan_.node_rank != 0 || plan_.master_port == 0) return look_up_local_address();
  std::optional<HeldPort>& port = plan_.nnodes > 1 ? link_port_ : port_;
  port = waited < kPortWait ? HeldPort::unless_in_use(plan_.master_port, asked_reach())
                            : HeldPort::exactly(plan_.master_port, asked_reach());
  if (port) return look_up_local_address();
  if (waited.count() == 0)
    say(fmt::format("[launch] --master-port={} is in use; waiting up to {} s for it.",
                    plan_.master_port, kPortWait.count() / 1000));
  port_timer_.start(kPortPause, [this, waited] { hold_asked_port(waited + kPortPause); });
}

// Several launchers on one host need only its loopback interface.
Reach Supervisor::asked_reach() const {
  if (plan_.nnodes == 1) return Reach::kLoopback;
  const std::string& address = plan_.master_addr;
  const bool here = address == "localhost" || address.rfind("127.", 0) == 0;
  return here ? Reach::kIpv4Loopback : Reach::kNetwork;
}

void Supervisor::look_up_local_address() {
  if (plan_.nnodes == 1 || plan_.local_addr.empty()) return begin();
  lookup_ = std::make_unique<Lookup>(
      loop_, plan_.local_addr, plan_.master_port, [this](const Addresses& found) {
        local_interface_ = interface_towards(plan_.local_addr, found);
        begin();
      });
}

void Supervisor::begin() {
  if (plan_.node_rank == 0) open_coordinator();
  if (plan_.nnodes == 1) {
    choose_loopback();
    coordinator_->begin({share_of(plan_)});
  } else if (plan_.node_rank == 0) {
    open_node_server();
  } else {
    open_node_client();
  }
}

// ---------------------------------------------------------------- set-up

void Supervisor::watch_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int number : guard_.signals) ::sigaddset(&set, number);
  ::sigaddset(&set, SIGCHLD);
  signals_.reset(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_) throw SystemError("launch", "cannot create a signalfd", errno);
  loop_.watch(signals_.get(), EPOLLIN, [this](std::uint32_t) { on_signals(); });
  loop_.watch(guard_.lifeline_fd, EPOLLIN, [this](std::uint32_t) { on_parent_gone(); });
}

// As torchrun does, leaves OMP_NUM_THREADS unset for a single rank, unless a cgroup limits it to
// fewer cores than it sees.
void Supervisor::choose_threads() {
  if (env::get("OMP_NUM_THREADS")) return;
  const int cores = allowed_cores();
  const int visible = static_cast<int>(allowed_cpus().size());
  if (plan_.nproc_per_node == 1 && cores >= visible) return;
  setup_.threads = threads_per_rank(plan_.nproc_per_node);
  inform(
      fmt::format("[launch] OMP_NUM_THREADS={} for each rank ({} cores, {} local ranks); set it "
                  "yourself to change that.",
                  setup_.threads, cores, plan_.nproc_per_node));
}

void Supervisor::bind_to_cpus() {
  if (plan_.numa_binding == NumaBinding::kNone) return;
  NumaRequest request;
  request.binding = plan_.numa_binding;
  request.local_ranks = plan_.nproc_per_node;
  request.gpu_pci_addresses = find_gpus().pci_addresses;
  request.allowed = allowed_cpus();
  for (int local_rank = 0; local_rank < plan_.nproc_per_node; ++local_rank) {
    request.local_rank = local_rank;
    const auto cpus = cpus_for_rank(request);
    inform(fmt::format("[launch] local rank {} is bound to CPUs {}.", local_rank,
                       cpu_list_text(cpus)));
    setup_.cpus.emplace_back(cpus);
  }
}

// The connection between the launchers shows which interface leads to the other hosts. A host name
// does not: Debian's resolves to 127.0.1.1.
void Supervisor::choose_interface() {
  const Interface found = local_interface_
                              ? *local_interface_
                              : interface_towards(node_server_ ? node_server_->local_address()
                                                               : node_client_->local_address());
  if (std::exchange(setup_.interface, found.name) == found.name) return;
  inform(
      fmt::format("[launch] node {} on {}: gloo and NCCL use interface {} ({}), which leads to "
                  "the {} at {}.",
                  plan_.node_rank, setup_.host, found.name, found.address,
                  plan_.node_rank == 0 ? "other nodes, master" : "master", plan_.master_addr));
}

// On one host, the ranks' own connections use the loopback interface too.
void Supervisor::choose_loopback() {
  try {
    setup_.interface = interface_towards("127.0.0.1").name;
  } catch (const SystemError&) {  // a container without one: left to the ranks
  }
  if (rank_address() != plan_.master_addr)
    inform(fmt::format("[launch] one host: MASTER_ADDR is {} for its ranks, not {}.",
                       rank_address(), plan_.master_addr));
}

// The address at which this launcher serves the store. As torchrun does, passes on the name of a
// loopback address that the port is bound to.
std::string Supervisor::rank_address() const {
  const bool held = plan_.master_addr == "localhost" || plan_.master_addr == "::1";
  return plan_.nnodes == 1 && held ? plan_.master_addr : "127.0.0.1";
}

void Supervisor::open_coordinator() {
  Coordinator::Actions orders;
  orders.broadcast = [this](const Message& message) {
    // The store must be open before a rank of another node uses it.
    if (message.kind == Message::Kind::kStart) open_store(message.attempt);
    if (node_server_) node_server_->broadcast(message);
    loop_.post([this, message] { obey(message); });
  };
  orders.await_nodes = [this] { node_server_->await_nodes(); };
  orders.missing = [this] { return node_server_->missing(); };
  coordinator_ = std::make_unique<Coordinator>(loop_, plan_, std::move(orders));
}

void Supervisor::open_node_server() {
  NodeServer::Handlers handlers;
  handlers.complete = [this] {
    coordinator_->begin(node_server_->nodes(), node_server_->first_attempt());
  };
  handlers.overdue = [this](const std::string& text) {
    if (!coordinator_->waiting()) return coordinator_->give_up();
    say(text);
    node_server_->broadcast({.kind = Message::Kind::kRefused, .code = 1, .text = text});
    end(1, std::nullopt);
  };
  handlers.message = [this](int node, const Message& message) {
    coordinator_->on_message(node, message);
  };
  handlers.frame = [this](int node, const StoreFrame& frame) {
    if (store_) store_->on_frame(node, frame);
  };
  handlers.lost = [this](int node, const std::string& host, const std::string& why) {
    if (store_) store_->on_lost(node);
    coordinator_->on_lost(node, host, why);
  };
  handlers.say = [this](const std::string& text) { say(text); };
  if (plan_.secret_file.empty() && log::enabled(log::Level::kWarning))
    say(
        fmt::format("[launch] without --secret-file anybody who reaches port {} here and knows the "
                    "run id ({}) can join this run as a node, and stop it.",
                    plan_.master_port, plan_.run_id));
  node_server_ = std::make_unique<NodeServer>(loop_, plan_, *link_port_, std::move(handlers));
  node_server_->await_nodes();
}

void Supervisor::open_node_client() {
  NodeClient::Handlers handlers;
  handlers.message = [this](const Message& message) { obey(message); };
  handlers.failed = [this](int code, const std::string& text) {
    say(text);
    end(code, std::nullopt);
  };
  handlers.frame = [this](const StoreFrame& frame) {
    if (store_) store_->on_frame(0, frame);
  };
  handlers.lost = [this](const std::string& why) { on_node_zero_lost(why); };
  handlers.say = [this](const std::string& text) { say(text); };
  node_client_ = std::make_unique<NodeClient>(loop_, plan_, setup_.host, std::move(handlers));
  node_client_->connect();
}

void Supervisor::tick() {
  observed_.notify([this](RunObserver& observer) {
    for (const std::string& line : observer.tick()) say(line);
  });
  if (observed_) tick_timer_.start(kTick, [this] { tick(); });
}

// ---------------------------------------------------------------- events

void Supervisor::on_signals() {
  signalfd_siginfo info{};
  while (::read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    const int number = static_cast<int>(info.ssi_signo);
    if (number == SIGCHLD) {
      if (group_) group_->on_child_signal();
    } else if (!is_echo(number)) {
      const bool named = std::ranges::count(plan_.signals_to_handle, number) != 0;
      const bool forwarded =
          std::find(std::begin(kForwarded), std::end(kForwarded), number) != std::end(kForwarded);
      if (forwarded && !named) {
        forward(number);
      } else {
        on_stop_request(number);
      }
    }
  }
}

// If a sender signals all processes of a job (scancel, systemd), the signal comes twice: directly
// and through the front process.
bool Supervisor::is_echo(int signal) {
  const auto now = EventLoop::Clock::now();
  const bool echo = signal == last_signal_ && now - last_signal_time_ < kEcho;
  last_signal_time_ = now;
  last_signal_ = signal;
  return echo;
}

void Supervisor::forward(int signal) {
  if (busy()) return group_->forward(signal);
  say(fmt::format("[launch] {} received while no rank runs: it is not forwarded.",
                  signal_name(signal)));
}

void Supervisor::on_stop_request(int signal) {
  ++requests_;
  if (ending_) return loop_.stop();  // do not wait for the console's queue
  if (!coordinator_ && !node_client_)
    return end(128 + signal, std::nullopt);  // nothing has started
  if (requests_ == 1 && busy()) {
    inform(fmt::format("[launch] {} received: passed on to the ranks, which have {:.1f} s to end.",
                       signal_name(signal),
                       static_cast<double>(plan_.shutdown_timeout.count()) / 1000));
  }
  if (busy()) {
    group_->request_stop(signal);
    if (requests_ >= kKillAtRequest) {
      inform("[launch] third request to stop: sending SIGKILL to the ranks.");
      group_->kill_now();
    }
  }
  report({.kind = Message::Kind::kStop, .signal = signal, .request = requests_});
  // No node 0 will send kEnd.
  if (node_zero_lost_) end_when_idle_ = Message{.kind = Message::Kind::kEnd, .code = 128 + signal};
  // Node 0 continues to wait for a replacement, or stops if it has just started the run.
  if (node_client_ && !in_run_) end(128 + signal, std::nullopt);
}

void Supervisor::on_parent_gone() {
  loop_.forget(guard_.lifeline_fd);
  parent_gone_ = true;
  code_ = 128 + SIGKILL;
  node_server_.reset();
  node_client_.reset();
  if (!busy()) return loop_.stop();
  say("[launch] the launcher was killed; its ranks are killed too.");
  group_->kill_now();
}

void Supervisor::report(Message message) {
  message.node = plan_.node_rank;
  message.attempt = attempt_;
  if (parent_gone_) return;
  if (coordinator_) {
    coordinator_->on_message(plan_.node_rank, message);
  } else {
    node_client_->send(message);
  }
}

void Supervisor::obey(const Message& message) {
  if (ending_ || parent_gone_) return;
  switch (message.kind) {
    case Message::Kind::kStart:
      in_run_ = true;
      setup_.layout = layout_of(message.nodes, plan_.node_rank);
      return start_attempt(message.attempt);
    case Message::Kind::kFailed:
      if (!busy() || message.attempt != attempt_ || !message.failure) return;
      announce_later(*message.failure);
      return group_->stop_for(*message.failure);
    case Message::Kind::kStop:
      return obey_stop(message);
    case Message::Kind::kRestart:
      if (message.failure) {
        say(failure_report(*message.failure));
        logs_.preserve(true);
      }
      return say(message.text);
    case Message::Kind::kEnd:
      if (!busy()) return end(message.code, message.failure);
      // Node 0 does not wait for this node any longer.
      end_when_idle_ = message;
      return group_->kill_now();
    default:
      return;
  }
}

// Ranks here have already received this node's own request, unless it came before their start.
void Supervisor::obey_stop(const Message& message) {
  const bool own = message.node == plan_.node_rank;
  if (!busy() || (own && group_->asked_to_stop())) return;
  if (!own)
    inform(fmt::format("[launch] node {} was asked to stop ({}); so are the ranks here.",
                       message.node, signal_name(message.signal)));
  group_->request_stop(message.signal);
  if (message.request < kKillAtRequest) return;
  inform(fmt::format("[launch] third request to stop node {}: sending SIGKILL to the ranks here.",
                     message.node));
  group_->kill_now();
}

// The report is printed when all ranks have ended. If that takes long, this prints the cause
// before.
void Supervisor::announce_later(const RankFailure& failure) {
  announce_timer_.start(
      kAnnounceAfter, [this, cause = with_message(failure.headline(), failure.message)] {
        if (busy()) say(fmt::format("[launch] {}; waiting for the other ranks to end.", cause));
      });
}

void Supervisor::open_store(int attempt) {
  store_.reset();  // which watches the port
  const Reach reach = plan_.nnodes == 1 ? Reach::kLoopback : Reach::kIpv4Loopback;
  // With several nodes, --master-port is the launchers'. The old port is held until another is
  // found, so that the numbers differ.
  if (plan_.nnodes > 1 || plan_.master_port == 0) port_ = HeldPort::any(reach);
  StoreServerOptions options;
  if (runs_python(plan_.command)) options.listen_after = milliseconds(0);
  if (plan_.nnodes > 1) {
    options.link.emplace();
    options.link->forwards = plan_.node_rank != 0;
    options.link->attempt = attempt;
    options.link->send = [this](int node, const StoreFrame& frame) {
      if (node_server_) node_server_->send(node, frame);
      if (node_client_) node_client_->send(frame);
    };
  }
  store_ = std::make_unique<StoreServer>(
      loop_, *port_, [this](const std::string& text) { say(text); }, std::move(options));
}

void Supervisor::start_attempt(int attempt) {
  attempt_ = attempt;
  if (plan_.nnodes > 1) choose_interface();
  if (node_client_) open_store(attempt);
  if (logs_.temporary() && !group_ && plan_.redirects.any())
    say(fmt::format("the ranks' output is stored in {}; --log-dir=DIR chooses another directory",
                    logs_.attempt(attempt)));
  group_ = std::make_unique<WorkerGroup>(
      setup_,
      GroupInfo{attempt, rank_address(), port_->number(), store_.get(), logs_.attempt(attempt)},
      GroupEvents{[this](const RankFailure& failure) { on_group_failed(failure); },
                  [this] { on_group_ended(); }});
  observed_.notify([&](RunObserver& observer) {
    observer.attempt_started(
        {attempt, setup_.layout.world_size, setup_.layout.first_rank, plan_.nproc_per_node});
  });
  group_->start();
}

void Supervisor::on_group_failed(const RankFailure& failure) {
  report({.kind = Message::Kind::kFailed, .failure = failure});
  group_->stop_for(failure);  // at once, not only when node 0 sends kFailed
}

void Supervisor::on_group_ended() {
  observed_.notify([this](RunObserver& observer) { observer.attempt_ended(attempt_); });
  if (parent_gone_) return loop_.stop();
  if (end_when_idle_) return end(end_when_idle_->code, end_when_idle_->failure);
  if (node_zero_lost_) return await_node_zero();
  Message message{.kind = Message::Kind::kDown, .failure = group_->outcome()};
  const std::vector<RankFailure> errors = group_->errors();
  if (message.failure) {
    message.failure->stacks =
        write_stacks(fmt::format("{}/{}", logs_.attempt(attempt_), kStacksFile), errors);
  } else {  // after a request to stop
    for (const std::string& line : error_lines(errors)) say(line);
  }
  report(message);
}

void Supervisor::on_node_zero_lost(const std::string& why) {
  if (ending_ || end_when_idle_) return;  // node 0 has sent kEnd
  RankFailure failure;
  failure.host = plan_.master_addr;
  failure.attempt = attempt_;
  failure.cause = fmt::format(
      "the launcher of node 0 at {} is lost: {}. It was killed, or its host or network is down",
      plan_.master_addr, why);
  const bool again =
      in_run_ && attempt_ < plan_.max_restarts && requests_ == 0 && !group_->asked_to_stop();
  if (again) node_zero_lost_ = failure;
  if (!busy()) return again ? await_node_zero() : end(1, failure);
  announce_later(failure);
  if (!again) end_when_idle_ = Message{.kind = Message::Kind::kEnd, .code = 1, .failure = failure};
  group_->stop_for(failure);
  store_->on_lost(0);  // only now: ranks that wait in the store have been told the cause
}

// Waits until node 0 comes back, or another launcher replaces it.
void Supervisor::await_node_zero() {
  in_run_ = false;
  say(failure_report(*node_zero_lost_));
  say(
      fmt::format("[launch] restarting all ranks ({} of {}) as soon as node 0 is here again. "
                  "Waiting up to {} s for it at {}:{}: start `lockstep run` there with the same "
                  "flags and --node-rank=0.",
                  attempt_ + 1, plan_.max_restarts, plan_.rendezvous_timeout.count(),
                  plan_.master_addr, plan_.master_port));
  node_zero_lost_.reset();
  node_client_->connect(attempt_ + 1);
}

// ---------------------------------------------------------------- end

void Supervisor::end(int code, std::optional<RankFailure> failure) {
  if (ending_) return;
  ending_ = true;
  code_ = code;
  tick_timer_.cancel();
  observed_.notify([&](RunObserver& observer) {
    for (const std::string& line : observer.tick()) say(line);
    RunEnded run{.code = code};
    if (failure) run = {code, failure->headline(), hint_for(*failure)};
    for (const std::string& line : observer.run_ended(run)) say(line);
  });
  const bool failed = failure.has_value();
  const std::string logs = failed || plan_.redirects.any() ? logs_.preserve(failed) : "";
  if (failure) {
    failure->logs = logs;
    say(failure_report(*failure));
    const auto own_file = env::get("TORCHELASTIC_ERROR_FILE");
    const bool here = group_ && failure->rank >= 0 && failure->node == plan_.node_rank;
    if (own_file) {
      const std::string problem = pass_on_error_file(
          *failure, here ? group_->error_file(failure->local_rank) : "", *own_file);
      if (!problem.empty()) say(problem);
    }
  }
  if (node_client_) node_client_->close();
  lookup_.reset();
  port_timer_.cancel();
  if (!node_server_) return leave();
  node_server_->wait_for_disconnects(kDisconnectTimeout, [this] { leave(); });
}

void Supervisor::leave() {
  console_.finish(kConsoleTimeout, [this] { loop_.stop(); });
}

}  // namespace

int supervise(const LaunchPlan& plan, RunObserver* observer) {
  std::vector<int> signals = stop_signals(plan);
  signals.insert(signals.end(), std::begin(kForwarded), std::end(kForwarded));
  return run_supervised(
      std::move(signals),
      [&](const GuardContext& guard) {
        Supervisor supervisor(plan, guard, observer);
        return supervisor.run();
      },
      [observer] {
        if (observer != nullptr) observer->left_behind();
      });
}

}  // namespace lockstep::launch
