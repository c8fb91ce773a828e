#include "launcher/node_link.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "launcher/event_loop.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/text.h"
#include "lockstep/core/thread_signals.h"

namespace lockstep::launch {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t kMaxUnjoined = 128;  // connections that have not joined
constexpr std::size_t kMaxReports = 8;     // of rejections, between two progress lines
constexpr milliseconds kHandshakeTimeout{10'000};
constexpr milliseconds kAcceptPause{200};

// The kernel has noticed the loss of a host after this time; a node that wants to join is told only
// then that its node rank is taken.
constexpr milliseconds kLossKnown = kLostAfter + milliseconds(1500);
constexpr milliseconds kFirstProgress{3000};  // a first progress line while waiting, then more
constexpr milliseconds kProgress{10'000};

// Makes room for more than StoreStreams::kLinkWindow, also while this process is stopped and does
// not read. Only takes effect before the connection is made.
void enlarge_buffer(int fd) {
  constexpr int kBytes = 512 << 10;
  ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &kBytes, sizeof kBytes);
}

// Whether another launcher may ask for a stop with this signal: one that this launcher forwards.
bool may_stop(const LaunchPlan& plan, int signal) {
  return signal == SIGUSR1 || signal == SIGUSR2 ||
         std::ranges::count(kUsualStopSignals, signal) != 0 ||
         std::ranges::count(plan.signals_to_handle, signal) != 0;
}

std::string ranks_text(const std::vector<int>& nodes) {
  return fmt::format("node rank{} {}", nodes.size() == 1 ? "" : "s", first_numbers(nodes));
}

std::string unexpected_signal_text(int signal) {
  return fmt::format(
      "it asked to stop with signal {}, which this launcher does not forward (give every host the "
      "same --signals-to-handle)",
      signal);
}

// The flags that must be equal on all launchers, as they are written on a command line. Node 0
// decides by its own values, so another node's would be ignored or contradict them.
std::map<std::string, std::string> flags_of_the_run(const LaunchPlan& plan) {
  std::set<std::string> signals;
  for (const int signal : stop_signals(plan)) signals.insert(signal_name(signal));
  const std::chrono::duration<double> grace = plan.shutdown_timeout;
  return {{"--max-restarts", std::to_string(plan.max_restarts)},
          {"--replace-gloo", plan.replace_gloo ? "true" : "false"},
          {"--shutdown-timeout", fmt::format("{}", grace.count())},
          {"--signals-to-handle", fmt::format("{}", fmt::join(signals, ","))},
          {"--timeout", plan.timeout.count() > 0 ? std::to_string(plan.timeout.count()) : "unset"}};
}

// Null without a --secret-file.
std::unique_ptr<SecureContext> secure_context(const LaunchPlan& plan, SecureContext::Side side) {
  if (plan.secret_file.empty()) return nullptr;
  return std::make_unique<SecureContext>(side, SecretKey::from_file(plan.secret_file), plan.run_id);
}

std::string secret_text(Closing::Secret secret, const std::string& peer) {
  constexpr const char* kAdvice = "Give every host the same --secret-file, or none of them one.";
  switch (secret) {
    case Closing::Secret::kPeerHasNone:
      return fmt::format("[launch] {} has no --secret-file, but this launcher has one. {}", peer,
                         kAdvice);
    case Closing::Secret::kPeerHasOne:
      return fmt::format("[launch] {} has a --secret-file, but this launcher has none. {}", peer,
                         kAdvice);
    default:
      return fmt::format(
          "[launch] {} does not have the secret of this launcher's --secret-file. Give every host "
          "the same file (compare with sha256sum) and the same --rdzv-id.",
          peer);
  }
}

}  // namespace

NodeShare share_of(const LaunchPlan& plan) {
  std::string words;
  for (const std::string& word : plan.command) words += word + '\0';
  // The first word is a path, such as an interpreter's, which may differ between hosts.
  if (!plan.command.empty()) words.erase(0, plan.command.front().rfind('/') + 1);
  return {plan.nproc_per_node, plan.role,
          fmt::format("{:016x}", fingerprint(words.data(), words.size()))};
}

// ---------------------------------------------------------------- NodeServer

NodeServer::NodeServer(EventLoop& loop, const LaunchPlan& plan, const HeldPort& port,
                       Handlers handlers)
    : loop_(loop),
      plan_(plan),
      port_(port),
      handlers_(std::move(handlers)),
      secure_(secure_context(plan, SecureContext::Side::kServer)) {}

void NodeServer::await_nodes() {
  started_ = EventLoop::Clock::now();
  enlarge_buffer(listener());
  port_.listen();
  loop_.watch(listener(), EPOLLIN, [this](std::uint32_t) { on_connect(); });
  overdue_timer_.start(plan_.rendezvous_timeout, [this] {
    handlers_.overdue(
        fmt::format("[launch] timed out: only {} of {} launchers came within {} s; missing: {}. "
                    "Start `lockstep run` there with --nnodes={} --node-rank=... --master-addr={} "
                    "--master-port={}, and check that the port can be reached.",
                    peer_of_node_.size() + 1, plan_.nnodes, plan_.rendezvous_timeout.count(),
                    ranks_text(missing()), plan_.nnodes, plan_.master_addr, plan_.master_port));
  });
  progress_timer_.start(kFirstProgress, [this] { report_progress(); });
}

NodeServer::~NodeServer() {
  loop_.forget(listener());
}

void NodeServer::on_connect() {
  Fd socket(::accept4(listener(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket) {
    const bool nothing_left =
        errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    // The listener stays readable: without a pause this would be called again at once.
    if (nothing_left && !evict()) pause_accept();
    return;
  }
  if (peers_.size() - peer_of_node_.size() >= kMaxUnjoined) evict();
  const std::uint64_t number = ++last_peer_;
  Peer& peer = peers_.try_emplace(number, loop_).first->second;
  peer.connection = std::make_unique<Connection>(
      loop_, std::move(socket), secure_ ? secure_->open() : nullptr,
      Connection::Handlers{[this, number](const Message& message) { on_message(number, message); },
                           [this, number](const StoreFrame& frame) { on_frame(number, frame); },
                           [this, number](const Closing& closing) { on_closed(number, closing); }});
  peer.address = peer.connection->peer_address();
  peer.deadline.start(kHandshakeTimeout, [this, number] { peers_.erase(number); });
}

void NodeServer::pause_accept() {
  loop_.change(listener(), 0);
  accept_timer_.start(kAcceptPause, [this] { loop_.change(listener(), EPOLLIN); });
}

// Of the connections that have not joined, closes the oldest from the busiest address, so that one
// host cannot keep the others out. False if there is none.
bool NodeServer::evict() {
  std::map<std::string, std::pair<int, std::uint64_t>> of_address;  // number, oldest
  for (const auto& [number, peer] : peers_) {
    if (peer.node < 0) ++of_address.try_emplace(peer.address, 0, number).first->second.first;
  }
  const auto busiest = std::ranges::max_element(
      of_address, [](const auto& a, const auto& b) { return a.second.first < b.second.first; });
  if (busiest == of_address.end()) return false;
  ++unreported_;
  peers_.erase(busiest->second.second);
  return true;
}

void NodeServer::on_message(std::uint64_t number, const Message& message) {
  const auto found = peers_.find(number);
  if (found == peers_.end()) return;
  const Peer& peer = found->second;
  if (peer.node >= 0 && !peer.started && message.kind == Message::Kind::kStop) {
    on_closed(number, {"it was asked to stop"});
  } else if (peer.node >= 0) {
    const std::string wrong = problem_of(peer, message);
    if (wrong.empty()) return handlers_.message(peer.node, message);
    on_closed(number, {wrong});
  } else if (message.kind == Message::Kind::kHandshake) {
    on_handshake(number, message);
  } else if (message.kind == Message::Kind::kOtherVersion) {
    refuse(number, message.text);
  } else {
    ++unreported_;
    peers_.erase(number);
  }
}

void NodeServer::on_frame(std::uint64_t number, const StoreFrame& frame) {
  const auto found = peers_.find(number);
  if (found == peers_.end()) return;
  if (!found->second.started)
    return on_closed(number, {"it used the store before the run has begun"});
  handlers_.frame(found->second.node, frame);
}

// Why a message is not acceptable: a node may only report about itself. Empty: it is.
std::string NodeServer::problem_of(const Peer& peer, const Message& message) const {
  if (!peer.started) return "it sent a message before the run has begun";
  if (message.kind == Message::Kind::kStop && !may_stop(plan_, message.signal))
    return unexpected_signal_text(message.signal);
  if (!message.failure) return {};
  const RankFailure& failure = *message.failure;
  const int first = layout_of(nodes(), peer.node).first_rank;
  const bool own_rank = failure.local_rank >= 0 && failure.local_rank < peer.share.nproc &&
                        failure.rank == first + failure.local_rank;
  if (failure.node == peer.node && (failure.rank == -1 || own_rank)) return {};
  return fmt::format("it reported a failure of rank {} on node {}, which is not its own",
                     failure.rank, failure.node);
}

std::vector<NodeShare> NodeServer::nodes() const {
  if (!shares_.empty()) return shares_;
  std::vector<NodeShare> shares(static_cast<std::size_t>(plan_.nnodes));
  shares[0] = share_of(plan_);
  for (const auto& [node, number] : peer_of_node_)
    shares[static_cast<std::size_t>(node)] = peers_.at(number).share;
  return shares;
}

std::string NodeServer::reason_to_refuse(const Message& handshake) const {
  const auto differs = [&](const char* flag, const auto& theirs, const auto& ours) {
    return fmt::format(
        "[launch] node rank {} on {} was started with {}={}, node 0 with {}={}. Use "
        "the same value on every host.",
        handshake.node, handshake.host, flag, theirs, flag, ours);
  };
  const auto index = static_cast<std::size_t>(handshake.node);
  if (handshake.run_id != plan_.run_id)
    return differs("--rdzv-id", printable(handshake.run_id), plan_.run_id);
  if (handshake.nnodes != plan_.nnodes) return differs("--nnodes", handshake.nnodes, plan_.nnodes);
  if (handshake.node < 1 || handshake.node >= plan_.nnodes)
    return fmt::format("[launch] --node-rank={} on {} is not between 1 and {}.", handshake.node,
                       handshake.host, plan_.nnodes - 1);
  for (const auto& [flag, ours] : flags_of_the_run(plan_)) {
    const auto theirs = handshake.flags.find(flag);
    if (theirs == handshake.flags.end() || theirs->second != ours)
      return differs(flag.c_str(), theirs == handshake.flags.end() ? "?" : theirs->second, ours);
  }
  if (const std::string run = token_of_peers();
      !run.empty() && !handshake.run.empty() && handshake.run != run)
    return fmt::format(
        "[launch] node rank {} on {} comes back to another run than this one, which has the same "
        "address and --rdzv-id={}. Give every run an id or a port of its own.",
        handshake.node, handshake.host, plan_.run_id);
  if (!shares_.empty() && (handshake.share.nproc != shares_[index].nproc ||
                           handshake.share.role != shares_[index].role))
    return fmt::format(
        "[launch] node rank {} on {} brings {} ranks of role {}, but the launcher that it comes "
        "for had {} of role {}. Use the same --nproc-per-node and --role.",
        handshake.node, handshake.host, handshake.share.nproc, printable(handshake.share.role),
        shares_[index].nproc, printable(shares_[index].role));
  if (std::string text = program_text(handshake); !text.empty()) return text;
  try {
    auto shares = nodes();
    shares[index] = handshake.share;
    layout_of(shares, handshake.node);
  } catch (const UsageError& error) {
    return error.what();
  }
  return {};
}

// Programs must be equal within a role.
std::string NodeServer::program_text(const Message& handshake) const {
  const bool first = shares_.empty();
  const NodeShare expected =
      first ? share_of(plan_) : shares_[static_cast<std::size_t>(handshake.node)];
  if (handshake.share.role != expected.role || handshake.share.program == expected.program)
    return {};
  return fmt::format(
      "[launch] node rank {} on {} was started with another program, or with other arguments, "
      "than {} ({}). Start the same command on every host that has the same --role; what differs "
      "between hosts goes into their environment, or gives them a --role of their own.",
      handshake.node, handshake.host, first ? "node 0" : "the launcher that it comes for",
      first ? shell_text(plan_.command) : "--role=" + printable(expected.role));
}

// The token of this run, or of the run that a joined peer comes back to; empty: any is accepted.
std::string NodeServer::token_of_peers() const {
  if (!run_.empty()) return run_;
  for (const auto& [node, number] : peer_of_node_)
    if (const Peer& peer = peers_.at(number); !peer.run.empty()) return peer.run;
  return {};
}

std::string NodeServer::taken_text(const Message& handshake) const {
  const auto taken = peer_of_node_.find(handshake.node);
  if (taken == peer_of_node_.end()) return {};
  return fmt::format(
      "[launch] --node-rank={} of {} is already taken by {}. Give every host its own node rank.",
      handshake.node, handshake.host, peers_.at(taken->second).host);
}

void NodeServer::refuse(std::uint64_t number, const std::string& reason) {
  Peer& peer = peers_.at(number);
  peer.refused = true;
  report(reason);
  // Without a secret anybody can ask, so the answer reveals nothing about this run.
  peer.connection->send(
      Message{.kind = Message::Kind::kRefused, .code = 2, .text = secure_ ? reason : ""});
  // The peer disconnects once it has read that; otherwise this does.
  peer.deadline.start(kHandshakeTimeout, [this, number] { peers_.erase(number); });
}

void NodeServer::on_handshake(std::uint64_t number, const Message& handshake) {
  Peer& peer = peers_.at(number);
  peer.deadline.cancel();
  const bool again = std::exchange(peer.asked, true);
  std::string refusal = reason_to_refuse(handshake);
  if (refusal.empty()) {
    refusal = taken_text(handshake);
    // It may replace a launcher whose host is lost, which nobody has noticed yet.
    if (!refusal.empty() && !again)
      return peer.deadline.start(kLossKnown,
                                 [this, number, handshake] { on_handshake(number, handshake); });
  }
  if (!refusal.empty()) return refuse(number, refusal);
  peer.node = handshake.node;
  peer.host = handshake.host;
  peer.run = handshake.run;
  peer.share = handshake.share;
  peer.connection->trust();
  peer_of_node_[handshake.node] = number;
  first_attempt_ = std::max(first_attempt_, handshake.attempt);
  peer.connection->send(Message{.kind = Message::Kind::kSay});
  check_complete();
}

void NodeServer::on_closed(std::uint64_t number, const Closing& closing) {
  const auto found = peers_.find(number);
  if (found == peers_.end()) return;
  const int node = found->second.node;
  const bool started = found->second.started, refused = found->second.refused;
  const std::string host = found->second.host;
  const std::string address = found->second.address;
  peers_.erase(number);
  if (node < 0) {
    if (closing.secret == Closing::Secret::kFine) {
      unreported_ += refused ? 0 : 1;  // report() has counted it
    } else {
      report(secret_text(closing.secret, "a launcher at " + address));
    }
    return;
  }
  peer_of_node_.erase(node);
  if (on_disconnected_) {
    if (peer_of_node_.empty()) {
      disconnect_timer_.cancel();
      loop_.post(std::exchange(on_disconnected_, nullptr));
    }
  } else if (!started) {
    handlers_.say(
        fmt::format("[launch] node rank {} on {} left again: {}.", node, host, closing.why));
  } else {
    handlers_.lost(node, host, closing.why);
  }
}

// Anybody can cause a rejection, so the number of lines is limited.
void NodeServer::report(const std::string& rejection) {
  if (reported_.size() < kMaxReports && reported_.insert(rejection).second)
    return handlers_.say(rejection);
  ++unreported_;
}

std::vector<int> NodeServer::missing() const {
  std::vector<int> nodes;
  for (int node = 1; node < plan_.nnodes; ++node)
    if (peer_of_node_.count(node) == 0) nodes.push_back(node);
  return nodes;
}

void NodeServer::report_progress() {
  progress_timer_.start(kProgress, [this] { report_progress(); });
  std::string text = fmt::format(
      "[launch] waiting for {} at {}:{} ({} of {} are here, {:.0f} s of {} s).",
      ranks_text(missing()), plan_.master_addr, plan_.master_port, peer_of_node_.size() + 1,
      plan_.nnodes, seconds_since(started_), plan_.rendezvous_timeout.count());
  broadcast({.kind = Message::Kind::kSay, .text = text});
  if (unreported_ > 0)
    text += fmt::format(" {} {}connection{} rejected.", unreported_,
                        reported_.empty() ? "" : "more ", unreported_ == 1 ? " was" : "s were");
  handlers_.say(text);
  reported_.clear();
  unreported_ = 0;
}

void NodeServer::check_complete() {
  if (static_cast<int>(peer_of_node_.size()) + 1 < plan_.nnodes) return;
  stop_waiting();
  run_ = token_of_peers();
  if (run_.empty())
    run_ = fmt::format("{:08x}{:08x}", std::random_device{}(), std::random_device{}());
  shares_ = nodes();  // fixed from now on: a lost node keeps its ranks, so the others keep theirs
  for (const auto& [node, number] : peer_of_node_) peers_.at(number).started = true;
  handlers_.complete();  // not posted: a node that is lost from here on is lost by a started run
}

void NodeServer::stop_waiting() {
  for (Timer* timer : {&overdue_timer_, &progress_timer_, &accept_timer_}) timer->cancel();
  loop_.forget(listener());
  port_.stop_listening();
  while (evict()) {
  }
}

void NodeServer::broadcast(Message message) {
  message.run = run_;
  for (const auto& [node, number] : peer_of_node_) peers_.at(number).connection->send(message);
}

void NodeServer::send(int node, const StoreFrame& frame) {
  const auto found = peer_of_node_.find(node);
  if (found != peer_of_node_.end()) peers_.at(found->second).connection->send(frame);
}

std::string NodeServer::local_address() const {
  std::string address;
  for (const auto& [node, number] : peer_of_node_) {
    const std::string own = peers_.at(number).connection->local_address();
    if (address.empty() || is_loopback(address)) address = own;
  }
  return address;
}

void NodeServer::wait_for_disconnects(milliseconds timeout, EventLoop::Task done) {
  stop_waiting();  // a node that joined now would be lost in a moment
  if (peer_of_node_.empty()) return loop_.post(std::move(done));
  on_disconnected_ = std::move(done);
  disconnect_timer_.start(timeout,
                          [this] { loop_.post(std::exchange(on_disconnected_, nullptr)); });
}

// ---------------------------------------------------------------- NodeClient

namespace {

constexpr milliseconds kConnectTimeout{5000};
constexpr milliseconds kAnswerTimeout = 2 * kLossKnown;
constexpr milliseconds kRetryDelay{200};
constexpr milliseconds kNodeZeroSlack{5000};

// Connecting to a local port on which nobody listens can connect a socket to itself, if the kernel
// picks that port for its own end.
bool connected_to_itself(int fd) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t own_size = sizeof own;
  socklen_t peer_size = sizeof peer;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
         own_size == peer_size && std::memcmp(&own, &peer, own_size) == 0;
}

}  // namespace

NodeClient::NodeClient(EventLoop& loop, const LaunchPlan& plan, std::string host, Handlers handlers)
    : loop_(loop),
      plan_(plan),
      host_(std::move(host)),
      handlers_(std::move(handlers)),
      secure_(secure_context(plan, SecureContext::Side::kClient)) {}

NodeClient::~NodeClient() {
  close();
}

// Also stops connecting.
void NodeClient::close() {
  for (Timer* timer : {&overdue_timer_, &retry_timer_, &answer_timer_, &progress_timer_})
    timer->cancel();
  if (pending_) loop_.forget(pending_.get());
  pending_.reset();
  lookup_.reset();
  connection_.reset();
}

void NodeClient::connect(int first_attempt) {
  first_attempt_ = first_attempt;
  attempt_started_ = false;
  started_ = EventLoop::Clock::now();
  start_join_timeout();
  try_now();
}

// Counts from connect(), also after a reconnection.
void NodeClient::start_join_timeout() {
  accepted_ = false;
  const auto end = started_ + plan_.rendezvous_timeout;
  const auto left = std::chrono::ceil<milliseconds>(end - EventLoop::Clock::now());
  overdue_timer_.start(left, [this] {
    handlers_.failed(1, fmt::format("[launch] timed out: node 0's launcher was not found at {}:{} "
                                    "within {} s ({}). Start it there with "
                                    "--node-rank=0, and check --master-addr, --master-port and "
                                    "that the port can be reached.",
                                    plan_.master_addr, plan_.master_port,
                                    plan_.rendezvous_timeout.count(), last_problem_));
  });
  progress_timer_.start(kFirstProgress, [this] { report_progress(); });
}

void NodeClient::report_progress() {
  if (accepted_) return;  // node 0 reports progress from now on
  progress_timer_.start(kProgress, [this] { report_progress(); });
  handlers_.say(fmt::format("[launch] waiting for node rank 0 at {}:{} ({}; {:.0f} s of {} s).",
                            plan_.master_addr, plan_.master_port, last_problem_,
                            seconds_since(started_), plan_.rendezvous_timeout.count()));
}

void NodeClient::try_later(const std::string& why) {
  last_problem_ = why;
  answer_timer_.cancel();
  if (pending_) loop_.forget(pending_.get());
  pending_.reset();
  connection_.reset();
  retry_timer_.start(kRetryDelay, [this] { try_now(); });
}

void NodeClient::try_now() {
  lookup_ = std::make_unique<Lookup>(loop_, plan_.master_addr, plan_.master_port,
                                     [this](const Addresses& found) { try_addresses(found); });
}

void NodeClient::try_addresses(const Addresses& found) {
  if (found.error != 0) return try_later(fmt::format("its name: {}", ::gai_strerror(found.error)));
  // A name may have several addresses, of which one answers: each try begins with the next.
  std::vector<const addrinfo*> order;
  for (const addrinfo* at = found.first.get(); at != nullptr; at = at->ai_next) order.push_back(at);
  std::rotate(order.begin(), order.begin() + static_cast<long>(tries_++ % order.size()),
              order.end());
  std::string problem = "no address";
  for (const addrinfo* at : order) {
    Fd socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) continue;
    enlarge_buffer(socket.get());
    if (::connect(socket.get(), at->ai_addr, at->ai_addrlen) != 0 && errno != EINPROGRESS) {
      problem = std::strerror(errno);
      continue;
    }
    pending_ = std::move(socket);
    answer_timer_.start(kConnectTimeout, [this] { try_later("it does not answer"); });
    loop_.watch(pending_.get(), EPOLLOUT, [this](std::uint32_t) {
      int result = 0;
      socklen_t size = sizeof result;
      ::getsockopt(pending_.get(), SOL_SOCKET, SO_ERROR, &result, &size);
      if (result != 0) return try_later(std::strerror(result));
      if (connected_to_itself(pending_.get())) return try_later("nobody listens there");
      loop_.forget(pending_.get());
      on_connected(std::move(pending_));
    });
    return;
  }
  try_later(problem);
}

void NodeClient::on_connected(Fd socket) {
  connection_ = std::make_unique<Connection>(
      loop_, std::move(socket), secure_ ? secure_->open() : nullptr,
      Connection::Handlers{[this](const Message& message) { on_message(message); },
                           [this](const StoreFrame& frame) {
                             if (connection_) handlers_.frame(frame);
                           },
                           [this](const Closing& closing) { on_closed(closing); }});
  local_address_ = connection_->local_address();
  answer_timer_.start(kAnswerTimeout, [this] { try_later("what listens there does not answer"); });
  connection_->send(Message{.kind = Message::Kind::kHandshake,
                            .node = plan_.node_rank,
                            .attempt = first_attempt_,
                            .run = run_,
                            .run_id = plan_.run_id,
                            .host = host_,
                            .nnodes = plan_.nnodes,
                            .share = share_of(plan_),
                            .flags = flags_of_the_run(plan_)});
}

void NodeClient::on_closed(const Closing& closing) {
  if (!connection_) return;
  connection_.reset();
  if (accepted_ && !attempt_started_ && first_attempt_ > 0) {
    // Node 0, which came back, is lost again before an attempt began.
    start_join_timeout();
    return try_later(closing.why);
  }
  if (accepted_) return handlers_.lost(closing.why);
  if (closing.secret == Closing::Secret::kFine)
    return try_later("what listens there is not a launcher that waits");
  answer_timer_.cancel();
  const std::string peer = fmt::format("node 0 at {}:{}", plan_.master_addr, plan_.master_port);
  handlers_.failed(2, secret_text(closing.secret, peer));
}

std::string NodeClient::problem_of(const Message& message) const {
  if (message.kind == Message::Kind::kStop && !may_stop(plan_, message.signal))
    return unexpected_signal_text(message.signal);
  const auto node = static_cast<std::size_t>(plan_.node_rank);
  if (message.kind == Message::Kind::kStart &&
      (message.nodes.size() != static_cast<std::size_t>(plan_.nnodes) ||
       message.nodes[node] != share_of(plan_) || (!run_.empty() && message.run != run_)))
    return "it started another run than this one";
  if (!message.failure || message.failure->node != plan_.node_rank || message.failure->rank < 0)
    return {};
  const int local_rank = message.failure->local_rank;
  if (local_rank >= 0 && local_rank < plan_.nproc_per_node) return {};
  return fmt::format("it reported a failure of local rank {} here, which does not exist",
                     local_rank);
}

void NodeClient::on_message(const Message& message) {
  if (!connection_) return;
  answer_timer_.cancel();
  if (message.kind == Message::Kind::kRefused) {
    if (!message.text.empty()) return handlers_.failed(message.code, message.text);
    return handlers_.failed(
        message.code,
        fmt::format("[launch] node 0 at {}:{} rejected node rank {}. Its flags do not agree with "
                    "node 0's, or the node rank is taken; node 0's output says which. Compare "
                    "--rdzv-id, --nnodes and --node-rank, then the other flags and the program.",
                    plan_.master_addr, plan_.master_port, plan_.node_rank));
  }
  if (message.kind == Message::Kind::kOtherVersion) return handlers_.failed(2, message.text);
  if (const std::string wrong = problem_of(message); !wrong.empty()) return on_closed({wrong});
  if (!accepted_) {
    // From here on node 0 times the rendezvous; this timeout is for a node 0 that hangs.
    accepted_ = true;
    connection_->trust();
    overdue_timer_.start(plan_.rendezvous_timeout + kNodeZeroSlack, [this] {
      handlers_.failed(1,
                       "[launch] timed out: node 0's launcher answered but never started the run. "
                       "Look at what it says; it may be stopped.");
    });
  }
  if (message.kind == Message::Kind::kStart) {
    attempt_started_ = true;
    run_ = message.run;
  }
  if (message.kind == Message::Kind::kSay) {
    if (!message.text.empty()) handlers_.say(message.text);
    return;
  }
  overdue_timer_.cancel();
  handlers_.message(message);
}

void NodeClient::send(const Message& message) {
  if (connection_) connection_->send(message);
}

void NodeClient::send(const StoreFrame& frame) {
  if (connection_) connection_->send(frame);
}

}  // namespace lockstep::launch
