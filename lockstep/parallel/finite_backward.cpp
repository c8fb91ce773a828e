#include "lockstep/parallel/finite_backward.h"

#include <ATen/ATen.h>

#include <unordered_set>

namespace lockstep::parallel {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

struct OnlyFinite : torch::autograd::FunctionPostHook {
  variable_list operator()(const variable_list& gradients, const variable_list&) override {
    variable_list finite = gradients;
    for (at::Tensor& g : finite)
      if (g.defined()) g = at::nan_to_num(g, 0.0, 0.0, 0.0);
    return finite;
  }
};

}  // namespace

FiniteBackward::FiniteBackward(const at::Tensor& loss) {
  std::unordered_set<const Node*> seen;
  std::vector<std::shared_ptr<Node>> open{loss.grad_fn()};
  while (!open.empty()) {
    const std::shared_ptr<Node> node = std::move(open.back());
    open.pop_back();
    // An accumulator leads nowhere, and what comes to it is finite already.
    if (!node || node->num_outputs() == 0 || !seen.insert(node.get()).second) continue;
    for (const auto& edge : node->next_edges()) open.push_back(edge.function);
    hooks_.emplace_back(node, node->add_post_hook(std::make_unique<OnlyFinite>()));
  }
}

FiniteBackward::~FiniteBackward() {
  for (const auto& [node, hook] : hooks_) node->del_post_hook(hook);
}

}  // namespace lockstep::parallel
