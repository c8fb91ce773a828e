// The optimizer of a Pipeline: each rank steps the parameters of its stages, by any rule.
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/rule_state.h"
#include "lockstep/parallel/divided.h"
#include "lockstep/parallel/pipeline_impl.h"

namespace lockstep::parallel {
namespace {

using optim::TensorDict;

struct StageMember {
  const StagedParameter* p = nullptr;
  std::size_t group = 0;
};

class PipelineOptimizer final : public optim::Optimizer {
 public:
  PipelineOptimizer(std::shared_ptr<PipelineImpl> model, std::vector<optim::ParamGroup> groups);

  optim::StepResult step(const optim::StepOptions& options = {}) override;
  void zero_grad() override;
  TensorDict state_dict(const optim::StateDictOptions& options = {}) override;
  void load_state_dict(const TensorDict& state) override;
  std::int64_t state_bytes() const override { return own_->state_bytes(); }

 private:
  World& line() const { return model_->line(); }
  // The rank whose copy counts and is saved.
  bool owns(const StageMember& m) const { return m.p->holders[0] == line().rank(); }
  at::Tensor norm() const;
  void scale(const at::Tensor& factor);
  void step_own(const optim::StepOptions& options);
  at::Tensor steps_taken(const TensorDict& mine) const;

  std::shared_ptr<PipelineImpl> model_;
  std::vector<StageMember> members_;       // of all ranks, in the module's order
  std::unique_ptr<optim::Optimizer> own_;  // of this rank's parameters
};

PipelineOptimizer::PipelineOptimizer(std::shared_ptr<PipelineImpl> model,
                                     std::vector<optim::ParamGroup> groups)
    : Optimizer(groups), model_(std::move(model)) {
  std::unordered_map<at::TensorImpl*, std::size_t> group_of;
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const at::Tensor& param : groups[g].params)
      if (group_of.emplace(param.unsafeGetTensorImpl(), g).first->second != g)
        throw UsageError(kPipeline, "a parameter of shape [{}] is in two groups. Put it into one.",
                         fmt::join(param.sizes(), ", "));
  for (optim::ParamGroup& group : groups) group.params.clear();
  optim::NamedParameters names;
  for (const StagedParameter& p : model_->parameters()) {
    const auto found = group_of.find(p.tensor.unsafeGetTensorImpl());
    if (found == group_of.end()) continue;
    members_.push_back({&p, found->second});
    if (!p.mine) continue;
    groups[found->second].params.push_back(p.tensor);
    names.emplace_back(p.name, p.tensor);
  }
  if (members_.size() != group_of.size())
    throw UsageError(kPipeline,
                     "{} of {} parameters in the groups are not the pipeline's. Take them from the "
                     "module that it was made with.",
                     group_of.size() - members_.size(), group_of.size());
  own_ = std::make_unique<optim::ReplicatedOptimizer>(std::move(names), std::move(groups));
}

// ---------------------------------------------------------------- a step

// Over all stages; a weight that several hold counts once. Ranks along "data" have the same.
at::Tensor PipelineOptimizer::norm() const {
  at::Tensor squares = at::zeros({1}, at::dtype(at::kDouble).device(line().device()));
  for (const StageMember& m : members_) {
    const at::Tensor& grad = m.p->tensor.grad();
    if (!owns(m) || !grad.defined()) continue;
    squares += at::linalg_vector_norm(grad, 2, std::nullopt, false, at::kDouble)
                   .square()
                   .to(squares.device());
  }
  if (line().size() > 1) line().all_reduce(squares).wait();
  return squares.sqrt().reshape({});
}

void PipelineOptimizer::scale(const at::Tensor& factor) {
  for (const StageMember& m : members_) {
    at::Tensor grad = m.p->tensor.grad();
    if (m.p->mine && grad.defined()) grad.mul_(factor.to(grad.device(), grad.scalar_type()));
  }
}

void PipelineOptimizer::step_own(const optim::StepOptions& options) {
  for (std::size_t g = 0; g < groups(); ++g) own_->options(g) = Optimizer::options(g);
  own_->step(options);
}

optim::StepResult PipelineOptimizer::step(const optim::StepOptions& options) {
  const ledger::PhaseScope phase(ledger::Phase::kOptimizer);
  const torch::NoGradGuard no_grad;
  optim::detail::check(options);
  struct Stepping {
    explicit Stepping(bool& on) : on(on) { on = true; }
    ~Stepping() { on = false; }
    bool& on;
  } const stepping(model_->stepping);
  if (line().size() > 1) model_->free_others();  // copies would be of the step before
  return step_divided(this, options,
                      {.norm = [this] { return norm(); },
                       .scale = [this](const at::Tensor& factor) { scale(factor); },
                       .step = [this](const optim::StepOptions& own) { step_own(own); }});
}

void PipelineOptimizer::zero_grad() {
  for (const StageMember& m : members_) at::Tensor(m.p->tensor).mutable_grad() = at::Tensor();
}

// ---------------------------------------------------------------- state

// The steps of each parameter, from the rank that owns it; below zero where it has no state.
at::Tensor PipelineOptimizer::steps_taken(const TensorDict& mine) const {
  at::Tensor steps = at::full({static_cast<std::int64_t>(members_.size())}, -1.0, at::kDouble);
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const auto found = mine.find(members_[i].p->name + ".step");
    if (found != mine.end()) steps[static_cast<std::int64_t>(i)] = found->second.item<double>();
  }
  steps = steps.to(line().device());
  if (line().size() > 1) line().all_reduce(steps, ReduceOp::kMax).wait();
  return steps.cpu();
}

// One tensor at a time, so that a rank which wants none never holds more than one of others.
TensorDict PipelineOptimizer::state_dict(const optim::StateDictOptions& options) {
  const torch::NoGradGuard no_grad;
  const TensorDict mine = own_->state_dict({.copy = false});
  const at::Tensor steps = steps_taken(mine);
  TensorDict all;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const StageMember& m = members_[i];
    const auto taken = steps[static_cast<std::int64_t>(i)].item<double>();
    if (taken < 0) continue;
    const at::TensorOptions like = m.p->tensor.options().requires_grad(false);
    for (const optim::StateSpec& spec : Optimizer::options(m.group)->state(m.p->tensor.sizes())) {
      const std::string key = m.p->name + "." + spec.name;
      const at::TensorOptions type =
          like.dtype(optim::dtype_of(spec, m.p->tensor.scalar_type())).device(line().device());
      at::Tensor whole = owns(m) ? mine.at(key).to(type).contiguous() : at::empty(spec.sizes, type);
      if (line().size() > 1) line().broadcast(whole, m.p->holders[0]).wait();
      if (options.wanted)
        all[key] = whole.to(at::kCPU, whole.scalar_type(), /*non_blocking=*/false, options.copy);
    }
    if (options.wanted) all[m.p->name + ".step"] = at::scalar_tensor(taken, at::kDouble);
  }
  return all;
}

// The same checks on every rank, also of what it does not hold, so that all refuse or none.
void PipelineOptimizer::load_state_dict(const TensorDict& state) {
  optim::detail::StateReader reader(kPipeline, state);
  TensorDict mine;
  for (const StageMember& m : members_) {
    const std::string& name = m.p->name;
    if (!m.p->tensor.requires_grad() && !state.contains(name + ".step")) continue;
    for (const optim::StateSpec& spec : Optimizer::options(m.group)->state(m.p->tensor.sizes())) {
      const std::string key = name + "." + spec.name;
      const at::Tensor& whole = reader.tensor(key, spec.sizes);
      if (m.p->mine) mine[key] = whole;
    }
    const at::Tensor& step = reader.number(name + ".step");
    if (m.p->mine) mine[name + ".step"] = step;
  }
  reader.finish();
  own_->load_state_dict(mine);
}

}  // namespace

std::unique_ptr<optim::Optimizer> make_pipeline_optimizer(std::shared_ptr<PipelineImpl> model,
                                                          std::vector<optim::ParamGroup> groups) {
  return std::make_unique<PipelineOptimizer>(std::move(model), std::move(groups));
}

}  // namespace lockstep::parallel
