// The store of a run as a c10d store: served by the launcher, reached over the channel that every
// rank inherits (rendezvous/store_client.h), without a TCP port.
//
//   auto store = detail::open_launcher_store(env.store_channel);
//
// Every call has a deadline: the store's timeout; zero means none, as in c10d.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::detail {

// `channel_fd` stays open as long as the process. Throws CommError when the launcher is gone.
c10::intrusive_ptr<c10d::Store> open_launcher_store(int channel_fd);

}  // namespace lockstep::detail
