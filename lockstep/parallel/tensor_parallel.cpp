#include "lockstep/parallel/tensor_parallel.h"

#include <fmt/ranges.h>
#include <torch/torch.h>

#include <unordered_map>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/optim/local_gradients.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/rule_state.h"
#include "lockstep/parallel/backward_hooks.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/prepared_block.h"
#include "lockstep/parallel/sharding.h"
#include "lockstep/parallel/tensor_slices.h"

namespace lockstep::parallel {

namespace {

nn::RowsPtr rows_of_slice(const SlicedParameter& p, const at::Tensor& slice) {
  return c10::make_intrusive<nn::Rows>(slice.reshape({-1}), 0, p.mine);
}

}  // namespace

class TensorParallelImpl : public std::enable_shared_from_this<TensorParallelImpl> {
 public:
  TensorParallelImpl(torch::nn::Module& module, Mesh mesh, DdpOptions options)
      : mesh_(std::move(mesh)),
        made_cut_(has_prepared_block(module)),
        slices_(cut(module, mesh_)),
        copies_(module, mesh_, std::move(options)) {
    // Blocks that were cut while they were read have each rank's file, not rank 0's values.
    if (made_cut_) verify_parameters();
  }

  const Mesh& mesh() const { return mesh_; }
  TensorSlices& slices() { return *slices_; }
  DataParallel& copies() { return copies_; }
  bool held() const { return !held_.expired(); }

  // The hooks refuse functions that look at all gradients, such as clip_grad_norm_: a rank has
  // slices of them. And they end a backward that is not this class's, after which an optimizer of
  // torch's may step.
  void install() {
    const std::weak_ptr<TensorParallelImpl> self = weak_from_this();
    using Variables = std::vector<at::Tensor>;
    for (const SlicedParameter& p : slices_->parameters()) {
      if (!p.tensor.requires_grad()) continue;
      accumulators_.push_back(torch::autograd::impl::grad_accumulator(p.tensor));
      accumulators_.back()->add_post_hook(std::make_unique<optim::GradientHook>(
          [self](const Variables& outputs, const Variables&) -> Variables {
            if (const auto alive = self.lock()) alive->note_backward();
            return outputs;
          },
          [self, cut = p.cut.has_value()] {
            const auto alive = self.lock();
            return cut && alive && !alive->stepping;
          }));
    }
  }

  void backward(const at::Tensor& loss, bool last) {
    slices_->check_backward();
    watch_.refuse_written(kTensorParallel);
    own_backward_ = true;
    const struct End {
      ~End() { on = false; }
      bool& on;
    } end{own_backward_};
    copies_.backward(loss, last);
    if (last) end_backward();
  }

  // Averages the remaining gradients, and refuses clipping of this rank's own.
  void end_backward() {
    slices_->average_gradients();
    watch_.forget();
    if (slices_->line().size() == 1) return;
    for (const SlicedParameter& p : slices_->parameters()) watch_.see(p.name, p.tensor);
  }
  optim::GradientWatch& watch() { return watch_; }

  std::shared_ptr<void> gathered() {
    slices_->gather();
    std::shared_ptr<void> held = held_.lock();
    if (!held) held_ = held = std::make_shared<int>();
    return held;
  }

  void verify_parameters() {
    copies_.verify_parameters();
    Fingerprints same;
    for (const SlicedParameter& p : slices_->parameters())
      if (!p.cut) same.add(p.name, p.tensor.detach());
    if (slices_->line().size() > 1)
      require_same(slices_->line(), {.component = kTensorParallel, .what = "this comparison"},
                   "parameter", " along 'tensor'", same);
  }

  void verify_buffers() {
    require_same(mesh_.world(), {.component = kTensorParallel, .what = "this comparison"}, "buffer",
                 "", slices_->model().buffer_fingerprints());
  }

  // While it is set, gradients are what the functions of lockstep/optim may use.
  bool stepping = false;

 private:
  void note_backward() {
    const int task = NestedBackward::outer_task();
    if (own_backward_ || task == task_) return;
    watch_.refuse_written(kTensorParallel);
    task_ = task;
    NestedBackward::at_end([self = weak_from_this()] {
      if (const auto alive = self.lock()) alive->end_backward();
    });
  }

  static bool has_prepared_block(const torch::nn::Module& module) {
    bool found = false;
    each_block(module, [&](const std::string&, const auto&, const nn::Block& block) {
      found = found || Prepared::of(block) != nullptr;
    });
    return found;
  }

  // Rank 0's values, as slices.
  static std::unique_ptr<TensorSlices> cut(torch::nn::Module& module, const Mesh& mesh) {
    std::unique_ptr<TensorSlices> slices;
    const auto refusal = refusal_of([&] {
      if (mesh.size("shard") > 1 || mesh.size("pipeline") > 1)
        throw UsageError(kTensorParallel,
                         "the mesh ({}) has ranks along axes other than 'data' and 'tensor'. Leave "
                         "them out, or make a FullyShard or a Pipeline with it.",
                         mesh.text());
      check_blocks(module, mesh, kTensorParallel);
      slices = std::make_unique<TensorSlices>(module, mesh["tensor"]);
    });
    const auto other = find_other_line(
        mesh.world(), {.component = kTensorParallel, .what = "this module", .refusal = refusal},
        slices ? slices->describe() + describe_prepared(module) : "");
    if (other)
      throw UsageError(kTensorParallel,
                       "rank {} has '{}', but rank 0 has '{}'. Ranks hold slices of one model. "
                       "Build the same one, from the same seed, on every rank.",
                       other->rank, other->here, other->first);
    slices->model().broadcast(mesh.world(), 0);
    slices->cut();
    // Files have whole tensors. The first rank writes the uncut ones.
    for (const SlicedParameter& p : slices->parameters())
      nn::set_rows(p.tensor, p.cut ? rows_of_slice(p, p.tensor.detach()) : nullptr);
    each_block(module, [](const std::string&, const auto&, nn::Block& block) {
      block.run_with(nullptr);  // that were cut while they were made
    });
    return slices;
  }

  Mesh mesh_;
  bool made_cut_;
  std::unique_ptr<TensorSlices> slices_;
  DataParallel copies_;                                               // of the slices
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // that have hooks
  std::weak_ptr<void> held_;
  optim::GradientWatch watch_;
  bool own_backward_ = false;
  int task_ = -1;  // the last backward that is not this class's
};

namespace {

using optim::TensorDict;

// Each rank steps its slices, and all of them what every rank has.
class TensorParallelOptimizer final : public optim::Optimizer {
 public:
  TensorParallelOptimizer(std::shared_ptr<TensorParallelImpl> model,
                          std::vector<optim::ParamGroup> groups);

  optim::StepResult step(const optim::StepOptions& options = {}) override;
  void zero_grad() override {
    model_->watch().reset();
    own_->zero_grad();
  }
  TensorDict state_dict(const optim::StateDictOptions& options = {}) override;
  void load_state_dict(const TensorDict& state) override;
  std::int64_t state_bytes() const override { return own_->state_bytes(); }

 private:
  struct Member {
    const SlicedParameter* p = nullptr;
    std::size_t group = 0;
  };

  World& line() const { return model_->slices().line(); }
  at::Tensor norm() const;
  void scale(const at::Tensor& factor) const;
  void step_own(const optim::StepOptions& options);
  // Calls `body` with the key and the state of each member, as it is for the whole parameter.
  template <typename Body>
  void each_state(const Body& body);

  std::shared_ptr<TensorParallelImpl> model_;
  std::vector<Member> members_;  // in the module's order
  std::unique_ptr<optim::Optimizer> own_;
};

TensorParallelOptimizer::TensorParallelOptimizer(std::shared_ptr<TensorParallelImpl> model,
                                                 std::vector<optim::ParamGroup> groups)
    : Optimizer(groups), model_(std::move(model)) {
  const TensorSlices::AsSlices shapes(&model_->slices());
  std::unordered_map<at::TensorImpl*, std::size_t> group_of;
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const at::Tensor& param : groups[g].params) group_of[param.unsafeGetTensorImpl()] = g;
  optim::NamedParameters names;
  for (const SlicedParameter& p : model_->slices().parameters()) {
    const auto found = group_of.find(p.tensor.unsafeGetTensorImpl());
    if (found == group_of.end()) continue;
    members_.push_back({&p, found->second});
    names.emplace_back(p.name, p.tensor);
    if (p.cut) TensorSlices::check_rule(groups[found->second].options, p.name);
  }
  if (members_.size() != group_of.size())
    throw UsageError(kTensorParallel,
                     "{} of {} parameters in the groups are not the model's. Take them from the "
                     "module that it was made with.",
                     group_of.size() - members_.size(), group_of.size());
  own_ = std::make_unique<optim::ReplicatedOptimizer>(std::move(names), std::move(groups));
}

// ---------------------------------------------------------------- a step

// Over all ranks; what every rank has counts once. Ranks along "data" have the same.
at::Tensor TensorParallelOptimizer::norm() const {
  at::Tensor squares = at::zeros({1}, at::dtype(at::kDouble).device(line().device()));
  for (const Member& m : members_) {
    const at::Tensor& grad = m.p->tensor.grad();
    if (!grad.defined() || (!m.p->cut && line().rank() > 0)) continue;
    squares += at::linalg_vector_norm(grad, 2, std::nullopt, false, at::kDouble)
                   .square()
                   .to(squares.device());
  }
  if (line().size() > 1) line().all_reduce(squares).wait();
  return squares.sqrt().reshape({});
}

void TensorParallelOptimizer::scale(const at::Tensor& factor) const {
  for (const Member& m : members_) {
    at::Tensor grad = m.p->tensor.grad();
    if (grad.defined()) grad.mul_(factor.to(grad.device(), grad.scalar_type()));
  }
}

void TensorParallelOptimizer::step_own(const optim::StepOptions& options) {
  for (std::size_t g = 0; g < groups(); ++g) own_->options(g) = Optimizer::options(g);
  own_->step(options);
}

optim::StepResult TensorParallelOptimizer::step(const optim::StepOptions& options) {
  const ledger::PhaseScope phase(ledger::Phase::kOptimizer);
  const torch::NoGradGuard no_grad;
  optim::detail::check(options);
  for (const auto& group : param_groups())
    optim::refuse_incomplete(group.params(), kTensorParallel);
  struct Stepping {
    explicit Stepping(bool& on) : on(on) { on = true; }
    ~Stepping() { on = false; }
    bool& on;
  } const stepping(model_->stepping);
  model_->slices().cut();
  model_->watch().refuse_written(kTensorParallel);
  model_->watch().reset();
  model_->slices().average_gradients();  // if no backward was the last
  return step_divided(this, options,
                      {.norm = [this] { return norm(); },
                       .scale = [this](const at::Tensor& factor) { scale(factor); },
                       .step = [this](const optim::StepOptions& own) { step_own(own); }});
}

// ---------------------------------------------------------------- state

template <typename Body>
void TensorParallelOptimizer::each_state(const Body& body) {
  for (const Member& m : members_)
    for (const optim::StateSpec& spec : Optimizer::options(m.group)->state(m.p->sizes))
      body(*m.p, m.p->name + "." + spec.name, spec);
}

// One tensor at a time, so that a rank which wants none never holds more than one whole.
TensorDict TensorParallelOptimizer::state_dict(const optim::StateDictOptions& options) {
  const torch::NoGradGuard no_grad;
  const TensorSlices::AsSlices shapes(&model_->slices());
  TensorDict mine = own_->state_dict({.copy = options.copy && options.wanted});
  each_state([&](const SlicedParameter& p, const std::string& key, const optim::StateSpec& spec) {
    const auto found = mine.find(key);
    if (found == mine.end() || at::IntArrayRef(spec.sizes) != at::IntArrayRef(p.sizes)) return;
    if (options.divided && p.cut) {
      const at::Tensor& own = found->second;
      found->second = nn::divided(own.sizes(), own.options(), rows_of_slice(p, own));
    }
    if (options.divided) return;
    const at::Tensor slice = found->second.to(line().device());
    const at::Tensor whole = model_->slices().whole_of(p, slice);
    if (options.wanted && p.cut) found->second = whole.to(found->second.device());
  });
  return options.wanted || options.divided ? mine : TensorDict{};
}

void TensorParallelOptimizer::load_state_dict(const TensorDict& state) {
  const torch::NoGradGuard no_grad;
  const TensorSlices::AsSlices shapes(&model_->slices());
  TensorDict mine = state;
  each_state([&](const SlicedParameter& p, const std::string& key, const optim::StateSpec& spec) {
    const auto found = mine.find(key);
    if (found == mine.end() || at::IntArrayRef(spec.sizes) != at::IntArrayRef(p.sizes)) return;
    if (found->second.sizes() != at::IntArrayRef(p.sizes))
      throw UsageError(kTensorParallel,
                       "the state '{}' has shape [{}], and its parameter [{}]. It is another "
                       "model's. Load the state that was saved with this model.",
                       key, fmt::join(found->second.sizes(), ", "), fmt::join(p.sizes, ", "));
    found->second = model_->slices().slice_of(p, found->second);
  });
  own_->load_state_dict(mine);
}

}  // namespace
}  // namespace lockstep::parallel

// ---------------------------------------------------------------- TensorParallel

namespace lockstep {

TensorParallel::TensorParallel(torch::nn::Module& module, Mesh mesh, DdpOptions options)
    : impl_(std::make_shared<parallel::TensorParallelImpl>(module, std::move(mesh),
                                                           std::move(options))) {
  if (impl_->mesh().size("tensor") > 1) impl_->install();
}

TensorParallel::~TensorParallel() = default;

const Mesh& TensorParallel::mesh() const {
  return impl_->mesh();
}

std::string TensorParallel::text() const {
  return fmt::format("in slices on {} tensor parallel rank{}", mesh().size("tensor"),
                     mesh().size("tensor") == 1 ? "" : "s");
}

std::unique_ptr<optim::Optimizer> TensorParallel::make_optimizer(
    std::vector<optim::ParamGroup> groups) {
  return std::make_unique<parallel::TensorParallelOptimizer>(impl_, std::move(groups));
}

void TensorParallel::before_forward() {
  impl_->watch().refuse_written(parallel::kTensorParallel);  // an optimizer of torch's does not
  if (!impl_->held() || at::GradMode::is_enabled()) impl_->slices().cut();
}

at::Tensor TensorParallel::watch(at::Tensor output) {
  return impl_->copies().watch(std::move(output));
}

void TensorParallel::backward(const at::Tensor& loss, bool last) {
  detail::check_samples(mesh(), parallel::kTensorParallel);
  impl_->backward(loss, last);
}

std::shared_ptr<void> TensorParallel::gathered() {
  return impl_->gathered();
}

bool TensorParallel::divided() const {
  return mesh().size("tensor") > 1;
}

void TensorParallel::verify_parameters() {
  impl_->verify_parameters();
}

void TensorParallel::verify_buffers() {
  impl_->verify_buffers();
}

std::string TensorParallel::unavailable_for_capture() const {
  return "tensor parallel ranks exchange activations inside a step";
}

}  // namespace lockstep
