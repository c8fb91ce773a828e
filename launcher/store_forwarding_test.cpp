// The store of several hosts: a server that forwards to one that serves, with a link that can be
// held up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <vector>

#include "launcher/store_server.h"
#include "lockstep/rendezvous/store_bytes_for_test.h"

namespace lockstep::launch {
namespace {

using ::testing::HasSubstr;
using Kind = StoreFrame::Kind;
using store::Command;

StoreFrame decoded(const std::string& bytes) {
  StoreFrame frame;
  EXPECT_EQ(decode(bytes, frame), bytes.size());
  return frame;
}

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
