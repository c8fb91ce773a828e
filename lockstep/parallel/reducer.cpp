#include "lockstep/parallel/reducer.h"

#include <ATen/ATen.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/device.h"
#include "lockstep/comm/numbers.h"
#include "lockstep/comm/world.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/parallel/backward_hooks.h"
#include "lockstep/parallel/bucket_set.h"
#include "lockstep/parallel/model_tensors.h"
#include "lockstep/parallel/pass_state.h"
#include "lockstep/parallel/replicas.h"

namespace lockstep {
namespace parallel {

// The order of events behind Reducer.
//
// Each part has one job and owns its state; this class calls them in order. From backward() on:
//   HookSet          reports a gradient                             on_gradient
//   PassState        a pass begins with the first one               begin_pass, start_pass
//   JoinSession      which ranks take part                          start_pass
//   ChangeDetector   is the model what the buckets are for          start_pass, refuse_change
//   BucketSet        the gradient goes to its slot                  on_gradient
//   PassState        its bucket may be ready                        launch_ready, launch
//   PassEnd          the outermost backward has ended               on_backward_end
//   ModelTensors     buffers are copied                             finalize
class ReducerImpl final : public BackwardListener,
                          public std::enable_shared_from_this<ReducerImpl> {
 public:
  ReducerImpl(World world, DdpOptions options)
      : world_(std::move(world)), options_(std::move(options)) {}
  // Communicates; separate from the constructor because hooks need a weak_ptr.
  void start(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers);

  void on_gradient(std::size_t parameter, const at::Tensor& arrived) override;
  at::Tensor free_slot(std::size_t parameter) override;
  bool gradients_are_local() const override { return false; }
  void on_watched_backward() override;
  void on_backward_end() override;
  void on_backward_abandoned() override;
  void on_outer_backward() override;
  // In a world of one, where no gradient is hooked: `output` says when backward begins.
  void watch_alone(const at::Tensor& output);

 private:
  friend class lockstep::Reducer;  // the handle of this one
  void choose_overlap();
  std::vector<std::size_t> reverse_dense_order() const;
  BucketLimits limits_as_set() const;
  void plan(const std::vector<std::size_t>& order);
  void plan_first();
  // Whether a pass that began now would exchange gradients.
  bool synchronises() const { return no_sync_depth_ == 0; }
  bool begin_pass();
  void start_pass();
  void check_recordable();
  void close_pass();
  void leave_phase();
  void reset_pass();
  void count_as_unused(std::size_t parameter);
  void launch_ready();
  void launch(std::size_t index);
  void finalize();
  void count_pass() const;
  void count_update();
  void reduce_sparse(const std::vector<bool>& used);
  void rebuild_from_observed_order();
  [[noreturn]] void refuse_change();
  bool flag_in_bucket() const;
  const at::Tensor& received_flag();
  [[noreturn]] void refuse_change_of_another();
  void shadow_pass();

  World world_;
  const DdpOptions options_;
  ModelTensors model_;
  ChangeDetector change_{world_, model_, options_};
  BucketSet buckets_{world_, model_, options_.gradient_as_bucket_view};
  PassState pass_{model_, buckets_, options_};
  PassEnd end_;
  JoinSession join_{world_};
  HookSet hooks_{model_, options_.gradient_as_bucket_view};

  bool passive_ = false;      // a world of one: nothing to reduce
  bool overlap_ = true;       // buckets are sent while backward runs
  bool rebuilt_ = false;      // the plan follows the observed order
  bool may_record_ = false;   // set_recording
  std::uint64_t layout_ = 0;  // plans made
  int no_sync_depth_ = 0;
  std::int64_t versions_before_ = -1;          // of the parameters, summed, at the last pass
  std::optional<ledger::Phase> phase_before_;  // the pass that runs
  BucketLimits limits_;
  CommHook hook_;
};

namespace {

BucketLimits limits_of(std::optional<double> bucket_cap_mb) {
  BucketLimits limits;
  if (!bucket_cap_mb) return limits;
  const double mb = *bucket_cap_mb;
  if (!(mb > 0))
    throw UsageError("reducer", "bucket_cap_mb = {} must be positive. 25 is the default.", mb);
  constexpr double kMaxMb = 1e9;  // above any model, and its bytes fit a 64-bit integer
  limits.cap_bytes = limits.first_cap_bytes =
      static_cast<std::int64_t>(std::min(mb, kMaxMb) * 1024 * 1024);
  return limits;
}

void verify_same(World& world, const Check& check, const char* kind,
                 const Fingerprints& fingerprints) {
  const auto difference = find_difference(world, check, fingerprints);
  if (!difference) return;
  throw CommError(
      "ddp",
      fmt::format(
          "replicas differ: {} '{}' on {} is not what it is on rank 0. Something changed "
          "it outside the synchronised step, or ranks took different steps. Change parameters "
          "on every rank alike (world.broadcast() does), and resume from a checkpoint.",
          kind, difference->name, show_ranks(difference->ranks)),
      {.rank = world.rank(), .peer = difference->ranks[0], .operation = "verify_replicas"});
}

}  // namespace

void ReducerImpl::start(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers) {
  const auto refusal = refusal_of([&] {
    limits_ = limits_of(options_.bucket_cap_mb);
    model_ = ModelTensors(std::move(parameters), std::move(buffers), options_);
    change_.accept();
  });
  passive_ = world_.size() == 1 && !options_.force_reducer;
  if (passive_ && refusal) std::rethrow_exception(refusal);
  pass_.expect(change_.forms());
  if (passive_) return;
  // Not earlier: the other ranks would wait here for a rank that has thrown.
  change_.check_same_model(refusal);
  if (pass_.missing().empty())
    throw UsageError("reducer",
                     "none of the model's {} parameters requires a gradient. There is "
                     "nothing to synchronise; use the module without wrapping it.",
                     model_.size());
  if (options_.init_sync) model_.broadcast(world_, 0);
  choose_overlap();
  limits_ = limits_as_set();
  plan_first();
}

// Sending buckets during backward pays while a core is free for it. Ranks that share memory and
// fill the cores would only take turns, and there large buckets are faster than small ones.
void ReducerImpl::choose_overlap() {
  overlap_ = options_.overlap.value_or(!world_.shares_memory());
  if (!options_.overlap && !overlap_) {
    const int cores = cores_of_ranks(world_);
    overlap_ =
        !all_ranks(world_, oversubscribed(world_.local_size(), at::get_num_threads(), cores));
  }
}

BucketLimits ReducerImpl::limits_as_set() const {
  constexpr std::int64_t kMinBytes = 4 << 20;
  BucketLimits limits = limits_of(options_.bucket_cap_mb);
  if (overlap_ || options_.bucket_cap_mb) return limits;
  limits.first_cap_bytes = limits.cap_bytes;
  limits.min_bytes = kMinBytes;
  return limits;
}

// The order in which gradients come, before it was observed.
std::vector<std::size_t> ReducerImpl::reverse_dense_order() const {
  auto order = reverse_order(model_.size());
  std::erase_if(order, [&](std::size_t i) { return !change_.trained(i) || model_[i].sparse; });
  return order;
}

void ReducerImpl::plan(const std::vector<std::size_t>& order) {
  ++layout_;
  buckets_.lay_out(change_.forms(), order, limits_);
  reset_pass();
}

void ReducerImpl::plan_first() {
  plan(reverse_dense_order());
  hooks_.install(weak_from_this(), change_.forms());
}

// ---------------------------------------------------------------- one gradient

void ReducerImpl::on_gradient(std::size_t parameter, const at::Tensor& arrived) {
  if (torch::GradMode::is_enabled())
    throw UsageError("reducer",
                     "backward(create_graph = true) reached parameter '{}'. Averaged "
                     "gradients cannot be differentiated again; for a gradient penalty use "
                     "torch::autograd::grad.",
                     model_[parameter].name);
  if (!begin_pass()) return;
  pass_[parameter].used = true;
  if (!change_.trained(parameter)) return;
  // The slot of a changed model may be of another kind; without no_sync() it is refused.
  if (!change_.stale()) buckets_.store(parameter, arrived, pass_.sync);
  if (pass_.sync && pass_.arrived(parameter) && overlap_) launch_ready();
}

// False in a backward that has been refused on another thread.
bool ReducerImpl::begin_pass() {
  const int task = NestedBackward::outer_task();
  if (pass_.task == task) return true;
  const auto lock = pass_.lock();
  if (pass_.task == task) return true;
  if (pass_.refused_task == task) return false;
  try {
    if (!pass_.running()) start_pass();
  } catch (...) {
    leave_phase();
    pass_.interrupt();
    pass_.refused_task = task;
    throw;
  }
  end_.queue(weak_from_this());
  pass_.task = task;
  return true;
}

void ReducerImpl::start_pass() {
  if (pass_.interrupted()) {
    if (pass_.launched > 0 && !pass_.recorded)
      throw CommError("reducer",
                      fmt::format("the previous backward was interrupted after {} of {} buckets "
                                  "had been sent, so ranks "
                                  "may be out of step. Restart from the last checkpoint.",
                                  pass_.launched, buckets_.size()),
                      {.rank = world_.rank()});
    close_pass();
  }
  phase_before_ = ledger::set_phase(ledger::Phase::kBackward);
  ledger::add(ledger::Counter::kMicroBatches);
  pass_.begin(/*synchronised=*/synchronises());
  pass_.recorded = recording(world_);
  if (pass_.recorded) check_recordable();
  if (pass_.sync && join_.active()) join_.exchange(true);
  if (!pass_.sync) {
    change_.look_at_known();  // new ones are refused by a pass that synchronises
  } else if (change_.look()) {
    refuse_change();
  }
  pass_.run();
  // Parameters that this backward will not reach count at once: no bucket waits for the end.
  if (!pass_.sync || !options_.find_unused_parameters || NestedBackward::active()) return;
  for (const std::size_t i : hooks_.unreached())
    if (change_.trained(i)) count_as_unused(i);
}

// A CUDA graph replays a pass's work on the device. Exchanges through the host, including the flag
// that announces a changed model, would not be replayed.
void ReducerImpl::check_recordable() {
  const char* reason = nullptr;
  if (change_.look()) reason = "the model was changed after it was wrapped";
  if (world_.size() > 1 && !may_record_)
    reason =
        "whoever records it does not know of the other ranks (CapturedStepOptions::parallelism)";
  const auto sparse = [](const ModelParameter& p) { return p.sparse; };
  if (pass_.sync && options_.broadcast_buffers && model_.has_cpu_buffers())
    reason = "it has buffers on the CPU, which are broadcast";
  if (pass_.sync && std::ranges::any_of(model_.parameters(), sparse))
    reason = "it has sparse gradients";
  if (pass_.sync && options_.find_unused_parameters) reason = "find_unused_parameters is set";
  if (pass_.sync && pass_.learns()) reason = "static_graph has not seen a backward yet";
  if (pass_.sync && !rebuilt_ && overlap_) reason = "buckets have not been planned from a backward";
  if (pass_.sync && join_.active()) reason = "it is inside join()";
  if (reason == nullptr) return;
  throw UsageError("reducer",
                   "this backward cannot be recorded into a CUDA graph: {}. Run it as it is.",
                   reason);
}

void ReducerImpl::count_as_unused(std::size_t parameter) {
  if (pass_[parameter].counted) return;
  buckets_.store_unused(parameter, /*save=*/!pass_[parameter].used);
  pass_.count(parameter);
}

// Returns the parameter's slot if autograd may write its gradient there. It is also called before
// the first hook of a pass, when the model may have changed since its buckets were laid out.
at::Tensor ReducerImpl::free_slot(std::size_t parameter) {
  const auto lock = pass_.lock();
  const at::Tensor& slot = buckets_.slot(parameter);
  if (pass_[parameter].counted || !slot.defined() || model_[parameter].tensor.grad().defined())
    return {};
  if (pass_.interrupted() || (pass_.running() ? change_.stale() : change_.changed())) return {};
  return hooks_.alone(parameter) ? slot : at::Tensor();
}

void ReducerImpl::on_watched_backward() {
  if (begin_pass() && pass_.sync && overlap_) launch_ready();
}

// ---------------------------------------------------------------- launching

void ReducerImpl::launch_ready() {
  const auto lock = pass_.lock();
  while (const auto index = pass_.next_ready()) {
    launch(*index);
    if (overlap_ || hook_) continue;
    // Nothing else to do: this thread carries the reduction out.
    const auto stamp = pass_.stamp_completion(*index);
    pass_.bucket(*index).reduction.work.wait();
    stamp();
  }
}

void ReducerImpl::launch(std::size_t index) {
  PassState::BucketProgress& bucket = pass_.bucket(index);
  const BucketMemory& memory = buckets_[index];
  // A shadow pass sends zeros.
  const at::Tensor wire = pass_.shadow ? at::zeros_like(memory.wire) : memory.wire;
  const at::Tensor flat = wire.narrow(0, 0, memory.flat.numel());
  const bool flagged = index == 0 && flag_in_bucket();
  if (index == 0 && !pass_.recorded)
    change_.send_flag(flagged ? wire.narrow(0, flat.numel(), 1) : at::Tensor());
  bucket.launched = PassState::Clock::now();
  if (hook_) {
    bucket.reduction = hook_(world_, buckets_.for_hook(index, flat));
  } else if (join_.divides_by_active()) {
    bucket.reduction = {world_.all_reduce(flagged ? wire : flat, ReduceOp::kSum),
                        [flat, n = join_.divisor()] { flat.div_(n); }};
  } else {
    bucket.reduction = {world_.all_reduce(flagged ? wire : flat, ReduceOp::kAvg), nullptr};
  }
  if (flat.is_cpu() && (overlap_ || hook_))
    bucket.reduction.work.on_completion(pass_.stamp_completion(index));
}

// ---------------------------------------------------------------- the end of a pass

void ReducerImpl::on_outer_backward() {
  const auto lock = pass_.lock();
  end_.saw_outer();
  const int task = NestedBackward::outer_task();
  if (!pass_.running() || pass_.task == task) return;
  end_.queue(weak_from_this());
  pass_.task = task;
}

void ReducerImpl::on_backward_abandoned() {
  const auto lock = pass_.lock();
  leave_phase();
  if (!passive_) pass_.interrupt();
}

void ReducerImpl::watch_alone(const at::Tensor& output) {
  if (!torch::GradMode::is_enabled() || !output.defined() || !output.grad_fn()) return;
  output.register_hook([listener = weak_from_this()](const at::Tensor&) {
    const auto alive = listener.lock();
    if (!alive || !alive->passive_ || alive->phase_before_) return;
    alive->phase_before_ = ledger::set_phase(ledger::Phase::kBackward);
    alive->end_.queue(listener);
  });
}

void ReducerImpl::on_backward_end() {
  if (passive_) return leave_phase();
  if (!pass_.running()) return;
  if (!pass_.sync) {
    if (hooks_.lost()) hooks_.install(weak_from_this(), change_.forms());
    close_pass();
    return;
  }
  // Inside a node of another backward: a nested one that nobody announced has ended.
  const auto outer = torch::autograd::get_current_node();
  if (!outer && end_.misses_outer())
    throw UsageError("reducer",
                     "an earlier backward did not finish after a nested one had computed gradients "
                     "of this model. It probably threw. Call zero_grad() and repeat the step.");
  if (!pass_.complete() || pass_.learns()) {
    // The outer backward may produce the missing gradients.
    if (outer && end_.leave_to(*outer, weak_from_this())) return;
    if (!pass_.learns() && !options_.find_unused_parameters)
      pass_.refuse_missing(world_.rank(), pass_.missing());
    for (const std::size_t i : pass_.missing()) {
      if (pass_[i].fired > 0) {
        pass_.count(i);
      } else {
        count_as_unused(i);
      }
    }
  }
  finalize();
}

void ReducerImpl::finalize() {
  torch::NoGradGuard no_grad;
  // This rank's gradients are there. What is still to be sent is not hidden behind backward.
  ledger::set_phase(ledger::Phase::kCommunication);
  mark_device_phase(ledger::Phase::kCommunication, world_.device());
  launch_ready();
  LOCKSTEP_ASSERT(pass_.launched == buckets_.size());
  if (!pass_.recorded) {
    if (buckets_.empty()) change_.send_flag({});
    if (received_flag().ne(0).item<bool>()) refuse_change_of_another();
  }
  const std::vector<bool> used = pass_.used_anywhere(world_);
  pass_.wait_for_buckets(/*finish=*/true);
  mark_device_phase(ledger::Phase::kNone, world_.device());
  count_pass();
  if (!pass_.shadow) count_update();
  if (!pass_.shadow) buckets_.publish(used);
  reduce_sparse(used);
  if (options_.broadcast_buffers) model_.broadcast_buffers(world_, join_.root());
  pass_.record_timing();
  if (pass_.learns()) pass_.learn(world_, join_.root());
  rebuild_from_observed_order();
  if (hooks_.lost()) hooks_.install(weak_from_this(), change_.forms());
  pass_.drop_used();
  ++pass_.step;
  close_pass();
  ledger::count_step();
}

void ReducerImpl::count_pass() const {
  if (pass_.shadow) return;
  ledger::add(ledger::Counter::kSynchronisedPasses);
  if (!options_.find_unused_parameters) return;
  ledger::add(ledger::Counter::kUnusedSearches);
  for (std::size_t i = 0; i < model_.size(); ++i) {
    if (!change_.trained(i) || pass_[i].used) continue;
    return ledger::add(ledger::Counter::kUnusedFound);
  }
}

// The step of any optimizer changes parameters in place. A pass that finds them unchanged since the
// last pass adds to the same gradients.
void ReducerImpl::count_update() {
  std::int64_t versions = 0;
  for (const ModelParameter& p : model_.parameters())
    if (!p.tensor.is_inference()) versions += static_cast<std::int64_t>(p.tensor._version());
  if (std::exchange(versions_before_, versions) != versions) ledger::add(ledger::Counter::kUpdates);
}

void ReducerImpl::reduce_sparse(const std::vector<bool>& used) {
  for (std::size_t i = 0; i < model_.size(); ++i) {
    const ModelParameter& p = model_[i];
    if (!p.sparse || !change_.trained(i)) continue;
    if (!used.empty() && !used[i]) continue;  // by no rank: .grad stays as it was
    at::Tensor& grad = p.tensor.mutable_grad();
    const at::Tensor sum =
        sum_sparse(world_, p.tensor, pass_.shadow ? at::Tensor() : grad, join_.divisor());
    if (!pass_.shadow && (sum._nnz() > 0 || grad.defined())) grad = sum;
  }
}

// The order in which gradients really came, as the root saw it, is better than the guess the first
// plan was made from. With unused parameters there is no one order, and without overlap it does
// not matter.
void ReducerImpl::rebuild_from_observed_order() {
  if (rebuilt_ || options_.find_unused_parameters || !overlap_) return;
  rebuilt_ = true;
  const auto order = pass_.observed(reverse_dense_order());
  at::Tensor agreed = at::tensor(std::vector<std::int64_t>(order.begin(), order.end()), at::kLong);
  world_.broadcast(agreed, join_.root()).wait();
  const auto* first = agreed.data_ptr<std::int64_t>();
  plan(std::vector<std::size_t>(first, first + agreed.numel()));
}

void ReducerImpl::close_pass() {
  leave_phase();
  reset_pass();
}

// Only if a pass has entered one: buckets are also laid out between steps and when a pass begins.
void ReducerImpl::leave_phase() {
  if (phase_before_) ledger::set_phase(*phase_before_);
  phase_before_.reset();
}

void ReducerImpl::reset_pass() {
  end_.forget();
  buckets_.drop_saved();
  pass_.reset();
}

// ---------------------------------------------------------------- a changed model

// At the first gradient of a synchronised pass, before anything was sent. The others learn of it at
// the end of that pass.
void ReducerImpl::refuse_change() {
  torch::NoGradGuard no_grad;
  pass_.shadow = true;
  if (buckets_.empty()) change_.send_flag({});
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    pass_.launched = i + 1;
    launch(i);
  }
  pass_.wait_for_buckets(/*finish=*/false);
  static_cast<void>(received_flag());
  pass_.launched = 0;
  change_.refuse();
}

// In the first bucket, where it costs nothing. Reading it there would make a host wait for its GPU,
// and a communication hook may do anything with a bucket: then it is a message of its own.
bool ReducerImpl::flag_in_bucket() const {
  return !hook_ && !buckets_.empty() && buckets_[0].wire.is_cpu();
}

const at::Tensor& ReducerImpl::received_flag() {
  if (flag_in_bucket()) pass_.bucket(0).reduction.work.wait();
  return change_.flag();
}

// Leaves this rank in step with the others.
void ReducerImpl::refuse_change_of_another() {
  pass_.wait_for_buckets(/*finish=*/false);
  pass_.drop_used();
  close_pass();
  change_.refuse();
}

// ---------------------------------------------------------------- uneven inputs

// A rank that has no more data issues the same operations, in the same order, as one that trains.
void ReducerImpl::shadow_pass() {
  torch::NoGradGuard no_grad;
  try {
    phase_before_ = ledger::set_phase(ledger::Phase::kCommunication);
    if (change_.look()) refuse_change();
    pass_.begin_shadow();
    finalize();
  } catch (...) {
    on_backward_abandoned();
    throw;
  }
}

}  // namespace parallel

Reducer::Reducer(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers, World world,
                 DdpOptions options)
    : impl_(std::make_shared<parallel::ReducerImpl>(std::move(world), std::move(options))) {
  impl_->start(std::move(parameters), std::move(buffers));
}
Reducer::~Reducer() = default;

void Reducer::set_sync(bool on) {
  impl_->no_sync_depth_ += on ? -1 : 1;
}
void Reducer::set_recording(bool on) {
  impl_->may_record_ = on;
}
std::uint64_t Reducer::layout() const {
  return impl_->layout_;
}

bool Reducer::settled() const {
  const parallel::ReducerImpl& impl = *impl_;
  if (impl.passive_) return true;
  const bool replans = !impl.rebuilt_ && impl.overlap_ && !impl.options_.find_unused_parameters;
  return !replans && !impl.pass_.learns() && !impl.change_.changed() &&
         impl.change_.new_parameters().empty();
}

const StepTiming& Reducer::last_timing() const {
  return impl_->pass_.timing;
}
std::size_t Reducer::bucket_count() const {
  return impl_->buckets_.size();
}
World& Reducer::world() {
  return impl_->world_;
}

void Reducer::follow(const torch::nn::Module& module) {
  impl_->change_.follow(module);
}

at::Tensor Reducer::watch(at::Tensor output) {
  if (impl_->passive_) impl_->watch_alone(output);
  if (impl_->passive_ || !torch::GradMode::is_enabled() || !output.defined() ||
      !output.is_floating_point())
    return output;
  // A backward that reaches only new parameters runs none of our hooks: look for them here.
  // Whether they are synchronised is decided by the backward.
  if (!impl_->options_.find_unused_parameters && !impl_->change_.look_for_new()) return output;
  return parallel::HookSet::watch(output, impl_->weak_from_this());
}

void Reducer::register_comm_hook(CommHook hook) {
  if (impl_->pass_.running())
    throw UsageError("reducer", "register_comm_hook was called during backward. Call it before.");
  if (impl_->hook_)
    throw UsageError("reducer", "a communication hook is already registered. One per model.");
  impl_->hook_ = std::move(hook);
}

void Reducer::join(const std::function<void()>& body, const JoinOptions& options) {
  if (impl_->passive_) return body();
  impl_->join_.begin(options);
  struct End {
    ~End() { session.end(); }
    parallel::JoinSession& session;
  } const end{impl_->join_};
  body();
  while (impl_->join_.exchange(false)) impl_->shadow_pass();
  impl_->model_.broadcast(impl_->world_, impl_->join_.root());
}

void Reducer::verify_replicas() {
  verify_parameters();
  verify_buffers();
}

void Reducer::verify_parameters() {
  parallel::verify_same(impl_->world_, {.component = "ddp", .what = "verify_replicas()"},
                        "parameter", impl_->model_.parameter_fingerprints());
}

void Reducer::verify_buffers() {
  parallel::verify_same(impl_->world_, {.component = "ddp", .what = "verify_replicas()"}, "buffer",
                        impl_->model_.buffer_fingerprints());
}

RecordedPasses::RecordedPasses(Reducer& reducer) : reducer_(reducer) {
  reducer_.set_recording(true);
}
RecordedPasses::~RecordedPasses() {
  reducer_.set_recording(false);
}

NoSync::NoSync(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {
  reducer_->set_sync(false);
}
NoSync::~NoSync() {
  if (reducer_) reducer_->set_sync(true);
}

}  // namespace lockstep
