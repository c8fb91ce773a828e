#include "lockstep/comm/shm/symmetric.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "lockstep/comm/shm/layout.h"
#include "lockstep/comm/shm/segment.h"
#include "lockstep/core/error.h"

namespace lockstep::shm {
namespace {

// A loop reads the same element of all ranks' arrays at once. If these began at the same place of
// their pages, those elements would share one set of each cache, which holds 12 to 16 lines: 16
// ranks' lines would push each other out. So every rank's array begins some lines after the
// previous one's. With 16 arrays a sum takes 12 to 18 % less time.
constexpr std::size_t kStagger = 65 * kLine;
constexpr int kStaggers = 16;
constexpr std::size_t kStaggeredFrom = 1u << 20;  // bytes; smaller ones fit into the caches

std::size_t begin_of(int rank, std::size_t bytes) {
  if (bytes < kStaggeredFrom) return 0;
  return static_cast<std::size_t>(rank % kStaggers) * kStagger;
}

std::size_t segment_bytes(std::size_t bytes, int ranks) {
  return bytes + begin_of(std::min(ranks, kStaggers) - 1, bytes);
}

}  // namespace

MappedBlock::MappedBlock(std::uint32_t id, int rank, std::size_t bytes,
                         std::vector<std::shared_ptr<Segment>> segments)
    : id_(id), segments_(std::move(segments)) {
  rank_ = rank;
  bytes_ = bytes;
  for (const auto& segment : segments_)
    bases_.push_back(segment->data() + begin_of(static_cast<int>(bases_.size()), bytes));
}

void SymmetricBlocks::add(const std::shared_ptr<MappedBlock>& block) {
  const std::lock_guard lock(mutex_);
  std::erase_if(blocks_, [](const auto& entry) { return entry.second.expired(); });
  blocks_[reinterpret_cast<std::uintptr_t>(block->data())] = block;
}

SymmetricBlocks::Location SymmetricBlocks::find(const void* data, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  if (blocks_.empty()) return {};
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return {};
  const auto& [base, weak] = *--next;
  auto block = weak.lock();
  if (!block || address - base > block->bytes() || bytes > block->bytes() - (address - base))
    return {};
  return {std::move(block), address - base};
}

namespace {

[[noreturn]] void throw_late(int rank, const Deadline& deadline) {
  throw TimeoutError("shm",
                     fmt::format("rank {} did not make its part of a symmetric block within {} ms. "
                                 "It is stopped, or took another way through the program.",
                                 rank, deadline.total().count()),
                     {.peer = rank, .operation = "symmetric", .elapsed = deadline.elapsed()});
}

// A process's files close a moment before its end is visible; the two together say more.
[[noreturn]] void throw_gone(int rank, const Doomed& doomed) {
  constexpr std::chrono::milliseconds kEndIsSeen{50};
  const Deadline limit = Deadline::after(kEndIsSeen);
  do {
    if (const auto doom = doomed()) std::rethrow_exception(doom);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (!limit.expired());
  throw CommError("shm",
                  fmt::format("rank {} closed its socket before its part of a symmetric block was "
                              "there. Look for the reason in that rank's output.",
                              rank),
                  {.peer = rank, .operation = "symmetric"});
}

// One message to every peer and one from each. "!" begins a rank's refusal.
std::vector<Packet> swap_packets(const BlockMakers& ranks, const std::string& text, int fd,
                                 const Deadline& deadline) {
  std::vector<Packet> packets(ranks.peers.size());
  packets[static_cast<std::size_t>(ranks.info.rank)].text = text;
  const auto with_each = [&](const auto& exchange) {
    for (int rank = 0; rank < ranks.info.size; ++rank) {
      const Fd& socket = ranks.peers[static_cast<std::size_t>(rank)].socket;
      if (!socket) continue;
      const Doomed doomed = [&ranks, rank] { return ranks.doom_of(rank); };
      try {
        exchange(socket.get(), packets[static_cast<std::size_t>(rank)], doomed);
      } catch (const TimeoutError&) {
        throw_late(rank, deadline);
      } catch (const CommError& error) {
        if (error.context().peer >= 0) throw;
        throw_gone(rank, doomed);
      }
    }
  };
  with_each([&](int socket, Packet&, const Doomed& doomed) {
    send_packet(socket, text, fd, deadline, doomed);
  });
  with_each([&](int socket, Packet& packet, const Doomed& doomed) {
    packet = receive_packet(socket, deadline, doomed);
  });
  return packets;
}

// Throws the same on every rank when one of them has refused.
void check_refusals(const std::vector<Packet>& packets) {
  for (std::size_t rank = 0; rank < packets.size(); ++rank) {
    const std::string& text = packets[rank].text;
    if (text.rfind('!', 0) == 0)
      throw UsageError("shm", "rank {} cannot make a symmetric block: {}", rank, text.substr(1));
  }
}

void check_sizes(const std::vector<Packet>& packets) {
  for (std::size_t rank = 1; rank < packets.size(); ++rank) {
    if (packets[rank].text != packets[0].text)
      throw CommError("shm", fmt::format("ranks disagree on a symmetric block: rank 0 asks for {} "
                                         "bytes, rank {} for {}. Every rank must ask for the same.",
                                         packets[0].text, rank, packets[rank].text));
  }
}

}  // namespace

std::shared_ptr<MappedBlock> make_symmetric(SymmetricBlocks& blocks, const BlockMakers& ranks,
                                            std::size_t bytes, const Deadline& deadline) {
  // One round of messages in which each rank says `text`, or why its `body` failed.
  const auto round = [&](std::string text, const std::function<void()>& body,
                         const std::shared_ptr<Segment>& handed) {
    try {
      body();
    } catch (const std::exception& error) {
      text = std::string("!") + error.what();
    }
    auto packets = swap_packets(ranks, text, handed ? handed->fd() : -1, deadline);
    check_refusals(packets);
    return packets;
  };
  const std::uint32_t id = blocks.next_id();
  std::vector<std::string> groups;
  for (const Peer& peer : ranks.peers) groups.push_back(peer.groups);
  const std::size_t needed = segment_bytes(bytes, ranks.info.size);
  check_sizes(round(std::to_string(bytes), [&] { check_room(needed, groups); }, nullptr));

  std::shared_ptr<Segment> own;
  std::vector<Packet> packets = round("made", [&] { own = Segment::make(needed); }, own);

  std::vector<std::shared_ptr<Segment>> segments(packets.size());
  round(
      "mapped",
      [&] {
        for (std::size_t rank = 0; rank < packets.size(); ++rank) {
          const bool mine = static_cast<int>(rank) == ranks.info.rank;
          segments[rank] = mine ? own : Segment::open(packets[rank].fd.get(), needed);
        }
      },
      nullptr);
  own->close_fd();
  auto block = std::make_shared<MappedBlock>(id, ranks.info.rank, bytes, std::move(segments));
  blocks.add(block);
  return block;
}

}  // namespace lockstep::shm
