#include <ATen/ops/from_blob.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/c10d.h"
#include "lockstep/comm/shm/engine.h"
#include "lockstep/comm/shm/tensor_types.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"

namespace lockstep::detail::shm {

namespace {

using lockstep::shm::ConstPart;
using lockstep::shm::DType;
using lockstep::shm::Engine;
using lockstep::shm::Op;
using lockstep::shm::Part;
using lockstep::shm::StartOptions;
using lockstep::shm::SymmetricBlock;
using lockstep::shm::TicketPtr;

Op translate(ReduceOp op) {
  static_assert(static_cast<int>(ReduceOp::kXor) == static_cast<int>(Op::kXor));
  static_assert(static_cast<int>(ReduceOp::kAvg) == static_cast<int>(Op::kAvg));
  static_assert(static_cast<int>(ReduceOp::kProduct) == static_cast<int>(Op::kProduct));
  return static_cast<Op>(op);
}

DType dtype_of(const at::Tensor& tensor) {
  const auto dtype = lockstep::shm::dtype_of(tensor.scalar_type());
  LOCKSTEP_ASSERT(dtype.has_value());
  return *dtype;
}

std::size_t count_of(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel());
}

std::vector<Part> parts_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Part> parts;
  for (const auto& tensor : tensors) parts.push_back({tensor.mutable_data_ptr(), tensor.nbytes()});
  return parts;
}

std::vector<ConstPart> const_parts_of(const std::vector<at::Tensor>& tensors) {
  std::vector<ConstPart> parts;
  for (const auto& tensor : tensors) parts.push_back({tensor.const_data_ptr(), tensor.nbytes()});
  return parts;
}

// One operation has one ticket and one or two tensors; a batch of messages has many.
using Tickets = c10::SmallVector<TicketPtr, 1>;
using Memory = c10::SmallVector<c10::Storage, 2>;

// The engine no longer touches the tensors.
bool all_done(const Tickets& tickets) {
  return std::all_of(tickets.begin(), tickets.end(),
                     [](const TicketPtr& ticket) { return ticket->done(); });
}

std::exception_ptr first_error(const Tickets& tickets) {
  for (const auto& ticket : tickets)
    if (auto error = ticket->error()) return error;
  return nullptr;
}

// One engine operation, or several that end together. The engine has only pointers: when an
// operation is dropped before it ends, the tickets own the memory and free it when they end.
class Operation : public HostOperation {
 public:
  Operation(Tickets tickets, Memory memory)
      : tickets_(std::move(tickets)), memory_(std::move(memory)) {}
  ~Operation() override {
    if (all_done(tickets_)) return;
    const auto memory = std::make_shared<Memory>(std::move(memory_));
    try {
      for (const auto& ticket : tickets_) ticket->on_done([memory] {});
    } catch (const std::exception&) {
      // No thread could be started for it: the memory is freed when someone else ends the ticket.
      new std::shared_ptr<Memory>(memory);
    }
  }

  bool poll() override {
    for (const auto& ticket : tickets_)
      if (!ticket->poll()) return false;
    if (auto error = first_error(tickets_)) std::rethrow_exception(error);
    return true;
  }
  void wait(const Deadline& deadline) override {
    for (const auto& ticket : tickets_) ticket->wait(deadline);
  }
  void request_progress(std::function<void()> noticed) override {
    for (const auto& ticket : tickets_) ticket->on_done(noticed);
  }

 private:
  Tickets tickets_;
  Memory memory_;
};

Memory memory_of(const std::vector<at::Tensor>& tensors) {
  Memory memory;
  for (const auto& tensor : tensors) memory.push_back(tensor.storage());
  return memory;
}

class ShmBackend : public Backend {
 public:
  explicit ShmBackend(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}

  const std::string& name() const override {
    static const std::string name = "shm";
    return name;
  }
  c10::DeviceType device_type() const override { return c10::kCPU; }

  bool takes_memory() const override { return true; }

  bool reduces(at::ScalarType dtype, ReduceOp op) const override {
    const auto translated = lockstep::shm::dtype_of(dtype);
    return translated && lockstep::shm::supports(*translated, translate(op));
  }

  bool shares_memory() const override { return true; }

  bool barrier(const State& state, bool last) override {
    follow(state, {last ? engine_->finish(started(state)) : engine_->barrier(started(state))}, {});
    return true;
  }

  void all_reduce(const State& state, at::Tensor tensor, ReduceOp op) override {
    follow(state,
           {engine_->all_reduce(tensor.mutable_data_ptr(), count_of(tensor), dtype_of(tensor),
                                translate(op), started(state))},
           {tensor.storage()});
  }

  void reduce(const State& state, at::Tensor tensor, int root, ReduceOp op) override {
    follow(state,
           {engine_->reduce(tensor.mutable_data_ptr(), count_of(tensor), dtype_of(tensor),
                            translate(op), root, started(state))},
           {tensor.storage()});
  }

  void broadcast(const State& state, at::Tensor tensor, int root) override {
    follow(state,
           {engine_->broadcast(tensor.mutable_data_ptr(), tensor.nbytes(), root, started(state))},
           {tensor.storage()});
  }

  void all_gather(const State& state, at::Tensor output, at::Tensor input) override {
    follow(state,
           {engine_->all_gather(output.mutable_data_ptr(), input.const_data_ptr(), input.nbytes(),
                                started(state))},
           {output.storage(), input.storage()});
  }

  void reduce_scatter(const State& state, at::Tensor output, at::Tensor input,
                      ReduceOp op) override {
    follow(state,
           {engine_->reduce_scatter(output.mutable_data_ptr(), input.const_data_ptr(),
                                    count_of(output), dtype_of(output), translate(op),
                                    started(state))},
           {output.storage(), input.storage()});
  }

  void gather(const State& state, std::vector<at::Tensor> outputs, at::Tensor input,
              int root) override {
    TicketPtr ticket = engine_->gather(parts_of(outputs), {input.const_data_ptr(), input.nbytes()},
                                       root, started(state));
    outputs.push_back(std::move(input));
    follow(state, {std::move(ticket)}, memory_of(outputs));
  }

  void scatter(const State& state, at::Tensor output, std::vector<at::Tensor> inputs,
               int root) override {
    TicketPtr ticket = engine_->scatter({output.mutable_data_ptr(), output.nbytes()},
                                        const_parts_of(inputs), root, started(state));
    inputs.push_back(std::move(output));
    follow(state, {std::move(ticket)}, memory_of(inputs));
  }

  void all_to_all(const State& state, std::vector<at::Tensor> outputs,
                  std::vector<at::Tensor> inputs) override {
    TicketPtr ticket =
        engine_->all_to_all(parts_of(outputs), const_parts_of(inputs), started(state));
    outputs.insert(outputs.end(), inputs.begin(), inputs.end());
    follow(state, {std::move(ticket)}, memory_of(outputs));
  }

  void point_to_point(const State& state, std::vector<P2p> messages) override {
    Tickets tickets;
    Memory memory;
    for (const auto& message : messages) {
      const at::Tensor& tensor = message.tensor;
      const bool sends = message.kind == P2p::Kind::kSend;
      tickets.push_back(sends ? engine_->send(tensor.const_data_ptr(), tensor.nbytes(),
                                              message.peer, started(state))
                              : engine_->recv(tensor.mutable_data_ptr(), tensor.nbytes(),
                                              message.peer, started(state)));
      memory.push_back(tensor.storage());
    }
    follow(state, std::move(tickets), std::move(memory));
  }

  std::vector<at::Tensor> symmetric(std::int64_t bytes, const Deadline& deadline) override {
    std::vector<at::Tensor> parts;
    const auto block = engine_->symmetric(static_cast<std::size_t>(bytes), deadline);
    for (int rank = 0; rank < engine_->size(); ++rank) {
      // Each tensor holds the block, so the memory lives as long as any of them.
      parts.push_back(
          at::from_blob(block->peer(rank), {bytes}, [block](void*) {}, at::dtype(at::kByte)));
    }
    return parts;
  }

  // Pending operations were completed with the cause already; peers see it when they look.
  void abort(int culprit) noexcept override { engine_->abort("this rank gave up", culprit); }

 private:
  static StartOptions started(const State& state) {
    return {.deadline = state->deadline(),
            .number = state->info().sequence,
            .saving = ledger::phase() == ledger::Phase::kSaving};
  }

  void follow(const State& state, Tickets tickets, Memory memory) {
    // If all other ranks had arrived before, the operation has ended already.
    if (all_done(tickets)) return state->complete(first_error(tickets));
    auto operation = std::make_unique<Operation>(std::move(tickets), std::move(memory));
    Operation& started = *operation;
    state->attach(std::move(operation));
    // If a last step remains (copying back), it must run even if no thread waits.
    if (state->has_finish()) started.request_progress([state] { state->poll(); });
  }

  std::unique_ptr<Engine> engine_;
};

}  // namespace

BackendResult make(const Options& options) {
  if (options.size > lockstep::shm::kMaxRanks)
    return {nullptr, fmt::format("{} ranks are more than the {} it can serve", options.size,
                                 lockstep::shm::kMaxRanks)};
  C10dStore kv(options.store);
  auto made =
      Engine::make(kv, {options.rank, options.size}, {}, Deadline::after(options.startup_timeout));
  if (!made.engine) return {nullptr, std::move(made.unavailable_reason)};
  return {std::make_unique<ShmBackend>(std::move(made.engine)), ""};
}

}  // namespace lockstep::detail::shm
