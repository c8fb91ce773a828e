#include "lockstep/parallel/cpu_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <atomic>
#include <mutex>
#include <new>

#include "lockstep/core/env.h"

namespace lockstep {
namespace {

// Smaller ones stay in malloc's heap, where keeping them brought nothing that could be measured.
constexpr std::size_t kLeastKept = 1 << 20;

std::size_t asked_most_idle() {
  return static_cast<std::size_t>(
      env::get_int("LOCKSTEP_KEPT_MEMORY_BYTES", 0).value_or(INT64_MAX));
}

class KeepingAllocator final : public c10::Allocator {
 public:
  // Never destroyed: tensors live until the very end.
  static void install(std::size_t most_idle) {
    auto* const allocator = new KeepingAllocator(c10::GetCPUAllocator(), most_idle);
    installed_ = allocator;
    const auto before = [] { installed_.load()->memory_.before_fork(); };
    const auto after = [] { installed_.load()->memory_.after_fork(); };
    if (::pthread_atfork(before, after, after) != 0) throw std::bad_alloc();
    c10::SetCPUAllocator(allocator);
  }
  static KeepingAllocator* if_installed() { return installed_; }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= kLeastKept) {
      c10::DataPtr block(memory_.take(bytes), c10::kCPU);
      if (block) {
        block = {block.get(), block.get(), &let_go, c10::kCPU};
        c10::profiledCPUMemoryReporter().New(block.get(), bytes);
        return block;
      }
    }
    try {
      return usual_->allocate(bytes);
    } catch (const c10::Error&) {
      if (memory_.counts().idle == 0) throw;  // its words are good
      memory_.release_idle();
    }
    return usual_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    usual_->copy_data(to, from, bytes);
  }
  // What the usual allocator gave carries its own deleter, which this one calls: either will do.
  c10::DeleterFnPtr raw_deleter() const override { return &let_go; }

  KeptMemory& memory() { return memory_; }

 private:
  KeepingAllocator(c10::Allocator* usual, std::size_t most_idle)
      : usual_(usual), memory_(most_idle) {}

  // For memory of either origin: raw_allocate() does not tell which it gave.
  static void let_go(void* data) {
    KeepingAllocator& self = *installed_.load();
    if (!self.memory_.holds(data)) return self.usual_->raw_deleter()(data);
    c10::profiledCPUMemoryReporter().Delete(data);  // before somebody else gets the block
    self.memory_.give_back(data);
  }

  static inline std::atomic<KeepingAllocator*> installed_{nullptr};
  c10::Allocator* const usual_;
  KeptMemory memory_;
};

}  // namespace

void CpuMemory::check_environment() {
  asked_most_idle();
}
void CpuMemory::keep() {
  static std::once_flag once;
  std::call_once(once, [] {
    const std::size_t most_idle = asked_most_idle();
    const bool own = c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator();
    if (most_idle > 0 && !own) KeepingAllocator::install(most_idle);
  });
}
bool CpuMemory::is_kept() {
  return KeepingAllocator::if_installed() != nullptr;
}
void CpuMemory::release_idle() {
  if (auto* allocator = KeepingAllocator::if_installed()) allocator->memory().release_idle();
}
KeptMemory::Counts CpuMemory::counts() {
  auto* const allocator = KeepingAllocator::if_installed();
  return allocator != nullptr ? allocator->memory().counts() : KeptMemory::Counts{};
}

}  // namespace lockstep
