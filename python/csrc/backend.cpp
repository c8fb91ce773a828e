// torch.distributed's view of the shared-memory engine: the backend `lockstep`.
//
// The engine takes plain arrays; torch.distributed passes tensors of any strides and lists of them.
// What is not one array already is staged, and copied back when the work is settled.
#include <fmt/ranges.h>
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/shm/engine.h"
#include "lockstep/core/deadline.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/memory/cpu_cache.h"
#include "python/csrc/arrays.h"
#include "python/csrc/message_matcher.h"
#include "python/csrc/outputs.h"
#include "python/csrc/work.h"

// How torch's own bindings hold such objects.
PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace lockstep::python {
namespace {

using c10d::OpType;
using shm::StartOptions;
using Tickets = std::vector<shm::TicketPtr>;
using std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct BackendConfig {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  milliseconds timeout{0};
  std::string group_name;
  std::vector<std::int64_t> global_ranks;  // empty: the world itself
  std::string asked;                       // the backend's name in torch.distributed
  std::string times;                       // how often a group has been made with this store
};

// ---------------------------------------------------------------- start-up

// The group's store as the engine's key-value store. A group that is destroyed and initialised
// again in the same store must not read the keys of the previous one.
class C10dStore : public KeyValueStore {
 public:
  C10dStore(c10::intrusive_ptr<c10d::Store> store, int rank) : store_(std::move(store)) {
    times_ = std::to_string(store_->add(fmt::format("lockstep/times/{}", rank), 1));
  }
  const std::string& times() const { return times_; }

  void set(const std::string& key, const std::string& value) override {
    store_->set(times_ + "/" + key, value);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    const std::string full = times_ + "/" + key;
    if (poll_until([&] { return store_->check({full}); }, deadline))
      return store_->get_to_str(full);
    throw TimeoutError("lockstep_torch",
                       fmt::format("start-up timed out after {} ms: '{}' was not set. A rank "
                                   "has probably ended; look at its output.",
                                   deadline.total().count(), key));
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  std::string times_;  // this group's part of the store
};

std::exception_ptr as_backend_error(const std::string& text) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, text));
}

// The engine's messages name ranks of the group; the global ranks are appended.
Explain explainer(const BackendConfig& config) {
  std::string note;
  bool plain = true;
  for (std::size_t i = 0; i < config.global_ranks.size(); ++i)
    plain &= config.global_ranks[i] == static_cast<std::int64_t>(i);
  if (!plain)
    note = fmt::format(" (Ranks are those of group '{}'; its members are the world's ranks {}.)",
                       config.group_name, fmt::join(config.global_ranks, ", "));
  return [note](const std::exception_ptr& error) -> std::exception_ptr {
    try {
      std::rethrow_exception(error);
    } catch (const c10::Error&) {
      return error;
    } catch (const TimeoutError& caught) {
      // Programs look for one of these two in the text, as gloo and NCCL write them.
      return as_backend_error(caught.what() + note +
                              " Timed out waiting, by the timeout of the call or of its group.");
    } catch (const std::exception& caught) {
      return as_backend_error(caught.what() + note);
    }
  };
}

// torch.distributed.monitored_barrier: a barrier that names the ranks that did not arrive.
//
// It goes through the group's store and not through the engine, which a timeout breaks for good.
// One key per rank and one for rank 0's answer hold the number of the last barrier, so that the
// store does not grow. The messages begin as gloo's do, because programs match them. One thread at
// a time, the same number of calls on every rank.
class MonitoredBarrier {
 public:
  MonitoredBarrier(c10::intrusive_ptr<c10d::Store> store, std::string prefix, int rank, int size)
      : store_(std::move(store)), prefix_(std::move(prefix)), rank_(rank), size_(size) {}

  // Throws c10::DistBackendError. `all`: rank 0 names every absent rank, not only the first one.
  void wait(milliseconds timeout, bool all) {
    const Deadline deadline = Deadline::after(timeout);
    ++round_;
    store_->set(key(rank_), std::to_string(round_));
    if (rank_ == 0) {
      collect(timeout, deadline, all);
    } else if (!arrives(prefix_ + "answer", deadline)) {
      fail(
          fmt::format("Rank {} successfully reached monitoredBarrier, but received errors while "
                      "waiting for send/recv from rank 0: no answer in {} ms. Please check rank 0 "
                      "logs for faulty rank.",
                      rank_, timeout.count()));
    }
  }

 private:
  void collect(milliseconds timeout, const Deadline& deadline, bool all) {
    std::vector<int> absent;
    for (int rank = 1; rank < size_ && (all || absent.empty()); ++rank) {
      const bool too_late = deadline.expired();  // before that rank is waited for at all
      if (arrives(key(rank), deadline)) continue;
      if (too_late && !all) fail(exhausted(timeout, rank));
      absent.push_back(rank);
    }
    if (!absent.empty())
      fail(fmt::format("{} {} failed to pass monitoredBarrier in {} ms",
                       absent.size() > 1 ? "Ranks" : "Rank", fmt::join(absent, ", "),
                       timeout.count()));
    store_->set(prefix_ + "answer", std::to_string(round_));
  }

  std::string exhausted(milliseconds timeout, int next) const {
    std::vector<int> passed(static_cast<std::size_t>(next - 1));
    std::iota(passed.begin(), passed.end(), 1);
    return fmt::format(
        "Rank {} timed out in monitoredBarrier after {} ms.\n{}", rank_, timeout.count(),
        passed.empty() ? "No ranks successfully processed in monitoredBarrier."
                       : fmt::format("Successfully processed ranks: {}", fmt::join(passed, ", ")));
  }

  std::string key(int rank) const { return fmt::format("{}{}", prefix_, rank); }

  // Whether the key holds this round's number, or a later one, before the deadline. Looks at least
  // once, even after it.
  bool arrives(const std::string& name, const Deadline& deadline) {
    auto pause = std::chrono::microseconds(100);
    while (true) {
      if (store_->check({name})) {
        const std::string text = store_->get_to_str(name);
        std::uint64_t round = 0;
        std::from_chars(text.data(), text.data() + text.size(), round);
        if (round >= round_) return true;
      }
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(5000));
    }
  }

  [[noreturn]] static void fail(const std::string& text) {
    std::rethrow_exception(as_backend_error(text));
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  const int rank_;
  const int size_;
  std::uint64_t round_ = 0;
};

// ---------------------------------------------------------------- the backend

class LockstepBackend : public c10d::Backend {
 public:
  LockstepBackend(const BackendConfig& config, std::unique_ptr<shm::Engine> engine)
      : Backend(config.rank, config.size),
        asked_(config.asked),
        explain_(explainer(config)),
        options_(c10::make_intrusive<Options>("lockstep", config.timeout)),
        matcher_(std::make_shared<MessageMatcher>(*engine)),
        engine_(std::move(engine)),
        monitored_(config.store, config.times + "/monitored/", config.rank, config.size) {
    options_->group_name = config.group_name;
    options_->global_ranks_in_group.assign(config.global_ranks.begin(), config.global_ranks.end());
    ledger::ended(ledger::post({.name = "connect", .group = config.group_name}),
                  ledger::End::kFinished);
    init();
  }
  ~LockstepBackend() override {
    if (::getpid() == process_) {
      shutdown();
    } else {
      // In a forked child: the group, its engine and their threads are the parent's.
      (void)engine_.release();
      new std::shared_ptr<MessageMatcher>(matcher_);
    }
  }

  const std::string getBackendName() const override { return "lockstep"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(milliseconds timeout) override { options_->timeout = timeout; }
  // Ranks that start together count identically: there is nothing to agree on.
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  c10d::ErrorType getError() override {
    const std::lock_guard lock(mutex_);
    return engine_ && engine_->failure().empty() ? c10d::ErrorType::SUCCESS
                                                 : c10d::ErrorType::COMM_ERROR;
  }

  void abort() override {
    const Deferral deferral;
    const std::lock_guard lock(mutex_);
    if (engine_) engine_->abort(fmt::format("rank {} aborted the process group", rank_));
  }

  void shutdown() override {
    if (::getpid() != process_) return;
    std::unique_ptr<shm::Engine> engine;
    {
      const std::lock_guard lock(mutex_);
      engine = std::move(engine_);
    }
    if (!engine) return;
    // The engine's thread may be about to run a Python callback; it must not wait for us while we
    // hold the GIL.
    std::optional<pybind11::gil_scoped_release> release_gil;
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) release_gil.emplace();
    const Deferral deferral;
    matcher_->close(std::move(engine));
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
    const PlainTensors plain;
    check("allreduce", tensors);
    check_same_kind("allreduce", tensors, tensors[0]);
    Call call = call_of(OpType::ALLREDUCE, "all_reduce", tensors, {tensors});
    Outputs outputs;
    at::Tensor data = outputs.stage(as_reals("allreduce", tensors[0], opts.reduceOp), true);
    if (tensors.size() > 1) {
      outputs.pairs.clear();
      for (std::size_t i = 1; i < tensors.size(); ++i)
        data = combine(data, as_reals("allreduce", tensors[i], opts.reduceOp), opts.reduceOp);
      for (const auto& tensor : tensors)
        outputs.copy_back(as_reals("allreduce", tensor, opts.reduceOp), data);
    }
    const Reduction how = reduction_of("allreduce", data, opts.reduceOp);
    return launch(std::move(call), outputs, [&](shm::Engine& engine, Tickets& tickets) {
      tickets.push_back(engine.all_reduce(data.mutable_data_ptr(), count_of(data), how.dtype,
                                          how.op, start(opts)));
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    const PlainTensors plain;
    check("allreduce_coalesced", tensors);
    Call call = call_of(OpType::ALLREDUCE_COALESCED, "all_reduce", tensors, {tensors});
    Outputs outputs;
    Tensors data;
    std::vector<Reduction> how;
    for (const auto& tensor : tensors) {
      data.push_back(outputs.stage(as_reals("allreduce_coalesced", tensor, opts.reduceOp), true));
      how.push_back(reduction_of("allreduce_coalesced", data.back(), opts.reduceOp));
    }
    return launch(std::move(call), outputs, [&](shm::Engine& engine, Tickets& tickets) {
      for (std::size_t i = 0; i < data.size(); ++i)
        tickets.push_back(engine.all_reduce(data[i].mutable_data_ptr(), count_of(data[i]),
                                            how[i].dtype, how[i].op, start(opts)));
    });
  }

  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    const PlainTensors plain;
    TORCH_CHECK(tensors.size() == 1 && tensors[0].is_sparse() && tensors[0].device().is_cpu(),
                "[lockstep_torch] allreduce: one sparse tensor (COO, CPU) at a time is expected.");
    TORCH_CHECK(opts.reduceOp == ReduceOp::SUM || opts.reduceOp == ReduceOp::AVG,
                "[lockstep_torch] allreduce: sparse tensors can be summed and averaged only.");
    Call call = call_of(OpType::ALLREDUCE, "sparse_all_reduce", tensors, {tensors});
    const at::Tensor packed = sparse::pack(tensors[0].coalesce());
    const auto parts = std::make_shared<sparse::Parts>();
    call.finish = [parts, tensor = tensors[0], op = opts.reduceOp] {
      const PlainTensors below;
      sparse::add_up(*parts, tensor, op);
    };
    Outputs outputs;
    outputs.held.push_back(packed);
    return launch(std::move(call), outputs, [&](shm::Engine& engine, Tickets& tickets) {
      tickets.push_back(engine.all_gather_v(*parts, const_part_of(packed), start(opts)));
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const PlainTensors plain;
    check_single("reduce", tensors);
    const int root = rank_in_group("reduce", opts.rootRank);
    Call call = call_of(OpType::REDUCE, "reduce", tensors, {tensors}, root);
    Outputs outputs;
    const at::Tensor data = outputs.stage(as_reals("reduce", tensors[0], opts.reduceOp), true);
    if (rank_ != root) outputs.pairs.clear();
    const Reduction how = reduction_of("reduce", data, opts.reduceOp);
    return launch(std::move(call), outputs, [&](shm::Engine& engine, Tickets& tickets) {
      tickets.push_back(engine.reduce(data.mutable_data_ptr(), count_of(data), how.dtype, how.op,
                                      root, start(opts)));
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const PlainTensors plain;
    check("broadcast", tensors);
    check_same_kind("broadcast", tensors, tensors[0]);
    const int root = rank_in_group("broadcast", opts.rootRank);
    const auto index = static_cast<std::size_t>(opts.rootTensor);
    TORCH_CHECK(index < tensors.size(), "[lockstep_torch] broadcast: there is no tensor ", index);
    Call call = call_of(OpType::BROADCAST, "broadcast", tensors, {tensors}, root);
    Outputs outputs;
    const at::Tensor data = outputs.stage(tensors[index], true);
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (i != index) outputs.copy_back(tensors[i], data);
    return launch(std::move(call), outputs, [&](shm::Engine& engine, Tickets& tickets) {
      tickets.push_back(
          engine.broadcast(data.mutable_data_ptr(), data.nbytes(), root, start(opts)));
    });
  }

  WorkPtr allgather(std::vector<Tensors>& lists, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    return gather_lists(OpType::ALLGATHER, lists, inputs, opts);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& lists, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    // Transposed: one list per rank.
    TORCH_CHECK(lists.size() == ranks(), "[lockstep_torch] allgather_coalesced: ", lists.size(),
                " lists for ", size_, " ranks.");
    std::vector<Tensors> turned(inputs.size());
    for (const auto& list : lists) {
      TORCH_CHECK(list.size() == inputs.size(), "[lockstep_torch] allgather_coalesced: a list of ",
                  list.size(), " tensors for ", inputs.size(), " inputs.");
      for (std::size_t i = 0; i < list.size(); ++i) turned[i].push_back(list[i]);
    }
    return gather_lists(OpType::ALLGATHER_COALESCED, turned, inputs, opts);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    return gather_flat(OpType::_ALLGATHER_BASE, outputs, inputs, opts);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return gather_flat(OpType::COALESCED, outputs, inputs, opts);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& lists,
                         const c10d::ReduceScatterOptions& opts) override {
    const PlainTensors plain;
    check_single("reduce_scatter", outputs);
    TORCH_CHECK(lists.size() == 1 && lists[0].size() == ranks(), "[lockstep_torch] ",
                "reduce_scatter: one list of ", size_, " tensors is expected, one per rank.");
    check_same_kind("reduce_scatter", lists[0], outputs[0]);
    Tensors inputs{as_input(lists[0])};
    return scatter_flat(OpType::REDUCE_SCATTER, outputs, inputs, opts);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    return scatter_flat(OpType::_REDUCE_SCATTER_BASE, outputs, inputs, opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return scatter_flat(OpType::COALESCED, outputs, inputs, opts);
  }

  WorkPtr gather(std::vector<Tensors>& lists, Tensors& inputs,
                 const c10d::GatherOptions& opts) override {
    const PlainTensors plain;
    check_single("gather", inputs);
    const int root = rank_in_group("gather", opts.rootRank);
    TORCH_CHECK(rank_ == root ? lists.size() == 1 && lists[0].size() == ranks() : lists.empty(),
                "[lockstep_torch] gather: the root gives one list of ", size_,
                " tensors, the other ranks none.");
    Call call = call_of(OpType::GATHER, "gather", inputs, lists, root);
    Outputs outputs;
    std::vector<Part> parts;
    if (rank_ == root) {
      check_same_kind("gather", lists[0], inputs[0]);
      for (const auto& tensor : lists[0]) parts.push_back(part_of(outputs.stage(tensor)));
    }
    const at::Tensor input = inputs[0].contiguous();
    outputs.held.push_back(input);
    return launch(std::move(call), outputs, [&](shm::Engine& engine, Tickets& tickets) {
      tickets.push_back(engine.gather(parts, const_part_of(input), root, start(opts)));
    });
  }

  WorkPtr scatter(Tensors& results, std::vector<Tensors>& lists,
                  const c10d::ScatterOptions& opts) override {
    const PlainTensors plain;
    check_single("scatter", results);
    const int root = rank_in_group("scatter", opts.rootRank);
    TORCH_CHECK(rank_ == root ? lists.size() == 1 && lists[0].size() == ranks() : lists.empty(),
                "[lockstep_torch] scatter: the root gives one list of ", size_,
                " tensors, the other ranks none.");
    Call call =
        call_of(OpType::SCATTER, "scatter", lists.empty() ? Tensors{} : lists[0], {results}, root);
    Outputs outputs;
    std::vector<ConstPart> parts;
    if (rank_ == root) {
      check_same_kind("scatter", lists[0], results[0]);
      for (const auto& tensor : lists[0]) {
        outputs.held.push_back(tensor.contiguous());
        parts.push_back(const_part_of(outputs.held.back()));
      }
    }
    const at::Tensor output = outputs.stage(results[0]);
    return launch(std::move(call), outputs, [&](shm::Engine& engine, Tickets& tickets) {
      tickets.push_back(engine.scatter(part_of(output), parts, root, start(opts)));
    });
  }

  WorkPtr alltoall(Tensors& results, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    const PlainTensors plain;
    TORCH_CHECK(results.size() == ranks() && inputs.size() == ranks(),
                "[lockstep_torch] alltoall: ", inputs.size(), " inputs and ", results.size(),
                " outputs for ", size_, " ranks.");
    check("alltoall", inputs);
    check("alltoall", results);
    Call call = call_of(OpType::ALLTOALL, "all_to_all", inputs, {results});
    Outputs outputs;
    std::vector<Part> to;
    std::vector<ConstPart> from;
    for (const auto& tensor : results) to.push_back(part_of(outputs.stage(tensor)));
    for (const auto& tensor : inputs) {
      outputs.held.push_back(tensor.contiguous());
      from.push_back(const_part_of(outputs.held.back()));
    }
    return launch(std::move(call), outputs, [&](shm::Engine& engine, Tickets& tickets) {
      tickets.push_back(engine.all_to_all(to, from, start(opts)));
    });
  }

  WorkPtr alltoall_base(at::Tensor& result, at::Tensor& input,
                        std::vector<std::int64_t>& result_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override {
    const PlainTensors plain;
    check("alltoall_base", Tensors{result, input});
    TORCH_CHECK(result.scalar_type() == input.scalar_type() && result.dim() > 0 && input.dim() > 0,
                "[lockstep_torch] alltoall_base: input and output differ in type or have no rows.");
    c10d::checkSplitSizes(input_splits, input, size_);
    c10d::checkSplitSizes(result_splits, result, size_);
    Call call = call_of(OpType::ALLTOALL_BASE, "all_to_all", {input}, {{result}});
    Outputs outputs;
    const at::Tensor to = outputs.stage(result);
    const at::Tensor from = input.contiguous();
    outputs.held.push_back(from);
    std::vector<Part> into;
    std::vector<ConstPart> out_of;
    std::size_t to_at = 0, from_at = 0;
    for (std::size_t i = 0; i < ranks(); ++i) {
      const std::size_t to_bytes = rows_bytes(to, result_splits, i);
      const std::size_t from_bytes = rows_bytes(from, input_splits, i);
      into.push_back({static_cast<std::byte*>(to.mutable_data_ptr()) + to_at, to_bytes});
      out_of.push_back(
          {static_cast<const std::byte*>(from.const_data_ptr()) + from_at, from_bytes});
      to_at += to_bytes;
      from_at += from_bytes;
    }
    return launch(std::move(call), outputs, [&](shm::Engine& engine, Tickets& tickets) {
      tickets.push_back(engine.all_to_all(into, out_of, start(opts)));
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    Outputs outputs;
    return launch(call_of(OpType::BARRIER, "barrier", {}, {}), outputs,
                  [&](shm::Engine& engine, Tickets& tickets) {
                    tickets.push_back(engine.barrier(start(opts)));
                  });
  }

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    // Zero is a limit here: look without waiting.
    const milliseconds timeout = opts.timeout >= milliseconds(0) ? opts.timeout : options_->timeout;
    monitored_.wait(timeout, wait_all_ranks);
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    const PlainTensors plain;
    check_single("send", tensors);
    rank_in_group("send", peer);
    Call call = call_of(OpType::SEND, "send", tensors, {}, peer);
    Outputs outputs;
    const at::Tensor data = tensors[0].contiguous();
    outputs.held.push_back(data);
    return launch(std::move(call), outputs, [&](shm::Engine&, Tickets& tickets) {
      tickets = matcher_->send({data.const_data_ptr(), data.nbytes(), peer, tag},
                               Deadline::after(options_->timeout));
    });
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return receive(OpType::RECV, tensors, rank_in_group("recv", peer), tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return receive(OpType::RECVANYSOURCE, tensors, MessageMatcher::kAnyone, tag);
  }

 private:
  std::size_t ranks() const { return static_cast<std::size_t>(size_); }

  int rank_in_group(const char* what, std::int64_t rank) const {
    TORCH_CHECK(rank >= 0 && rank < size_, "[lockstep_torch] ", what, ": rank ", rank,
                " is not in this group of ", size_, ".");
    return static_cast<int>(rank);
  }

  template <typename Opts>
  StartOptions start(const Opts& opts) const {
    const milliseconds timeout = opts.timeout > milliseconds(0) ? opts.timeout : options_->timeout;
    return {.deadline = Deadline::after(timeout), .caller_waits = !opts.asyncOp};
  }

  Call call_of(OpType type, const char* name, Tensors inputs, std::vector<Tensors> outputs,
               int peer = -1) {
    Call call;
    call.peer = peer;
    call.type = type;
    call.name = name;
    call.title = fmt::format("{}:{}", asked_, name);
    call.inputs = std::move(inputs);
    call.outputs = std::move(outputs);
    call.explain = explain_;
    return call;
  }

  // The size in bytes of rank i's rows of `tensor`.
  std::size_t rows_bytes(const at::Tensor& tensor, const std::vector<std::int64_t>& splits,
                         std::size_t i) const {
    if (tensor.size(0) == 0) return 0;
    const std::int64_t rows = splits.empty() ? tensor.size(0) / size_ : splits[i];
    return tensor.nbytes() / static_cast<std::size_t>(tensor.size(0)) *
           static_cast<std::size_t>(rows);
  }

  // Starts operations in the order of the calls, whichever thread they come from.
  template <typename Start>
  WorkPtr launch(Call call, Outputs& outputs, Start start_tickets) {
    if (!call.finish) call.finish = outputs.finish();
    call.held = std::move(outputs.held);
    const bool collective = call.type != OpType::SEND;
    const Deferral deferral;
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(engine_, "[lockstep_torch] the process group was destroyed.");
    call.sequence = collective ? ++sequence_ : sequence_.load();
    note(call, collective);
    const ledger::Ticket ticket = call.ticket;
    auto work = c10::make_intrusive<EngineWork>(rank_, std::move(call));
    Tickets tickets;
    try {
      start_tickets(*engine_, tickets);
    } catch (const lockstep::Error&) {
      work->attach(std::move(tickets));  // those that were started still have their arrays
      std::rethrow_exception(explain_(std::current_exception()));
    }
    work->attach(std::move(tickets));
    ledger::started(ticket);
    return work;
  }

  // Notes the call on the ledger.
  void note(Call& call, bool collective) {
    std::uint64_t bytes = 0;
    const Tensors& tensors =
        call.inputs.empty() && !call.outputs.empty() ? call.outputs[0] : call.inputs;
    for (const at::Tensor& tensor : tensors) bytes += tensor.is_sparse() ? 0 : tensor.nbytes();
    call.ticket =
        ledger::post({.name = call.name,
                      .dtype = tensors.empty() ? "" : c10::toString(tensors[0].scalar_type()),
                      .group = options_->group_name,
                      .sequence = collective ? call.sequence : ++messages_,
                      .bytes = bytes,
                      .peer = call.peer,
                      .message = !collective});
  }

  WorkPtr receive(OpType type, Tensors& tensors, int source, int tag) {
    const PlainTensors plain;
    check_single("recv", tensors);
    const bool any = source == MessageMatcher::kAnyone;
    TORCH_CHECK(source != rank_, "[lockstep_torch] recv: a rank cannot receive from itself.");
    Call call =
        call_of(type, any ? "recvAnySource" : "recv", tensors, {tensors}, any ? -1 : source);
    Outputs outputs;
    const at::Tensor data = outputs.stage(tensors[0]);
    call.finish = outputs.finish();
    call.sequence = sequence_.load();
    note(call, /*collective=*/false);
    auto work = c10::make_intrusive<ReceiveWork>(rank_, std::move(call), matcher_);
    try {
      work->attach(matcher_->receive({data.mutable_data_ptr(), data.nbytes(), source, tag,
                                      std::make_shared<at::Tensor>(data)}),
                   Deadline::after(options_->timeout));
    } catch (const lockstep::Error&) {
      std::rethrow_exception(explain_(std::current_exception()));
    }
    return work;
  }

  // Each input goes to its list, which has one tensor per rank (and input, if there are several).
  WorkPtr gather_lists(OpType type, const std::vector<Tensors>& lists, const Tensors& inputs,
                       const c10d::AllgatherOptions& opts) {
    const PlainTensors plain;
    check("allgather", inputs);
    TORCH_CHECK(lists.size() == inputs.size(), "[lockstep_torch] allgather: ", lists.size(),
                " lists for ", inputs.size(), " inputs.");
    Call call = call_of(type, "all_gather", inputs, lists);
    Outputs outputs;
    Tensors into, from;
    for (std::size_t i = 0; i < lists.size(); ++i) {
      TORCH_CHECK(lists[i].size() == ranks(), "[lockstep_torch] allgather: a list of ",
                  lists[i].size(), " tensors for ", size_, " ranks.");
      check_same_kind("allgather", lists[i], inputs[i]);
      into.push_back(outputs.stage_all(lists[i]));
      from.push_back(inputs[i].contiguous());
    }
    return gather_arrays(std::move(call), outputs, into, from, start(opts));
  }

  WorkPtr gather_flat(OpType type, const Tensors& results, const Tensors& inputs,
                      const c10d::AllgatherOptions& opts) {
    const PlainTensors plain;
    check("allgather", inputs);
    check("allgather", results);
    TORCH_CHECK(results.size() == inputs.size(), "[lockstep_torch] allgather: ", results.size(),
                " outputs for ", inputs.size(), " inputs.");
    Call call = call_of(type, "all_gather", inputs, {results});
    Outputs outputs;
    Tensors into, from;
    for (std::size_t i = 0; i < results.size(); ++i) {
      TORCH_CHECK(results[i].scalar_type() == inputs[i].scalar_type() &&
                      results[i].numel() == size_ * inputs[i].numel(),
                  "[lockstep_torch] allgather: the output has ", results[i].numel(),
                  " elements where ", size_, " times the ", inputs[i].numel(),
                  " of the input are expected, of the same type.");
      into.push_back(outputs.stage(results[i]));
      from.push_back(inputs[i].contiguous());
    }
    return gather_arrays(std::move(call), outputs, into, from, start(opts));
  }

  WorkPtr gather_arrays(Call call, Outputs& outputs, const Tensors& into, const Tensors& from,
                        const StartOptions& how) {
    outputs.held.insert(outputs.held.end(), from.begin(), from.end());
    return launch(std::move(call), outputs, [&](shm::Engine& engine, Tickets& tickets) {
      for (std::size_t i = 0; i < into.size(); ++i)
        tickets.push_back(engine.all_gather(into[i].mutable_data_ptr(), from[i].const_data_ptr(),
                                            from[i].nbytes(), how));
    });
  }

  WorkPtr scatter_flat(OpType type, const Tensors& results, const Tensors& inputs,
                       const c10d::ReduceScatterOptions& opts) {
    const PlainTensors plain;
    check("reduce_scatter", inputs);
    check("reduce_scatter", results);
    TORCH_CHECK(results.size() == inputs.size(),
                "[lockstep_torch] reduce_scatter: ", results.size(), " outputs for ", inputs.size(),
                " inputs.");
    Call call = call_of(type, "reduce_scatter", inputs, {results});
    Outputs outputs;
    Tensors into, from;
    std::vector<Reduction> how;
    for (std::size_t i = 0; i < results.size(); ++i) {
      TORCH_CHECK(results[i].scalar_type() == inputs[i].scalar_type() &&
                      inputs[i].numel() == size_ * results[i].numel(),
                  "[lockstep_torch] reduce_scatter: the input has ", inputs[i].numel(),
                  " elements where ", size_, " times the ", results[i].numel(),
                  " of the output are expected, of the same type.");
      into.push_back(outputs.stage(as_reals("reduce_scatter", results[i], opts.reduceOp)));
      from.push_back(as_reals("reduce_scatter", inputs[i], opts.reduceOp).contiguous());
      how.push_back(reduction_of("reduce_scatter", into.back(), opts.reduceOp));
    }
    outputs.held.insert(outputs.held.end(), from.begin(), from.end());
    return launch(std::move(call), outputs, [&](shm::Engine& engine, Tickets& tickets) {
      for (std::size_t i = 0; i < into.size(); ++i)
        tickets.push_back(engine.reduce_scatter(into[i].mutable_data_ptr(),
                                                from[i].const_data_ptr(), count_of(into[i]),
                                                how[i].dtype, how[i].op, start(opts)));
    });
  }

  const std::string asked_;
  const Explain explain_;
  const c10::intrusive_ptr<Options> options_;
  const pid_t process_ = ::getpid();
  const std::shared_ptr<MessageMatcher> matcher_;
  std::atomic<std::uint64_t> sequence_{0};  // counts collectives; messages do not count
  std::atomic<std::uint64_t> messages_{0};
  std::mutex mutex_;  // the order of operations, and the engine, which is gone after shutdown()
  std::unique_ptr<shm::Engine> engine_;
  MonitoredBarrier monitored_;
};

// The backend, or why these ranks cannot share memory; all ranks get the same one of the two.
using Outcome = std::pair<c10::intrusive_ptr<c10d::Backend>, std::string>;

// Collective over the group's ranks.
Outcome make_backend(BackendConfig config) {
  if (config.size > shm::kMaxRanks)
    return {nullptr,
            fmt::format("{} ranks are more than the {} of one group", config.size, shm::kMaxRanks)};
  const Explain explain = explainer(config);
  shm::EngineResult made;
  try {
    C10dStore kv(config.store, config.rank);
    config.times = kv.times();
    made = shm::Engine::make(kv, {config.rank, config.size}, {}, Deadline::after(config.timeout));
  } catch (const lockstep::Error&) {
    std::rethrow_exception(explain(std::current_exception()));
  }
  if (!made.engine) return {nullptr, made.unavailable_reason};
  return {c10::make_intrusive<LockstepBackend>(config, std::move(made.engine)), ""};
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  // What torch.distributed uses from gloo's class.
  pybind11::class_<LockstepBackend, c10::intrusive_ptr<LockstepBackend>, c10d::Backend>(module,
                                                                                        "Backend")
      .def_property_readonly("options", &LockstepBackend::getBackendOptions)
      .def("_set_default_timeout", &LockstepBackend::setTimeout);
  module.attr("torch_version") = TORCH_VERSION;
  module.def(
      "create",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, double timeout_s,
         const std::string& group_name, const std::vector<std::int64_t>& global_ranks,
         const std::string& asked) {
        return make_backend({store, rank, size,
                             milliseconds(static_cast<std::int64_t>(timeout_s * 1000)), group_name,
                             global_ranks, asked, ""});
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  // The signal by which the launcher asks for stacks; 0: there is no ledger.
  module.def("open_ledger", [] { return ledger::open() ? ledger::stack_signal() : 0; });
  module.def("cache_cpu_memory", &cache_cpu_memory);
  module.def("empty_cpu_cache", &empty_cpu_cache,
             pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("cpu_cache_stats", [] {
    const CpuCacheStats stats = cpu_cache_stats();
    pybind11::dict out;
    out["used"] = stats.used;
    out["idle"] = stats.idle;
    out["peak"] = stats.peak;
    out["mapped"] = stats.mapped;
    return out;
  });
}

}  // namespace lockstep::python
