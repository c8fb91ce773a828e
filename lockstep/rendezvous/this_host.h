// The names of this host, machine and program, and its network addresses. Only reads; call it from
// any thread.
#pragma once

#include <sys/socket.h>

#include <string>

namespace lockstep {

std::string host_name();

// Equal for processes of one machine and different otherwise, which host names are not
// ("localhost").
std::string machine_of(const std::string& host);

// The linker's build id of the running program, equal for equal builds only.
std::string build_id();

bool is_loopback(const std::string& host);

// An IPv4 or IPv6 address as text; an IPv4-mapped IPv6 address as IPv4.
std::string address_text(const sockaddr* address);

// This host's address on the route to `host`. Only asks the kernel and sends nothing.
std::string address_towards(const std::string& host, int port);

}  // namespace lockstep
