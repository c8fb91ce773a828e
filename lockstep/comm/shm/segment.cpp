#include "lockstep/comm/shm/segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <map>
#include <mutex>

#include "lockstep/core/error.h"
#include "lockstep/core/host.h"

namespace lockstep::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
#ifndef MFD_NOEXEC_SEAL
constexpr unsigned kNoExec = 0x0008U;  // younger than some C libraries
#else
constexpr unsigned kNoExec = MFD_NOEXEC_SEAL;
#endif
#ifndef MADV_COLLAPSE
constexpr int kCollapse = 25;  // Linux 6.1
#else
constexpr int kCollapse = MADV_COLLAPSE;
#endif

// This process's mappings. Never destroyed: segments may outlive static objects.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<unsigned long long, unsigned long long>, std::weak_ptr<Segment>> segments;
};
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

Fd make_file() {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  // Some systems insist on the flag, older kernels do not know it.
  int fd = ::memfd_create("lockstep", flags | kNoExec);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create("lockstep", flags);
  if (fd < 0) throw SystemError("shm", "cannot create a shared memory file", errno);
  return Fd(fd);
}

// Reserves addresses at which huge pages of the file can be huge pages of the mapping; nullptr
// where there are none, or no need.
void* place_for_huge_pages(std::size_t bytes) {
  return bytes < kHugePage ? nullptr : map_at_huge_page(bytes, PROT_NONE, MAP_NORESERVE);
}

std::size_t whole_pages(std::size_t bytes) {
  const std::size_t page = page_bytes();
  return std::max((bytes + page - 1) / page * page, page);
}

void check(const MemoryNeed& need) {
  const std::string lack = lacking_memory(need);
  if (!lack.empty())
    throw UsageError("shm", "{}. Use fewer ranks or smaller buffers, or raise the limit.", lack);
}

}  // namespace

void check_room(std::size_t bytes, const std::vector<std::string>& groups) {
  const std::size_t own = whole_pages(bytes);
  const std::size_t together = own * groups.size();
  check({.own_bytes = own, .host_bytes = together, .map_bytes = together, .groups = groups});
}

std::shared_ptr<Segment> Segment::make(std::size_t bytes) {
  const std::size_t rounded = whole_pages(bytes);
  check({.own_bytes = rounded, .host_bytes = rounded, .map_bytes = rounded});
  std::shared_ptr<Segment> segment(new Segment);
  segment->fd_ = make_file();
  const int fd = segment->fd_.get();
  if (::ftruncate(fd, static_cast<off_t>(rounded)) != 0)
    throw SystemError("shm", fmt::format("cannot size a segment of {} bytes", rounded), errno);
  int failed = 0;
  do {
    failed = ::fallocate(fd, 0, 0, static_cast<off_t>(rounded));
  } while (failed != 0 && errno == EINTR);
  if (failed != 0)
    throw SystemError("shm", fmt::format("cannot allocate a segment of {} bytes", rounded), errno);
  if (::fcntl(fd, F_ADD_SEALS, kSeals) != 0)
    throw SystemError("shm", "cannot seal a segment", errno);
  segment->bytes_ = rounded;
  segment->map(fd);
  return enter(segment);
}

std::shared_ptr<Segment> Segment::open(int fd, std::size_t bytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw SystemError("shm", "cannot look at a peer's segment", errno);
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || static_cast<std::size_t>(status.st_size) < bytes)
    throw CommError("shm", fmt::format("a peer sent something that is not a sealed segment of {} "
                                       "bytes (size {}, seals {:#x}). Do all ranks run the same "
                                       "version?",
                                       bytes, status.st_size, seals));
  {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().segments.find({status.st_dev, status.st_ino});
    if (found != registry().segments.end()) {
      if (auto known = found->second.lock()) return known;
    }
  }
  std::shared_ptr<Segment> segment(new Segment);
  segment->bytes_ = static_cast<std::size_t>(status.st_size);
  segment->map(fd);
  return enter(segment);
}

// Two threads may have mapped the same segment at once: the first to enter wins.
std::shared_ptr<Segment> Segment::enter(const std::shared_ptr<Segment>& segment) {
  const std::lock_guard lock(registry().mutex);
  auto& entry = registry().segments[segment->identity_];
  if (auto known = entry.lock()) return known;
  entry = segment;
  return segment;
}

void Segment::map(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw SystemError("shm", "cannot look at a segment", errno);
  identity_ = {status.st_dev, status.st_ino};
  void* const place = place_for_huge_pages(bytes_);
  const int fixed = place != nullptr ? MAP_FIXED : 0;
  if (place != nullptr && fd == fd_.get()) use_huge_pages(place);
  // Populated, so that the first pass over the memory is as fast as the others.
  void* const data =
      ::mmap(place, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE | fixed, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    if (place != nullptr) ::munmap(place, bytes_);
    throw SystemError("shm", fmt::format("cannot map a segment of {} bytes", bytes_), error);
  }
  data_ = static_cast<std::byte*>(data);
}

// Called by the maker before anybody has mapped the pages. Sums run faster over huge pages on some
// machines and never slower. Best effort: kernels before 6.1 do not support it, and there may be no
// memory in one piece; then the pages stay as they are.
void Segment::use_huge_pages(void* place) const {
  if (::mmap(place, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_.get(), 0) != place)
    return;
  ::madvise(place, whole_huge_pages(bytes_), kCollapse);
}

Segment::~Segment() {
  {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().segments.find(identity_);
    if (found != registry().segments.end() && found->second.expired())
      registry().segments.erase(found);
  }
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace lockstep::shm
