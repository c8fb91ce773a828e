// What a rank says about its host and its program: pure reads, from any thread.
#pragma once

#include <sys/socket.h>

#include <string>

namespace lockstep {

std::string host_name();

// Equal exactly for processes of one machine: host names alone repeat ("localhost").
std::string machine_of(const std::string& host);

// The linker's build id of the running program: equal exactly for equal builds.
std::string build_id();

bool is_loopback(const std::string& host);

// The number of an IPv4 or IPv6 address, the first without the wrapping of the second.
std::string address_text(const sockaddr* address);

// The address of this host on the way to `host`: asking the kernel for a route sends nothing.
std::string address_towards(const std::string& host, int port);

}  // namespace lockstep
