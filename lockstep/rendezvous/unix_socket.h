// Unix-domain sockets between processes of one host: abstract names, which leave no file behind,
// the peer's user, and messages that carry descriptors (SCM_RIGHTS).
//
//   if (connect_abstract(socket, name) == 0 && peer_uid(socket) == ::geteuid())
//     send_with_fd(socket, "here", memory.get());
//
// Any user of the host may take an abstract name, so both ends check the peer's user.
#pragma once

#include <sys/types.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/fd.h"

namespace lockstep {

// Like ::bind() and ::connect(): 0, or -1 with errno.
int bind_abstract(int socket, const std::string& name);
int connect_abstract(int socket, const std::string& name);

std::optional<uid_t> peer_uid(int socket);
// `type`: SOCK_STREAM, SOCK_SEQPACKET.
bool is_unix_socket(int fd, int type);

// Sends one message, with `fd` unless that is -1. Like ::sendmsg(), but never blocks (EAGAIN).
ssize_t send_with_fd(int socket, std::string_view bytes, int fd);
// Like ::recvmsg(), but never blocks. `fds` receives the message's descriptors, close-on-exec.
ssize_t receive_with_fds(int socket, std::span<char> buffer, std::vector<Fd>& fds);

}  // namespace lockstep
