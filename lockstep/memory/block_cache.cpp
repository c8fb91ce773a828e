#include "lockstep/memory/block_cache.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <fstream>
#include <iterator>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/host.h"
#include "lockstep/core/thread_signals.h"

namespace lockstep {
namespace {

// MADV_FREE takes about 1 us for a huge page and 30 us for small pages of the same size, which also
// fault when they are written again.
constexpr auto kSlowMark = std::chrono::microseconds(8);
constexpr int kMaxSlowMarks = 2;

// In steps of an eighth, so that batches of about the same length share blocks.
std::size_t rounded(std::size_t bytes) {
  const std::size_t minimum = std::max(bytes, page_bytes());
  const std::size_t step = std::max(std::bit_floor(minimum) / 8, page_bytes());
  return (minimum + step - 1) / step * step;
}

bool has_huge_pages() {
  static const bool has = [] {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    return text.find('[') != std::string::npos && text.find("[never]") == std::string::npos;
  }();
  return has;
}

// nullptr: out of memory.
void* map_pages(std::size_t bytes) {
  void* const data = map_at_huge_page(bytes, PROT_READ | PROT_WRITE);
  if (data != nullptr && has_huge_pages() && bytes >= kHugePage)
    ::madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

void unmap(void* data, std::size_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  ::munmap(data, bytes);
}

template <typename Blocks>
void unmap_all(const Blocks& blocks) {
  for (const auto& block : blocks) unmap(block.data, block.bytes);
}

// Marks for the address sanitizer that only the requested bytes may be used.
void* hand_out(void* data, std::size_t asked, std::size_t bytes) {
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(data) + asked, bytes - asked);
  ASAN_UNPOISON_MEMORY_REGION(data, asked);
  (void)asked, (void)bytes;
  return data;
}

}  // namespace

BlockCache::~BlockCache() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (trimmer_) trimmer_->join();
  unmap_all(used_);
  unmap_all(idle_);
}

void* BlockCache::allocate(std::size_t asked) {
  if (asked > SIZE_MAX / 4) return nullptr;
  const std::size_t bytes = rounded(asked);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = find_idle(bytes);
  if (found == idle_.end()) {
    void* const data = map_new(bytes, lock);
    return data == nullptr ? nullptr : hand_out(data, asked, bytes);
  }
  found->in_use = true;
  used_.splice(used_.end(), idle_, found);
  stats_.idle -= found->bytes;
  stats_.used += found->bytes;
  stats_.peak = std::max(stats_.peak, stats_.used);
  return hand_out(found->data, asked, found->bytes);
}

// The best fit that is at most a quarter too large; among equal sizes the last one used, which is
// the most likely to be in a cache.
BlockCache::Blocks::iterator BlockCache::find_idle(std::size_t bytes) {
  auto best = idle_.end();
  for (auto at = idle_.end(); at != idle_.begin();) {
    --at;
    if (at->bytes == bytes) return at;
    if (at->bytes < bytes || at->bytes > bytes + bytes / 4) continue;
    if (best == idle_.end() || at->bytes < best->bytes) best = at;
  }
  return best;
}

void* BlockCache::map_new(std::size_t bytes, std::unique_lock<std::mutex>& lock) {
  Blocks made(1);
  stats_.used += bytes;  // counted from now on, because other threads may map meanwhile
  const std::size_t peak = std::max(stats_.peak, stats_.used);
  const Blocks gone = drop_to(peak + peak / 4 - stats_.used);
  lock.unlock();  // unmapping takes as long as clearing
  unmap_all(gone);
  void* data = map_pages(bytes);
  if (data == nullptr) {
    release_idle();
    data = map_pages(bytes);
  }
  lock.lock();
  try {
    if (data == nullptr) throw std::bad_alloc();
    made.front() = {.data = data, .bytes = bytes};
    by_address_[data] = made.begin();
  } catch (const std::bad_alloc&) {
    if (data != nullptr) unmap(data, bytes);
    stats_.used -= bytes;
    return nullptr;
  }
  used_.splice(used_.end(), made);
  stats_.peak = std::max(stats_.peak, stats_.used);
  stats_.mapped += 1;
  return data;
}

void BlockCache::deallocate(void* data) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = by_address_.find(data);
  LOCKSTEP_ASSERT(found != by_address_.end() && found->second->in_use);
  const auto block = found->second;
  block->in_use = false;
  lock.unlock();
  // Done before another caller can get the block, whose first bytes would be lost otherwise.
  const std::size_t huge = whole_huge_pages(block->bytes);
  const auto now = Clock::now();
  if (has_huge_pages() && huge > 0 && block->slow_marks < kMaxSlowMarks) {
    ::madvise(data, huge, MADV_FREE);
    if (Clock::now() - now > kSlowMark * static_cast<std::int64_t>(huge / kHugePage))
      ++block->slow_marks;
  }
  ASAN_POISON_MEMORY_REGION(data, block->bytes);
  lock.lock();
  block->idle_since = now;
  stats_.used -= block->bytes;
  stats_.idle += block->bytes;
  // A block that may not stay at all must not evict the others.
  idle_.splice(block->bytes > options_.max_idle_bytes ? idle_.begin() : idle_.end(), used_, block);
  const Blocks gone = drop_to(options_.max_idle_bytes);
  start_trimmer();
  lock.unlock();
  unmap_all(gone);
}

// These take blocks out of the cache; the caller unmaps them without the lock.
BlockCache::Blocks BlockCache::drop_oldest() {
  Blocks gone;
  stats_.idle -= idle_.front().bytes;
  by_address_.erase(idle_.front().data);
  gone.splice(gone.end(), idle_, idle_.begin());
  return gone;
}
BlockCache::Blocks BlockCache::drop_to(std::size_t max_idle_bytes) {
  Blocks gone;
  while (stats_.idle > max_idle_bytes) gone.splice(gone.end(), drop_oldest());
  return gone;
}

bool BlockCache::owns(const void* block) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return by_address_.count(block) > 0;
}

void BlockCache::release_idle() {
  std::unique_lock<std::mutex> lock(mutex_);
  const Blocks gone = drop_to(0);
  stats_.peak = stats_.used;
  lock.unlock();
  unmap_all(gone);
}

BlockCacheStats BlockCache::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

// ---------------------------------------------------------------- idle too long

void BlockCache::start_trimmer() {
  if (trimming_ || stopping_ || idle_.empty()) return;
  if (trimmer_) trimmer_->join();  // has ended, or is about to: it does not lock any more
  trimmer_.reset();
  const SignalsBlocked blocked;
  try {
    trimmer_.emplace([this] { trim(); });
    trimming_ = true;
  } catch (const std::system_error&) {  // no more threads: idle blocks stay until the next call
  }
}

void BlockCache::trim() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_ && !idle_.empty()) {
    const auto due = idle_.front().idle_since + options_.max_idle_time;
    if (Clock::now() < due) {
      stop_.wait_until(lock, due);
      continue;
    }
    const Blocks gone = drop_oldest();
    stats_.peak = std::min(stats_.peak, stats_.used + stats_.idle);
    lock.unlock();
    unmap_all(gone);
    lock.lock();
  }
  trimming_ = false;
}

void BlockCache::after_fork_in_child() {
  // The thread does not exist here; its handle can be neither joined nor destroyed.
  if (trimmer_) new std::optional<std::thread>(std::move(trimmer_));
  trimmer_.reset();
  trimming_ = false;
  new (&stop_) std::condition_variable;  // the old one still counts the thread as waiting
  mutex_.unlock();
}

}  // namespace lockstep
