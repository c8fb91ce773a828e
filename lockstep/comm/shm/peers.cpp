#include "lockstep/comm/shm/peers.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>

#include "lockstep/comm/shm/segment.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/host.h"

namespace lockstep::shm {
namespace {

// All connections exist when the handshake begins, so it takes milliseconds; a rank that does not
// answer in this time is lost, not slow.
constexpr std::chrono::seconds kHandshakeLimit{20};
constexpr std::chrono::milliseconds kSlice{20};
// How long one look at the store takes before a rank checks whether the others are still alive.
constexpr std::chrono::milliseconds kLook{100};
// Rank 0 may host the store: it stays this long for the others to read the outcome.
constexpr std::chrono::seconds kFailureLinger{2};
constexpr std::size_t kMaxPacket = 4096;

std::string random_name() {
  unsigned char bytes[16];
  if (::getrandom(bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes))
    throw SystemError("shm", "no random numbers", errno);
  std::string name = "lockstep-";
  for (const unsigned char byte : bytes) name += fmt::format("{:02x}", byte);
  return name;
}

Fd open_socket() {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw SystemError("shm", "cannot create a socket", errno);
  return socket;
}

std::string link_of(const char* path) {
  char target[256];
  const ssize_t n = ::readlink(path, target, sizeof target);
  return n > 0 ? std::string(target, static_cast<std::size_t>(n)) : "unknown";
}

std::string first_line_of(const char* path) {
  std::string text = read_file(path, 4096);
  return text.substr(0, text.find('\n'));
}

// A rank's entry in the store: its identity and address, or why it cannot take part.
struct PeerInfo {
  std::string trouble;
  std::string boot_id;
  std::string network;  // abstract sockets do not cross network namespaces
  std::string user;
  std::string socket;
  std::string segment_bytes;
  std::string pid;
  std::string processes;  // the namespace in which pid means something
  std::string groups;     // last: it has several lines

  std::string text() const {
    return fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}", trouble, boot_id, network, user,
                       socket, segment_bytes, pid, processes, groups);
  }
  static PeerInfo from(const std::string& text) {
    PeerInfo info;
    std::string* const fields[] = {&info.trouble, &info.boot_id,  &info.network,
                                   &info.user,    &info.socket,   &info.segment_bytes,
                                   &info.pid,     &info.processes};
    std::size_t start = 0;
    for (std::string* field : fields) {
      const std::size_t end = std::min(text.find('\n', start), text.size());
      *field = text.substr(start, end - start);
      start = std::min(end + 1, text.size());
    }
    info.groups = text.substr(start);
    return info;
  }
};

// Why these two cannot share memory, or nothing.
std::string obstacle(const PeerInfo& first, int rank, const PeerInfo& info) {
  const auto differ = [&](const char* what, const std::string& a, const std::string& b) {
    return a == b ? ""
                  : fmt::format("rank {} has another {} than rank 0 ({}, {})", rank, what, b, a);
  };
  if (!info.trouble.empty()) return fmt::format("rank {}: {}", rank, info.trouble);
  if (info.boot_id != first.boot_id)
    return fmt::format("rank {} runs on another host than rank 0", rank);
  std::string text = differ("network namespace", first.network, info.network);
  if (text.empty()) text = differ("user", first.user, info.user);
  if (text.empty()) text = differ("buffer size", first.segment_bytes, info.segment_bytes);
  return text;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text.substr(0, 1000);
}

// A rank whose process has ended.
struct EndedRank {
  int rank = 0;
  std::string pid;

  [[noreturn]] void raise() const {
    throw CommError(
        "shm",
        fmt::format("rank {} (process {}) ended during the rendezvous on this host. Its "
                    "own output says why. Start all ranks again.",
                    rank, pid),
        {.peer = rank, .operation = "start-up"});
  }
  std::string text() const { return fmt::format("gone {} {}", rank, pid); }
  static std::optional<EndedRank> from(const std::string& text) {
    if (text.rfind("gone ", 0) != 0) return std::nullopt;
    const std::size_t space = text.find(' ', 5);
    return EndedRank{static_cast<int>(env::parse_int(text.substr(5, space - 5), "a rank")),
                     text.substr(space + 1)};
  }
};

// Whether other ranks' processes live, before they have handed over descriptors of themselves.
class Watch {
 public:
  Watch() = default;
  Watch(const RankAndSize& place, const std::vector<PeerInfo>& infos) {
    const PeerInfo& own = infos[static_cast<std::size_t>(place.rank)];
    for (int rank = 0; rank < place.size; ++rank) {
      const PeerInfo& info = infos[static_cast<std::size_t>(rank)];
      if ((place.rank != 0 && rank != 0) || info.pid == own.pid) continue;
      if (info.processes != own.processes) continue;
      const auto pid = static_cast<int>(env::parse_int(info.pid, "a peer's process id"));
      Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
      if (pidfd || errno == ESRCH) watched_.push_back({{rank, info.pid}, std::move(pidfd)});
    }
  }

  std::vector<EndedRank> ended(std::chrono::milliseconds backoff = {}) const {
    std::vector<EndedRank> found;
    for (const auto& [who, pidfd] : watched_) {
      pollfd poll_fd{pidfd.get(), POLLIN, 0};
      if (!pidfd || ::poll(&poll_fd, 1, static_cast<int>(backoff.count())) > 0)
        found.push_back(who);
    }
    return found;
  }

 private:
  struct Watched {
    EndedRank who;
    Fd pidfd;  // none: it had ended already
  };
  std::vector<Watched> watched_;
};

// The connections and limits with which ranks reach an agreement.
struct Agreement {
  KeyValueStore& kv;
  const RankAndSize place;
  const Deadline deadline;
  Watch watch{};
};

std::optional<std::string> look(KeyValueStore& kv, const std::string& key,
                                std::chrono::milliseconds time) {
  try {
    return kv.get(key, Deadline::after(time));
  } catch (const TimeoutError&) {
    return std::nullopt;
  }
}

// The store's value of `key`, or a rank that ended without writing `owed(rank)`.
struct Found {
  std::string text;
  std::optional<EndedRank> gone;
};
template <typename Owed>
Found await(Agreement& agreement, const std::string& key, const Owed& owed) {
  try {
    for (;;) {
      if (auto text = look(agreement.kv, key, std::min(kLook, agreement.deadline.remaining())))
        return {std::move(*text), std::nullopt};
      if (agreement.deadline.expired())
        return {agreement.kv.get(key, agreement.deadline), std::nullopt};
      for (EndedRank& gone : agreement.watch.ended())
        if (!look(agreement.kv, owed(gone.rank), {})) return {"", std::move(gone)};
    }
  } catch (const TimeoutError&) {
    throw;
  } catch (const std::exception&) {
    // The store is lost, perhaps with its host, whose files close a moment before its process ends.
    const auto ended =
        agreement.place.rank == 0 ? std::vector<EndedRank>() : agreement.watch.ended(kLook);
    if (!ended.empty()) return {"", ended.front()};
    throw;
  }
}

// Rank 0 reads a key of every rank, decides, and publishes the outcome.
template <typename Decide>
std::string agree(Agreement& agreement, const std::string& name, Decide decide) {
  const auto key = [&](auto who) { return fmt::format("shm/{}/{}", name, who); };
  const auto heard = [&](int rank) { return fmt::format("shm/{}/heard/{}", name, rank); };
  if (agreement.place.rank != 0) {
    Found outcome = await(agreement, key("outcome"), [&](int) { return key("outcome"); });
    if (outcome.gone) outcome.gone->raise();
    if (const auto gone = EndedRank::from(outcome.text)) {
      agreement.kv.set(heard(agreement.place.rank), "");
      gone->raise();
    }
    return outcome.text;
  }
  std::vector<std::string> texts;
  for (int rank = 0; rank < agreement.place.size; ++rank) {
    Found found = await(agreement, key(rank), key);
    if (found.gone) {
      agreement.kv.set(key("outcome"), found.gone->text());
      const auto limit = Deadline::after(kFailureLinger);
      for (int other = 1; other < agreement.place.size; ++other)
        if (other != found.gone->rank) look(agreement.kv, heard(other), limit.remaining());
      found.gone->raise();
    }
    texts.push_back(std::move(found.text));
  }
  const std::string outcome = decide(texts);
  agreement.kv.set(key("outcome"), outcome);
  return outcome;
}

// Runs `body` on every rank. Returns nothing when it worked on all, else one rank's reason.
std::string agree_that_it_works(Agreement& agreement, const std::string& name,
                                const std::function<void()>& body) {
  std::string own = "ok";
  try {
    body();
  } catch (const std::exception& error) {
    own = one_line(fmt::format("rank {}: {}", agreement.place.rank, error.what()));
  }
  agreement.kv.set(fmt::format("shm/{}/{}", name, agreement.place.rank), own);
  const std::string outcome = agree(agreement, name, [](const std::vector<std::string>& texts) {
    const auto bad = std::find_if(texts.begin(), texts.end(),
                                  [](const std::string& text) { return text != "ok"; });
    return bad == texts.end() ? std::string("ok") : *bad;
  });
  return outcome == "ok" ? "" : outcome;
}

class SegmentHandshake {
 public:
  SegmentHandshake(RankAndSize place, Fd listener, Fd pidfd)
      : place_(place),
        listener_(std::move(listener)),
        pidfd_(std::move(pidfd)),
        peers_(static_cast<std::size_t>(place.size)) {}

  // Any failure throws on all ranks. Connecting does not need the other side's help, so unreachable
  // ranks are known before any rank waits for them.
  void connect(const std::vector<PeerInfo>& infos) {
    for (int rank = 0; rank < place_.rank; ++rank)
      peers_[static_cast<std::size_t>(rank)].socket =
          connect_to(infos[static_cast<std::size_t>(rank)].socket);
  }

  void bring(std::shared_ptr<Segment> segment) { segment_ = std::move(segment); }

  std::vector<Peer> exchange(const Deadline& deadline) {
    for (int rank = 0; rank < place_.rank; ++rank)
      introduce(peers_[static_cast<std::size_t>(rank)].socket.get(), deadline);
    for (int missing = place_.size - 1 - place_.rank; missing > 0;)
      if (accept_one(deadline)) --missing;
    for (int rank = 0; rank < place_.size; ++rank) {
      if (rank == place_.rank) continue;
      Peer& peer = peers_[static_cast<std::size_t>(rank)];
      if (rank < place_.rank) take_segment(rank, receive_packet(peer.socket.get(), deadline));
      Packet packet = receive_packet(peer.socket.get(), deadline);
      peer.pid = static_cast<int>(env::parse_int(packet.text, "a peer's process id"));
      peer.pidfd = std::move(packet.fd);
      if (!peer.pidfd) throw CommError("shm", "a peer sent no descriptor of its process");
    }
    peers_[static_cast<std::size_t>(place_.rank)].segment = segment_;
    return std::move(peers_);
  }

 private:
  static bool same_user(int socket) { return peer_uid(socket) == ::geteuid(); }

  static Fd connect_to(const std::string& name) {
    Fd socket = open_socket();
    if (connect_abstract(socket.get(), name) != 0)
      throw SystemError("shm", "cannot connect to a peer's socket", errno);
    if (!same_user(socket.get())) throw CommError("shm", "a peer's socket belongs to another user");
    return socket;
  }

  void introduce(int socket, const Deadline& deadline) const {
    send_packet(socket, std::to_string(place_.rank), segment_->fd(), deadline);
    send_packet(socket, std::to_string(::getpid()), pidfd_.get(), deadline);
  }

  // False for an unknown process, whose connection is closed.
  bool accept_one(const Deadline& deadline) {
    pollfd poll_fd{listener_.get(), POLLIN, 0};
    if (::poll(&poll_fd, 1, deadline.remaining_ms()) == 0)
      throw TimeoutError("shm", "timed out: a peer did not connect");
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket || !same_user(socket.get())) return false;
    Packet packet = receive_packet(socket.get(), deadline);
    const auto rank = static_cast<int>(
        env::parse_int(packet.text, "a peer's rank", place_.rank + 1, place_.size - 1));
    take_segment(rank, std::move(packet));
    introduce(socket.get(), deadline);
    peers_[static_cast<std::size_t>(rank)].socket = std::move(socket);
    return true;
  }

  void take_segment(int rank, Packet packet) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (!packet.fd || peer.segment || packet.text != std::to_string(rank))
      throw CommError("shm", fmt::format("rank {} introduced itself in an unknown way", rank));
    peer.segment = Segment::open(packet.fd.get(), segment_->bytes());
  }

  RankAndSize place_;
  std::shared_ptr<Segment> segment_;
  Fd listener_;
  Fd pidfd_;
  std::vector<Peer> peers_;
};

struct OwnDescriptors {
  Fd listener;
  Fd pidfd;
};

// Prepares this rank's entry for the rendezvous; failures are reported in the entry.
PeerInfo prepare(const RankAndSize& place, std::size_t segment_bytes, OwnDescriptors* own) {
  PeerInfo info;
  try {
    info.boot_id = first_line_of("/proc/sys/kernel/random/boot_id");
    info.network = link_of("/proc/self/ns/net");
    info.user = std::to_string(::geteuid());
    info.pid = std::to_string(::getpid());
    info.processes = link_of("/proc/self/ns/pid");
    info.groups = memory_groups();
    info.segment_bytes = std::to_string(segment_bytes);
    info.socket = random_name();
    own->listener = open_socket();
    const int listener = own->listener.get();
    if (bind_abstract(listener, info.socket) != 0 || ::listen(listener, place.size + 8) != 0)
      throw SystemError("shm", "cannot listen on an abstract socket", errno);
    own->pidfd.reset(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
    if (!own->pidfd) throw SystemError("shm", "this kernel has no pidfd", errno);
  } catch (const std::exception& error) {
    info.trouble = one_line(error.what());
  }
  return info;
}

// "!reason", or every rank's info, separated by zeros.
std::string plan_of(const std::vector<std::string>& texts) {
  std::string all;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const std::string reason =
        obstacle(PeerInfo::from(texts[0]), static_cast<int>(rank), PeerInfo::from(texts[rank]));
    if (!reason.empty()) return "!" + reason;
    all += texts[rank] + '\0';
  }
  return all;
}

}  // namespace

PeersResult connect_peers(KeyValueStore& kv, const RankAndSize& place,
                          const ControlSegment& control, const Deadline& deadline) {
  OwnDescriptors own;
  const PeerInfo info = prepare(place, control.bytes, &own);
  kv.set(fmt::format("shm/info/{}", place.rank), info.text());
  Agreement agreement{kv, place, deadline};
  const std::string plan = agree(agreement, "info", plan_of);
  PeersResult result;
  if (plan.rfind('!', 0) == 0) {
    result.unavailable_reason = plan.substr(1);
    return result;
  }
  std::vector<PeerInfo> infos;
  std::vector<std::string> groups;
  for (std::size_t start = 0; start < plan.size(); start = plan.find('\0', start) + 1) {
    infos.push_back(PeerInfo::from(plan.substr(start, plan.find('\0', start) - start)));
    groups.push_back(infos.back().groups);
  }
  agreement.watch = Watch(place, infos);

  SegmentHandshake handshake(place, std::move(own.listener), std::move(own.pidfd));
  result.unavailable_reason = agree_that_it_works(agreement, "connected", [&] {
    check_room(control.bytes, groups);
    handshake.connect(infos);
  });
  if (!result.unavailable_reason.empty()) return result;
  result.unavailable_reason =
      agree_that_it_works(agreement, "made", [&] { handshake.bring(control.make()); });
  if (!result.unavailable_reason.empty()) return result;
  result.unavailable_reason = agree_that_it_works(agreement, "done", [&] {
    const auto limit = std::min<std::chrono::milliseconds>(kHandshakeLimit, deadline.remaining());
    result.peers = handshake.exchange(Deadline::after(limit));
  });
  if (!result.unavailable_reason.empty()) result.peers.clear();
  for (std::size_t rank = 0; rank < result.peers.size(); ++rank)
    result.peers[rank].groups = groups[rank];
  return result;
}

// ---------------------------------------------------------------- packets

namespace {

// Waits until the socket is ready; false at the deadline.
bool await_socket(int socket, short events, const Deadline& deadline,
                  const FailureCheck& failure_check) {
  for (;;) {
    pollfd poll_fd{socket, events, 0};
    const auto slice = std::min(kSlice, deadline.remaining());
    if (::poll(&poll_fd, 1, static_cast<int>(slice.count())) > 0) return true;
    const bool expired = deadline.expired();
    const std::exception_ptr failure = failure_check ? failure_check() : nullptr;
    if (!expired && !failure) continue;
    // A peer may have sent its last message and ended since the first look.
    if (::poll(&poll_fd, 1, 0) > 0) return true;
    if (failure) std::rethrow_exception(failure);
    return false;
  }
}

}  // namespace

void send_packet(int socket, std::string_view text, int fd, const Deadline& deadline,
                 const FailureCheck& failure_check) {
  while (send_with_fd(socket, text, fd) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN)
      throw CommError("shm", fmt::format("a peer's socket is closed: {}", std::strerror(errno)));
    if (!await_socket(socket, POLLOUT, deadline, failure_check))
      throw TimeoutError("shm", "timed out: a peer did not read its socket");
  }
}

Packet receive_packet(int socket, const Deadline& deadline, const FailureCheck& failure_check) {
  for (;;) {
    if (!await_socket(socket, POLLIN, deadline, failure_check))
      throw TimeoutError("shm", "timed out: a peer did not answer");
    char text[kMaxPacket];
    std::vector<Fd> fds;
    const ssize_t n = receive_with_fds(socket, text, fds);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) throw CommError("shm", "a peer closed its socket");
    Packet packet;
    packet.text.assign(text, static_cast<std::size_t>(n));
    if (!fds.empty()) packet.fd = std::move(fds.front());
    return packet;
  }
}

// ---------------------------------------------------------------- symmetric blocks

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

SymmetricBlock::SymmetricBlock(std::uint32_t id, int rank, std::size_t bytes,
                               std::vector<std::shared_ptr<Segment>> segments)
    : id_(id), rank_(rank), bytes_(bytes), segments_(std::move(segments)) {
  for (const auto& segment : segments_)
    bases_.push_back(segment->data() + begin_of(static_cast<int>(bases_.size()), bytes));
}

void SymmetricBlocks::add(const std::shared_ptr<SymmetricBlock>& block) {
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
                                 "It is stopped, or took another branch of the program.",
                                 rank, deadline.total().count()),
                     {.peer = rank, .operation = "symmetric", .elapsed = deadline.elapsed()});
}

// A process's files close a moment before its end is visible; the two together say more.
[[noreturn]] void throw_gone(int rank, const FailureCheck& failure_check) {
  constexpr std::chrono::milliseconds kEndIsSeen{50};
  const Deadline limit = Deadline::after(kEndIsSeen);
  do {
    if (const auto failure = failure_check()) std::rethrow_exception(failure);
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
      const FailureCheck failure_check = [&ranks, rank] { return ranks.peer_failure(rank); };
      try {
        exchange(socket.get(), packets[static_cast<std::size_t>(rank)], failure_check);
      } catch (const TimeoutError&) {
        throw_late(rank, deadline);
      } catch (const CommError& error) {
        if (error.context().peer >= 0) throw;
        throw_gone(rank, failure_check);
      }
    }
  };
  with_each([&](int socket, Packet&, const FailureCheck& failure_check) {
    send_packet(socket, text, fd, deadline, failure_check);
  });
  with_each([&](int socket, Packet& packet, const FailureCheck& failure_check) {
    packet = receive_packet(socket, deadline, failure_check);
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

std::shared_ptr<SymmetricBlock> make_symmetric(SymmetricBlocks& blocks, const BlockMakers& ranks,
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
  auto block = std::make_shared<SymmetricBlock>(id, ranks.info.rank, bytes, std::move(segments));
  blocks.add(block);
  return block;
}

}  // namespace lockstep::shm
