// A c10d store as the store of the rendezvous (rendezvous/key_value_store.h).
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

}  // namespace lockstep::detail
