#include "lockstep/core/kept_memory.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <fstream>
#include <iterator>
#include <new>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/pages.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// Saying that a huge page may be taken costs about 1 us, and for the small pages of the same bytes
// 30; those fault when they are written again, too.
constexpr auto kSlowMark = std::chrono::microseconds(8);
constexpr int kMostSlowMarks = 2;

// In steps of an eighth, so that batches of about the same length share blocks.
std::size_t rounded(std::size_t bytes) {
  const std::size_t least = std::max(bytes, page_bytes());
  const std::size_t step = std::max(std::bit_floor(least) / 8, page_bytes());
  return (least + step - 1) / step * step;
}

bool has_huge_pages() {
  static const bool has = [] {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    return text.find('[') != std::string::npos && text.find("[never]") == std::string::npos;
  }();
  return has;
}

// nullptr: there is no more.
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

// Only the caller's bytes are his, which the address sanitizer should know.
void* hand_out(void* data, std::size_t asked, std::size_t bytes) {
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(data) + asked, bytes - asked);
  ASAN_UNPOISON_MEMORY_REGION(data, asked);
  (void)asked, (void)bytes;
  return data;
}

}  // namespace

KeptMemory::~KeptMemory() {
  unmap_all(used_);
  unmap_all(idle_);
}

void* KeptMemory::take(std::size_t asked) {
  if (asked > SIZE_MAX / 4) return nullptr;
  const std::size_t bytes = rounded(asked);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = find_idle(bytes);
  if (found == idle_.end()) {
    void* const data = fetch(bytes, lock);
    return data == nullptr ? nullptr : hand_out(data, asked, bytes);
  }
  found->in_use = true;
  used_.splice(used_.end(), idle_, found);
  counts_.idle -= found->bytes;
  counts_.used += found->bytes;
  counts_.peak = std::max(counts_.peak, counts_.used);
  return hand_out(found->data, asked, found->bytes);
}

// The best that is no more than a quarter too large; of the same size the one used last, which is
// the likeliest to be in some cache.
KeptMemory::Blocks::iterator KeptMemory::find_idle(std::size_t bytes) {
  auto best = idle_.end();
  for (auto at = idle_.end(); at != idle_.begin();) {
    --at;
    if (at->bytes == bytes) return at;
    if (at->bytes < bytes || at->bytes > bytes + bytes / 4) continue;
    if (best == idle_.end() || at->bytes < best->bytes) best = at;
  }
  return best;
}

void* KeptMemory::fetch(std::size_t bytes, std::unique_lock<std::mutex>& lock) {
  Blocks made(1);
  counts_.used += bytes;  // from now on, because others may fetch meanwhile
  const std::size_t peak = std::max(counts_.peak, counts_.used);
  const Blocks gone = drop_to(peak + peak / 4 - counts_.used);
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
    counts_.used -= bytes;
    return nullptr;
  }
  used_.splice(used_.end(), made);
  counts_.peak = std::max(counts_.peak, counts_.used);
  counts_.fetched += 1;
  return data;
}

void KeptMemory::give_back(void* data) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = by_address_.find(data);
  LOCKSTEP_ASSERT(found != by_address_.end() && found->second->in_use);
  const auto block = found->second;
  block->in_use = false;
  lock.unlock();
  // Before anybody else can take it, whose first bytes would be lost otherwise.
  const std::size_t huge = whole_huge_pages(block->bytes);
  if (has_huge_pages() && huge > 0 && block->slow_marks < kMostSlowMarks) {
    const auto start = Clock::now();
    ::madvise(data, huge, MADV_FREE);
    const auto most = kSlowMark * static_cast<std::int64_t>(huge / kHugePage);
    if (Clock::now() - start > most) ++block->slow_marks;
  }
  ASAN_POISON_MEMORY_REGION(data, block->bytes);
  lock.lock();
  counts_.used -= block->bytes;
  counts_.idle += block->bytes;
  // One that may not be kept at all must not drive the others out.
  idle_.splice(block->bytes > most_idle_ ? idle_.begin() : idle_.end(), used_, block);
  const Blocks gone = drop_to(most_idle_);
  lock.unlock();
  unmap_all(gone);
}

// What has been idle longest, off the books; to be unmapped when the lock is gone.
KeptMemory::Blocks KeptMemory::drop_to(std::size_t most_idle) {
  Blocks gone;
  while (counts_.idle > most_idle) {
    counts_.idle -= idle_.front().bytes;
    by_address_.erase(idle_.front().data);
    gone.splice(gone.end(), idle_, idle_.begin());
  }
  return gone;
}

bool KeptMemory::holds(const void* block) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return by_address_.count(block) > 0;
}

void KeptMemory::release_idle() {
  std::unique_lock<std::mutex> lock(mutex_);
  const Blocks gone = drop_to(0);
  counts_.peak = counts_.used;
  lock.unlock();
  unmap_all(gone);
}

KeptMemory::Counts KeptMemory::counts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

}  // namespace lockstep
