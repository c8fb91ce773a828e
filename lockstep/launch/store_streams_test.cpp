// The store over the link between launchers: frames by their bytes, streams against streams, and a
// server that forwards to one that serves, with a link that can be held up.
#include "lockstep/launch/store_streams.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/launch/store_bytes_for_test.h"
#include "lockstep/launch/store_server.h"

namespace lockstep::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = StoreFrame::Kind;
using store::Command;

template <typename F>
std::string rejection_of(F&& f) {
  try {
    f();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "(no error)";
}

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
    return rejection_of([&] { decoded(encode(frame)); });
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
            "(no error)");
  StoreFrame frame;
  EXPECT_THAT(rejection_of([&] { decode("\x05", frame); }), HasSubstr("unknown kind"));
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
  // Also in the memory of the kernel, where every frame costs something.
  EXPECT_LE(Pair::bytes_of(pair.node), StoreStreams::kLinkWindow + 8192);
  EXPECT_LE(pair.node.outgoing.size(), 2 * StoreStreams::kLinkWindow / StoreStreams::kFrameCost);
  EXPECT_LE(taken, StoreStreams::kLinkWindow);
  EXPECT_GT(waiting.size(), 900u);
  pair.settle();
  std::sort(pair.node.writable.begin(), pair.node.writable.end());
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
    return rejection_of([&] { side.streams->on_frame(frame); });
  };
  const std::string much(StoreFrame::kMaxPayload, 'x');
  const StoreFrame data{.kind = Kind::kData,
                        .stream = 1,
                        .value = static_cast<std::uint32_t>(much.size()),
                        .payload = much};
  const StoreFrame open{.kind = Kind::kOpen, .stream = 1, .value = 0};
  Pair pair;
  EXPECT_EQ(rejection(pair.zero, data), "(no error)");  // of a stream that is closed here
  EXPECT_EQ(rejection(pair.zero, open), "(no error)");
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

// ---------------------------------------------------------------- servers

const std::string kPing = command(Command::kPing, number<std::uint32_t>(9));
const std::string kPong = number<std::uint32_t>(9);

// Node 0, which serves, and node 1, which forwards.
struct Servers {
  EventLoop loop;
  HeldPort port = HeldPort::any(Reach::kLoopback);
  HeldPort other_port = HeldPort::any(Reach::kLoopback);
  std::vector<std::string> said;
  std::unique_ptr<StoreServer> zero, one;

  StoreServerOptions options(bool forwards, int attempt = 0) {
    StoreServerOptions result;
    result.listen_after = std::chrono::milliseconds(0);
    result.link.emplace();
    result.link->forwards = forwards;
    result.link->attempt = attempt;
    result.link->send = [this, forwards](int node, const StoreFrame& frame) {
      EXPECT_EQ(node, forwards ? 0 : 1);
      loop.post([this, forwards, bytes = encode(frame)] {
        StoreServer* to = forwards ? zero.get() : one.get();
        if (to != nullptr) to->on_frame(forwards ? 1 : 0, decoded(bytes));
      });
    };
    return result;
  }
  std::unique_ptr<StoreServer> make(bool forwards, int attempt = 0) {
    return std::make_unique<StoreServer>(
        loop, forwards ? other_port : port,
        [this](const std::string& line) { said.push_back(line); }, options(forwards, attempt));
  }
  Servers() : zero(make(false)), one(make(true)) {}

  void run_for(int ms) {
    loop.after(std::chrono::milliseconds(ms), [this] { loop.stop(); });
    loop.run();
  }
  Fd client(StoreServer& server, int rank = 0) {
    const Fd channel = server.open_channel(rank);
    Fd connection = open_store_connection(channel.get(), Deadline::after(std::chrono::seconds(10)));
    set_nonblocking(connection.get());
    return connection;
  }
  // Writes the text and reads `size` bytes of replies.
  std::string exchange(const Fd& fd, const std::string& text, std::size_t size) {
    std::size_t sent = 0;
    std::string reply;
    for (int round = 0; round < 4000 && (sent < text.size() || reply.size() < size); ++round) {
      char buffer[65536];
      const ssize_t out =
          ::send(fd.get(), text.data() + sent, text.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (out > 0) sent += static_cast<std::size_t>(out);
      const ssize_t in = ::recv(fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (in == 0) return reply + "(closed)";
      if (in > 0) reply.append(buffer, static_cast<std::size_t>(in));
      run_for(in > 0 ? 0 : 1);
    }
    return reply;
  }
};

TEST(ForwardedStore, IsTheSameStore) {
  Servers s;
  const Fd here = s.client(*s.zero), there = s.client(*s.one, 5);
  EXPECT_EQ(
      s.exchange(here, kHandshake + command(Command::kSet, piece("k") + piece("v")) + kPing, 4),
      kPong);
  EXPECT_EQ(s.exchange(there, kHandshake + command(Command::kGet, piece("k")), 9), piece("v"));
  const std::string value(8u << 20, 'x');
  EXPECT_EQ(s.exchange(there, command(Command::kSet, piece("large") + piece(value)) + kPing, 4),
            kPong);
  const std::string wanted = piece(value);
  EXPECT_TRUE(s.exchange(there, command(Command::kGet, piece("large")), wanted.size()) == wanted);
  EXPECT_TRUE(s.exchange(here, command(Command::kGet, piece("large")), wanted.size()) == wanted);
}

TEST(ForwardedStore, WaitsAndClientsThatDoNotReadHoldUpNobody) {
  Servers s;
  const Fd writer = s.client(*s.zero);
  const Fd waiter = s.client(*s.one), lazy = s.client(*s.one), quick = s.client(*s.one);
  const std::string value(8u << 20, 'x');
  s.exchange(writer, kHandshake + command(Command::kSet, piece("large") + piece(value)) + kPing, 4);
  EXPECT_EQ(s.exchange(
                waiter,
                kHandshake + command(Command::kWait, number<std::uint64_t>(1) + piece("later")), 0),
            "");
  std::string gets = kHandshake;
  for (int i = 0; i < 20; ++i) gets += command(Command::kGet, piece("large"));
  EXPECT_EQ(s.exchange(lazy, gets, 0), "");
  s.run_for(50);
  EXPECT_EQ(s.exchange(quick, kHandshake + kPing, 4), kPong);
  EXPECT_EQ(s.exchange(quick, command(Command::kSet, piece("later") + piece("")) + kPing, 4),
            kPong);
  EXPECT_EQ(s.exchange(waiter, "", 1), std::string(1, store::kStopWaiting));
  EXPECT_EQ(s.exchange(lazy, "", 20 * (value.size() + 8)).size(), 20 * (value.size() + 8));
}

TEST(ForwardedStore, WhatAClientHasSentBeforeItEndsIsDone) {
  Servers s;
  const Fd reader = s.client(*s.zero);
  const std::string value(4u << 20, 'y');
  {
    Fd writer = s.client(*s.one);
    s.exchange(writer,
               kHandshake + command(Command::kSet, piece("k") + piece(value)) +
                   command(Command::kSet, piece("last") + piece("")),
               0);
  }
  EXPECT_EQ(
      s.exchange(reader,
                 kHandshake + command(Command::kWait, number<std::uint64_t>(1) + piece("last")), 1),
      std::string(1, store::kStopWaiting));
  EXPECT_EQ(s.exchange(reader, command(Command::kGet, piece("k")), value.size() + 8), piece(value));
}

TEST(ForwardedStore, NonsenseEndsItsOwnConnectionAlone) {
  Servers s;
  const Fd good = s.client(*s.one, 3), bad = s.client(*s.one, 4), worse = s.client(*s.one, 5);
  EXPECT_EQ(s.exchange(good, kHandshake + kPing, 4), kPong);
  EXPECT_EQ(s.exchange(bad, "nonsense", 1), "(closed)");
  EXPECT_THAT(s.said.back(), HasSubstr("not from a TCPStore client: the connection of rank 4"));
  EXPECT_EQ(
      s.exchange(worse,
                 kHandshake + command(Command::kSet, piece("k") + number<std::uint64_t>(1u << 30)),
                 1),
      "(closed)");
  EXPECT_THAT(s.said.back(), HasSubstr("too long"));
  EXPECT_THAT(s.said.back(), HasSubstr("the connection of rank 5 on node 1 is closed"));
  EXPECT_EQ(s.exchange(good, kPing, 4), kPong);
}

TEST(ForwardedStore, ALostNodeTakesItsWaitsAlongAndNothingElse) {
  Servers s;
  const Fd here = s.client(*s.zero), there = s.client(*s.one);
  const std::string wait = command(Command::kWait, number<std::uint64_t>(1) + piece("later"));
  s.exchange(here, kHandshake + wait, 0);
  s.exchange(there, kHandshake + kPing + wait, 4);
  s.zero->on_lost(1);
  s.one->on_lost(0);
  EXPECT_EQ(s.exchange(there, "", 1), "(closed)");
  const Fd late = s.client(*s.one);
  EXPECT_EQ(s.exchange(late, "", 1), "(closed)");
  const Fd setter = s.client(*s.zero);
  s.exchange(setter, kHandshake + command(Command::kSet, piece("later") + piece("")) + kPing, 4);
  EXPECT_EQ(s.exchange(here, "", 1), std::string(1, store::kStopWaiting));
}

TEST(ForwardedStore, AStreamNumberThatIsUsedAgainIsAnotherClient) {
  Servers s;
  const auto give = [&](Kind kind, const std::string& payload = "") {
    s.zero->on_frame(1, {.kind = kind,
                         .stream = 1,
                         .value = static_cast<std::uint32_t>(payload.size()),
                         .payload = payload});
  };
  give(Kind::kOpen);
  give(Kind::kData, kHandshake + command(Command::kSet, piece("a") + piece("1")) + kPing);
  give(Kind::kClose);
  give(Kind::kOpen);  // before the first one's commands were carried out
  give(Kind::kData, kHandshake + kPing);
  s.run_for(50);
  give(Kind::kData, command(Command::kSet, piece("b") + piece("2")) + kPing);
  const Fd here = s.client(*s.zero);
  for (const auto& [key, value] : {std::pair("a", "1"), std::pair("b", "2")})
    EXPECT_EQ(
        s.exchange(here, (key[0] == 'a' ? kHandshake : "") + command(Command::kGet, piece(key)), 9),
        piece(value));
}

TEST(ForwardedStore, FramesOfAnEarlierAttemptAreIgnored) {
  Servers s;
  const Fd old = s.client(*s.one);
  s.exchange(old, kHandshake + command(Command::kSet, piece("k") + piece("v")) + kPing, 4);
  s.zero = s.make(false, 1);
  EXPECT_EQ(s.exchange(old, kPing, 0), "");
  s.run_for(50);
  s.one = s.make(true, 1);
  EXPECT_EQ(s.exchange(old, "", 1), "(closed)");
  const Fd fresh = s.client(*s.one);
  EXPECT_EQ(s.exchange(fresh, kHandshake + command(Command::kGet, piece("k")), 8), piece(""));
}

}  // namespace
}  // namespace lockstep::launch
