// The addresses of a name, without blocking the event loop: a name server that does not answer
// takes many seconds, during which no signal and no rank would be heard.
//
//   Lookup lookup(loop, "n0", 29500, [&](const Addresses& found) { connect_to(found); });
//
// Owned and called by the loop's thread; `done` runs there, once, and may destroy the object.
// Once it is destroyed `done` is not called; the asking thread ends when it has its answer.
#pragma once

#include <netdb.h>

#include <functional>
#include <future>
#include <memory>
#include <string>

#include "launcher/event_loop.h"
#include "lockstep/core/fd.h"

namespace lockstep::launch {

struct Addresses {
  int error = 0;  // getaddrinfo's
  std::shared_ptr<const addrinfo> first;
};

class Lookup {
 public:
  using Done = std::function<void(const Addresses&)>;

  Lookup(EventLoop& loop, const std::string& host, int port, Done done);
  ~Lookup();
  Lookup(const Lookup&) = delete;
  Lookup& operator=(const Lookup&) = delete;

 private:
  EventLoop& loop_;
  Fd ready_;  // at end of file when the answer is there
  std::future<Addresses> answer_;
};

}  // namespace lockstep::launch
