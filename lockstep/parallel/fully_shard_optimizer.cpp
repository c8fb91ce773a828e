// The optimizer of a FullyShard and of a Pipeline: steps this rank's rows of its stages'
// parameters, and whole tensors for rules that need them.
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/kernels/step.h"
#include "lockstep/optim/cpu_step.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/optim/rule_state.h"
#include "lockstep/parallel/fully_shard_impl.h"
#include "lockstep/parallel/replicas.h"
#include "lockstep/parallel/sharding.h"
#include "lockstep/parallel/step_agreement.h"

namespace lockstep::parallel {
namespace {

using optim::TensorDict;

struct Member {
  ShardedParameter* p = nullptr;
  std::size_t group = 0;
  int owner = -1;                // steps it whole; -1: every rank steps its rows
  at::Tensor whole{};            // on its owner; has bytes in a step alone
  std::size_t index = 0;         // among the model's parameters
  std::int64_t first_block = 0;  // of the norm, where blocks_ counts them
  at::Tensor averaged{};         // rows of a gradient that every rank has in shared memory
  std::vector<double> sums{};    // of their squares, by block, where averaging has given them
};

class FullyShardOptimizer final : public optim::Optimizer {
 public:
  FullyShardOptimizer(std::shared_ptr<FullyShardImpl> model, std::vector<optim::ParamGroup> groups);

  optim::StepResult step(const optim::StepOptions& options = {}) override;
  void zero_grad() override;
  TensorDict state_dict(const optim::StateDictOptions& options = {}) override;
  void load_state_dict(const TensorDict& state) override;
  std::int64_t state_bytes() const override {
    return rows_->state_bytes() + (tensors_ ? tensors_->state_bytes() : 0);
  }
  void sync_from_model() override { model_->take_whole(); }

 private:
  World& shard() const { return model_->shard(); }
  World& line() const { return model_->line(); }
  bool divides() const {
    return model_->divides() || line().size() > 1 || model_->slices() != nullptr;
  }
  void find_members(const std::vector<optim::ParamGroup>& groups);
  void count_blocks();
  void deal_whole_tensors();
  void make_parts(const std::vector<optim::ParamGroup>& groups);
  bool holds_rows(const Member& m) const;
  bool steps_here(const Member& m) const;
  void check_step(const optim::StepOptions& options);
  void take_gradients(const optim::StepOptions& options);
  StepAgreement::Details trained() const;
  at::Tensor agree(const Check& check);
  void take_shared(const SharedGradients& gradients, const at::Tensor& flags);
  bool has_kernel(const Member& m) const;
  at::Tensor norm() const;
  at::Tensor norm_by_blocks() const;
  void scale(const at::Tensor& factor);
  void step_parts(const optim::StepOptions& options);
  at::Tensor gather_whole(const Member& m, const at::Tensor& mine) const;
  void scatter_whole(const Member& m) const;
  at::Tensor steps_taken(const TensorDict& mine) const;
  at::Tensor whole_state(const Member& m, const optim::StateSpec& spec, const TensorDict& mine);
  void read_state(const TensorDict& state, TensorDict& rows, TensorDict& tensors,
                  Fingerprints* read);
  at::Tensor divided_state(const Member& m, const optim::StateSpec& spec,
                           const TensorDict& mine) const;

  std::shared_ptr<FullyShardImpl> model_;
  StepAgreement agreement_;
  std::vector<Member> members_;  // of all ranks, in the module's order
  std::unique_ptr<optim::Optimizer> rows_;
  std::unique_ptr<optim::Optimizer> tensors_;  // null: no rule takes whole ones
  optim::SplitGradients split_;                // what the next step averages itself
  std::int64_t blocks_ = 0;                    // of the norm; 0: rows have other blocks
  std::size_t listed_ = 0;                     // parameters in the groups
};

template <typename Groups>
std::size_t count_listed(const Groups& groups) {
  std::size_t count = 0;
  for (const auto& group : groups) count += group.params().size();
  return count;
}

// Returns the sums of the average's squares, by block. An undefined `out` is not written.
template <typename T>
std::vector<double> average_by_kernel(const at::Tensor& out, const optim::SplitGradient& split) {
  const optim::detail::Sources<T> sources(split.sources);
  const std::int64_t count = split.sources[0].numel();
  const std::int64_t blocks = kernels::norm_blocks(count);
  std::vector<double> sums(static_cast<std::size_t>(blocks));
  T* const to = out.defined() ? out.mutable_data_ptr<T>() : nullptr;
  optim::detail::share_out(blocks, kernels::kNormBlock, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t begin = first * kernels::kNormBlock;
    const std::int64_t end = std::min(last * kernels::kNormBlock, count);
    const optim::detail::Sources<T> here = sources.after(begin);
    kernels::reduce_with_norms(here.gradient(split), to == nullptr ? to : to + begin, end - begin,
                               sums.data() + first);
  });
  return sums;
}

// For half types, sums in float are rounded once, and their squares are not known.
std::vector<double> average_into(const at::Tensor& out, const optim::SplitGradient& split) {
  const at::ScalarType type = split.sources[0].scalar_type();
  if (type == at::kFloat) return average_by_kernel<float>(out, split);
  if (type == at::kDouble) return average_by_kernel<double>(out, split);
  at::Tensor sum = split.sources[0].to(at::kFloat, false, /*copy=*/true);
  for (std::size_t i = 1; i < split.sources.size(); ++i) sum.add_(split.sources[i]);
  at::Tensor(out).view({-1}).copy_(sum.div_(split.divisor));
  return {};
}

double sum_of(const std::vector<double>& blocks) {
  return kernels::add_blocks(blocks.data(), static_cast<std::int64_t>(blocks.size()));
}

// ---------------------------------------------------------------- parameters and their owners

FullyShardOptimizer::FullyShardOptimizer(std::shared_ptr<FullyShardImpl> model,
                                         std::vector<optim::ParamGroup> groups)
    : Optimizer(groups),
      model_(std::move(model)),
      agreement_(model_->mesh().world(), *this, model_->component()) {
  const auto refusal = refusal_of([&] {
    find_members(groups);
    const TensorSlices::AsSlices shapes(model_->slices());
    count_blocks();
    deal_whole_tensors();
    make_parts(groups);
  });
  listed_ = count_listed(param_groups());
  if (model_->defers()) {
    std::string members;
    for (const Member& m : members_) members += fmt::format("{} in group {}\n", m.p->name, m.group);
    agreement_.agree_on_making(refusal, members);
  } else if (refusal) {
    std::rethrow_exception(refusal);
  }
}

void FullyShardOptimizer::find_members(const std::vector<optim::ParamGroup>& groups) {
  std::unordered_map<at::TensorImpl*, std::size_t> group_of;
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const at::Tensor& param : groups[g].params)
      if (group_of.emplace(param.unsafeGetTensorImpl(), g).first->second != g)
        throw UsageError(model_->component(),
                         "a parameter of shape [{}] is in two groups. Put it into one.",
                         fmt::join(param.sizes(), ", "));
  for (std::size_t i = 0; i < model_->parameters().size(); ++i) {
    ShardedParameter* const p = model_->parameters()[i];
    const auto found = group_of.find(p->tensor.unsafeGetTensorImpl());
    if (found == group_of.end()) continue;
    members_.push_back({.p = p, .group = found->second, .index = i});
    if (p->sliced != nullptr) TensorSlices::check_rule(groups[found->second].options, p->name);
  }
  if (members_.size() != group_of.size())
    throw UsageError(model_->component(),
                     "{} of {} parameters in the groups are not the divided model's. Take them "
                     "from the module that it was made with.",
                     group_of.size() - members_.size(), group_of.size());
}

// With Shard::kState rows begin at blocks, and the norm is the same at any number of ranks.
void FullyShardOptimizer::count_blocks() {
  const auto has_blocks = [](const Member& m) {
    return optim::detail::has_kernel(m.p->tensor.scalar_type(), m.p->tensor.device());
  };
  if (model_->shards() != Shard::kState || !std::ranges::all_of(members_, has_blocks)) return;
  for (Member& m : members_)
    m.first_block = std::exchange(blocks_, blocks_ + kernels::norm_blocks(m.p->tensor.numel()));
}

// In a world of one the rows are the whole tensor.
void FullyShardOptimizer::deal_whole_tensors() {
  if (shard().size() == 1) return;
  std::vector<std::size_t> dealt;
  std::vector<std::int64_t> sizes;
  std::vector<double> costs;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const optim::Rule& rule = Optimizer::options(members_[i].group);
    if (members_[i].p->absent || rule->granularity() != optim::Granularity::kTensors) continue;
    dealt.push_back(i);
    sizes.push_back(members_[i].p->tensor.numel());
    costs.push_back(rule->cost(members_[i].p->tensor.sizes()));
  }
  if (dealt.empty()) return;
  const std::vector<int> owners = deal_tensors(sizes, costs, shard().size());
  for (std::size_t i = 0; i < dealt.size(); ++i) members_[dealt[i]].owner = owners[i];
  for (Member& m : members_) {
    if (m.owner != shard().rank()) continue;
    const at::Tensor& like = m.p->tensor;
    m.whole = at::empty(like.sizes(), m.p->rows->values.options());
    m.whole.set_requires_grad(true);
    nn::empty_storage(m.whole.storage());
  }
}

bool FullyShardOptimizer::holds_rows(const Member& m) const {
  return m.owner < 0 && !m.p->absent && (m.p->shard.numel() > 0 || m.p->tensor.numel() == 0);
}

bool FullyShardOptimizer::steps_here(const Member& m) const {
  return m.owner < 0 ? holds_rows(m) : m.owner == shard().rank();
}

void FullyShardOptimizer::make_parts(const std::vector<optim::ParamGroup>& groups) {
  std::vector<optim::ParamGroup> of_rows, of_tensors;
  for (const optim::ParamGroup& group : groups) {
    of_rows.push_back({{}, group.options});
    of_tensors.push_back({{}, group.options});
  }
  optim::NamedParameters row_names, tensor_names;
  bool any_dealt = false;
  for (const Member& m : members_) {
    any_dealt |= m.owner >= 0;
    if (!steps_here(m)) continue;
    const at::Tensor& stepped = m.owner < 0 ? m.p->shard : m.whole;
    (m.owner < 0 ? of_rows : of_tensors)[m.group].params.push_back(stepped);
    (m.owner < 0 ? row_names : tensor_names).emplace_back(m.p->name, stepped);
  }
  rows_ = std::make_unique<optim::ReplicatedOptimizer>(row_names, std::move(of_rows));
  for (const Member& m : members_)
    if (m.owner < 0 && steps_here(m)) rows_->set_begin(m.p->shard, m.p->rows->begin);
  if (any_dealt)
    tensors_ = std::make_unique<optim::ReplicatedOptimizer>(tensor_names, std::move(of_tensors));
}

// ---------------------------------------------------------------- a step

void FullyShardOptimizer::check_step(const optim::StepOptions& options) {
  optim::detail::check(options);
  optim::detail::check_groups(model_->component(), param_groups());
  if (count_listed(param_groups()) != listed_)
    throw UsageError(model_->component(),
                     "the groups have {} parameters instead of {}: some were added or removed. "
                     "Make a new optimizer.",
                     count_listed(param_groups()), listed_);
  if (model_->failed())
    throw UsageError(model_->component(),
                     "step() came after a backward that failed, so that gradients are incomplete. "
                     "Call zero_grad() and run the passes of the step again.");
  model_->check_kept();
  if (model_->unreduced())
    throw UsageError(model_->component(),
                     "step() found gradients of this rank alone. Call the last backward() before a "
                     "step with last = true, and zero_grad() where there is none.");
  model_->watch().refuse_written(model_->component());
}

StepAgreement::Details FullyShardOptimizer::trained() const {
  std::string marks;
  for (const Member& m : members_) marks += m.p->tensor.requires_grad() ? '+' : '-';
  return {.print = fingerprint(marks.data(), marks.size()), .text = [this] {
            std::string text;
            for (const Member& m : members_)
              text += fmt::format("{} is {}\n", m.p->name,
                                  m.p->tensor.requires_grad() ? "trained" : "frozen");
            return text;
          }};
}

// With Shard::kState: what one rank refuses none steps. Returns which gradients there are. Behind
// these stands for each rank whether it has had a pass: buffers are those of the first that has.
at::Tensor FullyShardOptimizer::agree(const Check& check) {
  SharedGradients* const shared = model_->shared_gradients();
  World& world = model_->mesh().world();
  const auto count = static_cast<std::int64_t>(shared != nullptr ? model_->parameters().size() : 1);
  at::Tensor flags = at::zeros({count + world.size()}, at::kByte);
  const at::Tensor gradients = flags.narrow(0, 0, count);
  if (!check.refusal && shared != nullptr) shared->place(gradients);
  if (!check.refusal && shared == nullptr) gradients.fill_(model_->deferred() ? 1 : 0);
  flags[count + world.rank()] = model_->deferred() ? 1 : 0;
  flags = agreement_.exchange(check, flags, trained());
  const auto* const passed = flags.const_data_ptr<std::uint8_t>() + count;
  const auto* const first = std::find(passed, passed + world.size(), 1);
  model_->send_buffers(first == passed + world.size() ? 0 : static_cast<int>(first - passed));
  flags = flags.narrow(0, 0, count);
  if (shared != nullptr)
    shared->make_room(flags);
  else if (flags.item<bool>())
    model_->reduce_deferred();
  return flags;
}

// Takes backward's result from .grad of the model's parameters: this rank's rows of the average.
void FullyShardOptimizer::take_gradients(const optim::StepOptions& options) {
  const Check check{.component = model_->component(),
                    .what = "this step",
                    .refusal = refusal_of([&] { check_step(options); })};
  if (check.refusal && !model_->defers()) std::rethrow_exception(check.refusal);
  if (!check.refusal) model_->watch().reset();
  agreement_.settings = StepSettings::of(options);
  const at::Tensor flags = model_->defers() ? agree(check) : at::Tensor();
  if (model_->slices() != nullptr) model_->slices()->average_gradients();  // if none did
  const SharedGradients* const shared = model_->shared_gradients();
  model_->each_parameter([&](ShardedParameter& p) {
    p.shard.set_requires_grad(p.tensor.requires_grad());
    p.shard.mutable_grad() = shared != nullptr ? at::Tensor() : p.tensor.grad();
  });
  if (shared != nullptr) take_shared(*shared, flags);
}

bool FullyShardOptimizer::has_kernel(const Member& m) const {
  const at::ScalarType type = m.p->tensor.scalar_type();
  if (m.owner >= 0 || !optim::detail::has_kernel(type, m.p->tensor.device())) return false;
  const optim::SpanKernels kernels = rows_->options(m.group)->kernels();
  return type == at::kFloat ? kernels.float32 != nullptr : kernels.float64 != nullptr;
}

// Every rank's gradients are averaged where they lie: by the kernel of the step, in the same pass,
// or first, where the norm of the average must be known before. Writing the average and reading it
// back is three passes over memory (a line is read before it is written); summing again in the step
// is as many as there are ranks, and pays up to two.
void FullyShardOptimizer::take_shared(const SharedGradients& gradients, const at::Tensor& flags) {
  constexpr int kSummedTwice = 2;
  split_.by_parameter.clear();
  const auto* const used = flags.const_data_ptr<std::uint8_t>();
  const bool in_one_pass = !agreement_.settings.two_passes();
  const int ranks = shard().size();
  for (Member& m : members_) {
    ShardedParameter& p = *m.p;
    m.sums.clear();
    if (used[m.index] == 0 || !p.tensor.requires_grad()) continue;
    const std::int64_t count = p.rows->values.numel();
    const optim::SplitGradient split{gradients.parts(m.index, p.rows->begin, count),
                                     static_cast<double>(ranks)};
    if ((in_one_pass || ranks <= kSummedTwice) && count > 0 && has_kernel(m)) {
      if (!in_one_pass) m.sums = average_into({}, split);
      const at::Tensor& mine = split.sources[static_cast<std::size_t>(shard().rank())];
      p.shard.mutable_grad() = alias_of(mine, 0, p.shard.sizes());
      split_.by_parameter.emplace(p.shard.unsafeGetTensorImpl(), split);
      continue;
    }
    if (!m.averaged.defined())
      m.averaged = at::empty(p.shard.sizes(), p.shard.options().requires_grad(false));
    m.sums = average_into(m.averaged, split);
    p.shard.mutable_grad() = m.averaged;
  }
}

// The norm of all gradients, on their device, equal on every rank. Ranks along "data" have equal
// gradients, stages that share a weight have its gradient, and ranks along "tensor" those of uncut
// parameters: each counts once.
at::Tensor FullyShardOptimizer::norm() const {
  if (blocks_ > 0) return norm_by_blocks();
  const c10::Device device = members_.empty() || model_->offloads()
                                 ? c10::Device(c10::kCPU)
                                 : members_[0].p->tensor.device();
  at::Tensor squares = at::zeros({1}, at::dtype(at::kDouble).device(device));
  double by_blocks = 0;
  for (const Member& m : members_) {
    if (m.p->holders[0] != line().rank()) continue;
    if (m.p->sliced == nullptr && model_->tensor().rank() > 0) continue;
    const at::Tensor& grad = m.p->shard.grad();
    if (!grad.defined() || grad.numel() == 0) continue;
    const bool has_blocks =
        grad.is_contiguous() && optim::detail::has_kernel(grad.scalar_type(), grad.device());
    if (!m.sums.empty() || has_blocks)
      by_blocks += sum_of(m.sums.empty() ? average_into({}, {.sources = {grad}}) : m.sums);
    else
      squares +=
          at::linalg_vector_norm(grad, 2, std::nullopt, false, at::kDouble).square().to(device);
  }
  squares += by_blocks;
  for (World* const ranks : {&shard(), &line(), &model_->tensor()})
    if (ranks->size() > 1) ranks->all_reduce(squares).wait();
  return squares.sqrt().reshape({});
}

// The norm from sums of blocks, in the order of parameters, as a replicated optimizer has it.
at::Tensor FullyShardOptimizer::norm_by_blocks() const {
  const at::Tensor all = at::zeros({blocks_}, at::kDouble);
  auto* const sums = all.mutable_data_ptr<double>();
  for (const Member& m : members_) {
    const at::Tensor& grad = m.p->shard.grad();
    if (!grad.defined() || grad.numel() == 0) continue;
    const at::Tensor dense = grad.is_non_overlapping_and_dense() ? grad : grad.contiguous();
    std::ranges::copy(m.sums.empty() ? average_into({}, {.sources = {dense}}) : m.sums,
                      sums + m.first_block + m.p->rows->begin / kernels::kNormBlock);
  }
  if (shard().size() > 1) {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    shard().all_reduce(all).wait();
  }
  return at::scalar_tensor(std::sqrt(kernels::add_blocks(sums, blocks_)), at::kDouble);
}

void FullyShardOptimizer::scale(const at::Tensor& factor) {
  SharedGradients* const shared = model_->shared_gradients();
  for (const Member& m : members_) {
    if (m.p->absent) continue;
    at::Tensor grad = m.p->shard.grad();
    if (!grad.defined()) continue;
    if (shared != nullptr) shared->scale(m.index, factor.item<double>());
    // The kernel of the step multiplies what ranks share.
    at::TensorImpl* const stepped = m.p->shard.unsafeGetTensorImpl();
    if (const auto found = split_.by_parameter.find(stepped); found != split_.by_parameter.end())
      found->second.scale = factor.item<double>();
    else if (grad.is_same(m.averaged) && has_kernel(m))
      split_.by_parameter[stepped] = {.sources = {grad}, .scale = factor.item<double>()};
    else if (grad.is_cpu())
      grad.mul_(factor.item<double>());  // not rounded to the gradient's type
    else
      grad.mul_(factor.to(grad.device(), grad.scalar_type()));
  }
}

optim::StepResult FullyShardOptimizer::step(const optim::StepOptions& options) {
  const ledger::PhaseScope phase(ledger::Phase::kOptimizer);
  const torch::NoGradGuard no_grad;
  if (model_->slices() != nullptr) model_->slices()->cut();
  take_gradients(options);
  if (model_->defers()) ledger::add(ledger::Counter::kSynchronisedPasses);  // of all passes, once
  if (!model_->defers()) model_->before_rows_change();  // there all ranks have come already
  const optim::StepResult result =
      step_divided(this, options,
                   {.norm = [this] { return norm(); },
                    .scale = [this](const at::Tensor& factor) { scale(factor); },
                    .step = [this](const optim::StepOptions& of_parts) { step_parts(of_parts); }});
  // A graph that was kept across the step must not be walked with the new values.
  for (const Member& m : members_)
    if (!m.p->absent && m.p->shard.grad().defined())
      m.p->tensor.unsafeGetTensorImpl()->bump_version();
  model_->free_all();
  model_->after_rows_change();
  return result;
}

void FullyShardOptimizer::step_parts(const optim::StepOptions& options) {
  for (std::size_t g = 0; g < groups(); ++g) rows_->options(g) = Optimizer::options(g);
  if (split_.by_parameter.empty())
    rows_->step(options);
  else
    rows_->step_split(split_);
  if (!tensors_) return;
  for (std::size_t g = 0; g < groups(); ++g) tensors_->options(g) = Optimizer::options(g);
  for (Member& m : members_) {
    if (m.owner < 0 || !m.p->shard.grad().defined()) continue;
    const at::Tensor grad = gather_whole(m, m.p->shard.grad().reshape({-1}));
    const at::Tensor values = gather_whole(m, m.p->rows->values);
    if (!m.whole.defined()) continue;
    m.whole.mutable_grad() = grad;
    nn::fill_storage(m.whole.storage(), values);
  }
  tensors_->step(options);
  for (Member& m : members_) {
    if (m.owner < 0 || !m.p->shard.grad().defined()) continue;
    scatter_whole(m);
    if (!m.whole.defined()) continue;
    m.whole.mutable_grad() = at::Tensor();
    nn::empty_storage(m.whole.storage());
  }
}

// Joins the ranks' flat parts as one tensor in the parameter's shape, on its owner.
at::Tensor FullyShardOptimizer::gather_whole(const Member& m, const at::Tensor& mine) const {
  const at::Tensor rows = at::zeros({m.p->cut.padded()}, mine.options());
  rows.narrow(0, 0, mine.numel()).copy_(mine);
  std::vector<at::Tensor> parts;
  at::Tensor all;
  if (m.owner == shard().rank()) {
    all = at::empty({shard().size(), rows.numel()}, rows.options());
    parts = all.unbind(0);
  }
  shard().gather(parts, rows, m.owner).wait();
  if (!all.defined()) return {};
  at::Tensor whole = at::empty(m.p->tensor.sizes(), rows.options());
  copy_from_parts(m.p->cut, all, whole);
  return whole;
}

void FullyShardOptimizer::scatter_whole(const Member& m) const {
  const at::Tensor& mine = m.p->rows->values;
  const at::Tensor rows = at::empty({m.p->cut.padded()}, mine.options());
  std::vector<at::Tensor> parts;
  if (m.owner == shard().rank()) {
    const at::Tensor all = at::zeros({shard().size(), rows.numel()}, rows.options());
    copy_to_parts(m.p->cut, m.whole.detach(), all);
    parts = all.unbind(0);
  }
  shard().scatter(rows, parts, m.owner).wait();
  at::Tensor(mine).copy_(rows.narrow(0, 0, mine.numel()));
}

void FullyShardOptimizer::zero_grad() {
  model_->each_parameter([](ShardedParameter& p) { p.shard.mutable_grad() = at::Tensor(); });
  model_->forget_gradients();
}

// ---------------------------------------------------------------- state

// The steps of each parameter, from a rank that steps it; below zero where it has no state.
at::Tensor FullyShardOptimizer::steps_taken(const TensorDict& mine) const {
  at::Tensor steps = at::full({static_cast<std::int64_t>(members_.size())}, -1.0, at::kDouble);
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const auto found = mine.find(members_[i].p->name + ".step");
    if (found != mine.end()) steps[static_cast<std::int64_t>(i)] = found->second.item<double>();
  }
  if (!divides()) return steps;
  steps = steps.to(shard().device());
  for (World* const ranks : {&shard(), &line()})
    if (ranks->size() > 1) ranks->all_reduce(steps, ReduceOp::kMax).wait();
  return steps.cpu();
}

at::Tensor FullyShardOptimizer::whole_state(const Member& m, const optim::StateSpec& spec,
                                            const TensorDict& mine) {
  const at::Tensor& like = m.p->tensor;
  const at::TensorOptions options =
      like.options().dtype(optim::dtype_of(spec, like.scalar_type())).requires_grad(false);
  const auto found = mine.find(m.p->name + "." + spec.name);
  at::Tensor whole;
  if (m.owner < 0 && shard().size() > 1 && !m.p->absent) {
    const at::Tensor rows = found != mine.end() ? found->second.to(options).reshape({-1})
                                                : at::zeros({m.p->shard.numel()}, options);
    whole = at::cat(shard().all_gather_v(rows)).view(like.sizes());
  } else {
    whole = found != mine.end() ? found->second.to(options).contiguous()
                                : at::zeros(spec.sizes, options);
    if (m.owner >= 0) shard().broadcast(whole, m.owner).wait();
  }
  if (line().size() > 1) line().broadcast(whole, m.p->holders[0]).wait();
  return m.p->sliced != nullptr ? model_->slices()->whole_of(*m.p->sliced, whole) : whole;
}

// This rank's rows, or all of a tensor that it steps whole. Empty for other stages' parameters.
at::Tensor FullyShardOptimizer::divided_state(const Member& m, const optim::StateSpec& spec,
                                              const TensorDict& mine) const {
  const at::Tensor& like = m.p->rows->values;
  const at::TensorOptions options = like.options().dtype(optim::dtype_of(spec, like.scalar_type()));
  const auto found = mine.find(m.p->name + "." + spec.name);
  const std::int64_t missing = m.owner < 0 && !m.p->absent ? m.p->shard.numel() : 0;
  at::Tensor values =
      found != mine.end() ? found->second.to(options).reshape({-1}) : at::zeros({missing}, options);
  const std::int64_t begin = m.owner < 0 ? m.p->rows->begin : 0;
  const auto slice = m.p->sliced != nullptr ? m.p->sliced->mine : nullptr;
  return nn::divided(spec.sizes, options,
                     c10::make_intrusive<nn::Rows>(std::move(values), begin, slice));
}

// One tensor at a time, so that a rank which wants none never holds more than one.
TensorDict FullyShardOptimizer::state_dict(const optim::StateDictOptions& options) {
  const torch::NoGradGuard no_grad;
  const TensorSlices::AsSlices shapes(model_->slices());
  TensorDict mine = rows_->state_dict({.copy = false});
  if (tensors_) mine.merge(tensors_->state_dict({.copy = false}));
  const at::Tensor steps = steps_taken(mine);
  TensorDict all;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const Member& m = members_[i];
    const auto taken = steps[static_cast<std::int64_t>(i)].item<double>();
    if (taken < 0) continue;
    for (const optim::StateSpec& spec : Optimizer::options(m.group)->state(m.p->tensor.sizes())) {
      if (options.divided && divides()) {
        all[m.p->name + "." + spec.name] = divided_state(m, spec, mine);
        continue;
      }
      at::Tensor whole = whole_state(m, spec, mine);
      if (!options.wanted) continue;
      // What a rank has alone may still be the optimizer's own memory.
      all[m.p->name + "." + spec.name] = whole.to(at::kCPU, whole.scalar_type(),
                                                  /*non_blocking=*/false, /*copy=*/options.copy);
    }
    if (options.wanted || options.divided)
      all[m.p->name + ".step"] = at::scalar_tensor(taken, at::kDouble);
  }
  return all;
}

// The same checks on every rank, also of what it does not hold, so that all refuse or none. Where
// parameters are whole, the ranks compare what they have read.
void FullyShardOptimizer::load_state_dict(const TensorDict& state) {
  const torch::NoGradGuard no_grad;
  const TensorSlices::AsSlices shapes(model_->slices());
  TensorDict rows, tensors;
  Fingerprints read;
  if (!model_->keeps()) {
    read_state(state, rows, tensors, nullptr);
  } else {
    const auto refusal = refusal_of([&] { read_state(state, rows, tensors, &read); });
    const auto difference = find_difference(
        model_->mesh().world(),
        {.component = model_->component(), .what = "load_state_dict()", .refusal = refusal}, read);
    if (difference)
      throw UsageError(model_->component(),
                       "load_state_dict(): '{}' on {} is not what it is on rank 0. Perhaps a rank "
                       "has read another checkpoint. Load the same state on every rank.",
                       difference->name, show_ranks(difference->ranks));
  }
  rows_->load_state_dict(rows);
  if (tensors_) tensors_->load_state_dict(tensors);
}

// This rank's parts of `state`, for the optimizers of rows and of whole tensors.
void FullyShardOptimizer::read_state(const TensorDict& state, TensorDict& rows, TensorDict& tensors,
                                     Fingerprints* read) {
  optim::detail::StateReader reader(model_->component(), state);
  for (const Member& m : members_) {
    const std::string& name = m.p->name;
    if (!m.p->tensor.requires_grad() && !state.contains(name + ".step")) continue;
    TensorDict& mine = m.owner < 0 ? rows : tensors;
    const at::IntArrayRef sizes = m.p->sliced != nullptr ? m.p->sliced->sizes : m.p->tensor.sizes();
    for (const optim::StateSpec& spec : Optimizer::options(m.group)->state(sizes)) {
      const std::string key = name + "." + spec.name;
      at::Tensor whole = reader.tensor(key, spec.sizes);
      if (read != nullptr && nn::rows_of(whole) == nullptr)
        read->add(key, whole.to(optim::dtype_of(spec, m.p->tensor.scalar_type())));
      if (!steps_here(m)) continue;
      if (m.p->sliced != nullptr) whole = m.p->sliced->mine->of(whole);
      const std::int64_t begin = m.p->cut.begin(shard().rank()) * m.p->cut.row_size;
      mine[key] =
          m.owner >= 0 || shard().size() == 1
              ? whole
              : whole.reshape({-1}).narrow(0, begin, m.p->shard.numel()).view(m.p->shard.sizes());
    }
    const at::Tensor& step = reader.number(name + ".step");
    if (read != nullptr) read->add(name + ".step", step.to(at::kDouble));
    if (steps_here(m)) mine[name + ".step"] = step;
  }
  reader.finish();
}

}  // namespace

std::unique_ptr<optim::Optimizer> make_fully_shard_optimizer(
    std::shared_ptr<FullyShardImpl> model, std::vector<optim::ParamGroup> groups) {
  return std::make_unique<FullyShardOptimizer>(std::move(model), std::move(groups));
}

}  // namespace lockstep::parallel
