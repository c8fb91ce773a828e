// c10d's stores and process groups as the rendezvous and World want them.
//
//   detail::C10dStore store(tcp_store);            // for the rendezvous
//   class GlooBackend : public C10dBackend { ... };  // as nccl's; both wrap a process group
//
// c10d wants lists of one tensor and a struct of options; it starts an operation and does not wait.
#pragma once

#include <cstddef>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/types.h"
#include "lockstep/core/error.h"
#include "lockstep/rendezvous/startup.h"

namespace lockstep::detail::c10d_calls {

using C10dWork = c10::intrusive_ptr<c10d::Work>;

inline c10d::ReduceOp::RedOpType translate(ReduceOp op) {
  using Theirs = c10d::ReduceOp;
  constexpr Theirs::RedOpType kTheirs[] = {Theirs::SUM, Theirs::AVG,     Theirs::MIN,
                                           Theirs::MAX, Theirs::PRODUCT, Theirs::BAND,
                                           Theirs::BOR, Theirs::BXOR};
  return kTheirs[static_cast<std::size_t>(op)];
}

inline C10dWork all_reduce(c10d::Backend& group, at::Tensor tensor, ReduceOp op) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = translate(op);
  return group.allreduce(tensors, options);
}

}  // namespace lockstep::detail::c10d_calls

namespace lockstep::detail {

class C10dStore : public CountingStore {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  std::string get(const std::string& key, const Deadline& deadline) override {
    if (poll_until([&] { return check(key); }, deadline)) return store_->get_to_str(key);
    throw TimeoutError("shm",
                       fmt::format("'{}' was not reported within {} ms. A rank has probably ended "
                                   "during start-up; look at its output.",
                                   key, deadline.total().count()));
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return store_->add(key, amount);
  }
  bool check(const std::string& key) override { return store_->check({key}); }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

class C10dBackend : public Backend {
 public:
  bool reduces(at::ScalarType dtype, ReduceOp op) const override {
    switch (dtype) {
      case at::kByte:
      case at::kChar:
      case at::kInt:
      case at::kLong:
        return op != ReduceOp::kAvg;
      case at::kHalf:
      case at::kBFloat16:
      case at::kFloat:
      case at::kDouble:
        return !is_bitwise(op);
      default:
        return false;
    }
  }
  void all_reduce(const State& state, at::Tensor tensor, ReduceOp op) override {
    follow(state, c10d_calls::all_reduce(group(), std::move(tensor), op));
  }
  void reduce(const State& state, at::Tensor tensor, int root, ReduceOp op) override {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    c10d::ReduceOptions options;
    options.reduceOp = c10d_calls::translate(op);
    options.rootRank = root;
    follow(state, group().reduce(tensors, options));
  }
  void broadcast(const State& state, at::Tensor tensor, int root) override {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    follow(state, group().broadcast(tensors, options));
  }
  void all_gather(const State& state, at::Tensor output, at::Tensor input) override {
    follow(state, group()._allgather_base(output, input));
  }
  // The lists are given on root only.
  void gather(const State& state, std::vector<at::Tensor> outputs, at::Tensor input,
              int root) override {
    std::vector<std::vector<at::Tensor>> lists;
    if (!outputs.empty()) lists.push_back(std::move(outputs));
    std::vector<at::Tensor> inputs{std::move(input)};
    c10d::GatherOptions options;
    options.rootRank = root;
    follow(state, group().gather(lists, inputs, options));
  }
  void scatter(const State& state, at::Tensor output, std::vector<at::Tensor> inputs,
               int root) override {
    std::vector<std::vector<at::Tensor>> lists;
    if (!inputs.empty()) lists.push_back(std::move(inputs));
    std::vector<at::Tensor> outputs{std::move(output)};
    c10d::ScatterOptions options;
    options.rootRank = root;
    follow(state, group().scatter(outputs, lists, options));
  }

 protected:
  virtual c10d::Backend& group() = 0;
  // Completes the state when the work is complete.
  virtual void follow(const State& state, c10d_calls::C10dWork work) = 0;
};

}  // namespace lockstep::detail
