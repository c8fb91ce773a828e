#include "lockstep/comm/shm/layout.h"

#include <algorithm>
#include <new>

#include "lockstep/core/error.h"

namespace lockstep::shm {
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
