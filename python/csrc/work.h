// A c10d::Work over the engine's tickets, or over a receive of the matcher.
//
// The first thread that sees the end settles the work, once: copies staged results back, stores the
// error, completes the future. A waiting thread runs the operation itself; a future has no waiter,
// so it asks the engine for a callback. Inside such a callback (a communication hook's `then`) a
// new future runs at once, because the thread that would run it later is the calling one.
//
//   auto work = c10::make_intrusive<EngineWork>(rank, std::move(call));
//   work->attach({engine.all_reduce(...)});
//
// Any thread may call any function. A work that is dropped before its end leaves the call to its
// last ticket, which stores the result and frees the tensors: the engine has only their addresses.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "lockstep/core/ledger.h"
#include "python/csrc/message_matcher.h"

namespace lockstep::python {

// Turns what the engine throws into what Python shows. Made once per group.
using Explain = std::function<std::exception_ptr(const std::exception_ptr&)>;

// What a work is about, besides its tickets.
struct Call {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  const char* name = "";  // of the operation, as gloo names it
  std::string title;      // in profiles: with the backend's name
  std::vector<at::Tensor> inputs;
  std::vector<std::vector<at::Tensor>> outputs;  // what result() and the future hold
  std::vector<at::Tensor> held;                  // staging memory
  std::function<void()> finish;                  // copies back; run once, after success
  std::uint64_t sequence = 0;
  int peer = -1;  // root, or the other end of a message
  ledger::Ticket ticket = 0;
  Explain explain;
};

class EngineWork : public c10d::Work {
 public:
  EngineWork(int rank, Call call);
  ~EngineWork() override;

  // Once, before anyone else has the work. Tickets end in the order of the list.
  void attach(std::vector<shm::TicketPtr> tickets);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return call_.sequence; }

 private:
  void carry_out() noexcept;
  void subscribe();
  void settle() noexcept;
  void complete(const c10::intrusive_ptr<c10::ivalue::Future>& future);

  Call call_;
  std::vector<shm::TicketPtr> tickets_;
  std::mutex settle_mutex_;  // the four below, and the tensors while results are copied back
  bool settled_ = false;
  bool subscribed_ = false;
  std::exception_ptr error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class ReceiveWork : public c10d::Work {
 public:
  ReceiveWork(int rank, Call call, std::shared_ptr<MessageMatcher> matcher);
  void attach(std::shared_ptr<Receive> receive, const Deadline& deadline);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return call_.outputs.at(0); }
  int sourceRank() const override { return receive_->source(); }
  std::uint64_t getSequencenumber() const override { return call_.sequence; }

 private:
  void settle() noexcept;

  Call call_;
  const std::shared_ptr<MessageMatcher> matcher_;
  std::shared_ptr<Receive> receive_;
  Deadline deadline_ = Deadline::after(std::chrono::milliseconds(0));
  std::mutex settle_mutex_;
  bool settled_ = false;
};

}  // namespace lockstep::python
