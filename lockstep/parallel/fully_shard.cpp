#include "lockstep/parallel/fully_shard.h"

#include <ATen/autocast_mode.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/nn/fp8.h"
#include "lockstep/optim/local_gradients.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/fully_shard_impl.h"
#include "lockstep/parallel/prepared_block.h"
#include "lockstep/parallel/sharding.h"

namespace lockstep::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---------------------------------------------------------------- in the graph

struct InGraph : torch::CustomClassHolder {
  std::weak_ptr<FullyShardImpl> model;
  std::size_t unit = 0;
  ProductType computed;
};
using InGraphPtr = c10::intrusive_ptr<InGraph>;

InGraphPtr graph_of(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<InGraph>(context->saved_data["unit"].toCapsule());
}

// Wraps a block's output: its backward runs before that of everything in the block.
class BeforeBackward : public torch::autograd::Function<BeforeBackward> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& output,
                            const InGraphPtr& graph) {
    context->saved_data["unit"] = c10::IValue::make_capsule(graph);
    return output.view_as(output);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const InGraphPtr graph = graph_of(context);
    if (const auto model = graph->model.lock())
      model->before_unit_backward(graph->unit, graph->computed);
    return {gradients[0], at::Tensor()};
  }
};

// Wraps a block's inputs: made before everything in the block, its backward runs after all of it,
// because the engine takes the newest node among those that are ready.
class AfterBackward : public torch::autograd::Function<AfterBackward> {
 public:
  static variable_list forward(AutogradContext* context, const InGraphPtr& graph,
                               at::TensorList inputs) {
    context->saved_data["unit"] = c10::IValue::make_capsule(graph);
    context->set_materialize_grads(false);
    variable_list outputs;
    for (const at::Tensor& input : inputs) outputs.push_back(input.view_as(input));
    return outputs;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const InGraphPtr graph = graph_of(context);
    if (const auto model = graph->model.lock()) model->after_unit_backward(graph->unit);
    variable_list result{at::Tensor()};
    result.insert(result.end(), gradients.begin(), gradients.end());
    return result;
  }
};

}  // namespace

// ---------------------------------------------------------------- the module

FullyShardImpl::FullyShardImpl(torch::nn::Module& module, Mesh mesh, FullyShardOptions options)
    : mesh_(std::move(mesh)),
      shard_(mesh_["shard"]),
      data_(mesh_["data"]),
      line_(mesh_["pipeline"]),
      of_pipeline_(false),
      options_(options),
      offloads_(offloads_from(mesh_, options.cpu_offload)),
      alone_(mesh_.batch().size() == 1 && !offloads_),
      local_(alone_) {
  World& world = mesh_.world();
  const auto refusal = refusal_of([&] {
    check_mesh(mesh_);
    check_blocks(module, mesh_, kFullyShard);
    model_ = ModelTensors(parameters_of(module), buffers_of(module), {});
    for (const auto& type : {options_.param_dtype, options_.reduce_dtype})
      if (type && !at::isFloatingType(*type))
        throw UsageError(kFullyShard,
                         "param_dtype and reduce_dtype are floating-point types, and {} is none. "
                         "Write torch::kBFloat16, or leave it out.",
                         c10::toString(*type));
    if (model_.size() == 0)
      throw UsageError(kFullyShard, "the module has no parameters, so there is nothing to shard.");
    check_mode(options_, tensor().size() > 1 ? "ranks along 'tensor'" : "");
    if (options_.shard != Shard::kAll) check_shardable(module);
    if (tensor().size() > 1) slices_ = std::make_unique<TensorSlices>(module, tensor());
  });
  const auto other =
      find_other_line(world, {.component = kFullyShard, .what = "this module", .refusal = refusal},
                      describe(module));
  if (other)
    throw UsageError(kFullyShard,
                     "rank {} has '{}', but rank 0 has '{}'. Ranks hold parts of one model. Build "
                     "the same one, with the same options and from the same seed, on every rank.",
                     other->rank, other->here, other->first);
  model_.broadcast(world, 0);
  if (slices_) slices_->cut();
  make_units(module, {});
  stage_ = &stages_[0];
  stage_->units.assign(units_.size(), true);
  free_absent();
}

// Buffers are the pipeline's.
FullyShardImpl::FullyShardImpl(const torch::nn::Module& module, Mesh mesh,
                               FullyShardOptions options, OfPipeline pipeline)
    : mesh_(std::move(mesh)),
      shard_(mesh_["shard"]),
      data_(mesh_["data"]),
      line_(mesh_["pipeline"]),
      of_pipeline_(true),
      options_(options),
      offloads_(offloads_from(mesh_, options.cpu_offload)),
      model_(parameters_of(module), {}, {}),
      slices_(std::move(pipeline.slices)),
      alone_(mesh_.batch().size() == 1 && !offloads_),
      local_(alone_) {
  make_units(module, pipeline.holders);
  free_absent();
}

std::string FullyShardImpl::describe(const torch::nn::Module& module) const {
  const auto type = [](const std::optional<c10::ScalarType>& given) {
    return given ? c10::toString(*given) : "own";
  };
  std::string text = fmt::format(
      "shard: {}\nreshard_after_forward: {}\nreduce_every_backward: {}\nbroadcast_buffers: {}\n"
      "param_dtype: {}\nreduce_dtype: {}\ncpu_offload: {}\n",
      name(options_.shard), options_.reshard_after_forward, options_.reduce_every_backward,
      options_.broadcast_buffers, type(options_.param_dtype), type(options_.reduce_dtype),
      options_.cpu_offload);
  text += describe_prepared(module);
  if (slices_) text += slices_->describe();
  for (const ModelParameter& p : model_.parameters())
    text += fmt::format("{}: {}, shape [{}]{}\n", p.name, c10::toString(p.tensor.scalar_type()),
                        fmt::join(nn::whole_sizes(p.tensor), ", "),
                        p.tensor.requires_grad() ? "" : ", frozen");
  return text + model_.describe_buffers();
}

// A parameter belongs to the innermost block around it, and to the root where it is in none. One
// that is tied across units is the root's, which is whole while any of them computes. A block of
// another rank's stages is a unit without parameters.
void FullyShardImpl::make_units(const torch::nn::Module& module, const Holders& holders) {
  std::vector<std::string> names;
  each_block(module, [&](const std::string& name, const auto& of_block, nn::Block& block) {
    names.push_back(name);
    blocks_.push_back({of_block, &block});
  });
  const std::size_t root = blocks_.size();
  const auto innermost = [&](const std::string& parameter) {
    std::size_t found = root;
    for (std::size_t i = 0; i < root; ++i)
      if (parameter.starts_with(names[i] + ".") &&
          (found == root || names[i].size() > names[found].size()))
        found = i;
    return found;
  };
  std::unordered_map<at::TensorImpl*, std::size_t> unit_of;
  for (const auto& item : module.named_parameters()) {
    const std::size_t unit = innermost(item.key());
    auto [found, fresh] = unit_of.emplace(item.value().unsafeGetTensorImpl(), unit);
    if (!fresh && found->second != unit) found->second = root;
  }
  std::vector<ShardUnit::Named> members(root + 1);
  for (const ModelParameter& p : model_.parameters()) {
    at::TensorImpl* const tensor = p.tensor.unsafeGetTensorImpl();
    const auto held = holders.find(tensor);
    if (held == holders.end() || std::ranges::count(held->second, line_.rank()) > 0)
      members[unit_of.at(tensor)].emplace_back(p.name, p.tensor);
    else
      absent_.push_back(make_absent(p));
  }
  names.emplace_back();
  for (std::size_t i = 0; i <= root; ++i) {
    Prepared::Part* const prepared = i < root ? Prepared::of(*blocks_[i].block) : nullptr;
    if (prepared == nullptr || !prepared->unit) {
      units_.emplace_back(names[i], members[i], shard_);
    } else {
      units_.push_back(std::move(*prepared->unit));
      units_.back().complete(names[i], members[i]);
    }
    if (offloads_) units_.back().offload();
  }
  for (ShardUnit& unit : units_)
    unit.travel_as({.gather = options_.param_dtype, .reduce = options_.reduce_dtype});
  for (std::size_t i = 0; i < root; ++i) units_[i].set_products(blocks_[i].block->products());
  // Rows that are sent in another type cannot be read in place.
  shares_ = !options_.param_dtype && share_rows(units_, shard_);
  if (options_.shard != Shard::kAll) {
    for (ShardUnit& unit : units_) unit.keep(options_.shard == Shard::kState);
    kept_.emplace(units_, shard_, shares_);
  }
  wait_for_ranks();
  if (kept_) kept_->remember();
  list_parameters(holders);
}

// A tiny exchange that a rank passes when all along "shard" have come. What is shared needs it
// where other ranks' messages were awaited before: between writing rows and reading them.
void FullyShardImpl::wait_for_ranks() {
  if (!shares_) return;
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  shard_.all_reduce(at::zeros({1}, at::kByte), ReduceOp::kMax).wait();
}

void FullyShardImpl::before_rows_change() {
  if (offloads_) wait_for_copies(mesh_.world().device());
  wait_for_ranks();
}

ShardedParameter FullyShardImpl::make_absent(const ModelParameter& p) const {
  const at::NoGradGuard no_grad;
  if (nn::rows_of(p.tensor) == nullptr) own_memory(p.tensor);  // not freed while it was made
  return {.name = p.name,
          .tensor = p.tensor,
          .cut = cut_rows(p.tensor.sizes(), shard_.size()),
          .freed = absent_storage(p.name, p.tensor),
          .rows = no_rows(p.tensor),
          .absent = true};
}

// The list's elements do not move from here on.
void FullyShardImpl::list_parameters(const Holders& holders) {
  std::unordered_map<at::TensorImpl*, ShardedParameter*> found;
  const auto find = [&](ShardedParameter& p) { found[p.tensor.unsafeGetTensorImpl()] = &p; };
  each_parameter(find);
  std::ranges::for_each(absent_, find);
  for (const ModelParameter& p : model_.parameters()) {
    at::TensorImpl* const tensor = p.tensor.unsafeGetTensorImpl();
    all_.push_back(found.at(tensor));
    all_.back()->sliced = slices_ ? slices_->find(p.tensor) : nullptr;
    if (all_.back()->sliced != nullptr) all_.back()->rows->slice = all_.back()->sliced->mine;
    if (const auto held = holders.find(tensor); held != holders.end())
      all_.back()->holders = held->second;
  }
}

void FullyShardImpl::add_stage(int stage, const std::vector<at::Tensor>& parameters) {
  stage_ = &stages_[stage];
  std::vector<bool>& has = stage_->units;
  has.assign(units_.size(), false);
  for (std::size_t i = 0; i < units_.size(); ++i)
    has[i] = std::ranges::any_of(units_[i].parameters(), [&](const ShardedParameter& p) {
      return std::ranges::any_of(parameters,
                                 [&](const at::Tensor& each) { return each.is_same(p.tensor); });
    });
}

std::vector<std::string> FullyShardImpl::unit_names() const {
  std::vector<std::string> names;
  for (const ShardUnit& unit : units_) names.push_back(unit.name());
  return names;
}

void FullyShardImpl::each_parameter(const std::function<void(ShardedParameter&)>& visit) {
  for (ShardUnit& unit : units_)
    for (ShardedParameter& p : unit.parameters()) visit(p);
}

// The hooks refuse loss.backward(), clipping and optimizers of torch's: .grad is not what they
// need.
void FullyShardImpl::install() {
  const std::weak_ptr<FullyShardImpl> self = weak_from_this();
  // Otherwise nothing comes and goes, or is averaged.
  const bool runs = options_.shard != Shard::kState && (!of_pipeline_ || divides());
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    nn::Block::Runner runner;
    if (runs)
      runner = [self, i](const nn::Block::Body& body, std::vector<at::Tensor> inputs) {
        const auto alive = self.lock();
        return alive ? alive->run_block(i, body, std::move(inputs)) : body(inputs);
      };
    blocks_[i].block->run_with(std::move(runner));
  }
  const auto check = [self](const std::string& name) {
    if (const auto alive = self.lock()) alive->check_backward(name);
  };
  if (defers() && shares_ && data_.size() == 1 && !options_.reduce_dtype) {
    shared_gradients_ = std::make_shared<SharedGradients>(model_, shard_, check);
    if (shared_gradients_->install()) return;
    shared_gradients_.reset();
  }
  each_parameter([&](ShardedParameter& p) {
    if (!p.tensor.requires_grad()) return;
    auto accumulator = torch::autograd::impl::grad_accumulator(p.tensor);
    using Variables = std::vector<at::Tensor>;
    accumulator->add_post_hook(std::make_unique<optim::GradientHook>(
        [check, name = p.name](const Variables& outputs, const Variables&) -> Variables {
          check(name);
          return outputs;
        },
        [self] { return !self.expired(); }));
    accumulators_.push_back(std::move(accumulator));
  });
}

void FullyShardImpl::check_backward(const std::string& parameter) const {
  if (in_backward_) return;
  if (of_pipeline_)
    throw UsageError(kPipeline,
                     "a backward reached parameter '{}' past run_window(), which adds up and "
                     "averages gradients at its end. Give run_window() a function that computes "
                     "the loss.",
                     parameter);
  throw UsageError(kFullyShard,
                   "a backward reached parameter '{}' past FullyShard::backward(), which averages "
                   "and divides gradients at its end. Call model.backward(loss) instead of "
                   "loss.backward().",
                   parameter);
}

// ---------------------------------------------------------------- forward

void FullyShardImpl::begin_window() {
  if (!held()) {
    free_all();
    wait_for_ranks();
  }
  in_window_ = true;
  forget_amax();
}

void FullyShardImpl::end_window() {
  in_window_ = false;
  if (!held()) free_all();
}

// A training forward computes with slices, even while gathered() is held: tensors taken from
// parameters meanwhile stay whole.
void FullyShardImpl::before_forward(int stage) {
  if (slices_ && slices_->whole()) {
    if (!held()) free_all();
    if (torch::GradMode::is_enabled()) slices_->cut();
  }
  stage_ = &stages_.at(stage);
  stage_->order.clear();
  if (!held() && !in_window_ && options_.reshard_after_forward)
    for (std::size_t i = 0; i < blocks_.size(); ++i) units_[i].free();  // that gathered() has left
  // Weights may have been loaded into rows, by each rank in its time.
  if (!held() && !in_window_ && !keeps()) wait_for_ranks();
  if (!in_window_) forget_amax();
  units_.back().gather({});
}

// The type in which a forward on this thread computes products.
ProductType FullyShardImpl::computed_here() const {
  const auto device = mesh_.world().device().type();
  ProductType computed;
  if (at::autocast::is_autocast_enabled(device))
    computed.type = at::autocast::get_autocast_dtype(device);
  computed.fp8 = nn::Fp8Autocast::current();
  return computed;
}

// One exchange for all blocks, before the first block of a forward in fp8, because rows may have
// been written since the last one.
void FullyShardImpl::exchange_amax(const ProductType& computed) {
  if (computed.fp8 != nn::Fp8Recipe::kTensorwise || has_amax_ || in_backward_ || held()) return;
  has_amax_ = true;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> rows;
  for (const ShardUnit& unit : units_)
    for (at::Tensor& each : unit.fp8_rows())  // a rank may have none of a parameter
      rows.push_back(each.numel() > 0 ? std::move(each) : at::zeros({1}, each.options()));
  if (rows.empty()) return;
  const at::Tensor all = at::stack(at::_foreach_norm(rows, INFINITY)).to(at::kFloat);
  {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    shard_.all_reduce(all, ReduceOp::kMax).wait();
  }
  std::int64_t begin = 0;
  for (ShardUnit& unit : units_) {
    const auto count = static_cast<std::int64_t>(unit.fp8_rows().size());
    if (count > 0) unit.set_amax(all.narrow(0, std::exchange(begin, begin + count), count));
  }
}

void FullyShardImpl::forget_amax() {
  if (!std::exchange(has_amax_, false)) return;
  for (ShardUnit& unit : units_) unit.set_amax({});
}

at::Tensor FullyShardImpl::run_block(std::size_t unit, const nn::Block::Body& body,
                                     std::vector<at::Tensor> inputs) {
  const bool makes_graph = torch::GradMode::is_enabled();
  auto graph = c10::make_intrusive<InGraph>();
  graph->model = weak_from_this();
  graph->unit = unit;
  graph->computed = computed_here();
  if (makes_graph) {
    std::vector<at::Tensor> differentiable;
    for (const at::Tensor& input : inputs)
      if (input.defined() && input.requires_grad()) differentiable.push_back(input);
    std::size_t next = 0;
    if (!differentiable.empty()) {
      const variable_list marked = AfterBackward::apply(graph, at::TensorList(differentiable));
      for (at::Tensor& input : inputs)
        if (input.defined() && input.requires_grad()) input = marked[next++];
    }
  }
  exchange_amax(graph->computed);
  units_[unit].gather(graph->computed);
  // A second forward inside backward (checkpointing) is the beginning of the block's backward.
  if (in_backward_) {
    prefetch_before(unit, graph->computed);
  } else {
    stage_->order.push_back(unit);
    if (unit + 1 < blocks_.size() && stage_->units[unit + 1]) prefetch(unit + 1, graph->computed);
  }
  at::Tensor output = body(inputs);
  // Without a graph there is no backward that would free it. Slices that gathered() has left whole
  // are cut and freed by before_forward().
  const bool joined = slices_ && slices_->whole();
  if ((options_.reshard_after_forward || !makes_graph) && !in_backward_ && !held() && !joined)
    units_[unit].free();
  if (makes_graph && output.requires_grad()) output = BeforeBackward::apply(output, graph);
  return output;
}

void FullyShardImpl::prefetch(std::size_t unit, const ProductType& computed) {
  if (divides() && !held()) units_[unit].begin_gather(computed);
}

void FullyShardImpl::prefetch_before(std::size_t unit, const ProductType& computed) {
  const std::vector<std::size_t>& order = stage_->order;
  const auto used = std::ranges::find(order.rbegin(), order.rend(), unit);
  if (used != order.rend() && used + 1 != order.rend()) prefetch(*(used + 1), computed);
}

std::shared_ptr<void> FullyShardImpl::gathered() {
  if (!std::ranges::all_of(units_, [](const ShardUnit& unit) { return unit.exact(); })) {
    wait_for_ranks();
    for (ShardUnit& unit : units_) unit.gather_exactly();
    wait_for_ranks();
  }
  if (marks_rows()) gather_absent();
  if (slices_) slices_->gather();
  for (const ShardedParameter* const p : all_) nn::set_rows(p->tensor, nullptr);
  std::shared_ptr<void> held = held_.lock();
  if (!held) held_ = held = std::make_shared<int>();
  return held;
}

void FullyShardImpl::free_all() {
  if (slices_) slices_->cut();
  for (ShardUnit& unit : units_) {
    unit.forget_work();  // a gather that nobody wanted would bring values of before the step
    unit.free();
  }
  free_absent();
}

void FullyShardImpl::gather_absent() {
  if (std::exchange(absent_here_, true)) return;
  const at::NoGradGuard no_grad;
  std::vector<std::vector<at::Tensor>> from(static_cast<std::size_t>(line_.size()));
  for (const ShardedParameter* const p : all_) {
    if (p->absent)
      p->tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(
          at::empty(p->tensor.sizes(), p->tensor.options()).storage());
    // A copy of a weight that stages share stays as it is, so that verify_parameters() sees it.
    const bool copy = !p->absent && p->holders[0] != line_.rank();
    from[static_cast<std::size_t>(p->holders[0])].push_back(copy ? at::empty_like(p->tensor)
                                                                 : p->tensor.detach());
  }
  for (int rank = 0; line_.size() > 1 && rank < line_.size(); ++rank)
    if (!from[static_cast<std::size_t>(rank)].empty())
      broadcast_coalesced(line_, from[static_cast<std::size_t>(rank)], rank);
}

// This rank also writes the tensors that it has whole, so these have rows.
void FullyShardImpl::free_absent() {
  if (!marks_rows() || !std::exchange(absent_here_, false)) return;
  for (const ShardedParameter& p : absent_) parallel::make_absent(p.tensor, p.freed, p.rows);
  if (!divides()) each_parameter([](ShardedParameter& p) { nn::set_rows(p.tensor, p.rows); });
}

void FullyShardImpl::take_whole() {
  if (slices_) slices_->take();
  const TensorSlices::AsSlices shapes(slices());
  before_rows_change();
  if (kept_) {
    kept_->check_equal(mesh_.world(), model_);
    kept_->take_back();
  }
  for (ShardUnit& unit : units_) unit.take_whole();
  after_rows_change();
}

// ---------------------------------------------------------------- backward

void FullyShardImpl::backward(const std::function<void()>& walk, bool last, int stage) {
  if (in_backward_)
    throw UsageError(kFullyShard,
                     "backward() was called inside a backward. Call it once per loss.");
  if (slices_) slices_->check_backward();
  if (kept_ && last) kept_->check_backward();
  last_ = last;
  stage_ = &stages_.at(stage);
  units_.back().gather({});  // a graph may be walked a second time
  begin_pass();
  try {
    walk();
    end_pass();
  } catch (...) {
    abandon_pass();
    throw;
  }
}

void FullyShardImpl::abandon_pass() {
  in_backward_ = false;
  pending_.reset();
  for (ShardUnit& unit : units_) unit.forget_work();
  forget_gradients();
  failed_ = true;
}

// The sums of all passes of this rank, or zeros without one, which add to averages that an earlier
// step has left.
void FullyShardImpl::reduce_deferred() {
  if (!local_) hide_averages();
  try {
    for (std::size_t unit = units_.size(); unit-- > 0;) begin_reduce(unit);
    end_pending_reduce();
  } catch (...) {
    abandon_pass();
    throw;
  }
  local_ = false;
  show_gradients();
}

void FullyShardImpl::forget_gradients() {
  watch_.reset();
  if (shared_gradients_) shared_gradients_->forget_scales();
  each_parameter([](ShardedParameter& p) {
    p.grad = at::Tensor();
    p.tensor.mutable_grad() = at::Tensor();
  });
  local_ = alone_;
  failed_ = false;
}

// torch::autograd::grad() gives its caller gradients, and parameters none.
void FullyShardImpl::before_unit_backward(std::size_t unit, const ProductType& computed) {
  const auto& members = units_[unit].parameters();
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) {
    check_backward(members.empty() ? units_[unit].name() : members.front().name);
  } else if (torch::GradMode::is_enabled() && divides() && !keeps() && !held()) {
    throw UsageError(component(),
                     "torch::autograd::grad() was called with create_graph = true, and a backward "
                     "of its result would read block '{}' when its rows are divided again. Hold "
                     "gathered() until that backward has ended.",
                     units_[unit].name());
  }
  units_[unit].gather(computed);
  if (in_backward_) prefetch_before(unit, computed);
}

void FullyShardImpl::after_unit_backward(std::size_t unit) {
  if (in_backward_) reduce(unit);
  if (!held() && (!in_window_ || options_.reshard_after_forward)) units_[unit].free();
}

// One reduction is in progress at a time, so at most two units' gradients exist.
void FullyShardImpl::reduce(std::size_t unit) {
  if (!reduces()) return;
  begin_reduce(unit);
  reduced_[unit] = true;
}

void FullyShardImpl::begin_reduce(std::size_t unit) {
  if (!units_[unit].trains()) return;
  end_pending_reduce();
  units_[unit].begin_reduce();
  pending_ = unit;
}

void FullyShardImpl::end_pending_reduce() {
  if (pending_) units_[*std::exchange(pending_, std::nullopt)].end_reduce(data_);
}

void FullyShardImpl::begin_pass() {
  in_backward_ = true;
  watch_.forget();
  reduced_.assign(units_.size(), false);
  if (shared_gradients_) shared_gradients_->apply_scales();
  if (!local_) hide_averages();
}

// Between backwards .grad is what this rank has of the average. In one it is whole again.
void FullyShardImpl::hide_averages() {
  each_parameter(
      [](ShardedParameter& p) { p.grad = std::exchange(p.tensor.mutable_grad(), at::Tensor()); });
}

// A unit whose inputs need no gradient has no node that ends its backward, and the root has none.
// Gradients that are averaged once are those of all stages of this rank.
void FullyShardImpl::end_pass() {
  for (std::size_t unit = units_.size(); unit-- > 0;)
    if (!reduced_[unit] && (stage_->units[unit] || !options_.reduce_every_backward)) reduce(unit);
  end_pending_reduce();
  if (reduces()) check_late_gradients();
  in_backward_ = false;
  local_ = !reduces();
  if (!local_) show_gradients();
  if (last_ && slices_) slices_->average_gradients();
  if (last_ && !of_pipeline_) watch_gradients();
  if (last_ && !defers()) send_buffers(0);
  for (ShardUnit& unit : units_) unit.forget_work();
  if (!held()) free_pass();
}

void FullyShardImpl::free_pass() {
  if (!in_window_) return free_all();
  if (!options_.reshard_after_forward) return;
  for (std::size_t i = 0; i < blocks_.size(); ++i) units_[i].free();
}

// A gradient that reaches a parameter after its unit was reduced would be lost.
void FullyShardImpl::check_late_gradients() {
  each_parameter([](ShardedParameter& p) {
    if (p.tensor.grad().defined())
      throw UsageError(kFullyShard,
                       "a gradient reached parameter '{}' after those of its block were averaged: "
                       "the loss uses it outside of the block. Use it inside nn::Block::run().",
                       p.name);
  });
}

void FullyShardImpl::show_gradients() {
  each_parameter(
      [](ShardedParameter& p) { p.tensor.mutable_grad() = std::exchange(p.grad, at::Tensor()); });
}

// Where .grad is a part of the whole gradient.
void FullyShardImpl::watch_gradients() {
  if (shard_.size() == 1 && line_.size() == 1 && !slices_ && !defers()) return;
  watch_.forget();
  each_parameter([this](ShardedParameter& p) { watch_.see(p.name, p.tensor); });
}

// ---------------------------------------------------------------- replicas

void FullyShardImpl::verify_parameters() {
  if (kept_) return kept_->verify(mesh_.world());
  const Check check{.component = component(), .what = "verify_parameters()"};
  Fingerprints shards, same;
  each_parameter([&](ShardedParameter& p) {
    shards.add(p.name, p.rows->values);
    if (p.sliced == nullptr) same.add(p.name, p.rows->values);
  });
  require_same(data_, check, "parameter", " along 'data'", shards);
  if (slices_) require_same(tensor(), check, "parameter", " along 'tensor'", same);
  verify_shared();
}

// Every rank sends the fingerprints of what stages share, and compares with the first holder's.
void FullyShardImpl::verify_shared() {
  std::string sent;
  for (const ShardedParameter* const p : all_)
    if (p->holders.size() > 1)
      sent += fmt::format("{} ", p->absent ? 0 : fingerprint(p->rows->values));
  if (line_.size() == 1 || sent.empty()) return;
  const std::vector<std::string> all = all_gather_bytes(line_, sent);
  std::vector<std::istringstream> words(all.begin(), all.end());
  std::string differs;
  for (const ShardedParameter* const p : all_) {
    if (p->holders.size() < 2) continue;
    std::vector<std::uint64_t> values(all.size());
    for (std::size_t rank = 0; rank < all.size(); ++rank) words[rank] >> values[rank];
    for (const int holder : p->holders)
      if (values[static_cast<std::size_t>(holder)] !=
          values[static_cast<std::size_t>(p->holders[0])])
        differs = p->name;
  }
  if (!differs.empty())
    throw CommError(component(),
                    fmt::format("the copies of '{}', which stages share, differ. Something "
                                "changed one of them outside the optimizer's step. Resume from a "
                                "checkpoint.",
                                differs));
}

void FullyShardImpl::verify_buffers() {
  require_same(mesh_.world(), {.component = component(), .what = "verify_buffers()"}, "buffer", "",
               model_.buffer_fingerprints());
}

}  // namespace lockstep::parallel

// ---------------------------------------------------------------- FullyShard

namespace lockstep {

FullyShard::FullyShard(torch::nn::Module& module, Mesh mesh, FullyShardOptions options)
    : impl_(std::make_shared<parallel::FullyShardImpl>(module, std::move(mesh), options)) {
  impl_->install();
}

FullyShard::~FullyShard() {
  impl_->uninstall();
}

const Mesh& FullyShard::mesh() const {
  return impl_->mesh();
}

std::string FullyShard::text() const {
  const int ranks = impl_->shard().size();
  return fmt::format("{} sharded over {} rank{}{}{}", parallel::divided_by(impl_->shards()), ranks,
                     ranks == 1 ? "" : "s", impl_->offloads() ? ", offloaded to the CPU" : "",
                     parallel::slices_text(mesh()));
}

std::unique_ptr<optim::Optimizer> FullyShard::make_optimizer(
    std::vector<optim::ParamGroup> groups) {
  return parallel::make_fully_shard_optimizer(impl_, std::move(groups));
}

void FullyShard::before_forward() {
  impl_->before_forward();
}

void FullyShard::backward(const at::Tensor& loss, bool last) {
  detail::check_samples(mesh(), parallel::kFullyShard);
  impl_->backward([&] { loss.backward(); }, last);
  count_passes(1, last);
}

std::shared_ptr<void> FullyShard::gathered() {
  return impl_->gathered();
}

bool FullyShard::divided() const {
  return (impl_->divides() && !impl_->keeps()) || impl_->tensor().size() > 1;
}

void FullyShard::verify_parameters() {
  impl_->verify_parameters();
}

void FullyShard::verify_buffers() {
  impl_->verify_buffers();
}

std::string FullyShard::unavailable_for_capture() const {
  return impl_->defers() ? "gradients are averaged in a step that the ranks agree on"
                         : "parameters are gathered and freed inside a step";
}

std::vector<std::string> FullyShard::units() const {
  return impl_->unit_names();
}

ShardedConstruction::ShardedConstruction(Mesh mesh, bool cpu_offload) {
  parallel::check_mesh(mesh, /*slices=*/true);
  nn::BlockObserver take;
  const bool offloads = parallel::offloads_from(mesh, cpu_offload);
  if (mesh.size("shard") > 1 || mesh.size("tensor") > 1 || offloads)
    take = [mesh = std::move(mesh), offloads](torch::nn::Module& block) {
      parallel::prepare_block(block, mesh, /*mine=*/true, offloads);
    };
  before_ = nn::observe_blocks(std::move(take));
}

ShardedConstruction::~ShardedConstruction() {
  nn::observe_blocks(std::move(before_));
}

}  // namespace lockstep
