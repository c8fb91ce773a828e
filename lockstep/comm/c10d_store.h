// Adapters between c10d::Store and the rendezvous's KeyValueStore, in both directions:
//
//   detail::C10dStore store(tcp_store);                           // for the rendezvous
//   auto store = detail::open_launcher_store(env.store_channel);  // for c10d
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/rendezvous/key_value_store.h"

namespace lockstep::detail {

class C10dStore : public CountingStore {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  std::string get(const std::string& key, const Deadline& deadline) override {
    if (poll_until([&] { return check(key); }, deadline)) return store_->get_to_str(key);
    throw TimeoutError("shm",
                       fmt::format("'{}' was not reported within {} ms. A rank has probably ended "
                                   "during start-up; look at its output.",
                                   key, deadline.total().count()));
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return store_->add(key, amount);
  }
  bool check(const std::string& key) override { return store_->check({key}); }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

// The store that the launcher serves, reached over the channel that every rank inherits
// (rendezvous/store_client.h), without a TCP port. Every call has a deadline: the store's timeout;
// zero means none, as in c10d. `channel_fd` stays open as long as the process. Throws CommError
// when the launcher is gone.
c10::intrusive_ptr<c10d::Store> open_launcher_store(int channel_fd);

}  // namespace lockstep::detail
