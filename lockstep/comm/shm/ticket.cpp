#include "lockstep/comm/shm/ticket.h"

#include <utility>

namespace lockstep::shm {

void Ticket::wait(const Deadline& deadline) {
  executor_->wait(*this, deadline);
  if (auto failed = error()) std::rethrow_exception(failed);
}

void Ticket::wait() {
  wait(deadline_);
}

bool Ticket::poll() {
  return done() || executor_->poll(*this);
}

std::exception_ptr Ticket::error() const {
  return done() ? error_ : nullptr;  // stays as it is from then on
}

void Ticket::on_done(std::function<void()> callback) {
  // In a forked child nothing ends any more, and a lock may be held by a thread of the parent.
  if (executor_->inherited()) {
    new std::function<void()>(std::move(callback));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (!done()) {
      callback_ = std::move(callback);
      callback = nullptr;
    }
  }
  if (callback)
    callback();
  else
    executor_->request_progress();
}

void Completions::finish(Ticket& ticket, std::exception_ptr error) {
  const std::lock_guard lock(ticket.mutex_);
  ticket.error_ = std::move(error);
  if (ticket.callback_) callbacks.push_back(std::exchange(ticket.callback_, nullptr));
  ticket.done_.store(true, std::memory_order_release);
  any = true;
}

}  // namespace lockstep::shm
