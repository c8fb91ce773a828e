
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/kernels/cuda/table.h"

namespace lockstep::kernels::cuda {
namespace {

std::atomic<bool> is_capturing{false};
std::mutex mutex;
std::vector<std::function<void()>> actions;  // under the mutex: autograd's threads add to them

std::vector<std::function<void()>> take_actions() {
  const std::lock_guard lock(mutex);
  return std::exchange(actions, {});
}

}  // namespace

std::unique_ptr<Graph> make_graph(const Graph* other) {
  const Table* const found = table();
  return std::unique_ptr<Graph>(found != nullptr ? found->make_graph(other) : nullptr);
}

Capture::Capture(Graph& graph) : graph_(graph) {
  graph_.begin();
  is_capturing = true;
}

Capture::~Capture() {
  if (ended_) return;
  is_capturing = false;
  take_actions();
  try {
    graph_.end();
  } catch (...) {
    // It is already reported: this runs because something has thrown.
  }
}

void Capture::end() {
  ended_ = true;
  is_capturing = false;
  const auto todo = take_actions();
  graph_.end();
  for (const auto& action : todo) action();
}

bool capturing() {
  return is_capturing;
}

void after_capture(std::function<void()> action) {
  const std::lock_guard lock(mutex);
  actions.push_back(std::move(action));
}

}  // namespace lockstep::kernels::cuda
