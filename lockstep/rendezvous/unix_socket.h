// Unix-domain sockets between the processes of one host: abstract names, which leave nothing in a
// file system, the user at the other end, and descriptors that travel with a message (SCM_RIGHTS).
//
//   if (connect_abstract(socket, name) == 0 && peer_uid(socket) == ::geteuid())
//     send_with_fd(socket, "here", memory.get());
//
// Anyone on the host may take an abstract name, so both ends ask for the peer's user.
#pragma once

#include <sys/types.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/fd.h"

namespace lockstep {

// As ::bind() and ::connect(): 0, or -1 and errno.
int bind_abstract(int socket, const std::string& name);
int connect_abstract(int socket, const std::string& name);

std::optional<uid_t> peer_uid(int socket);
// `type`: SOCK_STREAM, SOCK_SEQPACKET.
bool is_unix_socket(int fd, int type);

// One message, together with `fd` unless that is -1. Like ::sendmsg(), and never waits: EAGAIN.
ssize_t send_with_fd(int socket, std::string_view bytes, int fd);
// Like ::recvmsg(), and never waits. `fds` are the descriptors that came along, close-on-exec.
ssize_t receive_with_fds(int socket, std::span<char> buffer, std::vector<Fd>& fds);

}  // namespace lockstep
