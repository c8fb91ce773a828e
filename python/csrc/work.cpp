#include "python/csrc/work.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "lockstep/core/error.h"

namespace lockstep::python {
namespace {

// True on a thread that is completing a future, whose callbacks may ask for another one.
bool& inside_callback() {
  thread_local bool value = false;
  return value;
}

void throw_timeout(std::chrono::milliseconds timeout, const std::string& title) {
  C10_THROW_ERROR(DistBackendError,
                  c10::str("[lockstep_torch] wait: ", title, " timed out after ", timeout.count(),
                           " ms. It continues; wait again, or raise the timeout."));
}

void note_end(const Call& call, const std::exception_ptr& error) {
  ledger::ended(call.ticket, error ? ledger::End::kFailed : ledger::End::kFinished);
}

std::vector<at::Tensor> flattened(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace

// ---------------------------------------------------------------- collectives and sends

EngineWork::EngineWork(int rank, Call call)
    : Work(rank, call.type, call.title.c_str(), call.inputs), call_(std::move(call)) {}

EngineWork::~EngineWork() {
  if (settled_ || tickets_.empty()) return;
  const auto call = std::make_shared<Call>(std::move(call_));
  const auto finish_call = [call, last = tickets_.back()] {
    try {
      if (call->finish && !last->error()) call->finish();
      note_end(*call, last->error());
    } catch (const std::exception&) {
      // Nobody is left to report it to.
    }
  };
  try {
    tickets_.back()->on_done([finish_call] { Deferral::run(finish_call); });
  } catch (const std::exception&) {
    // No thread could be started for it: another operation's waiter ends it.
  }
}

void EngineWork::attach(std::vector<shm::TicketPtr> tickets) {
  tickets_ = std::move(tickets);
}

void EngineWork::carry_out() noexcept {
  try {
    for (const auto& ticket : tickets_) ticket->wait();
  } catch (const std::exception&) {
    // The tickets keep it; settle() looks there.
  }
  settle();
}

void EngineWork::settle() noexcept {
  bool first = false;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(settle_mutex_);
    first = !settled_;
    if (first) {
      for (const auto& ticket : tickets_)
        if (!error_) error_ = ticket->error();
      try {
        if (error_)
          error_ = call_.explain(error_);
        else if (call_.finish)
          call_.finish();
      } catch (...) {
        error_ = std::current_exception();
      }
      call_.finish = nullptr;
      call_.held.clear();
      note_end(call_, error_);
      settled_ = true;
      future = future_;
    }
  }
  if (!first) return;
  finish(error_);
  if (future) complete(future);
}

void EngineWork::complete(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  const bool outer = std::exchange(inside_callback(), true);
  if (error_)
    future->setError(error_);
  else if (call_.outputs.size() > 1)
    future->markCompleted(c10::IValue(call_.outputs));
  else
    future->markCompleted(
        c10::IValue(call_.outputs.empty() ? std::vector<at::Tensor>() : call_.outputs[0]));
  inside_callback() = outer;
}

// Somebody who does not wait for the tickets wants to know when they end.
void EngineWork::subscribe() {
  {
    const std::lock_guard lock(settle_mutex_);
    if (settled_ || std::exchange(subscribed_, true)) return;
  }
  auto self = c10::intrusive_ptr<EngineWork>::reclaim_copy(this);
  if (tickets_.empty()) return settle();
  tickets_.back()->on_done([self] { Deferral::run([self] { self->settle(); }); });
}

bool EngineWork::isCompleted() {
  if (!std::all_of(tickets_.begin(), tickets_.end(), [](const auto& t) { return t->poll(); }))
    return false;
  settle();
  return true;
}

bool EngineWork::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout || inside_callback()) {
    carry_out();
  } else {
    subscribe();
    std::unique_lock lock(mutex_);
    if (!cv_.wait_for(lock, timeout, [this] { return completed_; }))
      throw_timeout(timeout, call_.title);
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

void EngineWork::abort() {
  TORCH_CHECK(false, "[lockstep_torch] one operation cannot be aborted: its peers are in it too. ",
              "Abort the process group.");
}

std::vector<at::Tensor> EngineWork::result() {
  TORCH_CHECK(isCompleted(), "[lockstep_torch] the result of an operation that is not finished. ",
              "Call wait() first.");
  return flattened(call_.outputs);
}

c10::intrusive_ptr<c10::ivalue::Future> EngineWork::getFuture() {
  if (inside_callback()) carry_out();
  bool settled = false;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(settle_mutex_);
    if (future_) return future_;
    const auto tensors = c10::ListType::ofTensors();
    const c10::TypePtr type =
        call_.outputs.size() > 1 ? c10::TypePtr(c10::ListType::create(tensors)) : tensors;
    future_ = c10::make_intrusive<c10::ivalue::Future>(type);
    future = future_;
    settled = settled_;
  }
  if (settled)
    complete(future);
  else
    subscribe();
  return future;
}

// ---------------------------------------------------------------- receives

ReceiveWork::ReceiveWork(int rank, Call call, std::shared_ptr<MessageMatcher> matcher)
    : Work(rank, call.type, call.title.c_str(), call.inputs),
      call_(std::move(call)),
      matcher_(std::move(matcher)) {}

void ReceiveWork::attach(std::shared_ptr<Receive> receive, const Deadline& deadline) {
  receive_ = std::move(receive);
  deadline_ = deadline;
}

bool ReceiveWork::isCompleted() {
  if (!receive_->done()) return false;
  settle();
  return true;
}

bool ReceiveWork::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout) {
    matcher_->wait(*receive_, deadline_);
  } else {
    matcher_->request_progress(*receive_);
    if (!receive_->wait_until(Deadline::after(timeout))) throw_timeout(timeout, call_.title);
  }
  settle();
  if (const auto error = exception()) std::rethrow_exception(error);
  return true;
}

void ReceiveWork::settle() noexcept {
  const std::lock_guard lock(settle_mutex_);
  if (std::exchange(settled_, true)) return;
  std::exception_ptr error = receive_->error();
  try {
    if (error)
      error = call_.explain(error);
    else if (call_.finish)
      call_.finish();
  } catch (...) {
    error = std::current_exception();
  }
  call_.finish = nullptr;
  note_end(call_, error);
  finish(error);
}

}  // namespace lockstep::python
