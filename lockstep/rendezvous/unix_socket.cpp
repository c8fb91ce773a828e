#include "lockstep/rendezvous/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

struct AbstractAddress {
  sockaddr_un data{};
  socklen_t length = 0;

  explicit AbstractAddress(const std::string& name) {
    data.sun_family = AF_UNIX;
    LOCKSTEP_ASSERT(name.size() + 1 < sizeof data.sun_path);
    std::memcpy(data.sun_path + 1, name.data(), name.size());  // the leading zero: abstract
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&data); }
};

}  // namespace

int bind_abstract(int socket, const std::string& name) {
  const AbstractAddress address(name);
  return ::bind(socket, address.get(), address.length);
}

int connect_abstract(int socket, const std::string& name) {
  const AbstractAddress address(name);
  return ::connect(socket, address.get(), address.length);
}

std::optional<uid_t> peer_uid(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    return std::nullopt;
  return credentials.uid;
}

bool is_unix_socket(int fd, int type) {
  const auto is = [fd](int option, int wanted) {
    int value = 0;
    socklen_t length = sizeof value;
    return ::getsockopt(fd, SOL_SOCKET, option, &value, &length) == 0 && value == wanted;
  };
  return is(SO_DOMAIN, AF_UNIX) && is(SO_TYPE, type);
}

ssize_t send_with_fd(int socket, std::string_view bytes, int fd) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
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
  return ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t receive_with_fds(int socket, std::span<char> buffer, std::vector<Fd>& fds) {
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t received = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  fds.clear();
  if (received < 0) return received;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      fds.emplace_back(fd);
    }
  }
  return received;
}

}  // namespace lockstep
