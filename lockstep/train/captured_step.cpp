#include "lockstep/train/captured_step.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/comm/device.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/log.h"
#include "lockstep/kernels/cuda/table.h"
#include "lockstep/optim/local_gradients.h"
#include "lockstep/parallel/parallelism.h"

namespace lockstep {
namespace {

namespace cuda = kernels::cuda;
using Tensors = CapturedStep::Tensors;
using Key = std::vector<std::int64_t>;

// Remembered shapes and variants; each holds its inputs. Others run uncaptured.
constexpr std::size_t kMaxEntries = 64;
// Calls after which a variant that did not come again is no longer waited for.
constexpr std::int64_t kMaxWait = 1024;
// Recordings of one entry. Where gradients move in every window, recording again does not help.
constexpr int kMaxRecordings = 4;

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

// The operation that began last, on any thread: the one at which a failed capture stopped.
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
  // The ways to run a call, in the order in which an entry goes through them.
  enum class Choice { kAsItIs, kRecord, kReplay };
  // The tensors whose addresses a graph contains.
  struct Place {
    const void* parameter = nullptr;
    const void* gradient = nullptr;  // null: it has none
    bool requires_grad = false;
    bool operator==(const Place&) const = default;
  };
  struct Entry {
    int runs = 0;  // uncaptured, since a graph was recorded or replayed
    std::int64_t last_call = 0;
    int recordings = 0;
    std::unique_ptr<cuda::Graph> graph{};
    Tensors inputs{}, outputs{};
    // The parameters' gradients after the function, where it makes or removes them. One that it
    // adds to in place is not held: a replay finds it at its address (is_of_here), and to hold it
    // would keep the gradients of an update that is over.
    std::vector<std::optional<at::Tensor>> gradients{};
    std::vector<Place> places{};  // of the parameters, before it
    std::uint64_t layout = 0;     // of the gradients
    std::uint64_t optimizer = 0;  // its layout
    ledger::Totals counted{};     // what the ledger has for each run of it
  };

  optim::Optimizer& optimizer;
  CapturedStepOptions options;
  Work work;
  const std::vector<at::Tensor>& parameters = options.parameters;
  std::map<Key, Entry> entries{};
  const cuda::Graph* first_graph = nullptr;  // the others share its memory
  bool recorded = false;                     // a graph was recorded; logged once
  std::optional<c10::Stream> side{};         // captures and what precedes them
  std::deque<lockstep::Work> under_way{};    // replays of several ranks
  bool replayed = false;
  std::int64_t calls = 0;
  bool full = false;  // no more entries; logged once
  std::string unavailable{};

  c10::Device device() const { return parameters.front().device(); }
  bool shared() const { return options.parallelism != nullptr && world().size() > 1; }
  World& world() const { return options.parallelism->mesh().world(); }
  std::uint64_t layout() const {
    return options.parallelism != nullptr ? options.parallelism->layout() : 0;
  }
  Place place_of(const at::Tensor& parameter) const {
    const at::Tensor& gradient = parameter.grad();
    return {parameter.const_data_ptr(), gradient.defined() ? gradient.const_data_ptr() : nullptr,
            parameter.requires_grad()};
  }

  std::string reason_against() const {
    if (options.parallelism != nullptr) {
      std::string reason = options.parallelism->unavailable_for_capture();
      if (!reason.empty()) return reason;
      if (options.parallelism->takes_windows()) return "a step's passes run together";
    }
    if (!device().is_cuda()) return "the model is on " + device().str() + ", not on a GPU";
    return cuda::table() == nullptr ? cuda::unavailable_reason() : "";
  }

  // A graph that was recorded without it has no collectives, so ranks would part in silence.
  // Asked in every call, because a model may be wrapped at any time.
  void refuse_unknown_wrapper() const {
    if (options.parallelism != nullptr) return;
    if (std::none_of(parameters.begin(), parameters.end(), optim::is_watched)) return;
    throw UsageError(
        "CapturedStep",
        "the model is wrapped in DistributedDataParallel, but the step was made "
        "without its parallelism. Wrap the model first, then make the CapturedStep with "
        "{{.parallelism = model.parallelism()}}.");
  }

  // The entry for these shapes and this variant; null when there are too many.
  Entry* entry_for(const Key& key) {
    if (const auto at = entries.find(key); at != entries.end() || entries.size() < kMaxEntries) {
      Entry& entry = at != entries.end() ? at->second : entries[key];
      entry.last_call = ++calls;
      return &entry;
    }
    if (!std::exchange(full, true))
      log::warning("CapturedStep",
                   "inputs have come in more than {} shapes: others run without a CUDA graph. "
                   "Pad them to a few lengths.",
                   kMaxEntries);
    return nullptr;
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

  // A gradient's accumulator runs on the stream that it was made on. One that somebody holds, as
  // the hooks of DistributedDataParallel do, was made on another stream, which a graph must not
  // touch.
  void move_accumulators_to_current_stream() const {
    for (const at::Tensor& parameter : parameters) {
      const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
      if (!node) continue;
      node->clear_input_metadata();
      node->add_input_metadata(parameter);  // with the current stream
    }
  }

  void fill(Entry& entry, const Tensors& from) const {
    if (entry.inputs.empty())
      for (const at::Tensor& input : from)
        entry.inputs.push_back(at::empty_like(input, input.options().device(device())));
    for (std::size_t i = 0; i < from.size(); ++i)
      entry.inputs[i].copy_(from[i], /*non_blocking=*/true);
  }

  Tensors run_as_it_is(const Tensors& inputs, int variant) {
    Tensors outputs;
    on_side_stream([&] {
      move_accumulators_to_current_stream();
      outputs = work(inputs, variant);
    });
    return outputs;
  }

  // A graph keeps the memory of its pass. The variants of a window are recorded in one window, so
  // that none of them runs uncaptured, with as much memory again, beside another one's graph.
  bool is_early(const Key& key) const {
    return std::ranges::any_of(entries, [&](const auto& other) {
      const auto& [its_key, entry] = other;
      return std::equal(key.begin() + 1, key.end(), its_key.begin() + 1, its_key.end()) &&
             !entry.graph && entry.runs < options.warmup_steps &&
             calls - entry.last_call < kMaxWait;
    });
  }

  // The choice that all ranks can make, so that they issue the same operations.
  Choice choose(const Entry* entry, const Key& key) const {
    Choice mine = Choice::kAsItIs;
    if (entry != nullptr && entry->graph && is_of_here(*entry)) {
      mine = Choice::kReplay;
    } else if (entry != nullptr && entry->runs >= options.warmup_steps &&
               entry->recordings < kMaxRecordings && !is_early(key) &&
               (options.parallelism == nullptr || options.parallelism->settled())) {
      mine = Choice::kRecord;
    }
    if (!shared()) return mine;
    return static_cast<Choice>(
        static_cast<int>(all_reduce(world(), static_cast<int>(mine), ReduceOp::kMin)));
  }

  // False: no rank has a graph or will have one.
  bool record(Entry& entry, int variant) {
    const Tensors gradients = gradients_now();
    unavailable = optimizer.unavailable_for_capture(options.step);
    const bool ran = unavailable.empty();
    if (ran) unavailable = try_to_record(entry, variant);
    if (shared() && !all_ranks(world(), unavailable.empty()) && unavailable.empty())
      unavailable = "another rank could not record it";
    if (unavailable.empty()) {
      remember_gradients(entry);
      if (!std::exchange(recorded, true))
        log::info("CapturedStep", "a step was recorded and is replayed as one CUDA graph");
      return true;
    }
    say(unavailable);
    if (ran) take_back(gradients);
    move_accumulators_to_current_stream();
    entries.clear();  // what is there holds memory
    return false;
  }

  void remember_gradients(Entry& entry) const {
    entry.gradients.clear();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].grad();
      const bool stayed =
          gradient.defined() && gradient.const_data_ptr() == entry.places[i].gradient;
      entry.gradients.push_back(stayed ? std::nullopt : std::optional(gradient));
    }
  }

  // Empty, or the reason. A rank that already has a graph records again when others have none.
  std::string try_to_record(Entry& entry, int variant) {
    optimizer.publish_options(options.step);
    ++entry.recordings;
    entry.places.clear();
    for (const at::Tensor& parameter : parameters) entry.places.push_back(place_of(parameter));
    entry.layout = layout();
    entry.optimizer = optimizer.layout();
    // The graph cannot use what earlier calls have left in the cache.
    const c10::impl::VirtualGuardImpl guard(device().type());
    guard.synchronizeDevice(device().index());
    c10::getDeviceAllocator(device().type())->emptyCache();
    // It holds the memory that they share until the new one does.
    const std::unique_ptr<cuda::Graph> replaced = std::move(entry.graph);
    entry.graph = cuda::make_graph(first_graph);
    if (first_graph == nullptr || first_graph == replaced.get()) first_graph = entry.graph.get();
    const LastOperation operation;
    const struct Recording {
      explicit Recording(ledger::Totals& counted) : counted(counted) { ledger::begin_recording(); }
      ~Recording() { counted = ledger::end_recording(); }
      ledger::Totals& counted;
    } recording(entry.counted);
    try {
      on_side_stream([&] {
        const DeviceMarksOff marks_off;
        const auto passes = options.parallelism ? options.parallelism->recording() : nullptr;
        move_accumulators_to_current_stream();
        cuda::Capture capture(*entry.graph);
        entry.outputs = work(entry.inputs, variant);
        capture.end();
      });
    } catch (const std::exception& e) {
      return "'" + LastOperation::get() + "' cannot be captured (" + first_line(e.what()) + ")";
    }
    return "";
  }

  // The recorded work has not run, and never will: the function is called again.
  void take_back(const Tensors& gradients) {
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradients[i];
  }

  void say(const std::string& reason) const {
    const auto level = options.asked ? log::Level::kWarning : log::Level::kInfo;
    if (log::enabled(level))
      log::write(level, "CapturedStep",
                 "steps run without a CUDA graph: " + reason +
                     ". Results are the same; small steps are slower.");
  }

  Tensors gradients_now() const {
    Tensors gradients;
    for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
    return gradients;
  }

  // A graph that continues a window adds to the gradients, and fills the buckets, at the addresses
  // they had when it was recorded.
  bool is_of_here(const Entry& entry) const {
    if (entry.layout != layout() || entry.optimizer != optimizer.layout()) return false;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (place_of(parameters[i]) != entry.places[i]) return false;
    return true;
  }

  // Applies the world's deadline to a replay, which no collective on the host represents.
  void watch_replay() {
    while (!under_way.empty() && under_way.front().done()) under_way.pop_front();
    under_way.push_back(after_stream(world(), "captured_step"));
  }

  Tensors replay(Entry& entry) {
    optimizer.publish_options(options.step);
    entry.graph->replay();
    entry.runs = 0;
    optim::mark_pass(parameters, /*last=*/true);  // the last pass may be in the graph alone
    if (shared()) watch_replay();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (const auto& gradient = entry.gradients[i]) parameters[i].mutable_grad() = *gradient;
      if (parameters[i].requires_grad()) parameters[i].unsafeGetTensorImpl()->bump_version();
    }
    return entry.outputs;
  }

  static void count(const ledger::Totals& run) {
    for (std::size_t i = 0; i < ledger::kCounters; ++i)
      ledger::add(static_cast<ledger::Counter>(i), run.counts[i]);
    for (std::uint64_t step = 0; step < run.steps; ++step) ledger::count_step();
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
  impl_->refuse_unknown_wrapper();
  impl_->unavailable = impl_->reason_against();
  const bool here = impl_->unavailable.empty();
  if (impl_->shared() && !all_ranks(impl_->world(), here) && here)
    impl_->unavailable = "another rank cannot record one";
  // One line is enough for a reason that all ranks have.
  const bool differ = impl_->shared() && any_rank(impl_->world(), here);
  if (!impl_->unavailable.empty() && (!impl_->shared() || differ || impl_->world().is_leader()))
    impl_->say(impl_->unavailable);
}

CapturedStep::~CapturedStep() = default;

CapturedStep::Tensors CapturedStep::run(const Tensors& inputs, int variant) {
  Impl& self = *impl_;
  self.replayed = false;
  self.refuse_unknown_wrapper();
  if (!self.unavailable.empty()) return self.work(inputs, variant);
  const Key key = key_of(inputs, variant);
  Impl::Entry* const entry = self.entry_for(key);
  using Choice = Impl::Choice;
  const Choice choice = self.choose(entry, key);
  if (entry == nullptr) return self.run_as_it_is(inputs, variant);
  self.fill(*entry, inputs);
  if (choice == Choice::kAsItIs) {
    ++entry->runs;
    return self.run_as_it_is(entry->inputs, variant);
  }
  if (choice == Choice::kRecord && !self.record(*entry, variant)) return self.work(inputs, variant);
  self.replayed = choice == Choice::kReplay;
  Impl::count(entry->counted);
  return self.replay(*entry);
}

bool CapturedStep::replayed() const {
  return impl_->replayed;
}

const std::string& CapturedStep::unavailable_reason() const {
  return impl_->unavailable;
}

}  // namespace lockstep
