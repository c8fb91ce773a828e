#include <atomic>
#include <csignal>
#include <cstdlib>
#include <list>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/c10d.h"
#include "lockstep/core/env.h"
#include "lockstep/core/text.h"

namespace lockstep::detail::gloo {

namespace {

using c10d_calls::C10dWork;

// c10d's flight recorder keeps one table per process without a lock: two worlds in one process
// corrupt it (seen as a crash in FlightRecorder::record). It reads its size from the environment at
// first use, so it is turned off before main(): later, setenv() may crash another thread that reads
// the environment. The variable is restored, and a value that the user has set is kept.
[[maybe_unused]] const bool recorder_is_off = [] {
  constexpr const char* kSize = "TORCH_FR_BUFFER_SIZE";
  if (std::getenv(kSize) != nullptr) return false;
  ::setenv(kSize, "0", 1);
  (void)c10d::dump_fr_trace_json(false, false);
  ::unsetenv(kSize);
  return true;
}();

// True while a completion runs on one of the process group's own threads. Dropping the last handle
// of a world there would make that thread join itself.
thread_local bool on_worker_thread = false;

// Users see our deadlines; gloo's own only ends operations that no thread waits for any more.
constexpr std::chrono::milliseconds kMargin{10'000};

// gloo writes to connections whose other end may have died. The SIGPIPE would end this rank without
// a report, and a launcher that notices it before the dead rank would name it as the cause. With a
// handler that does nothing the write fails instead; unlike an ignored signal, a handler is not
// inherited by programs that a rank starts. A handler that the program installs is kept.
void survive_broken_pipes() {
  static std::atomic<bool> done{false};
  if (done.exchange(true)) return;
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGPIPE, &action, nullptr);
}

// Reaches the connections, which ProcessGroupGloo gives no way to close.
class Group : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  void close_connections() {
    for (auto& context : contexts_) context->closeConnections();
  }
};

// Messages between two ranks finish in gloo without a notification: some thread has to block in
// wait(). One thread per batch does, because a message that never comes must not hold up the
// others.
class Waiter {
 public:
  Waiter(std::vector<C10dWork> works, Backend::State state, std::chrono::milliseconds timeout)
      : works_(std::move(works)),
        thread_([this, state = std::move(state), timeout] { run(state, timeout); }) {}
  ~Waiter() {
    abort();
    thread_.join();
  }
  bool finished() const { return finished_; }
  void abort() noexcept {
    const std::lock_guard lock(mutex_);
    for (auto& work : works_) work->abort();
  }

 private:
  void run(Backend::State state, std::chrono::milliseconds timeout) noexcept {
    std::exception_ptr error;
    try {
      for (auto& work : works_) {
        if (!work->wait(timeout)) throw std::runtime_error("the message was aborted");
      }
      // They hold the tensors, and this object lives until the next message.
      std::vector<C10dWork> ended;
      const std::lock_guard lock(mutex_);
      ended.swap(works_);
    } catch (...) {
      error = std::current_exception();
    }
    on_worker_thread = true;
    state->complete(error);
    state.reset();
    on_worker_thread = false;
    finished_ = true;
  }

  std::mutex mutex_;  // works_, against abort(); only the thread itself changes it
  std::vector<C10dWork> works_;
  std::atomic<bool> finished_{false};
  std::thread thread_;
};

// Leaked on purpose, and reachable so that leak checkers accept it.
void leave_behind(c10::intrusive_ptr<Group> group, std::list<Waiter> waiters) {
  struct Left {
    c10::intrusive_ptr<Group> group;
    std::list<Waiter> waiters;
  };
  static std::mutex mutex;
  static auto& all = *new std::list<Left>;
  const std::lock_guard lock(mutex);
  all.push_back({std::move(group), std::move(waiters)});
}

class GlooBackend : public C10dBackend {
 public:
  explicit GlooBackend(const Options& options)
      : rank_(options.rank),
        timeout_(options.timeout + kMargin),
        group_(connect(options)),
        pending_(std::make_shared<std::atomic<int>>(0)) {}

  // Never waits for a peer: a group with pending operations has threads that block in them, so it
  // is leaked on purpose (the process is about to exit, or the world was abandoned).
  ~GlooBackend() override {
    if (on_worker_thread) {
      leave_behind(std::move(group_), std::move(waiters_));
      return;
    }
    waiters_.clear();
    if (*pending_ == 0) return;
    group_->close_connections();
    leave_behind(std::move(group_), {});
  }

  const std::string& name() const override {
    static const std::string name = "gloo";
    return name;
  }

  c10::DeviceType device_type() const override { return c10::kCPU; }

  // LibTorch's own reduce_scatter over gloo is an all_reduce too, but without a completion
  // callback; so it is implemented here.
  void reduce_scatter(const State& state, at::Tensor output, at::Tensor input,
                      ReduceOp op) override {
    at::Tensor all = input.clone();
    const int64_t mine = rank_ * output.numel();
    follow(state, c10d_calls::all_reduce(*group_, all, op),
           [all, output, mine] { output.copy_(all.narrow(0, mine, output.numel())); });
  }

  // Gloo has all_to_all on one buffer with counts only: pack, exchange, unpack at the end.
  void all_to_all(const State& state, std::vector<at::Tensor> outputs,
                  std::vector<at::Tensor> inputs) override {
    std::vector<int64_t> output_counts;
    std::vector<int64_t> input_counts;
    int64_t total = 0;
    for (const auto& tensor : outputs) total += output_counts.emplace_back(tensor.numel());
    for (const auto& tensor : inputs) input_counts.push_back(tensor.numel());
    at::Tensor packed_input = at::cat(inputs);
    at::Tensor packed_output = at::empty({total}, packed_input.options());
    auto work = group_->alltoall_base(packed_output, packed_input, output_counts, input_counts);
    follow(state, work, [=, outputs = std::move(outputs)] {
      int64_t offset = 0;
      for (const auto& tensor : outputs) {
        tensor.copy_(packed_output.narrow(0, offset, tensor.numel()));
        offset += tensor.numel();
      }
    });
  }

  void point_to_point(const State& state, std::vector<P2p> messages) override {
    std::vector<C10dWork> works;
    for (auto& message : messages) {
      std::vector<at::Tensor> tensors{message.tensor};
      works.push_back(message.kind == P2p::Kind::kSend ? group_->send(tensors, message.peer, 0)
                                                       : group_->recv(tensors, message.peer, 0));
    }
    const std::lock_guard lock(waiters_mutex_);
    waiters_.remove_if([](const Waiter& waiter) { return waiter.finished(); });
    waiters_.emplace_back(std::move(works), state, timeout_);
  }

  void abort(int) noexcept override {
    {
      const std::lock_guard lock(waiters_mutex_);
      for (auto& waiter : waiters_) waiter.abort();
    }
    try {
      group_->close_connections();
    } catch (const std::exception&) {
      // Nothing to do: pending operations were completed with the cause already.
    }
  }

 private:
  static c10::intrusive_ptr<Group> connect(const Options& options) {
    survive_broken_pipes();
    auto group_options = c10d::ProcessGroupGloo::Options::create(options.startup_timeout);
    if (const auto names = env::get("GLOO_SOCKET_IFNAME")) {
      for (const std::string& name : split(*names, ','))
        group_options->devices.push_back(Group::createDeviceForInterface(name));
    } else {
      group_options->devices.push_back(Group::createDeviceForHostname(options.address));
    }
    auto group =
        c10::make_intrusive<Group>(options.store, options.rank, options.size, group_options);
    group->setTimeout(options.timeout + kMargin);
    return group;
  }

  c10d::Backend& group() override { return *group_; }
  void follow(const State& state, C10dWork work) override { follow(state, work, {}); }
  void follow(const State& state, const C10dWork& work, std::function<void()> unpack) {
    ++*pending_;
    work->getFuture()->addCallback(
        [state, unpack = std::move(unpack), pending = pending_](c10::ivalue::Future& future) {
          on_worker_thread = true;
          std::exception_ptr error = future.hasError() ? future.exception_ptr() : nullptr;
          try {
            if (!error && unpack) unpack();
          } catch (...) {
            error = std::current_exception();
          }
          // Before the waiter is released: it may drop the world at once.
          --*pending;
          state->complete(error);
          on_worker_thread = false;
        });
  }

  const int rank_;
  const std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<Group> group_;
  std::shared_ptr<std::atomic<int>> pending_;
  std::mutex waiters_mutex_;
  std::list<Waiter> waiters_;
};

}  // namespace

std::unique_ptr<Backend> make(const Options& options) {
  return std::make_unique<GlooBackend>(options);
}

}  // namespace lockstep::detail::gloo
