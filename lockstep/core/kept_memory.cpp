#include "lockstep/core/kept_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <iterator>
#include <string>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = 2 << 20;

// Steps of an eighth, so that batches of about the same length share blocks. What is beyond the
// caller's bytes is never touched, so it costs addresses, not memory.
std::size_t rounded(std::size_t bytes) {
  const std::size_t step = std::max(std::bit_floor(std::max(bytes, kPage)) / 8, kPage);
  return (std::max(bytes, kPage) + step - 1) / step * step;
}

std::size_t huge_part(std::size_t bytes) {
  return bytes / kHugePage * kHugePage;
}

bool has_huge_pages() {
  static const bool has = [] {
    std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    return text.find('[') != std::string::npos && text.find("[never]") == std::string::npos;
  }();
  return has;
}

// Begins a huge page. nullptr: there is no more.
void* map_pages(std::size_t bytes) {
  const std::size_t around = bytes + kHugePage;
  void* const pages =
      ::mmap(nullptr, around, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  char* const first = static_cast<char*>(pages);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(first) % kHugePage;
  if (before > 0) ::munmap(first, before);
  ::munmap(first + before + bytes, kHugePage - before);
  // Not what is left at the end: a huge page there would reach beyond it.
  if (has_huge_pages() && huge_part(bytes) > 0)
    ::madvise(first + before, huge_part(bytes), MADV_HUGEPAGE);
  return first + before;
}

}  // namespace

KeptMemory::~KeptMemory() {
  for (const auto& [data, block] : blocks_) ::munmap(const_cast<void*>(data), block.bytes);
}

void* KeptMemory::take(std::size_t bytes) {
  if (bytes > SIZE_MAX / 4) return nullptr;
  bytes = rounded(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  auto& idle = by_size_[bytes];
  void* data = nullptr;
  if (idle.empty()) {
    data = fetch(bytes);
    if (data == nullptr) return nullptr;
  } else {
    data = idle.back();  // most likely still in some cache
    idle.pop_back();
    Block& block = blocks_.at(data);
    idle_.erase(block.idle_since);
    block.idle_since = 0;
    counts_.idle -= bytes;
  }
  counts_.used += bytes;
  counts_.peak = std::max(counts_.peak, counts_.used);
  return data;
}

void KeptMemory::give_back(void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = blocks_.find(data);
  LOCKSTEP_ASSERT(found != blocks_.end() && found->second.idle_since == 0);
  Block& block = found->second;
  block.idle_since = ++returns_;
  by_size_[block.bytes].push_back(data);
  idle_[block.idle_since] = data;
  counts_.used -= block.bytes;
  counts_.idle += block.bytes;
  // Small pages would each have to be marked, and again on the next write: 5 ms for 34 MB, where
  // huge ones take 15 us.
  if (has_huge_pages() && huge_part(block.bytes) > 0)
    ::madvise(data, huge_part(block.bytes), MADV_FREE);
  while (counts_.idle > most_idle_) drop_oldest();
}

bool KeptMemory::holds(const void* block) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return blocks_.count(block) > 0;
}

void* KeptMemory::fetch(std::size_t bytes) {
  const std::size_t used = counts_.used + bytes;
  const std::size_t peak = std::max(counts_.peak, used);
  while (!idle_.empty() && used + counts_.idle > peak + peak / 4) drop_oldest();
  void* data = map_pages(bytes);
  if (data == nullptr) {
    while (!idle_.empty()) drop_oldest();
    data = map_pages(bytes);
    if (data == nullptr) return nullptr;
  }
  blocks_[data].bytes = bytes;
  counts_.fetched += 1;
  return data;
}

void KeptMemory::drop_oldest() {
  void* const data = idle_.begin()->second;
  idle_.erase(idle_.begin());
  const std::size_t bytes = blocks_.at(data).bytes;
  auto& same = by_size_[bytes];
  same.erase(std::find(same.begin(), same.end(), data));
  counts_.idle -= bytes;
  blocks_.erase(data);
  ::munmap(data, bytes);
}

void KeptMemory::release_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!idle_.empty()) drop_oldest();
}

KeptMemory::Counts KeptMemory::counts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

}  // namespace lockstep
