#include "lockstep/rendezvous/store_channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <sstream>

#include "lockstep/core/env.h"
#include "lockstep/core/error.h"
#include "lockstep/rendezvous/unix_socket.h"

namespace lockstep {

std::uint64_t inode_of(int fd) {
  struct stat status {};
  return fd >= 0 && ::fstat(fd, &status) == 0 ? static_cast<std::uint64_t>(status.st_ino) : 0;
}

std::optional<StoreChannel> StoreChannel::from_env() {
  const auto text = env::get("LOCKSTEP_STORE_CHANNEL");
  if (!text) return std::nullopt;
  StoreChannel channel;
  char colon[4] = {};
  std::istringstream in(*text);
  in >> channel.fd >> colon[0] >> channel.inode >> colon[1] >> channel.rank >> colon[2] >>
      channel.world_size >> colon[3] >> channel.master_port;
  const bool complete = in && in.peek() == std::istringstream::traits_type::eof();
  if (!complete || std::memcmp(colon, "::::", sizeof colon) != 0 || channel.fd < 0)
    return std::nullopt;
  return channel;
}

std::string StoreChannel::text() const {
  return fmt::format("{}:{}:{}:{}:{}", fd, inode, rank, world_size, master_port);
}

bool StoreChannel::intact() const {
  return is_unix_socket(fd, SOCK_SEQPACKET) && inode != 0 && inode_of(fd) == inode;
}

Fd open_store_connection(int channel_fd, const Deadline& deadline) {
  set_cloexec(channel_fd);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw SystemError("store", "cannot create a socket pair", errno);
  Fd mine(ends[0]);
  const Fd theirs(ends[1]);

  while (send_with_fd(channel_fd, "c", theirs.get()) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != ETOOMANYREFS) {
      throw CommError("store", fmt::format("the launcher does not take connections to its store "
                                           "({}). It was probably killed. Start the run again.",
                                           std::strerror(errno)));
    }
    if (deadline.expired()) {
      throw TimeoutError("store",
                         fmt::format("the launcher took no connection to its store within {} ms. "
                                     "It is probably stopped. Look at the launcher's process.",
                                     deadline.total().count()));
    }
    pollfd ready{channel_fd, POLLOUT, 0};
    ::poll(&ready, 1, std::min(deadline.remaining_ms(), 50));
  }
  return mine;
}

}  // namespace lockstep
