#include "lockstep/testing/faults.h"

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/comm/world_impl.h"
#include "lockstep/core/error.h"

namespace lockstep::testing {

namespace {

using detail::Backend;
using Clock = std::chrono::steady_clock;

// Runs functions at set times, on one thread.
class Alarm {
 public:
  Alarm() : thread_([this] { run(); }) {}
  ~Alarm() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void at(Clock::time_point time, std::function<void()> action) {
    const std::lock_guard lock(mutex_);
    actions_.emplace(time, std::move(action));
    changed_.notify_all();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (actions_.empty()) {
        changed_.wait(lock);
      } else if (actions_.begin()->first > Clock::now()) {
        const auto next = actions_.begin()->first;
        changed_.wait_until(lock, next);
      } else {
        const auto action = std::move(actions_.begin()->second);
        actions_.erase(actions_.begin());
        lock.unlock();
        action();
        lock.lock();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<Clock::time_point, std::function<void()>> actions_;
  bool stop_ = false;
  std::thread thread_;
};

class DelayBackend : public Backend {
 public:
  DelayBackend(std::unique_ptr<Backend> inner, std::chrono::milliseconds delay)
      : inner_(std::move(inner)), delay_(delay) {}

  const std::string& name() const override { return inner_->name(); }
  c10::DeviceType device_type() const override { return inner_->device_type(); }
  bool reduces(at::ScalarType dtype, ReduceOp op) const override {
    return inner_->reduces(dtype, op);
  }

  void all_reduce(const State& state, at::Tensor tensor, ReduceOp op) override {
    auto real =
        std::make_shared<detail::WorkState>(state->info(), state->deadline(), failure_state_);
    inner_->all_reduce(real, std::move(tensor), op);
    real->on_completion([alarm = alarm_, delay = delay_, state, weak = std::weak_ptr(real)] {
      const auto self = weak.lock();
      const std::string error = self ? self->error() : "the operation was dropped";
      alarm->at(Clock::now() + delay, [state, error] {
        state->complete(error.empty() ? nullptr
                                      : std::make_exception_ptr(std::runtime_error(error)));
      });
    });
  }

  void reduce(const State& state, at::Tensor tensor, int root, ReduceOp op) override {
    inner_->reduce(state, std::move(tensor), root, op);
  }
  void broadcast(const State& state, at::Tensor tensor, int root) override {
    inner_->broadcast(state, std::move(tensor), root);
  }
  void all_gather(const State& state, at::Tensor output, at::Tensor input) override {
    inner_->all_gather(state, std::move(output), std::move(input));
  }
  void reduce_scatter(const State& state, at::Tensor output, at::Tensor input,
                      ReduceOp op) override {
    inner_->reduce_scatter(state, std::move(output), std::move(input), op);
  }
  void gather(const State& state, std::vector<at::Tensor> outputs, at::Tensor input,
              int root) override {
    inner_->gather(state, std::move(outputs), std::move(input), root);
  }
  void scatter(const State& state, at::Tensor output, std::vector<at::Tensor> inputs,
               int root) override {
    inner_->scatter(state, std::move(output), std::move(inputs), root);
  }
  void all_to_all(const State& state, std::vector<at::Tensor> outputs,
                  std::vector<at::Tensor> inputs) override {
    inner_->all_to_all(state, std::move(outputs), std::move(inputs));
  }
  void point_to_point(const State& state, std::vector<P2p> messages) override {
    inner_->point_to_point(state, std::move(messages));
  }
  void abort(int culprit) noexcept override { inner_->abort(culprit); }

 private:
  // The inner operations report here; the world's own failure state hears of failures through the
  // outer ones.
  std::shared_ptr<detail::FailureState> failure_state_ = std::make_shared<detail::FailureState>(-1);
  const std::unique_ptr<Backend> inner_;
  const std::chrono::milliseconds delay_;
  const std::shared_ptr<Alarm> alarm_ = std::make_shared<Alarm>();
};

}  // namespace

void delay_all_reduce(World& world, std::chrono::milliseconds delay) {
  const auto& impl = detail::Access::impl(world);
  if (!impl->host) throw UsageError("testing", "delay_all_reduce: a world of one has no backend.");
  impl->host = std::make_unique<DelayBackend>(std::move(impl->host), delay);
}

}  // namespace lockstep::testing
