// The gloo backend: TCP between CPUs, on any number of hosts. Always built.
//
//   auto backend = detail::gloo::make({.store = store, .rank = 0, .size = 2});
//
// The constructor connects all ranks with each other, through the store, and blocks until they are.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/backend.h"

namespace lockstep::detail::gloo {

struct Options {
  c10::intrusive_ptr<c10d::Store> store = {};
  int rank = 0;
  int size = 1;
  std::string address = "127.0.0.1";  // this host's, as others reach it
  std::chrono::milliseconds startup_timeout{std::chrono::seconds(300)};
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
};

// GLOO_SOCKET_IFNAME, where set, names the interfaces instead of Options::address.
std::unique_ptr<Backend> make(const Options& options);

}  // namespace lockstep::detail::gloo
