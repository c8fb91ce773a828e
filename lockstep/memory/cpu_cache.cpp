#include "lockstep/memory/cpu_cache.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <atomic>
#include <mutex>
#include <new>

#include "lockstep/core/env.h"
#include "lockstep/memory/block_cache.h"
#include "lockstep/memory/inplace_gradients.h"

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
    if (!own) memory::InplaceGradients::enable();  // in front of the cache: it answers first
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

}  // namespace lockstep
