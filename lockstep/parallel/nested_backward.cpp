#include "lockstep/parallel/nested_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>
#include <vector>

#include "lockstep/core/error.h"

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

void NestedBackward::at_outer_end(std::function<void()> callback) {
  LOCKSTEP_ASSERT(active());
  outer.at_end->push_back(std::move(callback));
}

}  // namespace lockstep::parallel
