#include "lockstep/parallel/reducer.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/memory/inplace_gradients.h"
#include "lockstep/optim/local_gradients.h"
#include "lockstep/parallel/checkpoint_node.h"
#include "lockstep/parallel/nested_backward.h"
#include "lockstep/parallel/oversubscription.h"
#include "lockstep/parallel/reducer_impl.h"

namespace lockstep {
namespace parallel {

using memory::InplaceGradients;

struct ReducerImpl::PassToken {
  explicit PassToken(std::weak_ptr<ReducerImpl> reducer) : owner(std::move(reducer)) {}
  ~PassToken() {
    if (ended) return;
    if (auto reducer = owner.lock()) reducer->interrupted();
  }
  std::weak_ptr<ReducerImpl> owner;
  std::atomic<bool> ended{false};
};

namespace {

BucketLimits limits_of(const DdpOptions& options) {
  BucketLimits limits;
  if (!options.bucket_cap_mb) return limits;
  const double mb = *options.bucket_cap_mb;
  if (!(mb > 0))
    throw UsageError("reducer", "bucket_cap_mb = {} must be positive. 25 is the default.", mb);
  constexpr double kMaxMb = 1e9;  // above any model, and its bytes fit a 64-bit integer
  limits.cap_bytes = limits.first_cap_bytes =
      static_cast<std::int64_t>(std::min(mb, kMaxMb) * 1024 * 1024);
  return limits;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void check_names_exist(const std::vector<std::string>& names, const char* option,
                       const std::vector<NamedTensor>& parameters,
                       const std::vector<NamedTensor>& buffers) {
  for (const auto& name : names) {
    const auto is_it = [&](const NamedTensor& t) { return t.name == name; };
    if (std::none_of(parameters.begin(), parameters.end(), is_it) &&
        std::none_of(buffers.begin(), buffers.end(), is_it))
      throw UsageError("reducer",
                       "{} names '{}', which the model does not have. Check the "
                       "qualified name with named_parameters().",
                       option, name);
  }
}

}  // namespace

ReducerImpl::ReducerImpl(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                         World world, DdpOptions options)
    : world_(std::move(world)), options_(std::move(options)) {
  passive_ = world_.size() == 1 && !options_.force_reducer;
  // The others are on their way to start() and would wait there for a rank that has thrown here.
  refusal_ = refusal_of([&] { take(std::move(parameters), std::move(buffers)); });
}

void ReducerImpl::take(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers) {
  limits_ = limits_of(options_);
  check_names_exist(options_.ignored_parameters, "ignored_parameters", parameters, buffers);
  check_names_exist(options_.sparse_parameters, "sparse_parameters", parameters, buffers);
  if (options_.static_graph && options_.find_unused_parameters)
    throw UsageError("reducer",
                     "static_graph and find_unused_parameters are both set. A static "
                     "graph learns its unused parameters by itself; leave the second one off.");
  for (auto& [name, tensor] : parameters) {
    if (contains(options_.ignored_parameters, name)) {
      ignored_.push_back({name, tensor});
      continue;
    }
    const bool tied = std::any_of(parameters_.begin(), parameters_.end(),
                                  [&](const Parameter& p) { return p.tensor.is_same(tensor); });
    if (tied) continue;  // one tensor under two names has one gradient
    if (!tensor.defined())
      throw UsageError("reducer",
                       "parameter '{}' is an undefined tensor. Give it a value before wrapping the "
                       "model, or name it in ignored_parameters.",
                       name);
    Parameter parameter;
    parameter.name = std::move(name);
    parameter.tensor = std::move(tensor);
    parameter.sparse = contains(options_.sparse_parameters, parameter.name);
    parameter.form = form_of(parameter);
    parameters_.push_back(std::move(parameter));
  }
  for (auto& buffer : buffers) {
    if (contains(options_.ignored_parameters, buffer.name)) {
      ignored_.push_back(std::move(buffer));
      continue;
    }
    const bool counted = buffer.tensor.defined() && !buffer.tensor.is_inference();
    const std::int64_t version = counted ? buffer.tensor._version() : 0;
    buffers_.push_back({std::move(buffer.name), std::move(buffer.tensor), version});
  }
}

ReducerImpl::~ReducerImpl() {
  remove_hooks();
  withdraw_sentinels();
}

void ReducerImpl::start() {
  if (passive_ && refusal_) std::rethrow_exception(refusal_);
  if (passive_) return;
  const bool any = std::any_of(parameters_.begin(), parameters_.end(),
                               [](const Parameter& p) { return p.form.requires_grad; });
  check_same_model();
  if (!any)
    throw UsageError("reducer",
                     "none of the model's {} parameters requires a gradient. There is "
                     "nothing to synchronise; use the module without wrapping it.",
                     parameters_.size());
  if (options_.init_sync) broadcast_model(0);
  choose_overlap();
  auto order = dense_parameters();
  std::reverse(order.begin(), order.end());
  plan(order);
  install_hooks();
  post_sentinels();
}

ReducerImpl::Form ReducerImpl::form_of(const Parameter& parameter) const {
  const at::Tensor& t = parameter.tensor;
  return {t.requires_grad(), t.scalar_type(), t.device(), t.sizes().vec()};
}

std::vector<std::size_t> ReducerImpl::dense_parameters() const {
  std::vector<std::size_t> dense;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].form.requires_grad && !parameters_[i].sparse) dense.push_back(i);
  return dense;
}

// Sending buckets during backward pays while a core is free for it. Ranks that share memory and
// fill the cores would only take turns, and there large buckets are faster than small ones.
void ReducerImpl::choose_overlap() {
  constexpr std::int64_t kMinBytes = 4 << 20;
  overlap_ = options_.overlap.value_or(world_.backend() != "shm");
  if (!options_.overlap && !overlap_) {
    const int cores = cores_of_ranks(world_);
    overlap_ = !world_.all(oversubscribed(world_.local_size(), at::get_num_threads(), cores));
  }
  if (overlap_ || options_.bucket_cap_mb) return;
  limits_.first_cap_bytes = limits_.cap_bytes;
  limits_.min_bytes = kMinBytes;
}

namespace {

// Where each bucket begins in the block of CPU gradients, in bytes, and the block's size: the same
// in any order of the parameters. The first bucket is the last one there, so that the line for the
// change flag behind it stays where it is.
std::vector<std::int64_t> places_in_block(const std::vector<BucketPlan>& layouts) {
  std::vector<std::int64_t> offsets(layouts.size() + 1, 0);
  std::int64_t bytes = 0;
  bool any = false;
  for (std::size_t n = 1; n <= layouts.size(); ++n) {
    const std::size_t i = n % layouts.size();
    if (!layouts[i].device.is_cpu()) continue;
    any = true;
    offsets[i] = bytes;
    bytes += layouts[i].numel * static_cast<std::int64_t>(c10::elementSize(layouts[i].dtype));
  }
  offsets.back() = any ? bytes + kLine : 0;
  return offsets;
}

}  // namespace

// Lays the buckets out again. Gradients that exist move along.
void ReducerImpl::plan(const std::vector<std::size_t>& order) {
  torch::NoGradGuard no_grad;
  std::vector<ParameterInfo> infos;
  for (const auto& p : parameters_)
    infos.push_back({p.tensor.numel(), p.form.dtype, p.form.device});
  const auto layouts = plan_buckets(infos, order, limits_);
  const auto offsets = places_in_block(layouts);
  make_room(layouts, offsets);
  std::vector<std::unique_ptr<BucketState>> buckets;
  for (auto& p : parameters_) p.bucket = kNoBucket;
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const BucketPlan& layout = layouts[i];
    auto bucket = std::make_unique<BucketState>();
    const std::int64_t length = layout.numel + (i == 0 ? 1 : 0);
    if (layout.device.is_cpu()) {
      bucket->wire = block_.mine(offsets[i], length, layout.dtype);
      bucket->parts = block_.shared(offsets[i], length, layout.dtype);
    } else {
      bucket->wire = at::zeros({length}, at::dtype(layout.dtype).device(layout.device));
    }
    bucket->flat = bucket->wire.narrow(0, 0, layout.numel);
    for (const Slot& place : layout.slots) {
      parameters_[place.parameter].bucket = i;
      bucket->members.push_back(place.parameter);
      bucket->offsets.push_back(place.offset);
      bind_slot(place, *bucket);
    }
    buckets.push_back(std::move(bucket));
  }
  buckets_ = std::move(buckets);
  close_pass();
}

// The same parameters in another order change places within the block. Otherwise gradients wait in
// memory of their own, so that the old block is gone before there is a new one. So do those of a
// device, bucket by bucket: there is never more than one bucket's memory too much.
void ReducerImpl::make_room(const std::vector<BucketPlan>& layouts,
                            const std::vector<std::int64_t>& offsets) {
  for (auto& bucket : buckets_) {
    if (!bucket->wire.defined() || bucket->wire.is_cpu()) continue;
    for (const std::size_t i : bucket->members) {
      at::Tensor& grad = parameters_[i].tensor.mutable_grad();
      if (grad.defined() && grad.has_storage() && grad.is_alias_of(bucket->wire))
        grad = grad.clone();
      parameters_[i].slot = at::Tensor();
    }
    bucket->wire = bucket->flat = at::Tensor();
  }
  std::vector<Move> moves;
  bool again = block_.bytes() > 0 && block_.bytes() == offsets.back();
  for (std::size_t i = 0; i < layouts.size() && again; ++i) {
    if (!layouts[i].device.is_cpu()) continue;
    const auto element = static_cast<std::int64_t>(c10::elementSize(layouts[i].dtype));
    for (const Slot& place : layouts[i].slots) {
      const at::Tensor& slot = parameters_[place.parameter].slot;
      again &= slot.defined() && block_.holds(slot);
      if (!again) break;
      const std::int64_t lines = (slot.numel() * element + kLine - 1) / kLine;
      moves.push_back(
          {slot.storage_offset() * element, offsets[i] + place.offset * element, lines * kLine});
    }
  }
  if (again) {
    for (auto& p : parameters_) {
      // One that lies in its slot but is not the slot: its pass was refused.
      at::Tensor& grad = p.tensor.mutable_grad();
      if (grad.defined() && !grad.is_same(p.slot) && block_.holds(grad)) grad = grad.clone();
    }
    return block_.rearrange(moves);
  }
  for (auto& p : parameters_) {
    at::Tensor& grad = p.tensor.mutable_grad();
    if (grad.defined() && block_.holds(grad)) grad = grad.clone();
    p.slot = at::Tensor();
  }
  for (auto& bucket : buckets_) {
    bucket->wire = bucket->flat = at::Tensor();
    bucket->parts.clear();
  }
  block_.make(world_, offsets.back());
}

void ReducerImpl::bind_slot(const Slot& place, const BucketState& bucket) {
  Parameter& p = parameters_[place.parameter];
  const at::Tensor& wire = bucket.wire;
  const bool dense = p.tensor.is_non_overlapping_and_dense();
  const auto strides = dense ? p.tensor.strides().vec()
                             : at::empty_like(p.tensor, at::kMeta).contiguous().strides().vec();
  at::Tensor& grad = p.tensor.mutable_grad();
  // One that moved within the block stays the tensor that it is, for everyone who holds it.
  const bool moved = p.slot.defined() && block_.holds(p.slot);
  if (!moved) p.slot = at::empty({0}, wire.options());
  // An alias, not a view: zero_grad(false) detaches gradients in place, which a view refuses.
  p.slot.set_(wire.storage(), wire.storage_offset() + place.offset, p.form.sizes, strides);
  if (grad.is_same(p.slot) || !options_.gradient_as_bucket_view) return;
  if (grad.defined() && !grad.is_sparse() && grad.scalar_type() == wire.scalar_type() &&
      grad.device() == wire.device()) {
    p.slot.copy_(grad);
    grad = p.slot;
  }
}

// Puts a hook on every accumulator that has none; never during backward, which runs them.
void ReducerImpl::install_hooks() {
  std::weak_ptr<ReducerImpl> weak = weak_from_this();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    // One that was frozen since has no accumulator; the next synchronised pass plans again.
    if (!p.form.requires_grad || !p.tensor.requires_grad()) continue;
    auto accumulator = torch::autograd::impl::grad_accumulator(p.tensor);
    if (accumulator == p.accumulator) continue;
    if (p.accumulator) p.accumulator->del_post_hook(p.hook_key);
    p.accumulator = std::move(accumulator);
    using Variables = std::vector<at::Tensor>;
    p.hook_key = p.accumulator->add_post_hook(std::make_unique<optim::GradientHook>(
        [weak, i](const Variables& outputs, const Variables& gradients) -> Variables {
          if (auto self = weak.lock()) self->on_gradient(i, gradients.at(0));
          return outputs;
        },
        [weak] {
          const auto self = weak.lock();
          return self && self->deferred_;
        }));
    const bool fits = p.form.dtype == at::kFloat || p.form.dtype == at::kDouble;
    if (!options_.gradient_as_bucket_view || p.sparse || !p.tensor.is_cpu() || !fits) continue;
    InplaceGradients::offer(p.tensor, this, [weak, i] {
      auto self = weak.lock();
      return self ? self->free_slot(i) : at::Tensor();
    });
  }
  hooks_lost_ = false;
}

void ReducerImpl::remove_hooks() {
  InplaceGradients::withdraw(this);
  for (auto& p : parameters_) {
    if (p.accumulator) p.accumulator->del_post_hook(p.hook_key);
    p.accumulator.reset();
  }
}

// ---------------------------------------------------------------- one gradient

void ReducerImpl::on_gradient(std::size_t index, const at::Tensor& arrived) {
  if (torch::GradMode::is_enabled())
    throw UsageError("reducer",
                     "backward(create_graph = true) reached parameter '{}'. Averaged "
                     "gradients cannot be differentiated again; for a gradient penalty use "
                     "torch::autograd::grad.",
                     parameters_[index].name);
  if (!begin_pass()) return;
  Parameter& p = parameters_[index];
  p.used = true;
  // Frozen after forward: the engine added nothing to .grad. Or not planned yet: .grad is taken
  // along when it is.
  if (!p.form.requires_grad) return;
  store_gradient(p, arrived);
  if (sync_) mark_ready(index);
}

// False in a backward that has been refused on another thread.
bool ReducerImpl::begin_pass() {
  const int task = NestedBackward::outer_task();
  if (queued_task_.load(std::memory_order_acquire) == task) return true;
  std::lock_guard<std::mutex> lock(mutex_);
  if (queued_task_.load(std::memory_order_relaxed) == task) return true;
  if (refused_task_ == task) return false;
  try {
    if (phase_ != Phase::kRunning) start_pass();
  } catch (...) {
    // Nobody ends a pass that was not opened: it is forgotten, or remembered as what was sent.
    if (phase_ == Phase::kRunning || next_launch_ > 0) phase_ = Phase::kInterrupted;
    refused_task_ = task;
    throw;
  }
  queue_end_of(task);
  queued_task_.store(task, std::memory_order_release);
  return true;
}

void ReducerImpl::start_pass() {
  if (phase_ == Phase::kInterrupted) {
    if (next_launch_ > 0)
      throw CommError("reducer",
                      fmt::format("the previous backward was interrupted after {} of {} buckets "
                                  "had been sent, so ranks "
                                  "may be out of step. Restart from the last checkpoint.",
                                  next_launch_, buckets_.size()),
                      {.rank = world_.rank()});
    close_pass();
  }
  // A pass that would not have synchronised is one of several before a step.
  if (owner_.on_backward && no_sync_depth_ == 0) owner_.on_backward();
  sync_ = no_sync_depth_ == 0 && !deferred_;
  pass_start_ = Clock::now();
  if (sync_ && joining_) exchange_active(true);
  stale_ = changed();
  if (sync_ && stale_) plan_anew_together();
  phase_ = Phase::kRunning;
  if (sync_ && options_.find_unused_parameters && !NestedBackward::active()) mark_unused_in_graph();
}

// The engine runs this when the task ends; if backward throws, it drops it, and the token notices.
void ReducerImpl::queue_end_of(int task) {
  auto token = std::make_shared<PassToken>(weak_from_this());
  auto end = [token, weak = weak_from_this(), task] {
    if (auto self = weak.lock()) self->on_task_end(task);
    token->ended = true;  // not reached when the end itself throws: that interrupts the pass, too
  };
  if (NestedBackward::active()) {
    NestedBackward::at_outer_end(std::move(end));
  } else {
    torch::autograd::Engine::get_default_engine().queue_callback(std::move(end));
  }
}

void ReducerImpl::interrupted() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (phase_ == Phase::kRunning || next_launch_ > 0) phase_ = Phase::kInterrupted;
  queued_task_ = -1;
}

// On a node of the outer backward, where that can be asked for a callback at its end.
struct ReducerImpl::OuterHook final : torch::autograd::FunctionPreHook {
  explicit OuterHook(std::shared_ptr<PassToken> t) : token(std::move(t)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    auto reducer = token->owner.lock();
    if (reducer && !token->ended.exchange(true)) reducer->end_with_current_task();
    return gradients;
  }
  std::shared_ptr<PassToken> token;
};

// A nested backward has ended inside the node `outer`, and parameters are missing. The backward
// around it may bring them, so the pass ends with that one. False: nothing follows that node.
bool ReducerImpl::leave_end_to(const torch::autograd::Node& outer) {
  auto token = std::make_shared<PassToken>(weak_from_this());
  bool left = false;
  for (const auto& edge : outer.next_edges()) {
    if (!edge.is_valid()) continue;
    auto hook = std::make_unique<OuterHook>(token);
    outer_nodes_.push_back({edge.function, hook.get(), token});
    edge.function->tensor_pre_hooks().push_back(std::move(hook));
    left = true;
  }
  token->ended = !left;
  if (left) ++unseen_outers_;
  return left;
}

void ReducerImpl::end_with_current_task() {
  std::lock_guard<std::mutex> lock(mutex_);
  --unseen_outers_;
  const int task = NestedBackward::outer_task();
  if (phase_ != Phase::kRunning || queued_task_ == task) return;
  queue_end_of(task);
  queued_task_ = task;
}

void ReducerImpl::forget_outer() {
  const auto running = torch::autograd::get_current_node();
  std::erase_if(outer_nodes_, [&](const OuterNode& outer) {
    // Or it would interrupt the pass.
    if (const auto token = outer.token.lock()) token->ended = true;
    const auto node = outer.node.lock();
    if (!node) return true;
    if (node == running) return false;  // it may be walking through its hooks: next time
    std::erase_if(node->tensor_pre_hooks(),
                  [&](const auto& hook) { return hook.get() == outer.hook; });
    return true;
  });
  unseen_outers_ = 0;
}

// The engine knows which accumulators this backward will reach; the others count at once, so that
// their buckets need not wait for the end. A checkpointed block's parameters are in no graph before
// the block runs again: then unused ones are counted at the end instead.
void ReducerImpl::mark_unused_in_graph() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;
  for (const auto* node : *nodes)
    if (is_checkpoint_node(*node)) return;
  for (auto& p : parameters_) {
    if (!p.form.requires_grad) continue;
    const auto node = torch::autograd::impl::try_get_grad_accumulator(p.tensor);
    if (!node || nodes->count(node.get()) == 0) count_as_unused(p);
  }
}

// The slot, while nothing is in it that anybody needs. Asked before the first hook of a pass, too,
// which may find the model changed and lay the buckets out again. One gradient must be all that
// reaches the slot: not served where other hooks get it, or a checkpointed block may bring another
// one while the first is still on its way.
at::Tensor ReducerImpl::free_slot(std::size_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Parameter& p = parameters_[index];
  if (p.counted || !p.slot.defined() || p.tensor.grad().defined()) return {};
  const Phase phase = phase_;
  if (phase == Phase::kInterrupted || (phase == Phase::kRunning ? stale_ : changed())) return {};
  const bool ours = torch::autograd::impl::try_get_grad_accumulator(p.tensor) == p.accumulator &&
                    p.accumulator->post_hooks().size() == 1 && has_no_other_hook(p);
  if (!ours || runs_blocks_again()) return {};
  return p.slot;
}

// Whether the backward in progress has checkpointed blocks. Under mutex_.
bool ReducerImpl::runs_blocks_again() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (blocks_again_.first == task) return blocks_again_.second;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const bool found = nodes == nullptr || std::any_of(nodes->begin(), nodes->end(), [](auto* node) {
                       return is_checkpoint_node(*node);
                     });
  blocks_again_ = {task, found};
  return found;
}

// Before a slot is written: a tensor that lies there must be the gradient that has just arrived.
void ReducerImpl::claim(const Parameter& p, const at::Tensor& arrived) const {
  if (!InplaceGradients::in_use(p.slot)) return;
  if (arrived.defined() && arrived.const_data_ptr() == p.slot.const_data_ptr()) return;
  throw UsageError("reducer",
                   "parameter '{}' got a gradient while another one for it was being computed. A "
                   "hook or a function probably runs a backward of its own on the same parameters; "
                   "set LOCKSTEP_GRAD_INPLACE_MIN_BYTES=0.",
                   p.name);
}

void ReducerImpl::store_gradient(Parameter& p, const at::Tensor& arrived) {
  if (stale_) return;  // the slot may be of another kind; planning again takes .grad along
  at::Tensor& grad = p.tensor.mutable_grad();
  if (grad.defined() && grad.layout() != at::kStrided) {
    if (p.sparse) return;
    throw UsageError("reducer",
                     "parameter '{}' got a sparse gradient. Name it in "
                     "sparse_parameters.",
                     p.name);
  }
  if (p.sparse) {
    if (!grad.defined()) return;
    throw UsageError("reducer",
                     "parameter '{}' is named in sparse_parameters (or belongs to a "
                     "sparse embedding) but got a dense gradient.",
                     p.name);
  }
  if (!grad.defined()) {
    claim(p, arrived);
    if (sync_) p.slot.zero_();
    return;
  }
  if (grad.is_same(p.slot)) return;
  claim(p, arrived);
  if (options_.gradient_as_bucket_view) {
    block_.fill(p.slot, grad);
    grad = p.slot;
  } else if (sync_) {
    block_.fill(p.slot, grad);
  }
}

void ReducerImpl::mark_ready(std::size_t index) {
  Parameter& p = parameters_[index];
  ++p.fired;
  if (!rebuilt_) p.place = observed_.fetch_add(1);
  if (options_.static_graph && !learned_) return;
  if (p.counted || p.fired > p.expected) {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool late = p.bucket == kNoBucket || p.bucket < next_launch_;
    if (!late && !options_.static_graph) return;  // added to its slot in time
    if (options_.static_graph)
      throw UsageError("reducer",
                       "step {}: parameter '{}' got {} gradients in one backward; the first step "
                       "had {}. The graph is not static; set find_unused_parameters instead.",
                       step_, p.name, p.fired, p.expected);
    throw UsageError("reducer",
                     "step {}: parameter '{}' got {} gradients in one backward, the last after its "
                     "bucket had been sent. It is probably used in two checkpointed blocks; set "
                     "static_graph = true.",
                     step_, p.name, p.fired);
  }
  if (p.fired < p.expected) return;
  if (count_down(p) && overlap_) launch_ready();
}

// True when the parameter's bucket has become ready.
bool ReducerImpl::count_down(Parameter& p) {
  p.counted = true;
  bool ready = false;
  if (p.bucket != kNoBucket) {
    BucketState& bucket = *buckets_[p.bucket];
    ready = bucket.pending.fetch_sub(1) == 1;
    if (ready) bucket.ready = Clock::now();
  }
  if (waiting_for_.fetch_sub(1) == 1) last_gradient_ = Clock::now();
  return ready;
}

// Contributes what .grad holds from earlier passes of the window, or zeros.
void ReducerImpl::count_as_unused(Parameter& p) {
  if (p.counted) return;
  const at::Tensor& grad = p.tensor.grad();
  if (!p.sparse) {
    claim(p, at::Tensor());
    if (!grad.defined()) {
      p.slot.zero_();
    } else {
      if (!p.used) p.previous = grad.clone();
      if (!grad.is_same(p.slot)) p.slot.copy_(grad);
    }
  }
  count_down(p);
}

// ---------------------------------------------------------------- launching

void ReducerImpl::launch_ready() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (next_launch_ < buckets_.size() && buckets_[next_launch_]->pending.load() == 0) {
    const std::size_t index = next_launch_++;
    launch(index);
    if (overlap_ || hook_) continue;
    // Nothing else to do: this thread carries the reduction out.
    buckets_[index]->reduction.work.wait();
    (*completed_ns_)[index] = Clock::now().time_since_epoch().count();
  }
}

void ReducerImpl::launch(std::size_t index) {
  BucketState& bucket = *buckets_[index];
  if (index == 0) send_change_flag();
  const at::Tensor& sent = index == 0 && flag_in_bucket() ? bucket.wire : bucket.flat;
  bucket.launched = Clock::now();
  if (hook_) {
    Bucket view{.index = index,
                .is_last = index + 1 == buckets_.size(),
                .data = bucket.flat,
                .gradients = {},
                .parameters = {}};
    for (std::size_t i = 0; i < bucket.members.size(); ++i) {
      const Parameter& p = parameters_[bucket.members[i]];
      // In the memory that is sent, which may be lent zeros.
      view.gradients.push_back(bucket.flat.as_strided(
          p.slot.sizes(), p.slot.strides(), bucket.flat.storage_offset() + bucket.offsets[i]));
      view.parameters.push_back(p.tensor);
    }
    bucket.reduction = hook_(world_, view);
  } else if (joining_ && !joining_->divide_by_initial_world_size) {
    bucket.reduction = {world_.all_reduce(sent, ReduceOp::kSum),
                        [flat = bucket.flat, n = divisor()]() mutable { flat.div_(n); }};
  } else {
    bucket.reduction = {world_.all_reduce(sent, ReduceOp::kAvg), nullptr};
  }
  if (bucket.flat.is_cpu() && (overlap_ || hook_)) {
    bucket.reduction.work.on_completion([times = completed_ns_, index] {
      (*times)[index] = Clock::now().time_since_epoch().count();
    });
  }
}

void ReducerImpl::register_comm_hook(CommHook hook) {
  if (phase_ == Phase::kRunning)
    throw UsageError("reducer", "register_comm_hook was called during backward. Call it before.");
  if (hook_)
    throw UsageError("reducer", "a communication hook is already registered. One per model.");
  if (deferred_)
    throw UsageError("reducer",
                     "this model's gradients are reduced by a ShardedOptimizer, in its step(), "
                     "where no communication hook runs. Use a replicated optimizer with hooks.");
  hook_ = std::move(hook);
}

// ---------------------------------------------------------------- a backward that may use nothing

namespace {

struct Watcher : torch::CustomClassHolder {
  std::weak_ptr<ReducerImpl> reducer;
};

class WatchFunction : public torch::autograd::Function<WatchFunction> {
 public:
  // `anchor` requires a gradient, so the output does too, whatever the model used.
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& value,
                            const at::Tensor& /*anchor*/,
                            const c10::intrusive_ptr<Watcher>& watcher) {
    context->saved_data["watcher"] = c10::IValue::make_capsule(watcher);
    return value.clone();  // autograd refuses to change a view in place, which users do to outputs
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    const auto watcher = context->saved_data["watcher"].toCapsule();
    if (auto reducer = static_cast<Watcher*>(watcher.get())->reducer.lock())
      reducer->on_watched_backward();
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor ReducerImpl::watch(at::Tensor output) {
  if (passive_ || !options_.find_unused_parameters || !torch::GradMode::is_enabled() ||
      !output.defined() || !output.is_floating_point())
    return output;
  const at::Tensor anchor = at::empty({0}, output.options()).set_requires_grad(true);
  auto watcher = c10::make_intrusive<Watcher>();
  watcher->reducer = weak_from_this();
  return WatchFunction::apply(output, anchor, watcher);
}

void ReducerImpl::on_watched_backward() {
  // autograd::grad and backward(inputs) reach chosen tensors only and reduce nothing.
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen != nullptr && !chosen->empty()) return;
  if (begin_pass() && sync_ && overlap_) launch_ready();
}

}  // namespace parallel

Reducer::Reducer(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, World world,
                 DdpOptions options)
    : impl_(std::make_shared<parallel::ReducerImpl>(std::move(parameters), std::move(buffers),
                                                    std::move(world), std::move(options))) {
  impl_->start();
}
Reducer::~Reducer() = default;

at::Tensor Reducer::watch(at::Tensor output) {
  return impl_->watch(std::move(output));
}
void Reducer::set_sync(bool on) {
  impl_->hold_sync(!on);
}
void Reducer::join(const std::function<void()>& body, const JoinOptions& options) {
  impl_->join(body, options);
}
void Reducer::register_comm_hook(CommHook hook) {
  impl_->register_comm_hook(std::move(hook));
}
void Reducer::verify_replicas() {
  impl_->verify_replicas();
}
const StepTiming& Reducer::last_timing() const {
  return impl_->last_timing();
}
std::size_t Reducer::bucket_count() const {
  return impl_->bucket_count();
}
DeferredGradients Reducer::defer(DeferredOwner owner) {
  return impl_->defer(std::move(owner));
}
DeferredStep Reducer::begin_deferred_step(bool has_inputs) {
  return impl_->begin_deferred_step(has_inputs);
}
bool Reducer::joining() const {
  return impl_->joining();
}
void Reducer::check_unchanged() const {
  impl_->check_unchanged();
}
void Reducer::check_own_memory() const {
  impl_->check_own_memory();
}
void Reducer::resume() {
  impl_->resume();
}
bool Reducer::scale_deferred(double factor) {
  return impl_->scale_deferred(factor);
}
void Reducer::check_deferrable() const {
  impl_->check_deferrable();
}
void Reducer::end_deferred_step() {
  impl_->end_deferred_step();
}
World& Reducer::world() {
  return impl_->world();
}

NoSync::NoSync(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {
  reducer_->set_sync(false);
}
NoSync::~NoSync() {
  if (reducer_) reducer_->set_sync(true);
}

}  // namespace lockstep
