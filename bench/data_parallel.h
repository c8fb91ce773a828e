// DataParallel as torch.nn.DataParallel does it, for comparison: one process, one replica for each
// device, and device 0 in the middle of everything.
//
//   DataParallel<Net> model([] { return std::make_shared<Net>(); }, {cuda0, cuda1});
//   optim::Adam optimizer(model.parameters(), {});             // device 0's, the only ones
//   const at::Tensor loss = criterion(model.forward(batch), targets);       // on device 0
//   model.backward(loss);
//   optimizer.step();
//
// A step scatters the batch, copies parameters and buffers to the replicas, runs each replica in a
// thread of its own, gathers the outputs on device 0, runs backward there and in the replicas, and
// adds their gradients to device 0's. Where there is a choice it favours DataParallel: modules and
// threads of replicas are made once (Python makes them in every step), and on CPUs too the replicas
// run backward in threads of their own, as autograd does for GPUs only. A replica on a CPU has its
// own memory, so scattering and replicating copy there as they do between GPUs.
//
// Buffers that forward changes are those of replica 0, which is also DistributedDataParallel's
// rule. One thread at a time.
#pragma once

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/thread_pool.h>
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep::bench {

// Threads that run a function with their number, all at once.
class ReplicaThreads {
 public:
  explicit ReplicaThreads(std::size_t count) : errors_(count), pool_(static_cast<int>(count)) {}

  // Returns when all have finished; throws what one of them threw.
  void run(const std::function<void(std::size_t)>& body) {
    for (std::size_t i = 0; i < errors_.size(); ++i)
      pool_.run([&, i] {
        try {
          body(i);
        } catch (...) {
          errors_[i] = std::current_exception();
        }
      });
    pool_.waitWorkComplete();
    for (std::exception_ptr& error : errors_)
      if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }

 private:
  std::vector<std::exception_ptr> errors_;
  c10::ThreadPool pool_;
};

// The parts of a step, in its order. The update is the caller's.
enum DpPart : std::size_t {
  kScatterPart,
  kReplicatePart,
  kForwardPart,
  kGatherPart,
  kLossPart,
  kBackwardPart,
  kReducePart,
  kUpdatePart
};

template <typename Net>
class DataParallel {
 public:
  DataParallel(const std::function<std::shared_ptr<Net>()>& make, std::vector<c10::Device> devices)
      : devices_(std::move(devices)), threads_(devices_.size()) {
    for (const c10::Device device : devices_) {
      replicas_.push_back(make());
      replicas_.back()->to(device);
    }
  }

  const std::shared_ptr<Net>& module() const { return replicas_.front(); }
  std::vector<at::Tensor> parameters() const { return module()->parameters(); }
  // Called at the end of each part of a step.
  void on_part(std::function<void(DpPart)> reached) { reached_ = std::move(reached); }

  at::Tensor forward(const at::Tensor& batch) {
    const std::vector<at::Tensor> inputs = scatter(batch);
    reached(kScatterPart);
    replicate();
    reached(kReplicatePart);
    outputs_.assign(devices_.size(), {});
    threads_.run([&](std::size_t i) {
      const c10::DeviceGuard guard(devices_[i]);
      outputs_[i] = replicas_[i]->forward(inputs[i]);
    });
    reached(kForwardPart);
    gathered_ = gather().requires_grad_();
    reached(kGatherPart);
    return gathered_;
  }

  void backward(const at::Tensor& loss) {
    loss.backward();
    reached(kLossPart);
    const std::vector<at::Tensor> gradients = scatter(gathered_.grad());
    threads_.run([&](std::size_t i) {
      const c10::DeviceGuard guard(devices_[i]);
      outputs_[i].backward(gradients[i]);
    });
    outputs_.clear();
    reached(kBackwardPart);
    reduce();
    reached(kReducePart);
  }

 private:
  void reached(DpPart part) const {
    if (reached_) reached_(part);
  }

  std::vector<at::Tensor> scatter(const at::Tensor& whole) const {
    std::vector<at::Tensor> parts = whole.chunk(static_cast<std::int64_t>(devices_.size()));
    for (std::size_t i = 1; i < parts.size(); ++i)
      parts[i] = parts[i].to(devices_[i], /*non_blocking=*/true, /*copy=*/true);
    return parts;
  }

  void replicate() const {
    const torch::NoGradGuard no_grad;
    const auto copy = [](const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
      for (std::size_t k = 0; k < from.size(); ++k) to[k].copy_(from[k], /*non_blocking=*/true);
    };
    for (std::size_t i = 1; i < replicas_.size(); ++i) {
      copy(module()->parameters(), replicas_[i]->parameters());
      copy(module()->buffers(), replicas_[i]->buffers());
    }
  }

  at::Tensor gather() const {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& output : outputs_)
      parts.push_back(output.detach().to(devices_.front(), /*non_blocking=*/true));
    return at::cat(parts);
  }

  void reduce() const {
    const torch::NoGradGuard no_grad;
    const std::vector<at::Tensor> own = parameters();
    for (std::size_t i = 1; i < replicas_.size(); ++i) {
      const std::vector<at::Tensor> others = replicas_[i]->parameters();
      for (std::size_t k = 0; k < own.size(); ++k) {
        const at::Tensor& gradient = others[k].grad();
        if (gradient.defined()) own[k].grad().add_(gradient.to(devices_.front()));
        others[k].mutable_grad().reset();
      }
    }
  }

  std::vector<c10::Device> devices_;
  std::vector<std::shared_ptr<Net>> replicas_;
  ReplicaThreads threads_;
  std::vector<at::Tensor> outputs_;
  at::Tensor gathered_;
  std::function<void(DpPart)> reached_;
};

}  // namespace lockstep::bench
