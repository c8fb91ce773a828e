#include "lockstep/parallel/pass_end.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <utility>

namespace lockstep::parallel {
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
    // Or it would report an abandoned backward.
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
