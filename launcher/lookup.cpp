#include "launcher/lookup.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <thread>
#include <utility>

namespace lockstep::launch {

Addresses look_up(const std::string& host, int port) {
  std::string name = host;
  if (name.size() > 2 && name.front() == '[' && name.back() == ']')
    name = name.substr(1, name.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  Addresses result;
  result.error = ::getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (result.error == 0) result.first = {found, [found](auto) { ::freeaddrinfo(found); }};
  return result;
}

Lookup::Lookup(EventLoop& loop, const std::string& host, int port,
               std::function<void(const Addresses&)> done)
    : loop_(loop) {
  Pipe pipe = make_pipe();
  ready_ = std::move(pipe.read);
  std::promise<Addresses> promise;
  answer_ = promise.get_future();
  // Detached: nothing can cut a lookup short, and the launcher does not wait for it.
  std::thread([host, port, promise = std::move(promise), end = std::move(pipe.write)]() mutable {
    promise.set_value(look_up(host, port));
    end.reset();
  }).detach();
  loop_.watch(ready_.get(), EPOLLIN, [this, done = std::move(done)](std::uint32_t) {
    loop_.forget(ready_.get());
    const auto call = done;  // it may destroy this object
    call(answer_.get());
  });
}

}  // namespace lockstep::launch
