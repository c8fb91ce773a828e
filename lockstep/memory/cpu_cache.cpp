#include "lockstep/memory/cpu_cache.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "lockstep/core/env.h"
#include "lockstep/memory/block_cache.h"

namespace lockstep {
namespace {

// Caching smaller ones gained nothing that could be measured.
constexpr std::size_t kMinCached = 1 << 20;

std::size_t max_idle_bytes() {
  return static_cast<std::size_t>(
      env::get_int("LOCKSTEP_CPU_CACHE_MAX_BYTES", 0).value_or(INT64_MAX));
}

class CachingAllocator final : public c10::Allocator {
 public:
  // Never destroyed: tensors live until the very end.
  static void install(std::size_t max_idle) {
    auto* const allocator = new CachingAllocator(c10::GetCPUAllocator(), max_idle);
    installed_ = allocator;
    const auto before = [] { installed_.load()->cache_.before_fork(); };
    const auto in_parent = [] { installed_.load()->cache_.after_fork_in_parent(); };
    const auto in_child = [] { installed_.load()->cache_.after_fork_in_child(); };
    if (::pthread_atfork(before, in_parent, in_child) != 0) throw std::bad_alloc();
    c10::SetCPUAllocator(allocator);
  }
  static CachingAllocator* if_installed() { return installed_; }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= kMinCached) {
      c10::DataPtr block(cache_.allocate(bytes), c10::kCPU);
      if (block) {
        block = {block.get(), block.get(), &deallocate, c10::kCPU};
        c10::profiledCPUMemoryReporter().New(block.get(), bytes);
        return block;
      }
    }
    try {
      return usual_->allocate(bytes);
    } catch (const c10::Error&) {
      if (cache_.stats().idle == 0) throw;  // its message is good
      cache_.release_idle();
    }
    return usual_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    usual_->copy_data(to, from, bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }

  BlockCache& cache() { return cache_; }

 private:
  CachingAllocator(c10::Allocator* usual, std::size_t max_idle)
      : usual_(usual), cache_({.max_idle_bytes = max_idle}) {}

  // Also for memory of the usual allocator: raw_allocate() does not say whose it is.
  static void deallocate(void* data) {
    CachingAllocator& self = *installed_.load();
    if (!self.cache_.owns(data)) return self.usual_->raw_deleter()(data);
    c10::profiledCPUMemoryReporter().Delete(data);  // before another thread gets the block
    self.cache_.deallocate(data);
  }

  static inline std::atomic<CachingAllocator*> installed_{nullptr};
  c10::Allocator* const usual_;
  BlockCache cache_;
};

}  // namespace

bool cache_cpu_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    const std::size_t max_idle = max_idle_bytes();
    const bool own = c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator();
    if (max_idle > 0 && !own) CachingAllocator::install(max_idle);
    if (!own) detail::InplaceGradients::enable();  // in front of the cache: it answers first
  });
  return is_cpu_memory_cached();
}
bool is_cpu_memory_cached() {
  return CachingAllocator::if_installed() != nullptr;
}
void empty_cpu_cache() {
  if (auto* allocator = CachingAllocator::if_installed()) allocator->cache().release_idle();
}
CpuCacheStats cpu_cache_stats() {
  auto* const allocator = CachingAllocator::if_installed();
  if (allocator == nullptr) return {};
  const BlockCacheStats stats = allocator->cache().stats();
  return {.used = stats.used, .idle = stats.idle, .peak = stats.peak, .mapped = stats.mapped};
}

// ---------------------------------------------------------------- gradients in place

namespace detail {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

// Below this a copy costs less than the look-up.
constexpr std::int64_t kMinBytes = 64 << 10;

std::size_t min_bytes_of_environment() {
  const auto bytes = env::get_int("LOCKSTEP_GRAD_INPLACE_MIN_BYTES", 0).value_or(kMinBytes);
  return bytes == 0 ? SIZE_MAX : static_cast<std::size_t>(bytes);
}

// ATen's own nodes, which free every temporary before they return. Excludes convolutions: oneDNN
// allocates its own memory there, and it is unknown how long it holds that.
bool is_served(const Node& node) {
  static constexpr std::array<std::string_view, 5> kServed = {
      "AddmmBackward0", "MmBackward0", "BmmBackward0", "EmbeddingBackward0", "ToCopyBackward0"};
  const std::string name = node.name();
  return std::find(kServed.begin(), kServed.end(), name) != kServed.end();
}

// Whether the node changes a gradient's shape on its way to the parameter, but not its memory.
bool only_views(const Node& node) {
  static constexpr std::array<std::string_view, 4> kViews = {"TBackward0", "TransposeBackward0",
                                                             "PermuteBackward0", "ViewBackward0"};
  const std::string name = node.name();
  return node.num_outputs() == 1 && std::find(kViews.begin(), kViews.end(), name) != kViews.end();
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

// The only parameter whose gradient an allocation of this size in this node can be.
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
  // The engine also runs the hooks on the node's own gradient within the node.
  if (found == nullptr || !is_served(node) || is_watched(node) || !node.post_hooks().empty())
    return nullptr;
  Node* next = found->function.get();
  constexpr int kSteps = 4;
  for (int step = 0; step < kSteps && !is_watched(*next); ++step) {
    if (const auto* end = dynamic_cast<const AccumulateGrad*>(next))
      return end->variable.unsafeGetTensorImpl();
    if (!only_views(*next) || !next->post_hooks().empty() || !next->next_edge(0).is_valid()) break;
    next = next->next_edge(0).function.get();
  }
  return nullptr;
}

struct Offer {
  const void* owner = nullptr;
  InplaceGradients::Slot slot;
};

class SlotAllocator final : public c10::Allocator {
 public:
  // Never destroyed: tensors remember the allocator of their storage until the very end.
  static void install() {
    static auto* const allocator = new SlotAllocator(c10::GetCPUAllocator());
    installed_ = allocator;
  }
  static SlotAllocator* if_installed() { return installed_; }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= min_bytes().load(std::memory_order_relaxed) &&
        offering_.load(std::memory_order_relaxed)) {
      if (void* const data = slot_for(bytes)) return {data, data, &deallocate, c10::kCPU};
    }
    return usual_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    usual_->copy_data(to, from, bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return usual_->is_simple_data_ptr(data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return usual_->raw_deleter() ? &deallocate : nullptr;
  }

  void offer(const at::TensorImpl* parameter, Offer offer) {
    std::lock_guard<std::mutex> lock(mutex_);
    offers_[parameter] = std::move(offer);
    offering_ = true;
  }
  void withdraw(const void* owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(offers_, [owner](const auto& entry) { return entry.second.owner == owner; });
    offering_ = !offers_.empty();
  }
  bool in_use(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    return in_use_.count(data) > 0;
  }
  std::size_t offered() {
    std::lock_guard<std::mutex> lock(mutex_);
    return offers_.size();
  }
  static std::atomic<std::size_t>& min_bytes() {
    static std::atomic<std::size_t> bytes{min_bytes_of_environment()};
    return bytes;
  }
  std::uint64_t served() const { return served_.load(std::memory_order_relaxed); }

 private:
  explicit SlotAllocator(c10::Allocator* usual) : usual_(usual) { c10::SetCPUAllocator(this); }

  // Also for memory of the usual allocator: raw_allocate() does not say whose it is.
  static void deallocate(void* data) {
    SlotAllocator& self = *installed_.load();
    at::Tensor slot;  // may be the last reference to its bucket, which ends after the unlock
    {
      std::lock_guard<std::mutex> lock(self.mutex_);
      const auto found = self.in_use_.find(data);
      if (found != self.in_use_.end()) {
        slot = std::move(found->second);
        self.in_use_.erase(found);
      }
    }
    if (!slot.defined()) self.usual_->raw_deleter()(data);
  }

  void* slot_for(std::size_t bytes) {
    const auto node = torch::autograd::get_current_node();
    if (!node || c10::GradMode::is_enabled()) return nullptr;
    const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
    if (chosen != nullptr && !chosen->empty()) return nullptr;
    const at::TensorImpl* parameter = parameter_of(*node, bytes);
    if (parameter == nullptr) return nullptr;
    InplaceGradients::Slot ask;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = offers_.find(parameter);
      if (found == offers_.end()) return nullptr;
      ask = found->second.slot;
    }
    const at::Tensor slot = ask();
    if (!slot.defined() || slot.nbytes() != bytes) return nullptr;
    void* const data = slot.mutable_data_ptr();
    std::lock_guard<std::mutex> lock(mutex_);
    if (!in_use_.emplace(data, slot).second) return nullptr;
    // Autograd must notice when the values that lay here were saved for another backward.
    slot.unsafeGetTensorImpl()->bump_version();
    served_.fetch_add(1, std::memory_order_relaxed);
    return data;
  }

  static inline std::atomic<SlotAllocator*> installed_{nullptr};
  c10::Allocator* usual_;
  std::atomic<bool> offering_{false};  // spares all other allocations the lock
  std::atomic<std::uint64_t> served_{0};
  std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Offer> offers_;
  std::unordered_map<const void*, at::Tensor> in_use_;  // slots in which a tensor lies now
};

}  // namespace

void InplaceGradients::enable() {
  if (min_bytes_of_environment() != SIZE_MAX) SlotAllocator::install();
}
bool InplaceGradients::is_enabled() {
  return SlotAllocator::if_installed() != nullptr;
}
void InplaceGradients::offer(const at::Tensor& parameter, const void* owner, Slot slot) {
  if (auto* allocator = SlotAllocator::if_installed())
    allocator->offer(parameter.unsafeGetTensorImpl(), Offer{owner, std::move(slot)});
}
void InplaceGradients::withdraw(const void* owner) {
  if (auto* allocator = SlotAllocator::if_installed()) allocator->withdraw(owner);
}
std::size_t InplaceGradients::set_min_bytes(std::size_t bytes) {
  return SlotAllocator::min_bytes().exchange(bytes);
}
bool InplaceGradients::in_use(const at::Tensor& slot) {
  auto* const allocator = SlotAllocator::if_installed();
  return allocator != nullptr && allocator->in_use(slot.const_data_ptr());
}
std::size_t InplaceGradients::offered() {
  auto* const allocator = SlotAllocator::if_installed();
  return allocator != nullptr ? allocator->offered() : 0;
}
std::uint64_t InplaceGradients::served() {
  auto* const allocator = SlotAllocator::if_installed();
  return allocator != nullptr ? allocator->served() : 0;
}

}  // namespace detail
}  // namespace lockstep
