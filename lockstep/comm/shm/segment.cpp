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
#include <new>

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

// ---------------------------------------------------------------- the layout

namespace {

constexpr std::size_t kPage = 4096;
constexpr const char* kKindNames[] = {"barrier",    "all_reduce",     "reduce", "broadcast",
                                      "all_gather", "reduce_scatter", "gather", "scatter",
                                      "all_to_all", "all_gather_v",   "finish"};

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

constexpr std::size_t kHeaderBytes = round_up(sizeof(Header), kPage);

// Measured (docs/adr/0004). Two ranks on two cores: symmetric 16 KiB take 5.5 us in one round and
// 3.3 divided. With more ranks each of them reads more in one round, so dividing pays earlier; on
// fewer cores than ranks every round is a change of threads, so it pays late. Chunks of two ranks
// fit into a core's own cache; four ranks on two cores take 16 ms with 1 MiB, 23 with 256 KiB.
constexpr std::size_t kSmallBytesOfAll = 32u << 10;
constexpr std::size_t kMaxSmallBytes = 8u << 10;
constexpr std::size_t kChunkBytesOfTwo = 256u << 10;
constexpr std::size_t kChunkBytes = 1u << 20;
constexpr std::size_t kRingBytes = 256u << 10;
constexpr std::size_t kAllRingsBytes = 1u << 20;
constexpr std::size_t kMinRingBytes = 16u << 10;

std::size_t default_small(std::size_t ranks) {
  return std::min(kSmallBytesOfAll / ranks, kMaxSmallBytes);
}

std::size_t default_chunk(std::size_t ranks) {
  return ranks <= 2 ? kChunkBytesOfTwo : kChunkBytes;
}

std::size_t default_ring(std::size_t ranks) {
  const std::size_t share = kAllRingsBytes / std::max<std::size_t>(ranks - 1, 1);
  return round_up(std::clamp(share, kMinRingBytes, kRingBytes), kPage);
}

}  // namespace

const char* name(Kind kind) {
  return kKindNames[static_cast<int>(kind)];
}

std::string Descriptor::text() const {
  switch (kind) {
    case Kind::kBarrier:
    case Kind::kFinish:
    case Kind::kAllToAll:
    case Kind::kAllGatherV:
      return fmt::format("{}()", name(kind));
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
      return fmt::format("{}({} x {}, {})", name(kind), name(dtype), bytes / size_of(dtype),
                         name(op));
    case Kind::kReduce:
      return fmt::format("{}({} x {}, {}, root {})", name(kind), name(dtype),
                         bytes / size_of(dtype), name(op), root);
    case Kind::kAllGather:
      return fmt::format("{}({} bytes)", name(kind), bytes);
    case Kind::kBroadcast:
      return fmt::format("{}({} bytes, root {})", name(kind), bytes, root);
    case Kind::kGather:
    case Kind::kScatter:
      return fmt::format("{}(root {})", name(kind), root);
  }
  return "unknown";
}

std::string Descriptor::difference(const Descriptor& other) const {
  if (kind != other.kind || saving != other.saving) return "";
  const bool size = bytes / size_of(dtype) != other.bytes / size_of(other.dtype);
  if (dtype != other.dtype) return size ? "size and dtype" : "dtype";
  if (size) return "size";
  return op != other.op ? "reduction" : root != other.root ? "root" : "";
}

std::string Descriptor::action() const {
  if (kind == Kind::kFinish) return "has returned from its body";
  return fmt::format("called {}{}", text(), saving ? " to save a checkpoint" : "");
}

Layout::Layout(int size, const EngineOptions& options)
    : ranks_(static_cast<std::size_t>(size)),
      small_bytes_(options.small_bytes != 0 ? options.small_bytes : default_small(ranks_)),
      chunk_bytes_(options.chunk_bytes != 0 ? options.chunk_bytes : default_chunk(ranks_)),
      ring_bytes_(options.ring_bytes != 0 ? options.ring_bytes : default_ring(ranks_)) {
  chunk_bytes_ = round_up(chunk_bytes_, kPage);
  ring_bytes_ = round_up(ring_bytes_, kPage);
  if (options.small_bytes == 0) small_bytes_ = std::min(small_bytes_, chunk_bytes_);
  if (small_bytes_ > chunk_bytes_)
    throw UsageError("shm",
                     "small_bytes ({}) is larger than chunk_bytes ({}). A small operation must fit "
                     "into one chunk: make small_bytes smaller.",
                     small_bytes_, chunk_bytes_);
  if (chunk_bytes_ < ranks_ * kLine)
    throw UsageError("shm", "chunk_bytes ({}) is less than a cache line for each of {} ranks.",
                     chunk_bytes_, ranks_);
  rings_at_ = kHeaderBytes + 2 * chunk_bytes_;
  ring_stride_ = sizeof(Ring) + ring_bytes_;
}

std::string Form::text() const {
  return fmt::format("layout {}.{} with small_bytes {}, chunk_bytes {}, ring_bytes {}", version,
                     header_bytes, small_bytes, chunk_bytes, ring_bytes);
}

Form Layout::form() const {
  Form form;
  form.header_bytes = sizeof(Header);
  form.small_bytes = small_bytes_;
  form.chunk_bytes = chunk_bytes_;
  form.ring_bytes = ring_bytes_;
  return form;
}

void Layout::construct(std::byte* segment) const {
  new (segment) Header;
  const View mine = view(segment);
  mine.header->form = form();
  for (std::size_t to = 0; to < ranks_; ++to) new (&ring(mine, static_cast<int>(to))) Ring;
}

View Layout::view(std::byte* segment) const {
  View view;
  view.header = std::launder(reinterpret_cast<Header*>(segment));
  view.buffers[0] = segment + kHeaderBytes;
  view.buffers[1] = segment + kHeaderBytes + chunk_bytes_;
  view.rings = segment + rings_at_;
  return view;
}

Ring& Layout::ring(const View& view, int to) const {
  return *std::launder(
      reinterpret_cast<Ring*>(view.rings + ring_stride_ * static_cast<std::size_t>(to)));
}

}  // namespace lockstep::shm
