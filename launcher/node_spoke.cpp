#include "launcher/node_spoke.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "launcher/lookup.h"
#include "launcher/node_link.h"
#include "lockstep/core/deadline.h"

namespace lockstep::launch {
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
