// What a rank says about its host and its program: pure reads, from any thread.
#pragma once

#include <string>

namespace lockstep {

std::string host_name();

// Equal exactly for processes of one machine: host names alone repeat ("localhost").
std::string machine_of(const std::string& host);

// The linker's build id of the running program: equal exactly for equal builds.
std::string build_id();

bool is_loopback(const std::string& host);

// The address of this host on the way to `host`: asking the kernel for a route sends nothing.
std::string address_towards(const std::string& host, int port);

}  // namespace lockstep
