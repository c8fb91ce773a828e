// Pages of memory, small and huge.
//
//   void* const place = map_at_huge_page(bytes, PROT_READ | PROT_WRITE);   // the caller unmaps it
//   ::madvise(place, whole_huge_pages(bytes), MADV_HUGEPAGE);
//
// Free functions; any thread may call.
#pragma once

#include <cstddef>

namespace lockstep {

inline constexpr std::size_t kHugePage = 2u << 20;

constexpr std::size_t whole_huge_pages(std::size_t bytes) {
  return bytes / kHugePage * kHugePage;
}

std::size_t page_bytes();

// Private memory that begins where a huge page can begin; nullptr when there is none left. Whole
// pages, with mmap's protection and flags.
void* map_at_huge_page(std::size_t bytes, int protection, int flags = 0);

}  // namespace lockstep
