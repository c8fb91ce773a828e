// The shared state behind a Work handle: one operation, from its start to its result or failure.
//
// Operations complete by push: a backend calls complete() from whichever thread noticed, and
// waiters sleep on a condition variable. A backend whose operations live on a GPU cannot push; it
// attaches a DeviceOperation, which waiters poll. One whose operations are best carried out by the
// thread that waits (shared memory) attaches a HostOperation. FailureState is what all operations
// of one world share: when the world fails (launcher's word, timeout, abort), every pending
// operation is completed with that cause.
//
//   auto state = std::make_shared<WorkState>(info, deadline, failure_state);
//   state->finish_with([=] { user_tensor.copy_(staging); }, std::nullopt);
//   backend.all_reduce(state, staging, op);     // calls state->complete() later
//   state->wait_host(std::nullopt);
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"

namespace lockstep::detail {

struct WorkState;

// The rank that a failure is attributed to.
struct FailureCause {
  int rank = -1;              // in the same world; -1: nobody, or not known
  bool death = true;          // may be a process's end, which a launcher would explain
  bool disagreement = false;  // all ranks are alive, and all report the same
};

// Alive until something fails it, then failed forever with the first cause. Safe from any thread.
class FailureState {
 public:
  explicit FailureState(int rank) : rank_(rank) {}

  int rank() const { return rank_; }
  // Empty while all is well.
  std::string cause() const;
  FailureCause blame() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // Completes every pending operation with `cause` and runs the hook. The first call wins.
  void fail(const std::string& cause, FailureCause blame = {});
  // Run once at failure: aborts the backends. Replacing it waits for a call in progress.
  void set_hook(std::function<void()> hook);

  void add(const std::shared_ptr<WorkState>& state);
  void remove(WorkState& state);

 private:
  const int rank_;
  mutable std::mutex mutex_;
  std::mutex hook_mutex_;
  std::function<void()> hook_;
  std::string cause_;
  FailureCause blame_;
  std::atomic<bool> failed_{false};  // cause_ is set
  WorkState* pending_ = nullptr;     // linked through the states themselves
};

// An operation that runs on a device and must be polled.
class DeviceOperation {
 public:
  virtual ~DeviceOperation() = default;
  virtual bool poll() = 0;                 // finished? throws what went wrong
  virtual void wait_stream() = 0;          // the current stream waits; the host does not
  virtual void wait_current_stream() = 0;  // the host waits for the current stream
  virtual void request_progress() {}       // someone wants to know soon when it ends
};

// An operation that the waiting thread may carry out itself.
class HostOperation {
 public:
  virtual ~HostOperation() = default;
  virtual bool poll() = 0;  // finished? never blocks; throws what went wrong
  // Returns when it is finished; throws TimeoutError at the deadline, CommError when it cannot be.
  virtual void wait(const Deadline& deadline) = 0;
  // Makes the operation end without a waiting thread; then calls `noticed`, from any thread.
  virtual void request_progress(std::function<void()> noticed) = 0;
};

// What an error message says about an operation.
struct OperationInfo {
  const char* name = "";
  std::uint64_t sequence = 0;
  at::ScalarType dtype = at::ScalarType::Byte;
  std::int64_t elements = 0;  // -1: it has no tensor
  int peer = -1;
  bool on_device = false;  // on the accelerator's backend, where there is one
  bool recorded = false;   // into a CUDA graph: it runs, and can fail, when the graph does
  ledger::Ticket ledger = 0;
};

struct WorkState : std::enable_shared_from_this<WorkState> {
 public:
  WorkState(OperationInfo info, Deadline deadline, std::shared_ptr<FailureState> failure_state);
  ~WorkState();

  // ---- for the world, before the operation starts
  // Runs once after success, whether or not anybody waits. Without a stream it runs in the
  // completing thread. With one, a device has to do it: on the current stream of the thread that
  // waits, or on `stream` when the last handle is dropped without a wait.
  void finish_with(std::function<void()> step, std::optional<c10::Stream> stream);
  void keep_alive(std::vector<at::Tensor> tensors);
  bool has_finish() const { return finish_ != nullptr; }

  // ---- for backends
  void attach(std::unique_ptr<DeviceOperation> operation);
  void attach(std::unique_ptr<HostOperation> operation);
  void complete(std::exception_ptr error = nullptr) noexcept;  // the first call wins
  void fail(const std::string& cause, FailureCause blame) noexcept;
  // The deadline has passed: waits throw TimeoutError with `text`, and the world fails.
  void expire(const std::string& text, FailureCause blame = {}) noexcept;
  // `why`: which ranks did not come in time, for an operation that its waiter carried out.
  std::string timeout_text(const std::string& why = {}) const;
  const Deadline& deadline() const { return deadline_; }
  const OperationInfo& info() const { return info_; }
  // Asks an attached operation whether it is done and completes the state if so.
  bool poll() noexcept;

  // ---- for Work
  bool done() noexcept { return poll(); }
  void wait_host(std::optional<std::chrono::milliseconds> timeout);
  void wait_stream();
  void on_completion(std::function<void()> callback);

  // Blocks until completed or the deadline; true when completed. Throws nothing.
  bool await(const Deadline& deadline) noexcept;
  // "all_reduce #7 (float32, 12 elements)", "barrier #8"
  std::string describe() const;
  // Its peer is the rank that the failure is attributed to, else the message's other end.
  CommContext context();
  // Empty before completion and after success.
  std::string error();

 private:
  friend class FailureState;

  // True when nothing is left to do or report, so that a wait can return without a lock.
  bool ended_well() const {
    return done_.load(std::memory_order_acquire) && !finish_stream_ && error_.empty();
  }
  bool claim() noexcept;  // true for the one caller that may record its outcome
  void finish_or_throw();
  void finish_dropped() noexcept;
  [[noreturn]] void throw_error(const std::string& error, FailureCause blame);
  void record_outcome(std::string error, FailureCause blame) noexcept;
  void carry_out(const Deadline& deadline) noexcept;
  void end_late(const TimeoutError& error, const Deadline& deadline) noexcept;

  const OperationInfo info_;
  const Deadline deadline_;
  const std::shared_ptr<FailureState> failure_state_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool claimed_ = false;           // someone is completing it
  std::atomic<bool> done_{false};  // error_ stays as it is from then on
  bool timed_out_ = false;
  std::string error_;  // empty: success
  FailureCause blame_;
  std::function<void()> finish_;
  std::optional<c10::Stream> finish_stream_;  // set: a waiter takes the last step, if there is one
  std::vector<at::Tensor> alive_;
  std::unique_ptr<DeviceOperation> device_;
  std::unique_ptr<HostOperation> host_;
  std::vector<std::function<void()>> callbacks_;

  // The failure state's list of what is pending, under its mutex.
  std::atomic<bool> listed_{false};
  WorkState* before_ = nullptr;
  WorkState* after_ = nullptr;
};

}  // namespace lockstep::detail
