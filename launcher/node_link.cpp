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
#include "lockstep/core/fingerprint.h"
#include "lockstep/core/printable.h"
#include "lockstep/core/text.h"
#include "lockstep/core/thread_signals.h"
#include "lockstep/rendezvous/this_host.h"

namespace lockstep::launch {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t kMaxUnknown = 128;  // connections that have not joined
constexpr std::size_t kMaxReports = 8;
constexpr milliseconds kHandshakeTimeout{10'000};
constexpr milliseconds kAcceptPause{200};

}  // namespace

void enlarge_buffer(int fd) {
  constexpr int kBytes = 512 << 10;
  ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &kBytes, sizeof kBytes);
}

bool may_stop(const LaunchPlan& plan, int signal) {
  return signal == SIGUSR1 || signal == SIGUSR2 ||
         std::ranges::count(kUsualStopSignals, signal) != 0 ||
         std::ranges::count(plan.signals_to_handle, signal) != 0;
}

std::string bad_signal(int signal) {
  return fmt::format(
      "it asked to stop with signal {}, which this launcher does not forward (give every host the "
      "same --signals-to-handle)",
      signal);
}

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

NodeShare share_of(const LaunchPlan& plan) {
  std::string words;
  for (const std::string& word : plan.command) words += word + '\0';
  // Its first word is a path, which may differ between hosts: that of an interpreter, say.
  if (!plan.command.empty()) words.erase(0, plan.command.front().rfind('/') + 1);
  return {plan.nproc_per_node, plan.role,
          fmt::format("{:016x}", fingerprint(words.data(), words.size()))};
}

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

// ---------------------------------------------------------------- Hub

Hub::Hub(EventLoop& loop, const LaunchPlan& plan, const HeldPort& port, Handlers handlers)
    : loop_(loop),
      plan_(plan),
      port_(port),
      handlers_(std::move(handlers)),
      secure_(secure_context(plan, SecureContext::Side::kServer)) {}

void Hub::await_nodes() {
  started_ = EventLoop::Clock::now();
  enlarge_buffer(listener());
  port_.listen();
  loop_.watch(listener(), EPOLLIN, [this](std::uint32_t) { on_connect(); });
  overdue_timer_.start(plan_.rendezvous_timeout, [this] {
    handlers_.overdue(fmt::format(
        "[launch] timed out: only {} of {} launchers came within {} s; missing: node ranks {}. "
        "Start `lockstep run` there with --nnodes={} --node-rank=... --master-addr={} "
        "--master-port={}, and check that the port can be reached.",
        guest_of_node_.size() + 1, plan_.nnodes, plan_.rendezvous_timeout.count(),
        first_numbers(missing()), plan_.nnodes, plan_.master_addr, plan_.master_port));
  });
  progress_timer_.start(kFirstProgress, [this] { report_progress(); });
}

Hub::~Hub() {
  loop_.forget(listener());
}

void Hub::on_connect() {
  Fd socket(::accept4(listener(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket) {
    const bool nothing_left =
        errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    // The listener stays readable: without a pause this would be called again at once.
    if (nothing_left && !evict()) pause_accept();
    return;
  }
  if (guests_.size() - guest_of_node_.size() >= kMaxUnknown) evict();
  const std::uint64_t number = ++last_guest_;
  Guest& guest = guests_.try_emplace(number, loop_).first->second;
  guest.connection = std::make_unique<Connection>(
      loop_, std::move(socket), secure_ ? secure_->open() : nullptr,
      Connection::Handlers{[this, number](const Message& message) { on_message(number, message); },
                           [this, number](const StoreFrame& frame) { on_frame(number, frame); },
                           [this, number](const Closing& closing) { on_closed(number, closing); }});
  guest.address = guest.connection->peer_address();
  guest.deadline.start(kHandshakeTimeout, [this, number] { guests_.erase(number); });
}

void Hub::pause_accept() {
  loop_.change(listener(), 0);
  accept_timer_.start(kAcceptPause, [this] { loop_.change(listener(), EPOLLIN); });
}

// Drops the oldest connection of the address with the most connections that have not joined, so
// that one host cannot keep the others out. False when there is none.
bool Hub::evict() {
  std::map<std::string, std::pair<int, std::uint64_t>> of_address;  // how many, the oldest
  for (const auto& [number, guest] : guests_) {
    if (guest.node < 0) ++of_address.try_emplace(guest.address, 0, number).first->second.first;
  }
  const auto busiest = std::ranges::max_element(
      of_address, [](const auto& a, const auto& b) { return a.second.first < b.second.first; });
  if (busiest == of_address.end()) return false;
  ++unreported_;
  guests_.erase(busiest->second.second);
  return true;
}

void Hub::on_message(std::uint64_t number, const Message& message) {
  const auto found = guests_.find(number);
  if (found == guests_.end()) return;
  const Guest& guest = found->second;
  if (guest.node >= 0 && !guest.started && message.kind == Message::Kind::kStop) {
    on_closed(number, {"it was asked to stop"});
  } else if (guest.node >= 0) {
    const std::string wrong = what_is_wrong(guest, message);
    if (wrong.empty()) return handlers_.message(guest.node, message);
    on_closed(number, {wrong});
  } else if (message.kind == Message::Kind::kHandshake) {
    on_handshake(number, message);
  } else if (message.kind == Message::Kind::kForeign) {
    refuse(number, message.text);
  } else {
    ++unreported_;
    guests_.erase(number);
  }
}

void Hub::on_frame(std::uint64_t number, const StoreFrame& frame) {
  const auto found = guests_.find(number);
  if (found == guests_.end()) return;
  if (!found->second.started)
    return on_closed(number, {"it used the store before the run has begun"});
  handlers_.frame(found->second.node, frame);
}

// A node speaks only for itself.
std::string Hub::what_is_wrong(const Guest& guest, const Message& message) const {
  if (!guest.started) return "it sent a message before the run has begun";
  if (message.kind == Message::Kind::kStop && !may_stop(plan_, message.signal))
    return bad_signal(message.signal);
  if (!message.failure) return {};
  const RankFailure& failure = *message.failure;
  const int first = layout_of(nodes(), guest.node).first_rank;
  const bool own_rank = failure.local_rank >= 0 && failure.local_rank < guest.share.nproc &&
                        failure.rank == first + failure.local_rank;
  if (failure.node == guest.node && (failure.rank == -1 || own_rank)) return {};
  return fmt::format("it reported a failure of rank {} on node {}, which is not its own",
                     failure.rank, failure.node);
}

std::vector<NodeShare> Hub::nodes() const {
  if (!shares_.empty()) return shares_;
  std::vector<NodeShare> shares(static_cast<std::size_t>(plan_.nnodes));
  shares[0] = share_of(plan_);
  for (const auto& [node, number] : guest_of_node_)
    shares[static_cast<std::size_t>(node)] = guests_.at(number).share;
  return shares;
}

std::string Hub::reason_to_refuse(const Message& handshake) const {
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
  if (const std::string run = run_of_guests();
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

// A role may have a program of its own.
std::string Hub::program_text(const Message& handshake) const {
  const bool first = shares_.empty();
  const NodeShare expected =
      first ? share_of(plan_) : shares_[static_cast<std::size_t>(handshake.node)];
  if (handshake.share.role != expected.role || handshake.share.program == expected.program)
    return {};
  return fmt::format(
      "[launch] node rank {} on {} was started with another program, or with other arguments, "
      "than {} ({}). Start the same command on every host that has the same --role.",
      handshake.node, handshake.host, first ? "node 0" : "the launcher that it comes for",
      first ? shell_text(plan_.command) : "--role=" + printable(expected.role));
}

// The token of the run that they come back to; any, where none of them has been in one.
std::string Hub::run_of_guests() const {
  if (!run_.empty()) return run_;
  for (const auto& [node, number] : guest_of_node_)
    if (const Guest& guest = guests_.at(number); !guest.run.empty()) return guest.run;
  return {};
}

std::string Hub::taken_text(const Message& handshake) const {
  const auto taken = guest_of_node_.find(handshake.node);
  if (taken == guest_of_node_.end()) return {};
  return fmt::format(
      "[launch] --node-rank={} of {} is already taken by {}. Give every host its own node rank.",
      handshake.node, handshake.host, guests_.at(taken->second).host);
}

void Hub::refuse(std::uint64_t number, const std::string& reason) {
  Guest& guest = guests_.at(number);
  report(reason);
  // Where there is no secret anybody can ask, so the answer reveals nothing about this run.
  guest.connection->send(
      Message{.kind = Message::Kind::kRefused, .code = 2, .text = secure_ ? reason : ""});
  // The peer hangs up once it has read that; if it does not, this does.
  guest.deadline.start(kHandshakeTimeout, [this, number] { guests_.erase(number); });
}

void Hub::on_handshake(std::uint64_t number, const Message& handshake) {
  Guest& guest = guests_.at(number);
  guest.deadline.cancel();
  const bool again = std::exchange(guest.asked, true);
  std::string refusal = reason_to_refuse(handshake);
  if (refusal.empty()) {
    refusal = taken_text(handshake);
    // It may come for a launcher whose host is lost, which nobody has noticed yet.
    if (!refusal.empty() && !again)
      return guest.deadline.start(kLossKnown,
                                  [this, number, handshake] { on_handshake(number, handshake); });
  }
  if (!refusal.empty()) return refuse(number, refusal);
  guest.node = handshake.node;
  guest.host = handshake.host;
  guest.run = handshake.run;
  guest.share = handshake.share;
  guest.connection->trust();
  guest_of_node_[handshake.node] = number;
  first_attempt_ = std::max(first_attempt_, handshake.attempt);
  guest.connection->send(Message{.kind = Message::Kind::kSay});
  check_complete();
}

void Hub::on_closed(std::uint64_t number, const Closing& closing) {
  const auto found = guests_.find(number);
  if (found == guests_.end()) return;
  const int node = found->second.node;
  const bool started = found->second.started;
  const std::string host = found->second.host;
  const std::string address = found->second.address;
  guests_.erase(number);
  if (node < 0) {
    if (closing.secret == Closing::Secret::kFine) {
      ++unreported_;
    } else {
      report(secret_text(closing.secret, "a launcher at " + address));
    }
    return;
  }
  guest_of_node_.erase(node);
  if (on_goodbyes_) {
    if (guest_of_node_.empty()) {
      goodbye_timer_.cancel();
      loop_.post(std::exchange(on_goodbyes_, nullptr));
    }
  } else if (!started) {
    handlers_.say(
        fmt::format("[launch] node rank {} on {} left again: {}.", node, host, closing.why));
  } else {
    handlers_.lost(node, host, closing.why);
  }
}

// Anybody can cause a rejection, so only a few are reported between two progress lines.
void Hub::report(const std::string& rejection) {
  if (reported_.size() < kMaxReports && reported_.insert(rejection).second)
    return handlers_.say(rejection);
  ++unreported_;
}

std::vector<int> Hub::missing() const {
  std::vector<int> nodes;
  for (int node = 1; node < plan_.nnodes; ++node)
    if (guest_of_node_.count(node) == 0) nodes.push_back(node);
  return nodes;
}

void Hub::report_progress() {
  progress_timer_.start(kProgress, [this] { report_progress(); });
  std::string text = fmt::format(
      "[launch] waiting for node ranks {} at {}:{} ({} of {} are here, {:.0f} s "
      "of {} s).",
      first_numbers(missing()), plan_.master_addr, plan_.master_port, guest_of_node_.size() + 1,
      plan_.nnodes, seconds_since(started_), plan_.rendezvous_timeout.count());
  broadcast({.kind = Message::Kind::kSay, .text = text});
  if (unreported_ > 0) text += fmt::format(" {} more connections were rejected.", unreported_);
  handlers_.say(text);
  reported_.clear();
  unreported_ = 0;
}

void Hub::check_complete() {
  if (static_cast<int>(guest_of_node_.size()) + 1 < plan_.nnodes) return;
  stop_waiting();
  run_ = run_of_guests();
  if (run_.empty())
    run_ = fmt::format("{:08x}{:08x}", std::random_device{}(), std::random_device{}());
  shares_ = nodes();  // a node that is lost later keeps its ranks, so the others keep theirs
  for (const auto& [node, number] : guest_of_node_) guests_.at(number).started = true;
  // At once: a node that is lost from here on is one of a run that has begun.
  handlers_.complete();
}

void Hub::stop_waiting() {
  for (Timer* timer : {&overdue_timer_, &progress_timer_, &accept_timer_}) timer->cancel();
  loop_.forget(listener());
  port_.stop_listening();
  while (evict()) {
  }
}

void Hub::broadcast(Message message) {
  message.run = run_;
  for (const auto& [node, number] : guest_of_node_) guests_.at(number).connection->send(message);
}

void Hub::send(int node, const StoreFrame& frame) {
  const auto found = guest_of_node_.find(node);
  if (found != guest_of_node_.end()) guests_.at(found->second).connection->send(frame);
}

std::string Hub::local_address() const {
  std::string address;
  for (const auto& [node, number] : guest_of_node_) {
    const std::string own = guests_.at(number).connection->local_address();
    if (address.empty() || is_loopback(address)) address = own;
  }
  return address;
}

void Hub::wait_for_goodbyes(milliseconds timeout, EventLoop::Task done) {
  stop_waiting();  // whoever joined now would be lost in a moment
  if (guest_of_node_.empty()) return loop_.post(std::move(done));
  on_goodbyes_ = std::move(done);
  goodbye_timer_.start(timeout, [this] { loop_.post(std::exchange(on_goodbyes_, nullptr)); });
}

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kConnectTimeout{5000};
constexpr milliseconds kAnswerTimeout = 2 * kLossKnown;
constexpr milliseconds kRetryDelay{200};
constexpr milliseconds kNodeZeroSlack{5000};

// A connect to a local port nobody listens on can connect to itself when the kernel picks that very
// port as its own end.
bool met_itself(int fd) {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t own_size = sizeof own;
  socklen_t peer_size = sizeof peer;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
         own_size == peer_size && std::memcmp(&own, &peer, own_size) == 0;
}

}  // namespace

Spoke::Spoke(EventLoop& loop, const LaunchPlan& plan, std::string host, Handlers handlers)
    : loop_(loop),
      plan_(plan),
      host_(std::move(host)),
      handlers_(std::move(handlers)),
      secure_(secure_context(plan, SecureContext::Side::kClient)) {}

Spoke::~Spoke() {
  close();
}

// Node 0 is no longer looked for either.
void Spoke::close() {
  for (Timer* timer : {&overdue_timer_, &retry_timer_, &answer_timer_, &progress_timer_})
    timer->cancel();
  if (pending_) loop_.forget(pending_.get());
  pending_.reset();
  lookup_.reset();
  connection_.reset();
}

void Spoke::connect(int first_attempt) {
  first_attempt_ = first_attempt;
  begun_ = false;
  started_ = EventLoop::Clock::now();
  expect_node_zero();
  try_now();
}

// Within what is left of the time since connect().
void Spoke::expect_node_zero() {
  welcome_ = false;
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

void Spoke::report_progress() {
  if (welcome_) return;  // from now on node 0 reports
  progress_timer_.start(kProgress, [this] { report_progress(); });
  handlers_.say(fmt::format("[launch] waiting for node rank 0 at {}:{} ({}; {:.0f} s of {} s).",
                            plan_.master_addr, plan_.master_port, last_problem_,
                            seconds_since(started_), plan_.rendezvous_timeout.count()));
}

void Spoke::try_later(const std::string& why) {
  last_problem_ = why;
  answer_timer_.cancel();
  if (pending_) loop_.forget(pending_.get());
  pending_.reset();
  connection_.reset();
  retry_timer_.start(kRetryDelay, [this] { try_now(); });
}

void Spoke::try_now() {
  lookup_ = std::make_unique<Lookup>(loop_, plan_.master_addr, plan_.master_port,
                                     [this](const Addresses& found) { try_addresses(found); });
}

void Spoke::try_addresses(const Addresses& found) {
  if (found.error != 0) return try_later(fmt::format("its name: {}", ::gai_strerror(found.error)));
  // A name may have several addresses and answer at only one: each try begins with the next.
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
      if (met_itself(pending_.get())) return try_later("nobody listens there");
      loop_.forget(pending_.get());
      on_connected(std::move(pending_));
    });
    return;
  }
  try_later(problem);
}

void Spoke::on_connected(Fd socket) {
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

void Spoke::on_closed(const Closing& closing) {
  if (!connection_) return;
  connection_.reset();
  if (welcome_ && !begun_ && first_attempt_ > 0) {  // as is the one that came back, or its place
    expect_node_zero();
    return try_later(closing.why);
  }
  if (welcome_) return handlers_.lost(closing.why);
  if (closing.secret == Closing::Secret::kFine)
    return try_later("what listens there is not a launcher that waits");
  answer_timer_.cancel();
  const std::string peer = fmt::format("node 0 at {}:{}", plan_.master_addr, plan_.master_port);
  handlers_.failed(2, secret_text(closing.secret, peer));
}

std::string Spoke::what_is_wrong(const Message& message) const {
  if (message.kind == Message::Kind::kStop && !may_stop(plan_, message.signal))
    return bad_signal(message.signal);
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

void Spoke::on_message(const Message& message) {
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
  if (message.kind == Message::Kind::kForeign) return handlers_.failed(2, message.text);
  if (const std::string wrong = what_is_wrong(message); !wrong.empty()) return on_closed({wrong});
  if (!welcome_) {
    // From here on node 0 watches the clock; this is for a node 0 that hangs.
    welcome_ = true;
    connection_->trust();
    overdue_timer_.start(plan_.rendezvous_timeout + kNodeZeroSlack, [this] {
      handlers_.failed(1,
                       "[launch] timed out: node 0's launcher answered but never started the run. "
                       "Look at what it says; it may be stopped.");
    });
  }
  if (message.kind == Message::Kind::kStart) {
    begun_ = true;
    run_ = message.run;
  }
  if (message.kind == Message::Kind::kSay) {
    if (!message.text.empty()) handlers_.say(message.text);
    return;
  }
  overdue_timer_.cancel();
  handlers_.message(message);
}

void Spoke::send(const Message& message) {
  if (connection_) connection_->send(message);
}

void Spoke::send(const StoreFrame& frame) {
  if (connection_) connection_->send(frame);
}

}  // namespace lockstep::launch
