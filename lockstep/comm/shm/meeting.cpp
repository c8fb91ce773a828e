#include "lockstep/comm/shm/meeting.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "lockstep/comm/shm/segment.h"
#include "lockstep/core/env.h"
#include "lockstep/core/error.h"

namespace lockstep::shm {
namespace {

// All connections stand when the handshake begins, so it is a matter of milliseconds; a rank that
// is not heard of in this time is lost and not slow.
constexpr std::chrono::seconds kHandshakeLimit{20};
constexpr std::chrono::milliseconds kSlice{20};
constexpr std::size_t kMaxPacket = 4096;

std::string random_name() {
  unsigned char bytes[16];
  if (::getrandom(bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes))
    throw SystemError("shm", "no random numbers", errno);
  std::string name = "lockstep-";
  for (const unsigned char byte : bytes) name += fmt::format("{:02x}", byte);
  return name;
}

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  LOCKSTEP_ASSERT(name.size() + 1 < sizeof address.sun_path);
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero: no file
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
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

// What a rank writes on the board: who and where it is, or why it cannot take part.
struct Hello {
  std::string trouble;
  std::string boot_id;
  std::string network;  // abstract sockets do not cross network namespaces
  std::string user;
  std::string socket;
  std::string segment_bytes;
  std::string pid;

  std::string text() const {
    return fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}", trouble, boot_id, network, user, socket,
                       segment_bytes, pid);
  }
  static Hello from(const std::string& text) {
    Hello hello;
    std::string* const fields[] = {&hello.trouble, &hello.boot_id, &hello.network,
                                   &hello.user,    &hello.socket,  &hello.segment_bytes,
                                   &hello.pid};
    std::size_t start = 0;
    for (std::string* field : fields) {
      const std::size_t end = std::min(text.find('\n', start), text.size());
      *field = text.substr(start, end - start);
      start = std::min(end + 1, text.size());
    }
    return hello;
  }
};

// Why these two cannot share memory, or nothing.
std::string obstacle(const Hello& first, int rank, const Hello& hello) {
  const auto differ = [&](const char* what, const std::string& a, const std::string& b) {
    return a == b ? ""
                  : fmt::format("rank {} has another {} than rank 0 ({}, {})", rank, what, b, a);
  };
  if (!hello.trouble.empty()) return fmt::format("rank {}: {}", rank, hello.trouble);
  if (hello.boot_id != first.boot_id)
    return fmt::format("rank {} runs on another host than rank 0", rank);
  std::string text = differ("network namespace", first.network, hello.network);
  if (text.empty()) text = differ("user", first.user, hello.user);
  if (text.empty()) text = differ("buffer size", first.segment_bytes, hello.segment_bytes);
  return text;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text.substr(0, 1000);
}

// Rank 0 reads a key of every rank, decides, and tells all.
template <typename Decide>
std::string agree(Board& board, const Place& place, const std::string& name,
                  const Deadline& deadline, Decide decide) {
  const std::string verdict_key = fmt::format("shm/{}/verdict", name);
  if (place.rank != 0) return board.get(verdict_key, deadline);
  std::vector<std::string> texts;
  for (int rank = 0; rank < place.size; ++rank)
    texts.push_back(board.get(fmt::format("shm/{}/{}", name, rank), deadline));
  const std::string verdict = decide(texts);
  board.set(verdict_key, verdict);
  return verdict;
}

// Runs `body` on every rank. Returns nothing when it worked on all, else one rank's reason.
std::string agree_that_it_works(Board& board, const Place& place, const std::string& name,
                                const Deadline& deadline, const std::function<void()>& body) {
  std::string outcome = "ok";
  try {
    body();
  } catch (const std::exception& error) {
    outcome = one_line(fmt::format("rank {}: {}", place.rank, error.what()));
  }
  board.set(fmt::format("shm/{}/{}", name, place.rank), outcome);
  const std::string verdict =
      agree(board, place, name, deadline, [](const std::vector<std::string>& texts) {
        const auto bad = std::find_if(texts.begin(), texts.end(),
                                      [](const std::string& text) { return text != "ok"; });
        return bad == texts.end() ? std::string("ok") : *bad;
      });
  return verdict == "ok" ? "" : verdict;
}

class Handshake {
 public:
  Handshake(Place place, std::shared_ptr<Segment> segment, Fd listener, Fd pidfd)
      : place_(place),
        segment_(std::move(segment)),
        listener_(std::move(listener)),
        pidfd_(std::move(pidfd)),
        peers_(static_cast<std::size_t>(place.size)) {}

  // Both throw when anything is not as it should be. A connection is made without the other's help,
  // so who cannot be reached is known before anyone waits for it.
  void connect(const std::vector<Hello>& hellos) {
    for (int rank = 0; rank < place_.rank; ++rank)
      peers_[static_cast<std::size_t>(rank)].socket =
          connect_to(hellos[static_cast<std::size_t>(rank)].socket);
  }

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
  static bool same_user(int socket) {
    ucred peer{};
    socklen_t length = sizeof peer;
    return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
           peer.uid == ::geteuid();
  }

  static Fd connect_to(const std::string& name) {
    Fd socket = open_socket();
    socklen_t length = 0;
    const sockaddr_un address = abstract_address(name, &length);
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
      throw SystemError("shm", "cannot connect to a peer's socket", errno);
    if (!same_user(socket.get())) throw CommError("shm", "a peer's socket belongs to another user");
    return socket;
  }

  void introduce(int socket, const Deadline& deadline) const {
    send_packet(socket, std::to_string(place_.rank), segment_->fd(), deadline);
    send_packet(socket, std::to_string(::getpid()), pidfd_.get(), deadline);
  }

  // False for a stranger, who is shown the door.
  bool accept_one(const Deadline& deadline) {
    pollfd poll_fd{listener_.get(), POLLIN, 0};
    if (::poll(&poll_fd, 1, deadline.remaining_ms()) == 0)
      throw TimeoutError("shm", "a peer did not connect in time");
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

  Place place_;
  std::shared_ptr<Segment> segment_;
  Fd listener_;
  Fd pidfd_;
  std::vector<Peer> peers_;
};

struct Own {
  std::shared_ptr<Segment> segment;
  Fd listener;
  Fd pidfd;
};

// What this rank brings to the meeting; what fails is told in the hello.
Hello prepare(const Place& place, const std::function<std::shared_ptr<Segment>()>& make_segment,
              Own* own) {
  Hello hello;
  try {
    hello.boot_id = first_line_of("/proc/sys/kernel/random/boot_id");
    hello.network = link_of("/proc/self/ns/net");
    hello.user = std::to_string(::geteuid());
    hello.pid = std::to_string(::getpid());
    hello.socket = random_name();
    own->listener = open_socket();
    socklen_t length = 0;
    const sockaddr_un address = abstract_address(hello.socket, &length);
    const int listener = own->listener.get();
    if (::bind(listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        ::listen(listener, place.size + 8) != 0)
      throw SystemError("shm", "cannot listen on an abstract socket", errno);
    own->pidfd.reset(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
    if (!own->pidfd) throw SystemError("shm", "this kernel has no pidfd", errno);
    own->segment = make_segment();
    hello.segment_bytes = std::to_string(own->segment->bytes());
  } catch (const std::exception& error) {
    hello.trouble = one_line(error.what());
  }
  return hello;
}

}  // namespace

Meeting meet(Board& board, const Place& place,
             const std::function<std::shared_ptr<Segment>()>& make_segment,
             const Deadline& deadline) {
  Own own;
  const Hello hello = prepare(place, make_segment, &own);
  board.set(fmt::format("shm/hello/{}", place.rank), hello.text());
  // "!reason", or every rank's hello, separated by zeros.
  const std::string plan =
      agree(board, place, "hello", deadline, [](const std::vector<std::string>& texts) {
        std::string all;
        for (std::size_t rank = 0; rank < texts.size(); ++rank) {
          const std::string reason =
              obstacle(Hello::from(texts[0]), static_cast<int>(rank), Hello::from(texts[rank]));
          if (!reason.empty()) return "!" + reason;
          all += texts[rank] + '\0';
        }
        return all;
      });
  Meeting meeting;
  if (plan.rfind('!', 0) == 0) {
    meeting.why_not = plan.substr(1);
    return meeting;
  }
  std::vector<Hello> hellos;
  for (std::size_t start = 0; start < plan.size(); start = plan.find('\0', start) + 1)
    hellos.push_back(Hello::from(plan.substr(start, plan.find('\0', start) - start)));

  Handshake handshake(place, own.segment, std::move(own.listener), std::move(own.pidfd));
  meeting.why_not =
      agree_that_it_works(board, place, "connected", deadline, [&] { handshake.connect(hellos); });
  if (!meeting.why_not.empty()) return meeting;
  meeting.why_not = agree_that_it_works(board, place, "done", deadline, [&] {
    const auto limit = std::min<std::chrono::milliseconds>(kHandshakeLimit, deadline.remaining());
    meeting.peers = handshake.exchange(Deadline::after(limit));
  });
  if (!meeting.why_not.empty()) meeting.peers.clear();
  return meeting;
}

namespace {

// Waits until the socket is ready; false at the deadline.
bool await_socket(int socket, short events, const Deadline& deadline, const Doomed& doomed) {
  for (;;) {
    pollfd poll_fd{socket, events, 0};
    const auto slice = std::min(kSlice, deadline.remaining());
    if (::poll(&poll_fd, 1, static_cast<int>(slice.count())) > 0) return true;
    const bool expired = deadline.expired();
    const std::exception_ptr doom = doomed ? doomed() : nullptr;
    if (!expired && !doom) continue;
    // A peer may have sent its last words and gone since the first look.
    if (::poll(&poll_fd, 1, 0) > 0) return true;
    if (doom) std::rethrow_exception(doom);
    return false;
  }
}

}  // namespace

void send_packet(int socket, std::string_view text, int fd, const Deadline& deadline,
                 const Doomed& doomed) {
  iovec part{const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  for (;;) {
    if (::sendmsg(socket, &message, MSG_NOSIGNAL) >= 0) return;
    if (errno == EINTR) continue;
    if (errno != EAGAIN)
      throw CommError("shm", fmt::format("a peer's socket is closed: {}", std::strerror(errno)));
    if (!await_socket(socket, POLLOUT, deadline, doomed))
      throw TimeoutError("shm", "a peer did not read its socket in time");
  }
}

Packet receive_packet(int socket, const Deadline& deadline, const Doomed& doomed) {
  for (;;) {
    if (!await_socket(socket, POLLIN, deadline, doomed))
      throw TimeoutError("shm", "a peer did not answer in time");
    char text[kMaxPacket];
    iovec part{text, sizeof text};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) throw CommError("shm", "a peer closed its socket");
    Packet packet;
    packet.text.assign(text, static_cast<std::size_t>(n));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
      packet.fd.reset(fd);
    }
    return packet;
  }
}

}  // namespace lockstep::shm
