#include "lockstep/train/captured_step.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/comm/device_times.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/kernels/cuda/graph.h"
#include "lockstep/kernels/cuda/table.h"
#include "lockstep/nn/weight_copy.h"

namespace lockstep {
namespace {

namespace cuda = kernels::cuda;
using Tensors = CapturedStep::Tensors;
using Key = std::vector<std::int64_t>;

// Of shapes and variants that are remembered; each holds inputs. Others run as they are.
constexpr std::size_t kMaxEntries = 64;

Key key_of(const Tensors& inputs, int variant) {
  Key key{variant};
  for (const at::Tensor& input : inputs) {
    key.push_back(static_cast<std::int64_t>(input.scalar_type()));
    key.insert(key.end(), input.sizes().begin(), input.sizes().end());
    key.insert(key.end(), input.strides().begin(), input.strides().end());
    key.push_back(-1);
  }
  return key;
}

// The operation that began last, on any thread, while it lives: what a capture fails at.
class LastOperation {
 public:
  LastOperation() {
    forget();
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          const std::lock_guard lock(mutex());
          name() = function.name();
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }
  ~LastOperation() { at::removeCallback(handle_); }
  LastOperation(const LastOperation&) = delete;
  LastOperation& operator=(const LastOperation&) = delete;

  static std::string get() {
    const std::lock_guard lock(mutex());
    return name().empty() ? "an operation" : name();
  }

 private:
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::string& name() {
    static std::string text;
    return text;
  }
  static void forget() {
    const std::lock_guard lock(mutex());
    name().clear();
  }
  at::CallbackHandle handle_;
};

std::string first_line(const char* text) {
  const std::string all(text);
  return all.substr(0, all.find('\n'));
}

}  // namespace

struct CapturedStep::Impl {
  struct Entry {
    int runs = 0;
    std::unique_ptr<cuda::Graph> graph{};
    Tensors inputs{}, outputs{};
    Tensors gradients{};                     // of the parameters, as the function leaves them
    std::vector<const void*> begins_with{};  // where they were before it; null: nowhere
    std::vector<bool> writes_copy{};         // current after it: of the parameters' copies
  };

  optim::Optimizer& optimizer;
  CapturedStepOptions options;
  Work work;
  const std::vector<at::Tensor>& parameters = options.parameters;
  std::map<Key, Entry> entries{};
  const cuda::Graph* first_graph = nullptr;  // whose memory the others share
  std::optional<c10::Stream> side{};         // captures and what precedes them
  std::uint64_t versions = 0;                // of the parameters, when a graph was last replayed
  std::string unavailable{};

  c10::Device device() const { return parameters.front().device(); }

  std::uint64_t sum_of_versions() const {
    std::uint64_t sum = 0;
    for (const at::Tensor& parameter : parameters)
      sum += static_cast<std::uint64_t>(parameter._version());
    return sum;
  }

  // Graphs are recorded on a stream of their own; what goes before them runs there too, so that
  // libraries have made what they need for it.
  template <typename Body>
  void on_side_stream(Body&& body) {
    const c10::impl::VirtualGuardImpl guard(device().type());
    if (!side) side = guard.getStreamFromGlobalPool(device());
    const c10::Stream outside = guard.getStream(device());
    const auto order = [&](const c10::Stream& before, const c10::Stream& after) {
      c10::Event event(device().type());
      event.record(before);
      event.block(after);
    };
    order(outside, *side);
    {
      const c10::StreamGuard inside(*side);
      body();
    }
    order(*side, outside);
  }

  void fill(Entry& entry, const Tensors& from) const {
    if (entry.inputs.empty())
      for (const at::Tensor& input : from)
        entry.inputs.push_back(at::empty_like(input, input.options().device(device())));
    for (std::size_t i = 0; i < from.size(); ++i)
      entry.inputs[i].copy_(from[i], /*non_blocking=*/true);
  }

  Tensors run_as_it_is(Entry& entry, const Tensors& inputs, int variant) {
    ++entry.runs;
    fill(entry, inputs);
    Tensors outputs;
    on_side_stream([&] { outputs = work(entry.inputs, variant); });
    return outputs;
  }

  bool capture(Entry& entry, int variant) {
    if (unavailable = optimizer.unavailable_for_capture(options.step); !unavailable.empty()) {
      say(unavailable);
      return false;
    }
    nn::refresh_weight_copies(parameters);
    optimizer.publish_options(options.step);
    const Tensors gradients = gradients_now();
    for (const at::Tensor& gradient : gradients)
      entry.begins_with.push_back(gradient.defined() ? gradient.const_data_ptr() : nullptr);
    // What the calls before have left in the cache cannot serve the graph.
    const c10::impl::VirtualGuardImpl guard(device().type());
    guard.synchronizeDevice(device().index());
    c10::getDeviceAllocator(device().type())->emptyCache();
    entry.graph = cuda::make_graph(first_graph);
    const LastOperation operation;
    try {
      on_side_stream([&] {
        const DeviceMarksOff marks_off;
        cuda::Capture capture(*entry.graph);
        entry.outputs = work(entry.inputs, variant);
        capture.end();
      });
    } catch (const std::exception& e) {
      unavailable =
          "'" + LastOperation::get() + "' cannot be captured (" + first_line(e.what()) + ")";
      say(unavailable);
      entry.graph.reset();
      entry.outputs.clear();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        parameters[i].mutable_grad() = gradients[i];
        // What was recorded of copies has not run: they are made again.
        parameters[i].unsafeGetTensorImpl()->bump_version();
      }
      if (options.after_failed_capture) options.after_failed_capture();
      return false;
    }
    if (first_graph == nullptr) first_graph = entry.graph.get();
    entry.gradients = gradients_now();
    for (const at::Tensor& parameter : parameters)
      entry.writes_copy.push_back(nn::weight_copy_is_current(parameter));
    versions = sum_of_versions();
    return true;
  }

  void say(const std::string& reason) const {
    log::warning("CapturedStep",
                 "steps run without a CUDA graph: {}. Results are the same; small steps are "
                 "slower.",
                 reason);
  }

  Tensors gradients_now() const {
    Tensors gradients;
    for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
    return gradients;
  }

  // A graph that continues a window adds to gradients where they were when it was recorded.
  bool continues_from_here(const Entry& entry) const {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].grad();
      if ((gradient.defined() ? gradient.const_data_ptr() : nullptr) != entry.begins_with[i])
        return false;
    }
    return true;
  }

  Tensors replay(Entry& entry) {
    optimizer.publish_options(options.step);
    // Somebody has loaded other weights: the graph does not convert them where the optimizer does.
    if (const std::uint64_t now = sum_of_versions(); now != versions) {
      nn::refresh_weight_copies(parameters);
      versions = now;
    }
    entry.graph->replay();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = entry.gradients[i];
      if (!parameters[i].requires_grad()) continue;
      parameters[i].unsafeGetTensorImpl()->bump_version();
      if (entry.writes_copy[i]) nn::mark_weight_copy_current(parameters[i]);
    }
    versions = sum_of_versions();
    return entry.outputs;
  }
};

CapturedStep::CapturedStep(optim::Optimizer& optimizer, CapturedStepOptions options, Work work)
    : impl_(new Impl{
          .optimizer = optimizer, .options = std::move(options), .work = std::move(work)}) {
  if (impl_->parameters.empty())
    throw UsageError("CapturedStep", "there are no parameters. Pass model.parameters().");
  if (impl_->options.warmup_steps < 1)
    throw UsageError("CapturedStep",
                     "warmup_steps = {}. A step must run once before it is recorded.",
                     impl_->options.warmup_steps);
  if (!impl_->device().is_cuda()) {
    impl_->unavailable = "the model is on " + impl_->device().str() + ", not on a GPU";
  } else if (cuda::table() == nullptr) {
    impl_->unavailable = cuda::unavailable_reason();
  }
  if (!impl_->unavailable.empty()) impl_->say(impl_->unavailable);
}

CapturedStep::~CapturedStep() = default;

CapturedStep::Tensors CapturedStep::run(const Tensors& inputs, int variant) {
  if (!impl_->unavailable.empty()) return impl_->work(inputs, variant);
  const Key key = key_of(inputs, variant);
  if (impl_->entries.size() >= kMaxEntries && !impl_->entries.contains(key))
    return impl_->work(inputs, variant);
  Impl::Entry& entry = impl_->entries[key];
  const bool warms_up = !entry.graph && entry.runs < impl_->options.warmup_steps;
  if (warms_up || (entry.graph && !impl_->continues_from_here(entry)))
    return impl_->run_as_it_is(entry, inputs, variant);
  impl_->fill(entry, inputs);
  if (!entry.graph && !impl_->capture(entry, variant)) return impl_->work(inputs, variant);
  return impl_->replay(entry);
}

bool CapturedStep::replays(const Tensors& inputs, int variant) const {
  const auto at = impl_->entries.find(key_of(inputs, variant));
  return impl_->unavailable.empty() && at != impl_->entries.end() && at->second.graph != nullptr &&
         impl_->continues_from_here(at->second);
}

const std::string& CapturedStep::unavailable_reason() const {
  return impl_->unavailable;
}

}  // namespace lockstep
