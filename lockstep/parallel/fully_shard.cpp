#include "lockstep/parallel/fully_shard.h"

#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/optim/local_gradients.h"
#include "lockstep/optim/optimizer.h"
#include "lockstep/parallel/divided.h"
#include "lockstep/parallel/fully_shard_impl.h"

namespace lockstep::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---------------------------------------------------------------- in the graph

struct InGraph : torch::CustomClassHolder {
  std::weak_ptr<FullyShardImpl> model;
  std::size_t unit = 0;
};
using InGraphPtr = c10::intrusive_ptr<InGraph>;

InGraphPtr graph_of(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<InGraph>(context->saved_data["unit"].toCapsule());
}

// Around a block's output: its backward runs before that of everything in the block.
class BeforeBackward : public torch::autograd::Function<BeforeBackward> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& output,
                            const InGraphPtr& graph) {
    context->saved_data["unit"] = c10::IValue::make_capsule(graph);
    return output.view_as(output);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const InGraphPtr graph = graph_of(context);
    if (const auto model = graph->model.lock()) model->before_unit_backward(graph->unit);
    return {gradients[0], at::Tensor()};
  }
};

// Around a block's inputs: made before everything in the block, its backward runs after all of it,
// because the engine takes the node that was made last among those that are ready.
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

// ---------------------------------------------------------------- the module

void check_mesh(const Mesh& mesh) {
  const bool has_shard =
      std::ranges::any_of(mesh.axes(), [](const MeshAxis& axis) { return axis.name == "shard"; });
  if (!has_shard && mesh.world().size() > 1)
    throw UsageError(kFullyShard,
                     "the mesh ({}) has no axis 'shard', so that every rank would hold the whole "
                     "model. Make it with Mesh(world, {{{{\"shard\", -1}}}}), or use "
                     "DistributedDataParallel.",
                     mesh.text());
  if (mesh.batch().size() != mesh.world().size())
    throw UsageError(kFullyShard,
                     "the mesh ({}) has ranks that see the same samples. Parameters are divided "
                     "along 'shard' and copied along 'data'; leave the other axes out.",
                     mesh.text());
}

// A block that was divided while it was made, until FullyShard takes its unit over.
struct Prepared {
  struct Part {
    Mesh mesh;
    ShardUnit unit;
    std::uint64_t values = 0;  // the fingerprint of what was drawn
  };
  std::shared_ptr<Part> part;

  at::Tensor operator()(const nn::Block::Body&, const std::vector<at::Tensor>&) const {
    throw UsageError(kFullyShard,
                     "a block was called that was divided over ranks while it was made. Make a "
                     "FullyShard of the model first.");
  }
  static Part* of(const nn::Block& block) {
    const auto* const prepared = block.runner().target<Prepared>();
    return prepared != nullptr ? prepared->part.get() : nullptr;
  }
};

void prepare(torch::nn::Module& module, const Mesh& mesh) {
  auto* const block = dynamic_cast<nn::Block*>(&module);
  if (block == nullptr)
    throw UsageError(kFullyShard,
                     "nn::made() was called with a module that is no nn::Block. Derive it from "
                     "nn::Block, and let its forward call run().");
  ShardUnit::Named parameters;
  std::uint64_t values = 0;
  for (const auto& item : module.named_parameters()) {
    if (nn::rows_of(item.value()) != nullptr) continue;  // of a block inside of this one
    parameters.emplace_back(item.key(), item.value());
    values = 31 * values + fingerprint(item.value().detach());
  }
  module.to(mesh.world().device());
  block->run_with(Prepared{std::make_shared<Prepared::Part>(
      Prepared::Part{mesh, ShardUnit("", parameters, mesh["shard"]), values})});
}

void check_blocks(const torch::nn::Module& module, const World& shard) {
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    const auto* const block = dynamic_cast<const nn::Block*>(item.value().get());
    if (block == nullptr || !block->has_runner()) continue;
    const Prepared::Part* const prepared = Prepared::of(*block);
    if (prepared != nullptr && &prepared->unit.shard() != &shard)
      throw UsageError(kFullyShard,
                       "block '{}' was divided along another mesh while it was made. Give "
                       "ShardedConstruction and FullyShard the same Mesh.",
                       item.key());
    if (prepared == nullptr)
      throw UsageError(kFullyShard,
                       "block '{}' is run by something else already, probably by another "
                       "FullyShard of this module. Make one, and keep it.",
                       item.key());
  }
}

}  // namespace

FullyShardImpl::FullyShardImpl(const torch::nn::Module& module, Mesh mesh,
                               FullyShardOptions options)
    : mesh_(std::move(mesh)),
      shard_(mesh_["shard"]),
      data_(mesh_["data"]),
      options_(options),
      alone_(mesh_.batch().size() == 1),
      local_(alone_) {
  World& world = mesh_.world();
  const auto refusal = refusal_of([&] {
    check_mesh(mesh_);
    check_blocks(module, shard_);
    model_ = ModelTensors(parameters_of(module), buffers_of(module), {});
    for (const auto& type : {options_.param_dtype, options_.reduce_dtype})
      if (type && !at::isFloatingType(*type))
        throw UsageError(kFullyShard,
                         "param_dtype and reduce_dtype are floating-point types, and {} is none. "
                         "Write torch::kBFloat16, or leave it out.",
                         c10::toString(*type));
    if (model_.size() == 0)
      throw UsageError(kFullyShard, "the module has no parameters, so there is nothing to shard.");
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
  make_units(module);
}

std::string FullyShardImpl::describe(const torch::nn::Module& module) const {
  const auto type = [](const std::optional<c10::ScalarType>& given) {
    return given ? c10::toString(*given) : "own";
  };
  std::string text = fmt::format(
      "reshard_after_forward: {}\nreduce_every_backward: {}\nparam_dtype: {}\n"
      "reduce_dtype: {}\n",
      options_.reshard_after_forward, options_.reduce_every_backward, type(options_.param_dtype),
      type(options_.reduce_dtype));
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    if (const auto* const block = dynamic_cast<const nn::Block*>(item.value().get())) {
      const Prepared::Part* const prepared = Prepared::of(*block);
      text += fmt::format("{}: block{}\n", item.key(),
                          prepared == nullptr
                              ? ""
                              : fmt::format(" with values of fingerprint {:x}", prepared->values));
    }
  for (const ModelParameter& p : model_.parameters())
    text +=
        fmt::format("{}: {}, shape [{}]{}\n", p.name, c10::toString(p.tensor.scalar_type()),
                    fmt::join(p.tensor.sizes(), ", "), p.tensor.requires_grad() ? "" : ", frozen");
  return text + model_.describe_buffers();
}

// A parameter belongs to the innermost block around it, and to the root where it is in none. One
// that is tied across units is the root's, which is whole while any of them computes.
void FullyShardImpl::make_units(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    auto* const block = dynamic_cast<nn::Block*>(item.value().get());
    if (block == nullptr) continue;
    names.push_back(item.key());
    blocks_.push_back({item.value(), block});
  }
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
  for (const ModelParameter& p : model_.parameters())
    members[unit_of.at(p.tensor.unsafeGetTensorImpl())].emplace_back(p.name, p.tensor);
  names.emplace_back();
  for (std::size_t i = 0; i <= root; ++i) {
    Prepared::Part* const prepared = i < root ? Prepared::of(*blocks_[i].block) : nullptr;
    if (prepared == nullptr) {
      units_.emplace_back(names[i], members[i], shard_);
      continue;
    }
    units_.push_back(std::move(prepared->unit));
    units_.back().complete(names[i], members[i]);
  }
  for (ShardUnit& unit : units_)
    unit.travel_as({.gather = options_.param_dtype, .reduce = options_.reduce_dtype});
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
  for (std::size_t i = 0; i < blocks_.size(); ++i)
    blocks_[i].block->run_with(
        [self, i](const nn::Block::Body& body, std::vector<at::Tensor> inputs) {
          const auto alive = self.lock();
          return alive ? alive->run_block(i, body, std::move(inputs)) : body(inputs);
        });
  each_parameter([&](ShardedParameter& p) {
    if (!p.tensor.requires_grad()) return;
    auto accumulator = torch::autograd::impl::grad_accumulator(p.tensor);
    using Variables = std::vector<at::Tensor>;
    accumulator->add_post_hook(std::make_unique<optim::GradientHook>(
        [self, name = p.name](const Variables& outputs, const Variables&) -> Variables {
          if (const auto alive = self.lock()) alive->check_backward(name);
          return outputs;
        },
        [self] { return !self.expired(); }));
    accumulators_.push_back(std::move(accumulator));
  });
}

void FullyShardImpl::uninstall() {
  for (const Used& used : blocks_) used.block->run_with(nullptr);
}

void FullyShardImpl::check_backward(const std::string& parameter) const {
  if (in_backward_) return;
  throw UsageError(kFullyShard,
                   "a backward reached parameter '{}' past FullyShard::backward(), which averages "
                   "and divides gradients at its end. Call model.backward(loss) instead of "
                   "loss.backward().",
                   parameter);
}

// ---------------------------------------------------------------- forward

void FullyShardImpl::before_forward() {
  order_.clear();
  if (!held() && options_.reshard_after_forward)
    for (std::size_t i = 0; i < blocks_.size(); ++i) units_[i].free();  // that gathered() has left
  units_.back().gather();
}

at::Tensor FullyShardImpl::run_block(std::size_t unit, const nn::Block::Body& body,
                                     std::vector<at::Tensor> inputs) {
  const bool makes_graph = torch::GradMode::is_enabled();
  auto graph = c10::make_intrusive<InGraph>();
  graph->model = weak_from_this();
  graph->unit = unit;
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
  units_[unit].gather();
  // A second forward inside backward (checkpointing) is the beginning of the block's backward.
  if (in_backward_) {
    prefetch_before(unit);
  } else {
    order_.push_back(unit);
    if (unit + 1 < blocks_.size()) prefetch(unit + 1);
  }
  at::Tensor output = body(inputs);
  // Without a graph there is no backward that would free it.
  if ((options_.reshard_after_forward || !makes_graph) && !in_backward_ && !held())
    units_[unit].free();
  if (makes_graph && output.requires_grad()) output = BeforeBackward::apply(output, graph);
  return output;
}

void FullyShardImpl::prefetch(std::size_t unit) {
  if (divides() && !held()) units_[unit].begin_gather();
}

void FullyShardImpl::prefetch_before(std::size_t unit) {
  const auto used = std::ranges::find(order_.rbegin(), order_.rend(), unit);
  if (used != order_.rend() && used + 1 != order_.rend()) prefetch(*(used + 1));
}

std::shared_ptr<void> FullyShardImpl::gathered() {
  for (ShardUnit& unit : units_) unit.gather_exactly();
  std::shared_ptr<void> held = held_.lock();
  if (!held) held_ = held = std::make_shared<int>();
  return held;
}

void FullyShardImpl::free_all() {
  for (ShardUnit& unit : units_) {
    unit.forget_work();  // a gather that nobody wanted would bring values of before the step
    unit.free();
  }
}

void FullyShardImpl::take_whole() {
  for (ShardUnit& unit : units_) unit.take_whole();
}

// ---------------------------------------------------------------- backward

void FullyShardImpl::backward(const at::Tensor& loss, bool last) {
  if (in_backward_)
    throw UsageError(kFullyShard,
                     "backward() was called inside a backward. Call it once per loss.");
  last_ = last;
  units_.back().gather();  // a graph may be walked a second time
  begin_pass();
  try {
    loss.backward();
    end_pass();
  } catch (...) {
    in_backward_ = false;
    pending_.reset();
    for (ShardUnit& unit : units_) unit.forget_work();
    forget_gradients();
    failed_ = true;
    throw;
  }
}

void FullyShardImpl::forget_gradients() {
  each_parameter([](ShardedParameter& p) {
    p.grad = at::Tensor();
    p.tensor.mutable_grad() = at::Tensor();
  });
  local_ = alone_;
  failed_ = false;
}

void FullyShardImpl::before_unit_backward(std::size_t unit) {
  const auto& members = units_[unit].parameters();
  check_backward(members.empty() ? units_[unit].name() : members.front().name);
  units_[unit].gather();
  prefetch_before(unit);
}

void FullyShardImpl::after_unit_backward(std::size_t unit) {
  reduce(unit);
  if (!held()) units_[unit].free();
}

// One reduction is under way at a time, so that the gradients of two units exist at most.
void FullyShardImpl::reduce(std::size_t unit) {
  if (!reduces() || !units_[unit].trains()) return;
  end_pending_reduce();
  units_[unit].begin_reduce();
  pending_ = unit;
  reduced_[unit] = true;
}

void FullyShardImpl::end_pending_reduce() {
  if (pending_) units_[*std::exchange(pending_, std::nullopt)].end_reduce(data_);
}

// Between backwards .grad is what this rank has of the average. In one it is whole again.
void FullyShardImpl::begin_pass() {
  in_backward_ = true;
  reduced_.assign(units_.size(), false);
  if (!local_)
    each_parameter(
        [](ShardedParameter& p) { p.grad = std::exchange(p.tensor.mutable_grad(), at::Tensor()); });
}

// A unit whose inputs need no gradient has no node that ends its backward, and the root has none.
void FullyShardImpl::end_pass() {
  for (std::size_t unit = units_.size(); unit-- > 0;)
    if (!reduced_[unit]) reduce(unit);
  end_pending_reduce();
  if (reduces()) check_late_gradients();
  in_backward_ = false;
  local_ = !reduces();
  if (!local_) show_gradients();
  if (last_) model_.broadcast_buffers(mesh_.world(), 0);
  for (ShardUnit& unit : units_) unit.forget_work();
  if (!held()) free_all();
}

// What reaches a parameter after its unit was reduced would be lost.
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

// ---------------------------------------------------------------- replicas

void FullyShardImpl::verify_parameters() {
  Fingerprints shards;
  each_parameter([&](ShardedParameter& p) { shards.add(p.name, p.padded); });
  require_same(data_, kFullyShard, "parameter", " along 'data'", shards);
}

void FullyShardImpl::verify_buffers() {
  require_same(mesh_.world(), kFullyShard, "buffer", "", model_.buffer_fingerprints());
}

}  // namespace lockstep::parallel

// ---------------------------------------------------------------- FullyShard

namespace lockstep {

FullyShard::FullyShard(const torch::nn::Module& module, Mesh mesh, FullyShardOptions options)
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
  return fmt::format("fully sharded over {} rank{}", ranks, ranks == 1 ? "" : "s");
}

std::unique_ptr<optim::Optimizer> FullyShard::make_optimizer(std::vector<optim::ParamGroup> groups,
                                                             bool) {
  return parallel::make_fully_shard_optimizer(impl_, std::move(groups));
}

void FullyShard::check_shardable() const {
  throw UsageError(parallel::kFullyShard,
                   "the optimizer's state is divided with the parameters already.");
}

void FullyShard::before_forward() {
  impl_->before_forward();
}

void FullyShard::backward(const at::Tensor& loss, bool last) {
  impl_->backward(loss, last);
}

std::shared_ptr<void> FullyShard::gathered() {
  return impl_->gathered();
}

bool FullyShard::divided() const {
  return impl_->shard().size() > 1;
}

void FullyShard::verify_parameters() {
  impl_->verify_parameters();
}

void FullyShard::verify_buffers() {
  impl_->verify_buffers();
}

void FullyShard::set_bucket_cap_mb(std::optional<double>) {
  throw UsageError(parallel::kFullyShard,
                   "there are no buckets: the gradients of a block are averaged together. Delete "
                   "ddp_bucket_cap_mb, or `tune`.");
}

std::vector<std::string> FullyShard::units() const {
  return impl_->unit_names();
}

ShardedConstruction::ShardedConstruction(Mesh mesh) {
  parallel::check_mesh(mesh);
  nn::BlockObserver take;
  if (mesh.size("shard") > 1)
    take = [mesh = std::move(mesh)](torch::nn::Module& block) { parallel::prepare(block, mesh); };
  before_ = nn::observe_blocks(std::move(take));
}

ShardedConstruction::~ShardedConstruction() {
  nn::observe_blocks(std::move(before_));
}

}  // namespace lockstep
