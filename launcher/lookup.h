// The addresses of a name, asked from the system's resolver.
//
// A name server that does not answer takes many seconds. In the launcher's event loop no signal and
// no rank would be heard meanwhile, so there a Lookup asks in a thread of its own.
//
//   Lookup lookup(loop, "n0", 29500, [](const Addresses& found) { connect(found.first); });
//
// Owned and called by the thread of the event loop.
#pragma once

#include <netdb.h>

#include <functional>
#include <future>
#include <memory>
#include <string>

#include "launcher/event_loop.h"
#include "lockstep/core/fd.h"

namespace lockstep::launch {

// getaddrinfo's answer.
struct Addresses {
  int error = 0;
  std::shared_ptr<const addrinfo> first;
};

// Waits for the answer. An IPv6 address may have brackets.
Addresses look_up(const std::string& host, int port);

// `done` runs in the loop, once, and may destroy the object. Once it is destroyed `done` is not
// called; the asking thread ends when it has its answer.
class Lookup {
 public:
  Lookup(EventLoop& loop, const std::string& host, int port,
         std::function<void(const Addresses&)> done);
  ~Lookup() { loop_.forget(ready_.get()); }
  Lookup(const Lookup&) = delete;
  Lookup& operator=(const Lookup&) = delete;

 private:
  EventLoop& loop_;
  Fd ready_;  // at end of file when the answer is there
  std::future<Addresses> answer_;
};

}  // namespace lockstep::launch
