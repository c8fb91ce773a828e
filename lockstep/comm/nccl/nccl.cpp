#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/backend.h"
#include "lockstep/comm/c10d.h"
#include "lockstep/comm/nccl/plugin.h"
#include "lockstep/core/env.h"

namespace lockstep::detail::nccl {

namespace {

using c10d_calls::C10dWork;
using Group = c10::intrusive_ptr<c10d::Backend>;

// LibTorch must never think an operation has timed out: the deadlines are ours.
constexpr std::chrono::hours kNever{24 * 365};
// How long the end of a healthy communicator may take before it is left behind.
constexpr std::chrono::milliseconds kCloseTimeout{10'000};

// ---------------------------------------------------------------- the plug-in

struct Loaded {
  const PluginTable* table = nullptr;
  std::string trouble;
};

// Beside the program (an installed or moved tree), then wherever the loader looks (build tree).
std::vector<std::string> plugin_candidates() {
  if (const auto path = env::get("LOCKSTEP_CUDA_PLUGIN")) return {*path};
  std::vector<std::string> candidates{kPluginFile};
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    const auto root = program.parent_path();
    for (const char* folder : {".", "../lib", "../../lib", "../lib64"})
      candidates.push_back((root / folder / kPluginFile).string());
  }
  return candidates;
}

// LibTorch reads these whenever a group is made, and has no other interface for them. Nobody but us
// ends an operation or the process: no error handling that tears down, no monitor thread that
// aborts, no waits that block inside the library. They are set once and stay: setenv() while other
// threads run may crash one that reads the environment, and the plug-in is opened before main() as
// a rule.
void silence_watchdog() {
  for (const char* name :
       {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_PROPAGATE_ERROR",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN"})
    ::setenv(name, "0", 1);
  // With it, ranks wait for each other inside NCCL while a graph is recorded, and one that cannot
  // record would leave the others there. Users who want it can set it.
  ::setenv("NCCL_GRAPH_REGISTER", "0", 0);
}

Loaded open_plugin() {
  Loaded loaded;
  silence_watchdog();
  for (const auto& path : plugin_candidates()) {
    // Global, because libtorch_cuda comes in with it and later plug-ins resolve against it.
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      const char* error = ::dlerror();
      // Report the first error other than "no such file".
      if (loaded.trouble.empty() || ::access(path.c_str(), F_OK) == 0)
        loaded.trouble = error != nullptr ? error : "unknown error";
      continue;
    }
    const auto entry = reinterpret_cast<PluginEntry>(::dlsym(library, kPluginEntry));
    const PluginTable* table = entry != nullptr ? entry() : nullptr;
    if (table == nullptr || table->version != kPluginVersion) {
      loaded.trouble = path + " belongs to another build of Lockstep";
      continue;
    }
    loaded.table = table;
    return loaded;
  }
  return loaded;
}

const Loaded& loaded_plugin() {
  static const Loaded loaded = open_plugin();
  return loaded;
}

const PluginTable& plugin() {
  load();
  return *loaded_plugin().table;
}

// LibTorch decides once, at the first question about CUDA (torch::manual_seed asks), whether this
// process has it. On a machine with an NVIDIA driver the plug-in is therefore opened before main().
[[maybe_unused]] const bool opened_early = [] {
  const char* device = std::getenv("LOCKSTEP_DEVICE");
  const bool refused = device != nullptr && std::string(device) == "cpu";
  if (refused || ::access("/dev/nvidiactl", F_OK) != 0) return false;
  return loaded_plugin().table != nullptr;
}();

// ---------------------------------------------------------------- operations

class NcclOperation : public DeviceOperation {
 public:
  NcclOperation(C10dWork work, std::function<void()> request_progress)
      : work_(std::move(work)), request_progress_(std::move(request_progress)) {}

  bool poll() override {
    if (!work_->isCompleted()) return false;
    // A failed operation has an exception; isSuccess() only throws that it is deprecated.
    if (const auto error = work_->exception()) std::rethrow_exception(error);
    return true;
  }
  void wait_stream() override { work_->wait(); }
  void wait_current_stream() override {
    const c10::impl::VirtualGuardImpl device(c10::kCUDA);
    device.getStream(device.getDevice()).synchronize();
  }
  void request_progress() override { request_progress_(); }

 private:
  const C10dWork work_;
  const std::function<void()> request_progress_;
};

// Recorded into a CUDA graph: it runs when the graph does. The host has nothing to wait for.
class RecordedOperation : public DeviceOperation {
 public:
  explicit RecordedOperation(C10dWork work) : work_(std::move(work)) {}

  bool poll() override {
    wait_stream();
    return true;
  }
  void wait_stream() override { work_->wait(); }
  void wait_current_stream() override {}

 private:
  const C10dWork work_;
};

// Ends when the stream reaches it.
class StreamOperation : public DeviceOperation {
 public:
  explicit StreamOperation(std::function<void()> request_progress)
      : request_progress_(std::move(request_progress)) {
    const c10::impl::VirtualGuardImpl device(c10::kCUDA);
    event_.record(device.getStream(device.getDevice()));
  }

  bool poll() override { return event_.query(); }
  void wait_stream() override {
    const c10::impl::VirtualGuardImpl device(c10::kCUDA);
    event_.block(device.getStream(device.getDevice()));
  }
  void wait_current_stream() override { event_.synchronize(); }
  void request_progress() override { request_progress_(); }

 private:
  c10::Event event_{c10::kCUDA};
  const std::function<void()> request_progress_;
};

// Polls operations that the host does not wait for: otherwise a rank that only enqueues would hang
// in its next device synchronisation instead of getting our TimeoutError.
class Watcher {
 public:
  Watcher() : shared_(std::make_shared<Shared>()), thread_([shared = shared_] { run(*shared); }) {}
  ~Watcher() {
    {
      const std::lock_guard lock(shared_->mutex);
      shared_->stop = true;
    }
    shared_->changed.notify_all();
    // A completion callback may drop the last handle of the world on the watching thread itself.
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  void add(const Backend::State& state) {
    const std::lock_guard lock(shared_->mutex);
    shared_->watched.push_back(state);
    shared_->changed.notify_all();
  }
  void request_progress() {
    const std::lock_guard lock(shared_->mutex);
    shared_->hurried = true;
    shared_->changed.notify_all();
  }

 private:
  static constexpr std::chrono::milliseconds kCalm{100};
  static constexpr std::chrono::microseconds kBusy{200};

  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::weak_ptr<WorkState>> watched;
    bool hurried = false;  // someone waits for a callback: ask often
    bool stop = false;
  };

  static void run(Shared& shared) {
    std::unique_lock lock(shared.mutex);
    while (!shared.stop) {
      if (shared.watched.empty()) {
        shared.hurried = false;
        shared.changed.wait(lock, [&] { return shared.stop || !shared.watched.empty(); });
        continue;
      }
      if (shared.hurried) {
        shared.changed.wait_for(lock, kBusy, [&] { return shared.stop; });
      } else {
        shared.changed.wait_for(lock, kCalm, [&] { return shared.stop || shared.hurried; });
      }
      std::vector<std::weak_ptr<WorkState>> round = std::exchange(shared.watched, {});
      lock.unlock();
      std::erase_if(round, [](const auto& weak) {
        const auto state = weak.lock();
        if (!state || state->poll()) return true;
        if (!state->deadline().expired()) return false;
        state->expire(state->timeout_text());
        return true;
      });
      lock.lock();
      shared.watched.insert(shared.watched.begin(), round.begin(), round.end());
    }
  }

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

// Leaked on purpose, and reachable so that leak checkers accept it.
void leave_behind(Group group) {
  static std::mutex mutex;
  static auto& all = *new std::vector<Group>;
  const std::lock_guard lock(mutex);
  all.push_back(std::move(group));
}

class NcclBackend : public C10dBackend {
 public:
  explicit NcclBackend(Group group)
      : group_(std::move(group)), watcher_(std::make_shared<Watcher>()) {}

  // Aborting is local; destroying would wait for peers. A communicator that cannot be aborted is
  // left.
  ~NcclBackend() override {
    watcher_.reset();
    abort(-1);
    const auto deadline = Deadline::after(kCloseTimeout);
    while (!*closed_ && !deadline.expired())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!*closed_) leave_behind(std::move(group_));
  }

  const std::string& name() const override {
    static const std::string name = "nccl";
    return name;
  }
  c10::DeviceType device_type() const override { return c10::kCUDA; }
  bool recording() const override { return plugin().capturing(); }

  bool reduces(at::ScalarType dtype, ReduceOp op) const override {
    return !is_bitwise(op) && C10dBackend::reduces(dtype, op);
  }

  void reduce_scatter(const State& state, at::Tensor output, at::Tensor input,
                      ReduceOp op) override {
    c10d::ReduceScatterOptions options;
    options.reduceOp = c10d_calls::translate(op);
    follow(state, group_->_reduce_scatter_base(output, input, options));
  }

  void all_to_all(const State& state, std::vector<at::Tensor> outputs,
                  std::vector<at::Tensor> inputs) override {
    follow(state, group_->alltoall(outputs, inputs));
  }

  // Grouped, so that messages in both directions cannot wait for each other.
  void point_to_point(const State& state, std::vector<P2p> messages) override {
    group_->startCoalescing();
    for (auto& message : messages) {
      std::vector<at::Tensor> tensors{message.tensor};
      if (message.kind == P2p::Kind::kSend) {
        group_->send(tensors, message.peer, 0);
      } else {
        group_->recv(tensors, message.peer, 0);
      }
    }
    follow(state, group_->endCoalescing());
  }

  void after_stream(const State& state) override {
    watch(state, std::make_unique<StreamOperation>(progress_request()));
  }

  // Takes milliseconds as a rule, but may get stuck in the driver: never on the caller's thread.
  void abort(int) noexcept override {
    if (aborting_.exchange(true)) return;
    std::thread([group = group_, closed = closed_]() mutable {
      try {
        group->abort();
      } catch (const std::exception&) {
        // The communicator is useless either way.
      }
      group.reset();
      *closed = true;
    }).detach();
  }

 private:
  c10d::Backend& group() override { return *group_; }
  void follow(const State& state, C10dWork work) override {
    if (recording()) {
      state->attach(std::make_unique<RecordedOperation>(std::move(work)));
      return;
    }
    watch(state, std::make_unique<NcclOperation>(std::move(work), progress_request()));
  }
  void watch(const State& state, std::unique_ptr<DeviceOperation> operation) {
    state->attach(std::move(operation));
    watcher_->add(state);
  }
  std::function<void()> progress_request() const {
    return [watcher = std::weak_ptr(watcher_)] {
      if (const auto there = watcher.lock()) there->request_progress();
    };
  }

  Group group_;
  std::shared_ptr<std::atomic<bool>> closed_ = std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> aborting_{false};
  std::shared_ptr<Watcher> watcher_;
};

}  // namespace

bool built() {
  return true;
}

void load() {
  const Loaded& loaded = loaded_plugin();
  if (loaded.table != nullptr) return;
  throw UsageError("nccl",
                   "the CUDA plug-in cannot be loaded ({}). Set LOCKSTEP_CUDA_PLUGIN to the "
                   "path of {}, or LOCKSTEP_DEVICE=cpu to run without a GPU (backend shm or gloo).",
                   loaded.trouble, kPluginFile);
}

void set_device(c10::Device device) {
  plugin().set_device(device.index());
}

std::unique_ptr<Backend> make(const Options& options) {
  // NCCL refuses two ranks on one GPU of one host, but not of two: let it think so when sharing was
  // asked for. Ranks of one slot have different GPUs and keep their direct links. NCCL has no other
  // interface for it; a program with threads that read the environment sets it beforehand.
  if (!options.shared_host_id.empty()) ::setenv("NCCL_HOSTID", options.shared_host_id.c_str(), 0);
  return std::make_unique<NcclBackend>(plugin().make_group({.store = options.store,
                                                            .rank = options.rank,
                                                            .size = options.size,
                                                            .device = options.device.index(),
                                                            .timeout = kNever}));
}

}  // namespace lockstep::detail::nccl
