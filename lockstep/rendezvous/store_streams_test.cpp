// The store over the link between launchers: frames by their bytes, and streams against streams. A
// server that forwards to one that serves: launch/store_forwarding_test.cpp.
#include "lockstep/rendezvous/store_streams.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = StoreFrame::Kind;

// ---------------------------------------------------------------- frames

StoreFrame decoded(const std::string& bytes) {
  StoreFrame frame;
  EXPECT_EQ(decode(bytes, frame), bytes.size());
  return frame;
}

TEST(StoreFrame, IsTheSameBytesOnEveryHost) {
  const StoreFrame frame{.kind = Kind::kData,
                         .attempt = 0x01020304,
                         .stream = 0x1122334455667788,
                         .value = 3,
                         .payload = "abc"};
  const std::string bytes = encode(frame);
  EXPECT_EQ(bytes,
            std::string("\x02\x04\x03\x02\x01\x88\x77\x66\x55\x44\x33\x22\x11\x03\0\0\0abc", 20));
  const StoreFrame copy = decoded(bytes);
  EXPECT_EQ(copy.kind, frame.kind);
  EXPECT_EQ(copy.attempt, frame.attempt);
  EXPECT_EQ(copy.stream, frame.stream);
  EXPECT_EQ(copy.payload, "abc");
  StoreFrame part;
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_EQ(decode(std::string_view(bytes).substr(0, size), part), 0u) << size;
  EXPECT_EQ(decode(bytes + bytes, part), bytes.size());
}

TEST(StoreFrame, WhatIsNotOneIsRejected) {
  const auto rejection = [](const StoreFrame& frame) {
    return message_of([&] { decoded(encode(frame)); });
  };
  EXPECT_THAT(rejection({.kind = Kind::kData, .stream = 1, .value = 0}), HasSubstr("bad length"));
  EXPECT_THAT(rejection({.kind = Kind::kData, .stream = 1, .value = 1u << 30}),
              HasSubstr("bad length"));
  EXPECT_THAT(rejection({.kind = Kind::kClose, .stream = 0}), HasSubstr("no stream"));
  EXPECT_THAT(rejection({.kind = Kind::kOpen, .stream = 1, .value = 2'000'000}),
              HasSubstr("rank that cannot exist"));
  EXPECT_THAT(rejection({.kind = Kind::kCredit, .stream = 1, .value = 1u << 30}),
              HasSubstr("more than a window"));
  EXPECT_EQ(rejection({.kind = Kind::kOpen, .stream = 1, .value = StoreFrame::kNoRank}),
            "(nothing thrown)");
  StoreFrame frame;
  EXPECT_THAT(message_of([&] { decode("\x05", frame); }), HasSubstr("unknown kind"));
  for (const char first : {'{', '\x15', '\x16', '\0', '\xff'})
    EXPECT_FALSE(begins_store_frame(first));
}

// ---------------------------------------------------------------- streams

// Two ends and the frames between them, which arrive when the test says so.
struct Pair {
  struct Side {
    std::deque<std::string> outgoing;
    std::map<StoreStreams::Id, std::string> received;
    std::vector<StoreStreams::Id> opened, writable, closed;
    std::size_t consumed_at_once = 1u << 30;
    std::unique_ptr<StoreStreams> streams;
  };
  Side node, zero;

  Pair() {
    for (Side* side : {&node, &zero}) {
      StoreStreams::Handlers handlers;
      handlers.send = [side](const StoreFrame& frame) { side->outgoing.push_back(encode(frame)); };
      handlers.received = [side](auto id, auto bytes) {
        side->received[id] += bytes;
        side->streams->consumed(id, std::min(bytes.size(), side->consumed_at_once));
      };
      handlers.writable = [side](auto id) { side->writable.push_back(id); };
      handlers.closed = [side](auto id) { side->closed.push_back(id); };
      if (side == &zero) handlers.opened = [side](auto id, int) { side->opened.push_back(id); };
      side->streams = std::make_unique<StoreStreams>(std::move(handlers));
    }
  }
  void deliver(Side& from, Side& to) {
    while (!from.outgoing.empty()) {
      const std::string bytes = std::move(from.outgoing.front());
      from.outgoing.pop_front();
      to.streams->on_frame(decoded(bytes));
    }
  }
  void settle() {
    while (!node.outgoing.empty() || !zero.outgoing.empty()) {
      deliver(node, zero);
      deliver(zero, node);
    }
  }
  static std::size_t bytes_of(const Side& side) {
    std::size_t sum = 0;
    for (const std::string& each : side.outgoing) sum += each.size();
    return sum;
  }
};

TEST(StoreStreams, BytesPassInOrderAndTheWindowOpensAgain) {
  Pair pair;
  pair.node.streams->open(7, 3);
  EXPECT_TRUE(pair.node.outgoing.empty());  // the peer learns of it with the first bytes
  std::string text;
  for (int i = 0; i < 100'000; ++i) text += std::to_string(i);
  std::size_t sent = 0;
  for (int round = 0; sent < text.size() && round < 1000; ++round) {
    sent += pair.node.streams->write(7, std::string_view(text).substr(sent));
    EXPECT_LE(Pair::bytes_of(pair.node), StoreStreams::kStreamWindow + 200);
    pair.settle();
  }
  EXPECT_EQ(pair.zero.received[7], text);
  EXPECT_THAT(pair.zero.opened, ElementsAre(7));
  EXPECT_EQ(pair.zero.streams->write(7, "reply"), 5u);
  pair.settle();
  EXPECT_EQ(pair.node.received[7], "reply");
}

TEST(StoreStreams, AClientThatDoesNotReadHoldsUpNoOther) {
  Pair pair;
  const std::string much(1u << 20, 'x');
  for (StoreStreams::Id id = 1; id <= 10; ++id) {
    pair.node.streams->open(id, 0);
    pair.node.streams->write(id, "a");
  }
  pair.settle();
  pair.node.consumed_at_once = 0;
  for (StoreStreams::Id id = 1; id <= 9; ++id) {
    EXPECT_EQ(pair.zero.streams->write(id, much), StoreStreams::kStreamWindow) << id;
    pair.settle();  // it has arrived, so the link is free again
  }
  EXPECT_EQ(pair.zero.streams->write(10, "quick"), 5u);
  pair.settle();
  EXPECT_EQ(pair.node.received[10], "quick");
  pair.node.streams->consumed(4, StoreStreams::kStreamWindow);
  pair.settle();
  EXPECT_THAT(pair.zero.writable, ElementsAre(4));
}

TEST(StoreStreams, SmallWritesPassLargeOnes) {
  Pair pair;
  const std::string much(1u << 20, 'x');
  for (StoreStreams::Id id = 1; id <= 9; ++id) {
    pair.node.streams->open(id, 0);
    pair.node.streams->write(id, much);
  }
  pair.node.streams->open(10, 0);
  EXPECT_EQ(pair.node.streams->write(10, "small"), 5u);
  pair.settle();
  EXPECT_EQ(pair.zero.received[10], "small");
}

TEST(StoreStreams, WhatIsOnTheLinkIsBounded) {
  Pair pair;
  const std::string much(1u << 20, 'x'), little = "small";
  std::size_t taken = 0;
  std::vector<StoreStreams::Id> waiting;
  for (StoreStreams::Id id = 1; id <= 1000; ++id) {
    pair.node.streams->open(id, 0);
    const std::string& text = id % 2 == 0 ? much : little;
    const std::size_t part = pair.node.streams->write(id, text);
    if (part < text.size()) waiting.push_back(id);
    taken += part;
  }
  // Also in the kernel's memory, where every frame costs something.
  EXPECT_LE(Pair::bytes_of(pair.node), StoreStreams::kLinkWindow + 8192);
  EXPECT_LE(pair.node.outgoing.size(), 2 * StoreStreams::kLinkWindow / StoreStreams::kFrameCost);
  EXPECT_LE(taken, StoreStreams::kLinkWindow);
  EXPECT_GT(waiting.size(), 900u);
  pair.settle();
  std::ranges::sort(pair.node.writable);
  EXPECT_EQ(pair.node.writable, waiting);  // each is asked again, once
}

TEST(StoreStreams, EitherSideMayCloseWhileFramesAreOnTheWay) {
  Pair pair;
  for (StoreStreams::Id id = 1; id <= 3; ++id) {
    pair.node.streams->open(id, 0);
    pair.node.streams->write(id, "a");
  }
  pair.settle();
  pair.node.streams->write(1, "b");
  pair.zero.streams->write(1, "c");
  pair.zero.streams->close(1);
  pair.node.streams->close(2);
  pair.zero.streams->close(2);
  pair.settle();
  EXPECT_THAT(pair.node.closed, ElementsAre(1));
  EXPECT_EQ(pair.node.received[1], "c");
  EXPECT_EQ(pair.zero.received[1], "a");  // what came after its own end is dropped
  EXPECT_TRUE(pair.zero.closed.empty());
  EXPECT_EQ(pair.node.streams->write(3, "still"), 5u);
  pair.settle();
  EXPECT_EQ(pair.zero.received[3], "astill");
  pair.node.streams->open(4, 0);
  pair.node.streams->close(4);  // before the peer has learned of it
  EXPECT_TRUE(pair.node.outgoing.empty());
}

TEST(StoreStreams, APeerThatBreaksTheProtocolIsRejected) {
  const auto rejection = [](Pair::Side& side, const StoreFrame& frame) {
    return message_of([&] { side.streams->on_frame(frame); });
  };
  const std::string much(StoreFrame::kMaxPayload, 'x');
  const StoreFrame data{.kind = Kind::kData,
                        .stream = 1,
                        .value = static_cast<std::uint32_t>(much.size()),
                        .payload = much};
  const StoreFrame open{.kind = Kind::kOpen, .stream = 1, .value = 0};
  Pair pair;
  EXPECT_EQ(rejection(pair.zero, data), "(nothing thrown)");  // for a stream that is closed here
  EXPECT_EQ(rejection(pair.zero, open), "(nothing thrown)");
  EXPECT_THAT(rejection(pair.zero, open), HasSubstr("opens a stream again"));
  EXPECT_THAT(rejection(pair.node, open), HasSubstr("a node that has no store"));
  pair.zero.consumed_at_once = 0;
  std::string text;
  for (int i = 0; i < 5 && text.size() < 20; ++i) text = rejection(pair.zero, data);
  EXPECT_THAT(text, HasSubstr("exceeds the window"));
  for (const StoreStreams::Id stream : {0, 1})
    EXPECT_THAT(rejection(pair.zero, {.kind = Kind::kCredit, .stream = stream, .value = 1}),
                HasSubstr("bytes that were not sent"));
  for (StoreStreams::Id id = 2; id <= StoreStreams::kMaxStreams; ++id)
    pair.zero.streams->on_frame({.kind = Kind::kOpen, .stream = id, .value = 0});
  EXPECT_THAT(rejection(pair.zero, {.kind = Kind::kOpen, .stream = 1u << 20, .value = 0}),
              HasSubstr("too many streams"));
}

}  // namespace
}  // namespace lockstep
