#include "lockstep/parallel/backward_hooks.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <unordered_set>
#include <utility>

#include "lockstep/memory/cpu_cache.h"
#include "lockstep/optim/local_gradients.h"

namespace lockstep::parallel {

using detail::InplaceGradients;

namespace {

using Nodes = std::unordered_set<torch::autograd::Node*>;
bool has_checkpoint(const Nodes& nodes) {
  return std::any_of(nodes.begin(), nodes.end(), [](auto* n) { return is_checkpoint_node(*n); });
}

}  // namespace

// The hook on the accumulator is needed as well: this one is not called for an undefined gradient,
// and a tensor has room for one only.
struct HookSet::Sentinel final : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& tensor) override {
    if (previous) (*previous)(tensor);
    if (auto alive = listener.lock()) hooks->on_sentinel(parameter, *alive);
  }
  HookSet* hooks = nullptr;  // lives while the listener does
  std::weak_ptr<BackwardListener> listener;
  std::size_t parameter = 0;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous;
};

void HookSet::install(const std::weak_ptr<BackwardListener>& listener,
                      const std::vector<ParameterForm>& forms) {
  if (installed_.empty()) post_sentinels(listener);
  installed_.resize(model_.size());
  for (std::size_t i = 0; i < model_.size(); ++i) {
    const ModelParameter& p = model_[i];
    Installed& hook = installed_[i];
    // One that was frozen since has no accumulator; the next synchronised pass refuses that.
    if (!forms[i].requires_grad || !p.tensor.requires_grad()) continue;
    auto accumulator = torch::autograd::impl::grad_accumulator(p.tensor);
    if (accumulator == hook.accumulator) continue;
    if (hook.accumulator) hook.accumulator->del_post_hook(hook.key);
    hook.accumulator = std::move(accumulator);
    using Variables = std::vector<at::Tensor>;
    hook.key = hook.accumulator->add_post_hook(std::make_unique<optim::GradientHook>(
        [listener, i](const Variables& outputs, const Variables& gradients) -> Variables {
          if (auto alive = listener.lock()) alive->on_gradient(i, gradients.at(0));
          return outputs;
        },
        [listener] {
          const auto alive = listener.lock();
          return alive && alive->gradients_are_local();
        }));
    const bool fits = forms[i].dtype == at::kFloat || forms[i].dtype == at::kDouble;
    if (!in_place_ || p.sparse || !p.tensor.is_cpu() || !fits) continue;
    InplaceGradients::offer(p.tensor, this, [listener, i] {
      auto alive = listener.lock();
      return alive ? alive->free_slot(i) : at::Tensor();
    });
  }
  lost_ = false;
}

void HookSet::post_sentinels(const std::weak_ptr<BackwardListener>& listener) {
  for (std::size_t i = 0; i < model_.size(); ++i) {
    const at::Tensor& tensor = model_[i].tensor;
    auto previous = std::move(torch::autograd::impl::post_acc_grad_hooks(tensor));
    // Drops the sentinels whose listeners are gone.
    for (auto* old = dynamic_cast<Sentinel*>(previous.get()); old && old->listener.expired();
         old = dynamic_cast<Sentinel*>(previous.get()))
      previous = std::move(old->previous);
    auto sentinel = std::make_unique<Sentinel>();
    sentinel->hooks = this;
    sentinel->listener = listener;
    sentinel->parameter = i;
    sentinel->previous = std::move(previous);
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::move(sentinel));
  }
}

void HookSet::on_sentinel(std::size_t parameter, BackwardListener& listener) {
  const auto& hooked = installed_[parameter].accumulator;
  if (hooked && torch::autograd::get_current_node() == hooked) return;  // its own hook follows
  lost_ = true;
  listener.on_gradient(parameter, at::Tensor());
}

HookSet::~HookSet() {
  if (installed_.empty()) return;
  InplaceGradients::withdraw(this);
  for (const auto& hook : installed_)
    if (hook.accumulator) hook.accumulator->del_post_hook(hook.key);
  for (const auto& p : model_.parameters()) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(p.tensor);
    auto* sentinel = dynamic_cast<Sentinel*>(hook.get());
    if (sentinel != nullptr && sentinel->hooks == this) hook = std::move(sentinel->previous);
  }
}

bool HookSet::alone(std::size_t parameter) {
  const at::Tensor& tensor = model_[parameter].tensor;
  const auto& hooked = installed_[parameter].accumulator;
  if (torch::autograd::impl::try_get_grad_accumulator(tensor) != hooked ||
      hooked->post_hooks().size() != 1)
    return false;
  const auto* sentinel =
      dynamic_cast<const Sentinel*>(torch::autograd::impl::post_acc_grad_hooks(tensor).get());
  if (sentinel == nullptr || sentinel->hooks != this || sentinel->previous) return false;
  // A checkpointed block may bring another gradient while the first is still on its way.
  const int task = torch::autograd::get_current_graph_task_id();
  if (recomputes_.first != task) {
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    recomputes_ = {task, nodes == nullptr || has_checkpoint(*nodes)};
  }
  return !recomputes_.second;
}

std::vector<std::size_t> HookSet::unreached() const {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr || has_checkpoint(*nodes)) return {};
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < model_.size(); ++i) {
    const auto node = torch::autograd::impl::try_get_grad_accumulator(model_[i].tensor);
    if (!node || nodes->count(node.get()) == 0) result.push_back(i);
  }
  return result;
}

namespace {

struct Watcher : torch::CustomClassHolder {
  std::weak_ptr<BackwardListener> listener;
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
    // autograd::grad and backward(inputs) reach chosen tensors only and reduce nothing.
    const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
    auto listener = static_cast<Watcher*>(watcher.get())->listener.lock();
    if (listener && (chosen == nullptr || chosen->empty())) listener->on_watched_backward();
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor HookSet::watch(const at::Tensor& output, std::weak_ptr<BackwardListener> listener) {
  const at::Tensor anchor = at::empty({0}, output.options()).set_requires_grad(true);
  auto watcher = c10::make_intrusive<Watcher>();
  watcher->listener = std::move(listener);
  return WatchFunction::apply(output, anchor, watcher);
}

namespace {

struct Outer {
  int depth = 0;
  int task = -1;
  std::shared_ptr<std::vector<std::function<void()>>> at_end;
};
thread_local Outer outer;

}  // namespace

NestedBackward::NestedBackward() {
  if (outer.depth == 0) {
    const int task = torch::autograd::get_current_graph_task_id();
    auto at_end = std::make_shared<std::vector<std::function<void()>>>();
    if (task >= 0)
      torch::autograd::Engine::get_default_engine().queue_callback([ends = at_end] {
        for (auto& end : *ends) end();
        ends->clear();
      });
    outer.task = task;
    outer.at_end = std::move(at_end);
  }
  ++outer.depth;  // last: what throws here leaves no trace
}

NestedBackward::~NestedBackward() {
  if (--outer.depth > 0) return;
  outer.task = -1;
  outer.at_end.reset();
}

bool NestedBackward::active() {
  return outer.depth > 0;
}

int NestedBackward::outer_task() {
  return active() ? outer.task : torch::autograd::get_current_graph_task_id();
}

void NestedBackward::at_end(std::function<void()> call) {
  if (active())
    outer.at_end->push_back(std::move(call));
  else
    torch::autograd::Engine::get_default_engine().queue_callback(std::move(call));
}

// Reports an abandoned backward if it is destroyed before its end.
struct PassEnd::Token {
  explicit Token(std::weak_ptr<BackwardListener> l) : listener(std::move(l)) {}
  ~Token() {
    if (ended) return;
    if (auto alive = listener.lock()) alive->on_backward_abandoned();
  }
  std::weak_ptr<BackwardListener> listener;
  std::atomic<bool> ended{false};
};

void PassEnd::queue(const std::weak_ptr<BackwardListener>& listener) {
  NestedBackward::at_end([token = std::make_shared<Token>(listener)] {
    if (auto alive = token->listener.lock()) alive->on_backward_end();
    token->ended = true;  // not reached when the end itself throws, which abandons the pass, too
  });
}

// On a node of the outer backward, where that can be asked for a callback at its end.
struct PassEnd::OuterHook final : torch::autograd::FunctionPreHook {
  explicit OuterHook(std::shared_ptr<Token> t) : token(std::move(t)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    auto listener = token->listener.lock();
    if (listener && !token->ended.exchange(true)) listener->on_outer_backward();
    return gradients;
  }
  std::shared_ptr<Token> token;
};

bool PassEnd::leave_to(const torch::autograd::Node& outer,
                       const std::weak_ptr<BackwardListener>& listener) {
  auto token = std::make_shared<Token>(listener);
  bool left = false;
  for (const auto& edge : outer.next_edges()) {
    if (!edge.is_valid()) continue;
    auto hook = std::make_unique<OuterHook>(token);
    nodes_.push_back({edge.function, hook.get(), token});
    edge.function->tensor_pre_hooks().push_back(std::move(hook));
    left = true;
  }
  token->ended = !left;
  if (left) ++unseen_;
  return left;
}

void PassEnd::forget() {
  const auto running = torch::autograd::get_current_node();
  std::erase_if(nodes_, [&](const OuterNode& outer) {
    // Its destructor would report an abandoned backward otherwise.
    if (const auto token = outer.token.lock()) token->ended = true;
    const auto node = outer.node.lock();
    if (!node) return true;
    if (node == running) return false;  // it may be walking through its hooks: next time
    std::erase_if(node->tensor_pre_hooks(),
                  [&](const auto& hook) { return hook.get() == outer.hook; });
    return true;
  });
  unseen_ = 0;
}

}  // namespace lockstep::parallel
