// What one launcher reads from another's link for the store: frames that survive being sent on, to
// streams that echo what they receive, or a rejection in words.
#include <map>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/rendezvous/store_table.h"
#include "tests/fuzz/driver.h"

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
