#include "lockstep/parallel/birthplace.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "lockstep/core/env.h"

namespace lockstep::parallel {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

// Below this a copy costs less than the question.
constexpr std::int64_t kLeastBytes = 64 << 10;

std::size_t asked_least_bytes() {
  const auto bytes = env::get_int("LOCKSTEP_BIRTHPLACE_BYTES", 0).value_or(kLeastBytes);
  return bytes == 0 ? SIZE_MAX : static_cast<std::size_t>(bytes);
}

// ATen's own, which let every temporary go before they return. Not convolutions: oneDNN asks for
// memory of its own there, and nobody promises how long it is kept.
bool is_served(const Node& node) {
  static constexpr std::array<std::string_view, 5> kServed = {
      "AddmmBackward0", "MmBackward0", "BmmBackward0", "EmbeddingBackward0", "ToCopyBackward0"};
  const std::string name = node.name();
  return std::find(kServed.begin(), kServed.end(), name) != kServed.end();
}

// What changes a gradient's shape on its way to the parameter, but not its memory.
bool only_looks(const Node& node) {
  static constexpr std::array<std::string_view, 4> kLooks = {"TBackward0", "TransposeBackward0",
                                                             "PermuteBackward0", "ViewBackward0"};
  const std::string name = node.name();
  return node.num_outputs() == 1 && std::find(kLooks.begin(), kLooks.end(), name) != kLooks.end();
}

// Bytes of the gradient that goes along the edge; 0 if they cannot be known.
std::size_t bytes_of(const torch::autograd::Edge& edge) {
  const auto& form = edge.function->input_metadata(edge.input_nr);
  if (form.was_default_constructed() || form.is_nested_tensor()) return 0;
  std::int64_t numel = 1;
  for (const auto& size : form.shape_as_dim_vector()) numel *= size.expect_int();
  return static_cast<std::size_t>(numel) * form.dtype().itemsize();
}

bool is_watched(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty();
}

// The parameter whose gradient an allocation of so many bytes in this node can only be.
const at::TensorImpl* parameter_of(Node& node, std::size_t bytes) {
  const torch::autograd::Edge* found = nullptr;
  for (const auto& edge : node.next_edges()) {
    if (!edge.is_valid()) continue;
    const std::size_t length = bytes_of(edge);
    if (length == 0) return nullptr;
    if (length != bytes) continue;
    if (found != nullptr) return nullptr;
    found = &edge;
  }
  // The engine runs the hooks on the node's own gradient within the node, too.
  if (found == nullptr || !is_served(node) || is_watched(node) || !node.post_hooks().empty())
    return nullptr;
  Node* next = found->function.get();
  constexpr int kSteps = 4;
  for (int step = 0; step < kSteps && !is_watched(*next); ++step) {
    if (const auto* end = dynamic_cast<const AccumulateGrad*>(next))
      return end->variable.unsafeGetTensorImpl();
    if (!only_looks(*next) || !next->post_hooks().empty() || !next->next_edge(0).is_valid()) break;
    next = next->next_edge(0).function.get();
  }
  return nullptr;
}

struct Expected {
  const void* owner = nullptr;
  Birthplace::Place place;
};

class BirthAllocator final : public c10::Allocator {
 public:
  // Never destroyed: tensors remember the allocator of their storage until the very end.
  static BirthAllocator& instance() {
    static auto* const allocator = new BirthAllocator(c10::GetCPUAllocator());
    installed_ = allocator;
    return *allocator;
  }
  // nullptr while nothing was ever expected: then there is nothing to forget or to find, either.
  static BirthAllocator* if_installed() { return installed_; }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= least_bytes().load(std::memory_order_relaxed) &&
        expecting_.load(std::memory_order_relaxed)) {
      if (void* const data = place_for(bytes)) return {data, data, &let_go, c10::kCPU};
    }
    return usual_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    usual_->copy_data(to, from, bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return usual_->is_simple_data_ptr(data);
  }
  // What the usual allocator gave carries its own deleter, which this one calls: either will do.
  c10::DeleterFnPtr raw_deleter() const override {
    return usual_->raw_deleter() ? &let_go : nullptr;
  }

  void expect(const at::TensorImpl* parameter, Expected expected) {
    std::lock_guard<std::mutex> lock(mutex_);
    expected_[parameter] = std::move(expected);
    expecting_ = true;
  }
  void forget(const void* owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(expected_, [owner](const auto& entry) { return entry.second.owner == owner; });
    expecting_ = !expected_.empty();
  }
  bool is_taken(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    return stays_.count(data) > 0;
  }
  std::size_t expecting() {
    std::lock_guard<std::mutex> lock(mutex_);
    return expected_.size();
  }
  static std::atomic<std::size_t>& least_bytes() {
    static std::atomic<std::size_t> bytes{asked_least_bytes()};
    return bytes;
  }
  std::uint64_t served() const { return served_.load(std::memory_order_relaxed); }

 private:
  explicit BirthAllocator(c10::Allocator* usual) : usual_(usual) { c10::SetCPUAllocator(this); }

  // For memory of either origin: raw_allocate() does not tell which it gave.
  static void let_go(void* data) {
    BirthAllocator& self = instance();
    at::Tensor place;  // may be the last to hold its block, which goes when the lock is gone
    {
      std::lock_guard<std::mutex> lock(self.mutex_);
      const auto found = self.stays_.find(data);
      if (found != self.stays_.end()) {
        place = std::move(found->second);
        self.stays_.erase(found);
      }
    }
    if (!place.defined()) self.usual_->raw_deleter()(data);
  }

  void* place_for(std::size_t bytes) {
    const auto node = torch::autograd::get_current_node();
    if (!node || c10::GradMode::is_enabled()) return nullptr;
    const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
    if (chosen != nullptr && !chosen->empty()) return nullptr;
    const at::TensorImpl* parameter = parameter_of(*node, bytes);
    if (parameter == nullptr) return nullptr;
    Birthplace::Place ask;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = expected_.find(parameter);
      if (found == expected_.end()) return nullptr;
      ask = found->second.place;
    }
    const at::Tensor place = ask();
    if (!place.defined() || place.nbytes() != bytes) return nullptr;
    void* const data = place.mutable_data_ptr();
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stays_.emplace(data, place).second) return nullptr;
    // Who has saved what lay here before must learn that it is gone.
    place.unsafeGetTensorImpl()->bump_version();
    served_.fetch_add(1, std::memory_order_relaxed);
    return data;
  }

  static inline std::atomic<BirthAllocator*> installed_{nullptr};
  c10::Allocator* usual_;
  std::atomic<bool> expecting_{false};  // spares all other allocations the lock
  std::atomic<std::uint64_t> served_{0};
  std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Expected> expected_;
  std::unordered_map<const void*, at::Tensor> stays_;  // places in which a tensor lies now
};

}  // namespace

void Birthplace::check_environment() {
  asked_least_bytes();
}
void Birthplace::expect(const at::Tensor& parameter, const void* owner, Place place) {
  BirthAllocator::instance().expect(parameter.unsafeGetTensorImpl(),
                                    Expected{owner, std::move(place)});
}
void Birthplace::forget(const void* owner) {
  if (auto* allocator = BirthAllocator::if_installed()) allocator->forget(owner);
}
std::size_t Birthplace::set_least_bytes(std::size_t bytes) {
  return BirthAllocator::least_bytes().exchange(bytes);
}
bool Birthplace::is_taken(const at::Tensor& place) {
  auto* const allocator = BirthAllocator::if_installed();
  return allocator != nullptr && allocator->is_taken(place.const_data_ptr());
}
std::size_t Birthplace::expecting() {
  auto* const allocator = BirthAllocator::if_installed();
  return allocator != nullptr ? allocator->expecting() : 0;
}
std::uint64_t Birthplace::served() {
  auto* const allocator = BirthAllocator::if_installed();
  return allocator != nullptr ? allocator->served() : 0;
}

}  // namespace lockstep::parallel
