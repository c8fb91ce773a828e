// The store's protocol by its bytes.

#include "lockstep/rendezvous/store_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/rendezvous/store_bytes_for_test.h"

namespace lockstep {

namespace {

using store::Command;
using ::testing::HasSubstr;

struct Table {
  std::map<StoreTable::Client, std::string> replies;
  StoreTable table;

  explicit Table(StoreLimits limits = {})
      : table([this](auto client, auto bytes) { replies[client] += bytes; }, limits) {}

  std::string say(StoreTable::Client client, const std::string& bytes) {
    if (introduced.insert(client).second) feed_all(table, client, kHandshake);
    replies[client].clear();
    EXPECT_EQ(feed_all(table, client, bytes), bytes.size());
    return replies[client];
  }
  std::string error(StoreTable::Client client, const std::string& bytes) {
    try {
      say(client, bytes);
    } catch (const CommError& e) {
      table.drop(client);
      introduced.erase(client);
      return e.what();
    }
    return "no error";
  }
  std::set<StoreTable::Client> introduced;
};

TEST(StoreTable, ACommandInPiecesIsCarriedOutWhenItIsComplete) {
  Table t;
  const std::string all =
      kHandshake + command(Command::kSet, piece("key") + piece("value")) +
      command(Command::kMultiSet, number<std::uint64_t>(1) + piece("other") + piece("thing")) +
      command(Command::kGet, piece("key"));
  std::string input;
  for (const char byte : all) {
    EXPECT_EQ(t.replies[1], "");
    input += byte;
    input.erase(0, feed_all(t.table, 1, input));
  }
  EXPECT_EQ(input, "");
  EXPECT_EQ(t.replies[1], piece("value"));
}

TEST(StoreTable, WhoeverIsNotAClientIsRefused) {
  Table t;
  EXPECT_THROW(feed_all(t.table, 1, "GET / HTTP/1.1\r\n"), CommError);
  EXPECT_THROW(feed_all(t.table, 2, command(Command::kNumKeys, "12345")), CommError);
  EXPECT_THROW(feed_all(t.table, 3, command(Command::kValidate, "zzzz")), CommError);
  EXPECT_THAT(t.error(4, "\xff"), HasSubstr("command 255 is not known"));
  EXPECT_THAT(t.error(4, command(Command::kGet, number<std::uint64_t>(1u << 20))),
              HasSubstr("a key of 1048576 bytes is too long"));
  EXPECT_THAT(t.error(4, command(Command::kWait, number<std::uint64_t>(~0ull))),
              HasSubstr("keys in one command"));
  EXPECT_THAT(t.error(4, command(Command::kSet, piece("k") + piece("not a number")) +
                             command(Command::kAdd, piece("k") + number<std::int64_t>(1))),
              HasSubstr("not one"));
}

TEST(StoreTable, EverythingThatItHoldsIsBounded) {
  const std::string value(1000, 'v');
  const auto set = [&](int i) {
    return command(Command::kSet, piece(std::to_string(i)) + piece(value));
  };
  Table keys({.keys = 3});
  for (int i = 0; i < 3; ++i) keys.say(1, set(i));
  EXPECT_THAT(keys.error(1, set(3)), HasSubstr("more than 3 keys"));

  Table bytes({.bytes = 5000});
  for (int i = 0; i < 4; ++i) bytes.say(1, set(i));
  EXPECT_THAT(bytes.error(1, set(4)), HasSubstr("more than 5000 bytes"));
  for (int round = 0; round < 10; ++round) bytes.say(1, set(0));  // replaced, not added
  bytes.say(1, command(Command::kDeleteKey, piece("1")));
  bytes.say(1, set(4));
  const auto waiting = command(Command::kWait, number<std::uint64_t>(1) + piece(value));
  EXPECT_THAT(bytes.error(2, waiting), HasSubstr("more than 5000 bytes"));
  EXPECT_THAT(bytes.error(1, command(Command::kQueuePush, piece("q") + piece(value))),
              HasSubstr("more than 5000 bytes"));
  EXPECT_THAT(bytes.error(1, command(Command::kAppend, piece("4") + piece(value))),
              HasSubstr("more than 5000 bytes"));

  Table waits({.bytes = 5000});  // the memory of a wait is released with it
  for (int round = 0; round < 100; ++round) {
    waits.say(1, waiting);
    EXPECT_EQ(waits.say(1, command(Command::kCancelWait)), std::string(1, store::kWaitCanceled));
    waits.say(2, waiting);
    waits.table.drop(2);
    waits.introduced.erase(2);
  }
  Table commands({.command_bytes = 100});
  const std::string half = command(Command::kSet, piece("k") + number<std::uint64_t>(1000));
  commands.say(1, command(Command::kPing, number<std::uint32_t>(7)));
  EXPECT_EQ(feed_all(commands.table, 1, half), 0u);
  EXPECT_THROW(feed_all(commands.table, 1, half + std::string(200, 'v')), CommError);
}

TEST(StoreTable, AQueueAndAnAwaitedKeyCountWithTheMemoryThatTheyTake) {
  const auto fill = [](Table& t, auto one) {
    for (int i = 0; i < 100; ++i)
      if (t.error(1, one(std::to_string(i))) != "no error") return i;
    return 100;
  };
  const auto push = [](const std::string& key) {
    return command(Command::kQueuePush, piece(key) + piece(""));
  };
  Table queues({.bytes = 10'000});
  EXPECT_LT(fill(queues, push), 20);
  queues.say(1, command(Command::kQueuePop, piece("0")));  // which releases its memory
  queues.say(1, push("again"));
  Table values({.bytes = 10'000});  // one queue with many values
  EXPECT_EQ(fill(values, [&](const std::string&) { return push("q"); }), 100);

  std::string keys = number<std::uint64_t>(100);
  for (int i = 0; i < 100; ++i) keys += piece(std::to_string(i));
  Table waits({.bytes = 10'000});
  EXPECT_THAT(waits.error(1, command(Command::kWait, keys)), HasSubstr("more than 10000 bytes"));
}

TEST(StoreTable, AKeyThatIsAwaitedTwiceIsOneKey) {
  Table t;
  std::string keys = number<std::uint64_t>(store::kMaxKeys);
  for (std::size_t i = 0; i < store::kMaxKeys; ++i) keys += piece("");
  for (StoreTable::Client client = 1; client <= 4; ++client)
    t.say(client, command(Command::kWait, keys));
  const auto began = std::chrono::steady_clock::now();
  for (StoreTable::Client client = 1; client <= 3; ++client) t.table.drop(client);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(1));
  t.say(5, command(Command::kSet, piece("") + piece("")));
  EXPECT_EQ(t.replies[4], std::string(1, store::kStopWaiting));
}

TEST(StoreTable, AReplyIsBoundedWhateverTheCommand) {
  Table t({.command_bytes = 1000});
  for (int i = 0; i < 3; ++i)
    t.say(1, command(Command::kAppend, piece("k") + piece(std::string(500, 'v'))));
  EXPECT_THAT(t.error(1, command(Command::kGet, piece("k"))), HasSubstr("a reply of more"));
  EXPECT_THAT(t.error(1, command(Command::kCompareSet, piece("k") + piece("a") + piece("b"))),
              HasSubstr("a reply of more"));
}

TEST(StoreTable, AWaitEndsWhenTheLastKeyIsThere) {
  Table t;
  t.say(1, command(Command::kWait, number<std::uint64_t>(2) + piece("a") + piece("b")));
  t.say(3, command(Command::kWait, number<std::uint64_t>(1) + piece("b")));
  t.say(2, command(Command::kSet, piece("a") + piece("")));
  EXPECT_EQ(t.replies[1], "");
  t.table.drop(3);
  t.say(2, command(Command::kAdd, piece("b") + number<std::int64_t>(5)));
  EXPECT_EQ(t.replies[1], std::string(1, store::kStopWaiting));
  EXPECT_EQ(t.replies[3], "");
  // Two wait for a queue; one value wakes one.
  t.say(5, command(Command::kWait, number<std::uint64_t>(1) + piece("q")));
  t.say(6, command(Command::kWait, number<std::uint64_t>(1) + piece("q")));
  t.say(2, command(Command::kQueuePush, piece("q") + piece("x")));
  EXPECT_EQ(t.replies[5].size() + t.replies[6].size(), 1u);
}

// ---------------------------------------------------------------- streams

using ::testing::ElementsAre;
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
