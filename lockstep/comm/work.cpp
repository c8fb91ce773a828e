#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "lockstep/comm/types.h"
#include "lockstep/comm/work_state.h"
#include "lockstep/core/error.h"
#include "lockstep/rendezvous/control.h"

namespace lockstep {
namespace detail {

namespace {

// A broken connection is often the first sign of a rank whose death the launcher is about to
// explain; its report is worth a short wait, because it names the cause and not the symptom.
constexpr std::chrono::milliseconds kLauncherReport{1500};
// How long the thread that ends an operation may take to store its result.
constexpr std::chrono::seconds kOutcomeLimit{30};

std::string launcher_cause() {
  const auto failure = control::failure(kLauncherReport);
  return failure ? failure->text() : "";
}

std::string first_line(const char* text) {
  const std::string all(text);
  return all.substr(0, all.find('\n'));
}

std::string error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return first_line(e.what());
  } catch (...) {
    return "unknown error";
  }
}

FailureCause blame_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const TimeoutError& e) {
    return {e.context().peer, false};
  } catch (const Disagreement& e) {
    return {e.context().peer, false, true};
  } catch (const CommError& e) {
    return {e.context().peer};
  } catch (...) {
    return {};
  }
}

}  // namespace

// ---------------------------------------------------------------- FailureState

std::string FailureState::cause() const {
  const std::lock_guard lock(mutex_);
  return cause_;
}

FailureCause FailureState::blame() const {
  const std::lock_guard lock(mutex_);
  return blame_;
}

void FailureState::fail(const std::string& cause, FailureCause blame) {
  std::vector<std::shared_ptr<WorkState>> pending;
  {
    const std::lock_guard lock(mutex_);
    if (!cause_.empty()) return;
    cause_ = cause.empty() ? "aborted" : cause;
    blame_ = blame;
    failed_.store(true, std::memory_order_release);
    // An operation that nobody holds any more is being destroyed and takes itself off the list.
    for (WorkState* state = pending_; state != nullptr; state = state->after_)
      if (auto held = state->weak_from_this().lock()) pending.push_back(std::move(held));
  }
  for (auto& state : pending) state->fail(cause_, blame);
  const std::lock_guard lock(hook_mutex_);
  if (hook_) hook_();
}

void FailureState::set_hook(std::function<void()> hook) {
  const std::lock_guard lock(hook_mutex_);
  hook_ = std::move(hook);
}

void FailureState::add(const std::shared_ptr<WorkState>& state) {
  std::string failed;
  FailureCause blame;
  {
    const std::lock_guard lock(mutex_);
    failed = cause_;
    blame = blame_;
    if (failed.empty()) {
      state->after_ = pending_;
      if (pending_ != nullptr) pending_->before_ = state.get();
      pending_ = state.get();
      state->listed_.store(true, std::memory_order_release);
    }
  }
  if (!failed.empty()) state->fail(failed, blame);
}

void FailureState::remove(WorkState& state) {
  if (!state.listed_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  if (!state.listed_.load(std::memory_order_acquire)) return;
  (state.before_ != nullptr ? state.before_->after_ : pending_) = state.after_;
  if (state.after_ != nullptr) state.after_->before_ = state.before_;
  state.before_ = state.after_ = nullptr;
  state.listed_.store(false, std::memory_order_release);
}

// ---------------------------------------------------------------- WorkState

WorkState::WorkState(OperationInfo info, Deadline deadline,
                     std::shared_ptr<FailureState> failure_state)
    : info_(info), deadline_(deadline), failure_state_(std::move(failure_state)) {}

WorkState::~WorkState() {
  failure_state_->remove(*this);
  if (!done_) ledger::ended(info_.ledger, ledger::End::kReleased);
  const bool finishes = finish_ && finish_stream_ && error_.empty() && (done_ || device_);
  if (finishes && !info_.recorded) finish_dropped();
}

// No thread has waited or can wait any more, but the result must still be stored.
void WorkState::finish_dropped() noexcept {
  try {
    const c10::StreamGuard guard(*finish_stream_);
    if (device_) device_->wait_stream();
    finish_();
  } catch (const std::exception& e) {
    failure_state_->fail(fmt::format("{} failed: the result could not be stored: {}", describe(),
                                     first_line(e.what())));
  }
}

void WorkState::finish_with(std::function<void()> step, std::optional<c10::Stream> stream) {
  finish_ = std::move(step);
  finish_stream_ = stream;
}

void WorkState::keep_alive(std::vector<at::Tensor> tensors) {
  alive_ = std::move(tensors);
}

void WorkState::attach(std::unique_ptr<DeviceOperation> operation) {
  const std::lock_guard lock(mutex_);
  device_ = std::move(operation);
}

void WorkState::attach(std::unique_ptr<HostOperation> operation) {
  const std::lock_guard lock(mutex_);
  host_ = std::move(operation);
}

void WorkState::complete(std::exception_ptr error) noexcept {
  std::function<void()> step;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(claimed_, true)) return;
    if (!error && !finish_stream_) step = std::exchange(finish_, nullptr);
  }
  std::string text;
  if (step) {
    try {
      step();
    } catch (const std::exception& e) {
      text = fmt::format("the result could not be stored: {}", first_line(e.what()));
    }
  }
  FailureCause blame;
  if (error) {
    text = error_text(error);
    blame = blame_of(error);
  }
  record_outcome(text, blame);
  // A failed operation breaks the world: its peers cannot know this rank's position.
  if (!text.empty()) failure_state_->fail(fmt::format("{} failed: {}", describe(), text), blame);
}

bool WorkState::claim() noexcept {
  const std::lock_guard lock(mutex_);
  return !std::exchange(claimed_, true);
}

void WorkState::fail(const std::string& cause, FailureCause blame) noexcept {
  if (claim()) record_outcome(cause, blame);
}

void WorkState::expire(const std::string& text, FailureCause blame) noexcept {
  if (!claim()) return;
  timed_out_ = true;  // published by record_outcome
  record_outcome(text, blame);
  failure_state_->fail(text, blame);
}

std::string WorkState::timeout_text(const std::string& why) const {
  const std::string unknown =
      ". Another rank has probably not called it (a branch on the rank, fewer batches), is stuck, "
      "or cannot be reached over the network (several hosts: check firewall and interface).";
  return fmt::format(
      "{} was not finished after {} ms{} Set LOCKSTEP_DEBUG=1 to see the call that differs, or "
      "raise LOCKSTEP_TIMEOUT_S if the ranks are only slow.",
      describe(), deadline_.elapsed().count(), why.empty() ? unknown : why);
}

void WorkState::record_outcome(std::string error, FailureCause blame) noexcept {
  std::vector<std::function<void()>> callbacks;
  std::vector<at::Tensor> alive;
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    blame_ = blame;
    callbacks.swap(callbacks_);
    if (error_.empty()) alive.swap(alive_);  // after a failure a backend may still touch them
    ledger::ended(info_.ledger, error_.empty() ? ledger::End::kFinished : ledger::End::kFailed);
    done_.store(true, std::memory_order_release);
  }
  failure_state_->remove(*this);
  changed_.notify_all();
  for (auto& callback : callbacks) callback();
}

bool WorkState::poll() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (done_ || claimed_ || (!device_ && !host_)) return done_;
  }
  try {
    if (device_ ? device_->poll() : host_->poll()) complete();
  } catch (const TimeoutError& e) {
    end_late(e, deadline_);
  } catch (...) {
    complete(std::current_exception());
  }
  const std::lock_guard lock(mutex_);
  return done_;
}

// Only this rank's own deadline counts; another rank's is a failure of the world, which that rank
// reports. Expires at once: the peers know of it already, and their ends must not become the cause
// of this one.
void WorkState::end_late(const TimeoutError& error, const Deadline& deadline) noexcept {
  if (!deadline.expired()) return complete(std::current_exception());
  const auto* late = dynamic_cast<const LateOperation*>(&error);
  expire(timeout_text(late != nullptr ? late->why() : ""), {error.context().peer, false});
}

void WorkState::carry_out(const Deadline& deadline) noexcept {
  try {
    host_->wait(deadline);
    complete();
  } catch (const TimeoutError& e) {
    end_late(e, deadline);
  } catch (...) {
    complete(std::current_exception());
  }
}

bool WorkState::await(const Deadline& deadline) noexcept {
  {
    std::unique_lock lock(mutex_);
    if (done_) return true;
    if (host_) {
      lock.unlock();
      carry_out(deadline);
      if (ended_well()) return true;
      lock.lock();
    }
    if (!device_)
      return changed_.wait_until(lock, deadline.time(), [this] { return done_.load(); });
  }
  // Most operations on a device end within a few hundred microseconds: ask often, then less often.
  std::chrono::microseconds pause{20};
  while (!poll()) {
    if (deadline.expired()) return false;
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, pause, [this] { return done_.load(); });
    pause = std::min(pause * 5 / 4, std::chrono::microseconds(1000));
  }
  return true;
}

void WorkState::wait_host(std::optional<std::chrono::milliseconds> timeout) {
  if (!await(timeout ? Deadline::after(*timeout) : deadline_)) expire(timeout_text());
  if (ended_well()) return;
  bool device_step = false;
  {
    // Another thread may have ended the operation at the very deadline, and is about to say how it
    // ended.
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kOutcomeLimit, [this] { return done_.load(); })) {
      throw CommError(
          "world",
          fmt::format("rank {}: {} ended on another thread, which has not stored its result within "
                      "{} s. The copy into the caller's tensor is stuck; end this rank.",
                      failure_state_->rank(), describe(), kOutcomeLimit.count()),
          {failure_state_->rank(), info_.peer, info_.name, info_.sequence, deadline_.elapsed()});
    }
    // The last step of a device operation goes to the current stream, which the host waits for.
    device_step = device_ != nullptr && finish_ != nullptr;
  }
  finish_or_throw();
  if (device_step) device_->wait_current_stream();
}

void WorkState::wait_stream() {
  if (ended_well()) return;
  bool on_device = false;
  {
    const std::lock_guard lock(mutex_);
    on_device = device_ != nullptr && error_.empty();
  }
  if (!on_device) return wait_host(std::nullopt);
  try {
    device_->wait_stream();
  } catch (...) {
    if (info_.recorded) throw;
    complete(std::current_exception());
  }
  if (info_.recorded) complete();
  finish_or_throw();
}

void WorkState::finish_or_throw() {
  std::string error;
  FailureCause blame;
  std::function<void()> step;
  {
    const std::lock_guard lock(mutex_);
    error = error_;
    blame = blame_;
    if (error.empty()) step = std::exchange(finish_, nullptr);
  }
  if (!error.empty()) throw_error(error, blame);
  if (!step) return;
  if (device_) device_->wait_stream();
  step();
}

void WorkState::throw_error(const std::string& error, FailureCause blame) {
  if (timed_out_) {
    throw TimeoutError("world", fmt::format("rank {}: {}", failure_state_->rank(), error),
                       context());
  }
  std::string cause = blame.death ? launcher_cause() : "";
  if (cause.empty()) cause = error;
  if (cause.back() != '.') cause += '.';
  // The message names the calls of two ranks, and this rank's adds no information.
  if (blame.disagreement)
    throw Disagreement("world", cause.substr(cause.starts_with("[shm] ") ? 6 : 0), context());
  throw CommError(
      "world",
      fmt::format("rank {}: {} failed after {} ms: {} This world cannot be used any "
                  "more. End this rank; if another rank reports an error, that is the cause.",
                  failure_state_->rank(), describe(), deadline_.elapsed().count(), cause),
      context());
}

void WorkState::on_completion(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      if (device_) device_->request_progress();
      callback = nullptr;
    }
  }
  if (callback) return callback();
  // Outside the lock: it may be finished at once, in this thread.
  if (host_) host_->request_progress([self = shared_from_this()] { self->poll(); });
}

std::string WorkState::describe() const {
  std::string text = fmt::format("{} #{}", info_.name, info_.sequence);
  if (info_.elements < 0) return text;
  text += fmt::format(" ({}, {} element{}", c10::toString(info_.dtype), info_.elements,
                      info_.elements == 1 ? "" : "s");
  if (info_.peer >= 0) text += fmt::format(", peer {}", info_.peer);
  return text + ")";
}

std::string WorkState::error() {
  const std::lock_guard lock(mutex_);
  return error_;
}

CommContext WorkState::context() {
  const std::lock_guard lock(mutex_);
  const int peer = blame_.rank >= 0 ? blame_.rank : info_.peer;
  return {failure_state_->rank(), peer, info_.name, info_.sequence, deadline_.elapsed()};
}

}  // namespace detail

// ---------------------------------------------------------------- Work

Work::Work() = default;
Work::Work(std::shared_ptr<detail::WorkState> state) : state_(std::move(state)) {}

void Work::wait() {
  if (state_) state_->wait_stream();
}

void Work::synchronize(std::optional<std::chrono::milliseconds> timeout) {
  if (state_) state_->wait_host(timeout);
}

bool Work::done() const {
  return !state_ || state_->done();
}

void Work::on_completion(std::function<void()> callback) {
  if (state_) {
    state_->on_completion(std::move(callback));
  } else {
    callback();
  }
}

}  // namespace lockstep
