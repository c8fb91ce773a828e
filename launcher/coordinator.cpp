#include "launcher/coordinator.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

using std::chrono::milliseconds;
// The time that a node has, after its ranks' grace, to kill them and report it.
constexpr milliseconds kDownSlack{15'000};
using Kind = Message::Kind;

}  // namespace

Coordinator::Coordinator(EventLoop& loop, const LaunchPlan& plan, Actions orders)
    : plan_(plan), actions_(std::move(orders)), backoff_timer_(loop), down_timer_(loop) {}

milliseconds Coordinator::backoff(int attempt) {
  return std::min(milliseconds(500) * (1 << std::min(attempt, 10)), milliseconds(30'000));
}

void Coordinator::begin(std::vector<NodeShare> nodes, int attempt) {
  if (phase_ != Phase::kWaiting && phase_ != Phase::kAwaitingNodes) return;
  nodes_ = std::move(nodes);
  attempt_ = std::max(attempt_, std::min(attempt, plan_.max_restarts));
  lost_.clear();
  start_attempt();
}

void Coordinator::start_attempt() {
  phase_ = Phase::kRunning;
  down_.clear();
  failure_.reset();
  node_outcome_.reset();
  actions_.broadcast({.kind = Kind::kStart, .attempt = attempt_, .nodes = nodes_});
}

void Coordinator::on_message(int node, const Message& message) {
  if (phase_ == Phase::kEnded) return;
  switch (message.kind) {
    case Kind::kFailed:
      if (message.failure && message.attempt == attempt_) on_failed(*message.failure);
      break;
    case Kind::kStop:
      on_stop(node, message);
      break;
    case Kind::kDown:
      if (phase_ != Phase::kRunning || message.attempt != attempt_) break;
      // The node now knows more about its failure: exit code, last lines, an earlier cause.
      if (message.failure && failure_ && failure_->node == node && failure_->rank >= 0)
        failure_ = message.failure;
      // A failure during a stop takes precedence over an early exit.
      if (message.failure && !failure_ &&
          (!node_outcome_ || (node_outcome_->restartable && !message.failure->restartable)))
        node_outcome_ = message.failure;
      down_.insert(node);
      check_all_down();
      break;
    default:
      break;
  }
}

void Coordinator::on_failed(const RankFailure& failure) {
  if (phase_ != Phase::kRunning || failure_ || stop_signal_ != 0) return;
  failure_ = failure;
  // The early exit of a rank is the cause if it broke the connection of this one.
  if (node_outcome_ && failure.rank >= 0) {
    failure_ = node_outcome_;
    failure_->others.push_back(with_message(failure.headline(), failure.message));
  }
  expect_all_down();
  actions_.broadcast({.kind = Kind::kFailed, .attempt = attempt_, .failure = failure_});
}

void Coordinator::on_stop(int node, const Message& request) {
  if (stop_signal_ == 0) stop_signal_ = request.signal;
  if (phase_ != Phase::kRunning) {
    failure_.reset();  // of an earlier attempt, and already reported
    return end(128 + stop_signal_);
  }
  expect_all_down();
  actions_.broadcast({.kind = Kind::kStop,
                      .node = node,
                      .attempt = attempt_,
                      .signal = request.signal,
                      .request = request.request});
}

void Coordinator::on_lost(int node, const std::string& host, const std::string& why) {
  if (phase_ == Phase::kEnded) return;
  RankFailure failure;
  failure.node = node;
  failure.attempt = attempt_;
  failure.host = host;
  failure.cause = fmt::format(
      "the launcher of node {} on {} is lost: {}. It was killed, or its host or network is down",
      node, host, why);
  lost_[node] = failure;
  down_.insert(node);
  if (phase_ == Phase::kBackoff || phase_ == Phase::kAwaitingNodes) {
    failure_ = failure;
    return await_lost_nodes();
  }
  on_failed(failure);
  check_all_down();
}

void Coordinator::expect_all_down() {
  if (down_timer_.pending()) return;
  // Ranks that handle a forwarded signal have the grace twice: to save, and after SIGTERM.
  const int graces = failure_ && failure_->stopped ? 2 : 1;
  down_timer_.start(graces * plan_.shutdown_timeout + kDownSlack, [this] {
    if (failure_) failure_->restartable = false;
    decide();
  });
}

void Coordinator::check_all_down() {
  if (phase_ == Phase::kRunning && static_cast<int>(down_.size()) == plan_.nnodes) decide();
}

void Coordinator::decide() {
  down_timer_.cancel();
  // A rank that failed during the stop is a failure that is not restarted. One that exited early
  // before the stop is not, nor one that lost a peer which another launcher stopped first.
  if (!failure_ && stop_signal_ != 0 && node_outcome_ && !node_outcome_->restartable)
    failure_ = node_outcome_;
  // A failure before the stop request has ended the run, not the request.
  if (!failure_) return end(stop_signal_ == 0 ? 0 : 128 + stop_signal_);
  const bool possible = failure_->restartable && stop_signal_ == 0;
  if (!possible || attempt_ >= plan_.max_restarts) return end(failure_->code);
  const milliseconds delay = backoff(attempt_);
  ++attempt_;
  if (!lost_.empty()) return await_lost_nodes();
  phase_ = Phase::kBackoff;
  announce_restart(fmt::format("in {:.1f} s.", static_cast<double>(delay.count()) / 1000));
  backoff_timer_.start(delay, [this] { start_attempt(); });
}

void Coordinator::announce_restart(const std::string& when) {
  actions_.broadcast({.kind = Kind::kRestart,
                      .attempt = attempt_,
                      .text = fmt::format("[launch] restarting all ranks ({} of {}) {}", attempt_,
                                          plan_.max_restarts, when),
                      .failure = failure_});
}

// Called when nothing of the previous attempt is left here. More nodes may be lost meanwhile; the
// deadline counts from the first loss.
void Coordinator::await_lost_nodes() {
  backoff_timer_.cancel();
  const bool first = phase_ != Phase::kAwaitingNodes;
  phase_ = Phase::kAwaitingNodes;
  announce_restart(fmt::format(
      "as soon as every node is here again. Waiting up to {} s for node {}: start `lockstep run` "
      "there, or on another host, with the same flags and this --node-rank.",
      plan_.rendezvous_timeout.count(), fmt::join(actions_.missing(), ", ")));
  if (first) actions_.await_nodes();
}

void Coordinator::give_up() {
  if (phase_ != Phase::kAwaitingNodes) return;
  failure_ = lost_.at(actions_.missing().at(0));
  failure_->cause += fmt::format(
      ". Waiting for it timed out: neither it nor another launcher with "
      "--node-rank={} came back within {} s",
      failure_->node, plan_.rendezvous_timeout.count());
  end(failure_->code);
}

void Coordinator::end(int code) {
  if (phase_ == Phase::kEnded) return;
  phase_ = Phase::kEnded;
  backoff_timer_.cancel();
  down_timer_.cancel();
  actions_.broadcast({.kind = Kind::kEnd, .attempt = attempt_, .code = code, .failure = failure_});
}

}  // namespace lockstep::launch
