// A rank's control segment, which all ranks of the host map: its memory and its layout.
//
//   check_room(bytes, groups);                     // all ranks; throws UsageError
//   auto mine = Segment::make(bytes);
//   send_packet(socket, "here", mine->fd(), deadline);
//   auto theirs = Segment::open(packet.fd.get(), bytes);
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/shm/engine_types.h"
#include "lockstep/comm/shm/reduce.h"
#include "lockstep/core/fd.h"

namespace lockstep::shm {

// Throws UsageError where the ranks of this host, whose control groups these are (memory_groups()),
// cannot make a segment of this size each and map all of them. All ranks must ask before any of
// them makes its own, which the others would otherwise count as missing or not count at all.
void check_room(std::size_t bytes, const std::vector<std::string>& groups);

// An anonymous file without a name, sealed so that nobody can shrink it under a reader's feet, and
// allocated in full so that touching it never fails. From 2 MiB on it lies in huge pages, where the
// kernel provides them. Opening a segment that this process already maps gives the same mapping,
// for ranks that are threads of one process. Reference counted; safe from any thread.
class Segment {
 public:
  // Throws UsageError when there is no room for it.
  static std::shared_ptr<Segment> make(std::size_t bytes);
  // A descriptor received from a peer; it stays the caller's. Throws SystemError, or CommError
  // when it is not a sealed segment of at least that size.
  static std::shared_ptr<Segment> open(int fd, std::size_t bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }
  // Only the mapping is needed once every peer has the descriptor.
  void close_fd() { fd_.reset(); }

 private:
  using Identity = std::pair<unsigned long long, unsigned long long>;  // device and inode

  Segment() = default;
  void map(int fd);
  void use_huge_pages(void* place) const;
  static std::shared_ptr<Segment> enter(const std::shared_ptr<Segment>& segment);

  Fd fd_;  // the maker's
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Identity identity_{};
};

// The layout: header | buffer 0 | buffer 1 | ring to rank 0 | ring to rank 1 | ...
//
// A rank writes its own segment only, except for three words of the header (`bell`, `waiting_for`)
// and of a ring (`taken`) by which others wake it and give it room. Words that different sides
// write stand on cache lines of their own; 128 bytes, because some processors fetch lines in pairs.

inline constexpr std::size_t kLine = 64;
inline constexpr std::size_t kApart = 128;

enum class Kind : std::uint8_t {
  kBarrier,
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kGather,
  kScatter,
  kAllToAll,
  kAllGatherV,
  kFinish  // the barrier of a rank that has nothing more to do
};
const char* name(Kind kind);

// The operation that a rank has called. Everything up to `op` must be equal on all ranks; the block
// that holds the array (0: private memory) decides between the algorithms.
struct Descriptor {
  std::uint64_t sequence = 0;
  std::uint64_t bytes = 0;
  std::int16_t root = -1;
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kU8;
  Op op = Op::kSum;
  bool saving = false;  // a checkpoint; for messages only
  std::uint32_t block = 0;
  std::uint32_t number = 0;  // the caller's, for messages only
  std::uint64_t offset = 0;

  bool agrees(const Descriptor& other) const {
    return sequence == other.sequence && bytes == other.bytes && root == other.root &&
           kind == other.kind && dtype == other.dtype && op == other.op;
  }
  // How calls of one operation differ: "size and dtype", "reduction", "root"; empty for others.
  std::string difference(const Descriptor& other) const;
  // "all_reduce(float32 x 12, sum)"
  std::string text() const;
  // "called all_reduce(float32 x 12, sum)", "has returned from its body", "... to save a
  // checkpoint"
  std::string action() const;
};

// One cache line: a rank that waits for a post reads the description with it.
struct alignas(kLine) Post {
  std::atomic<std::uint64_t> round{0};
  Descriptor what;
  std::atomic<std::int32_t> cpu{-1};  // the one it was made on
};
static_assert(sizeof(Post) == kLine);

enum class State : std::uint32_t { kAlive, kClosed, kBroken };

// Why a rank's engine is broken, for its peers. Written once, before `state`.
struct Trouble {
  std::int32_t origin = -1;   // the rank that found it
  std::int32_t culprit = -1;  // the rank it blames, if any
  std::uint32_t timeout = 0;
  std::uint32_t disagreement = 0;
  std::uint32_t why_at = 0;  // where in `text` the reason of a timeout begins; 0: nowhere
  char text[1024] = {};
};

// The sizes that determine a segment's layout. All are compared, because different sizes can have
// the same sum. Increment kVersion when operations change what they write there.
struct Form {
  static constexpr std::uint64_t kVersion = 4;
  std::uint64_t version = kVersion;
  std::uint64_t header_bytes = 0;
  std::uint64_t small_bytes = 0;
  std::uint64_t chunk_bytes = 0;
  std::uint64_t ring_bytes = 0;

  bool operator==(const Form&) const = default;
  std::string text() const;
};

struct Header {
  alignas(kApart) Form form;      // first, where every build finds it
  alignas(kApart) Post posts[2];  // by the round's parity
  // Changed and woken by any rank that has news for a sleeping one.
  alignas(kApart) std::atomic<std::uint32_t> bell{0};
  // 0: awake; rank + 1: asleep until that one posts; kAnyone: until anyone does anything.
  alignas(kApart) std::atomic<std::uint32_t> waiting_for{0};
  alignas(kApart) std::atomic<State> state{State::kAlive};
  Trouble trouble;
  // Bytes to and from each rank, for operations where they differ; by the first round's parity.
  alignas(kApart) std::uint64_t sends[2][kMaxRanks] = {};
  std::uint64_t receives[2][kMaxRanks] = {};
};
inline constexpr std::uint32_t kAnyone = 0xffff;
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<State>::is_always_lock_free);

// Bytes from one rank to one other. Both counters only grow; the place in the ring is the
// remainder of the division by its size.
struct Ring {
  alignas(kApart) std::atomic<std::uint64_t> written{0};
  alignas(kApart) std::atomic<std::uint64_t> taken{0};
  // The ring's bytes follow.
  std::byte* data() { return reinterpret_cast<std::byte*>(this + 1); }
};

struct View {
  Header* header = nullptr;
  std::byte* buffers[2] = {nullptr, nullptr};
  std::byte* rings = nullptr;
};

class Layout {
 public:
  // Fills in the defaults; throws UsageError for sizes that cannot work.
  Layout(int size, const EngineOptions& options);

  std::size_t segment_bytes() const { return rings_at_ + ring_stride_ * ranks_; }
  std::size_t small_bytes() const { return small_bytes_; }
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  std::size_t ring_bytes() const { return ring_bytes_; }
  Form form() const;

  void construct(std::byte* segment) const;  // by its owner, before anyone else maps it
  View view(std::byte* segment) const;
  Ring& ring(const View& view, int to) const;

 private:
  std::size_t ranks_, small_bytes_, chunk_bytes_, ring_bytes_, rings_at_, ring_stride_;
};

}  // namespace lockstep::shm
