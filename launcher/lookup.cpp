#include "launcher/lookup.h"

#include <sys/epoll.h>

#include <thread>
#include <utility>

namespace lockstep::launch {
namespace {

Addresses addresses_of(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  Addresses result;
  result.error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (result.error == 0)
    result.first.reset(found,
                       [](const addrinfo* list) { ::freeaddrinfo(const_cast<addrinfo*>(list)); });
  return result;
}

}  // namespace

Lookup::Lookup(EventLoop& loop, const std::string& host, int port, Done done) : loop_(loop) {
  Pipe pipe = make_pipe();
  ready_ = std::move(pipe.read);
  std::promise<Addresses> promise;
  answer_ = promise.get_future();
  // Detached: nothing can cut a lookup short, and the launcher does not wait for it.
  std::thread([host, port = std::to_string(port), promise = std::move(promise),
               end = std::move(pipe.write)]() mutable {
    promise.set_value(addresses_of(host, port));
    end.reset();
  }).detach();
  loop_.watch(ready_.get(), EPOLLIN, [this, done = std::move(done)](std::uint32_t) {
    loop_.forget(ready_.get());
    const auto call = done;  // it may destroy this object
    call(answer_.get());
  });
}

Lookup::~Lookup() {
  if (ready_) loop_.forget(ready_.get());
}

}  // namespace lockstep::launch
