// What ranks and launchers read to find each other: slurm, store, store_frames. Each program is
// compiled for one of them (driver.h).
#include <algorithm>
#include <map>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/rendezvous/store_bytes_for_test.h"
#include "lockstep/rendezvous/store_table.h"
#include "tests/fuzz/driver.h"

// SLURM's compressed lists, "n[03-07,9],m1" and "2(x3),1", after a byte that chooses the node.
namespace fuzz_slurm {

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  using fuzz::require;
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 1), size - 1);
  const auto attempt = [](auto&& read) {
    try {
      read();
    } catch (const UsageError& error) {
      require(error.what()[0] == '[', "an error without its component");
    }
  };
  attempt([&] { require(!detail::first_host(text).empty(), "a host without a name"); });
  attempt([&] { require(detail::tasks_on_node(text, data[0]) >= 1, "a node without a task"); });
  return 0;
}

}  // namespace fuzz_slurm

// Feeds the launcher's store with the bytes of two clients. The input is a series of chunks; the
// first byte of each says which client sends it and how long it is.
namespace fuzz_store {

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  using fuzz::require;
  const StoreLimits limits{.keys = 16, .bytes = 4096, .command_bytes = 1024};
  std::map<StoreTable::Client, std::string> inputs;
  std::size_t replied = 0;
  StoreTable table(
      [&](auto client, auto bytes) {
        require(inputs.count(client) != 0, "a reply to a client that is gone");
        replied += bytes.size();
      },
      limits);
  while (size > 0) {
    const StoreTable::Client client = data[0] & 1u;
    const std::size_t count = std::min<std::size_t>(size - 1, data[0] >> 1);
    std::string& input = inputs[client];
    input.append(reinterpret_cast<const char*>(data + 1), count);
    data += 1 + count;
    size -= 1 + count;
    try {
      const std::size_t used = feed_all(table, client, input);
      require(used <= input.size(), "more was used than came");
      input.erase(0, used);
    } catch (const CommError& error) {
      require(std::string(error.what()).rfind("[store] ", 0) == 0, "an error without component");
      table.drop(client);
      inputs.erase(client);
    }
  }
  return 0;
}

}  // namespace fuzz_store

// What one launcher reads from another's link for the store: frames that survive being sent on, to
// streams that echo what they receive, or a rejection in words.
namespace fuzz_store_frames {

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  using fuzz::require;
  std::string_view bytes(reinterpret_cast<const char*>(data), size);
  std::map<StoreStreams::Id, std::string> streams;  // to be echoed
  StoreStreams* all = nullptr;
  std::size_t on_link = 0;
  const auto echo = [&](StoreStreams::Id id) {
    std::string& rest = streams.at(id);
    const std::size_t taken = all->write(id, rest);
    require(taken <= rest.size(), "more was taken than given");
    rest.erase(0, taken);
    all->consumed(id, taken);
  };
  StoreStreams::Handlers handlers;
  handlers.send = [&](const StoreFrame& frame) {
    StoreFrame copy;
    const std::string sent = encode(frame);
    require(decode(sent, copy) == sent.size() && encode(copy) == sent, "a frame that changes");
    if (frame.kind == StoreFrame::Kind::kData) on_link += frame.payload.size();
  };
  handlers.opened = [&](StoreStreams::Id id, int) { streams[id]; };
  handlers.received = [&](StoreStreams::Id id, std::string_view text) {
    streams.at(id) += text;
    require(streams.at(id).size() <= StoreStreams::kStreamWindow, "more than a window is held");
    echo(id);
  };
  handlers.writable = echo;
  handlers.closed = [&](StoreStreams::Id id) { streams.erase(id); };
  StoreStreams receiver(std::move(handlers));
  all = &receiver;
  std::size_t credits = StoreStreams::kLinkWindow;
  try {
    StoreFrame frame;
    while (const std::size_t used = decode(bytes, frame)) {
      if (frame.kind == StoreFrame::Kind::kCredit && frame.stream == 0) credits += frame.value;
      receiver.on_frame(frame);
      require(on_link <= credits, "more was sent than the link has room for");
      bytes.remove_prefix(used);
    }
  } catch (const UsageError& error) {
    require(std::string_view(error.what()).starts_with("[launch] "),
            "an error without its component");
  }
  return 0;
}

}  // namespace fuzz_store_frames

LOCKSTEP_FUZZ_ONE()
