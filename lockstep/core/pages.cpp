#include "lockstep/core/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace lockstep {

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

void* map_at_huge_page(std::size_t bytes, int protection, int flags) {
  void* const held =
      ::mmap(nullptr, bytes + kHugePage, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (held == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(held);
  const std::size_t past = reinterpret_cast<std::uintptr_t>(begin) % kHugePage;
  const std::size_t skipped = past == 0 ? 0 : kHugePage - past;
  if (skipped > 0) ::munmap(begin, skipped);
  ::munmap(begin + skipped + bytes, kHugePage - skipped);
  return begin + skipped;
}

}  // namespace lockstep
