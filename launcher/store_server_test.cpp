// The store's server behind real sockets. Its behaviour beside c10d's own servers is compared in
// tests/store.

#include "launcher/store_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/rendezvous/store_bytes_for_test.h"
#include "lockstep/rendezvous/store_client.h"

namespace lockstep::launch {

namespace {

using store::Command;
using ::testing::HasSubstr;

// ---------------------------------------------------------------- sockets

Fd connect_to(int port) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fd.reset();
  return fd;
}

struct Server {
  static constexpr int kRounds = 6000;  // 10 ms or more each: a busy machine may hold up clients

  EventLoop loop;
  HeldPort port = HeldPort::any(Reach::kLoopback);
  std::vector<std::string> said;
  StoreServer server;

  explicit Server(StoreServerOptions options = {})
      : server(loop, port, [this](const std::string& line) { said.push_back(line); }, options) {}

  void run_for(int ms) {
    loop.after(std::chrono::milliseconds(ms), [this] { loop.stop(); });
    loop.run();
  }
  Fd connect_tcp() { return connect_to(port.number()); }
  // The next bytes from the connection while the server runs; "" when it is closed.
  std::string receive(const Fd& fd) {
    char buffer[4096];
    for (int round = 0; round < kRounds; ++round) {
      const ssize_t n = ::recv(fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (n >= 0) return std::string(buffer, static_cast<std::size_t>(n));
      if (errno == ECONNRESET) return "";  // closed before all that was sent had been read
      run_for(10);
    }
    return "nothing came";
  }
  std::string exchange(const Fd& fd, const std::string& bytes) {
    write_all(fd.get(), bytes);
    return receive(fd);
  }
  void run_until_listening() {
    for (int round = 0; round < kRounds && !server.listening(); ++round) run_for(10);
    EXPECT_TRUE(server.listening());
  }
};

const std::string kPing = command(Command::kPing, number<std::uint32_t>(9));
const std::string kPong = number<std::uint32_t>(9);
Deadline soon() {
  return Deadline::after(std::chrono::seconds(60));
}

TEST(StoreServer, NoPortIsOpenWhereRanksUseTheirChannels) {
  Server s({.listen_after = std::chrono::milliseconds(50)});
  const Fd channel = s.server.open_channel(0);
  EXPECT_FALSE(s.server.listening());
  {
    const Fd connection = open_store_connection(channel.get(), soon());
    EXPECT_NE(::fcntl(channel.get(), F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_EQ(s.exchange(connection, kHandshake + kPing), kPong);
    s.run_for(100);
    EXPECT_FALSE(s.server.listening());
    EXPECT_FALSE(s.connect_tcp());
  }
  s.run_until_listening();  // no channel is in use any more, and a Python program may follow
}

TEST(StoreServer, ListensOnLoopbackForRanksWithoutAChannel) {
  Server s({.listen_after = std::chrono::milliseconds(10)});
  const Fd channel = s.server.open_channel(0);
  s.run_until_listening();
  const Fd scanner = s.connect_tcp();
  write_all(scanner.get(), "who");
  const Fd before = open_store_connection(channel.get(), soon());
  EXPECT_EQ(s.exchange(before, kHandshake + kPing), kPong);
  EXPECT_FALSE(s.server.listening());  // a client without a handshake does not keep it listening
}

TEST(StoreServer, StaysOpenOnceATcpClientHasCome) {
  Server s({.listen_after = std::chrono::milliseconds(10)});
  const Fd channel = s.server.open_channel(0);
  s.run_until_listening();
  const Fd python = s.connect_tcp();
  EXPECT_EQ(s.exchange(python, kHandshake + kPing), kPong);
  const Fd connection = open_store_connection(channel.get(), soon());
  EXPECT_EQ(s.exchange(connection, kHandshake + kPing), kPong);
  EXPECT_TRUE(s.server.listening());
  EXPECT_EQ(s.exchange(connection, command(Command::kSet, piece("k") + piece("v")) + kPing), kPong);
  EXPECT_EQ(s.exchange(python, command(Command::kGet, piece("k"))), piece("v"));
}

TEST(StoreServer, RefusesTheConnectionThatIsTooManyAndNonsense) {
  Server s({.connections_per_rank = 2,
            .tcp_connections = 2,
            .listen_after = std::chrono::milliseconds(10)});
  const Fd channel = s.server.open_channel(7);
  s.run_until_listening();
  std::vector<Fd> clients;
  for (int i = 0; i < 3; ++i) clients.push_back(s.connect_tcp());
  EXPECT_EQ(s.exchange(clients[0], kHandshake + kPing), kPong);
  EXPECT_EQ(s.receive(clients[2]), "");
  EXPECT_EQ(s.exchange(clients[1], "nonsense"), "");
  ASSERT_EQ(s.said.size(), 1u);
  EXPECT_THAT(s.said[0], HasSubstr("not from a TCPStore client: the connection of a TCP client"));

  std::vector<Fd> rank;
  for (int i = 0; i < 3; ++i) rank.push_back(open_store_connection(channel.get(), soon()));
  EXPECT_EQ(s.exchange(rank[1], kHandshake + kPing), kPong);
  EXPECT_EQ(s.receive(rank[2]), "");
  EXPECT_THAT(s.said.back(), HasSubstr("rank 7 has 2 connections"));
}

TEST(StoreServer, ThePortIsHeldWhileItDoesNotListen) {
  Server s({.listen_after = std::chrono::milliseconds(10)});
  const Fd channel = s.server.open_channel(0);
  s.run_until_listening();
  const Fd earlier = s.connect_tcp();  // leaves a connection of the port in the kernel
  {
    const Fd connection = open_store_connection(channel.get(), soon());
    EXPECT_EQ(s.exchange(connection, kHandshake + kPing), kPong);
    EXPECT_FALSE(s.server.listening());
    EXPECT_FALSE(s.connect_tcp());
    EXPECT_THROW(HeldPort::exactly(s.port.number(), Reach::kLoopback), UsageError);
  }
  s.run_until_listening();
  EXPECT_EQ(s.exchange(s.connect_tcp(), kHandshake + kPing), kPong);
}

TEST(StoreServer, WaitsWhileThereAreNoDescriptors) {
  Server s({.listen_after = std::chrono::milliseconds(10)});
  s.run_until_listening();
  const Fd client = s.connect_tcp();
  write_all(client.get(), kHandshake + kPing);
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const Fd probe(::dup(0));
  const rlimit none{static_cast<rlim_t>(probe.get()), before.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &none);
  const auto began = ::clock();
  s.run_for(150);
  EXPECT_LT(static_cast<double>(::clock() - began) / CLOCKS_PER_SEC, 0.1);  // it does not spin
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(s.receive(client), kPong);
}

// ---------------------------------------------------------------- clients that ask for much

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kManyKeys = 50'000;  // sanitizers make them slow
#else
constexpr int kManyKeys = 200'000;
#endif
std::string set_many_keys() {
  constexpr int kAtOnce = kManyKeys / 2;
  std::string commands = kHandshake;
  for (int begin = 0; begin < kManyKeys; begin += kAtOnce) {
    commands += command(Command::kMultiSet, number<std::uint64_t>(kAtOnce));
    for (int i = begin; i < begin + kAtOnce; ++i)
      commands += piece(std::to_string(1'000'000 + i)) + piece("");
  }
  return commands;
}
constexpr std::size_t kListBytes = 8 + std::size_t{kManyKeys} * (8 + 7);

// Sends what `client` says from a thread, since nobody reads before the server runs.
struct Sender {
  std::thread thread;
  Sender(const Fd& client, std::string bytes)
      : thread([fd = client.get(), bytes = std::move(bytes)] {
          for (std::size_t sent = 0; sent < bytes.size();) {
            const auto n = ::send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
            if (n <= 0) return;
            sent += static_cast<std::size_t>(n);
          }
        }) {}
  ~Sender() { thread.join(); }
};

// Its 400 replies are made one by one, as there is room for them. All at once they would delay the
// other clients and exceed the limit for all TCP connections, which would be reported.
TEST(StoreServer, AClientThatAsksForMuchDoesNotStallTheLoop) {
  Server s({.listen_after = std::chrono::milliseconds(10)});
  s.run_until_listening();
  const Fd greedy = s.connect_tcp(), modest = s.connect_tcp();
  EXPECT_EQ(s.exchange(modest, kHandshake + kPing), kPong);
  {
    const Sender sender(greedy, set_many_keys() + kPing + std::string(400, '\x11'));
    EXPECT_EQ(s.receive(greedy).substr(0, 4), kPong);
    for (int round = 0; round < 10; ++round) EXPECT_EQ(s.exchange(modest, kPing), kPong);
  }
  EXPECT_THAT(s.said, ::testing::IsEmpty());
}

TEST(StoreServer, AllRepliesComeHoweverManyAreAskedForAtOnce) {
  Server s;
  const Fd channel = s.server.open_channel(0);
  const Fd connection = open_store_connection(channel.get(), soon());
  const Sender sender(connection, set_many_keys() + std::string(20, '\x11') + kPing);
  std::string all, buffer(1u << 20, '\0');
  for (int round = 0; round < 5000 && all.size() < 20 * kListBytes + 4; ++round) {
    const ssize_t n = ::recv(connection.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    ASSERT_NE(n, 0);
    if (n > 0) all.append(buffer, 0, static_cast<std::size_t>(n));
    s.run_for(1);
  }
  ASSERT_EQ(all.size(), 20 * kListBytes + 4);
  EXPECT_EQ(all.substr(20 * kListBytes), kPong);
  for (std::size_t i = 0; i < 20; ++i)
    EXPECT_EQ(all.substr(i * kListBytes, 8), number<std::int64_t>(kManyKeys)) << i;
}

TEST(StoreServer, WhatAClientHasSentBeforeItClosesIsCarriedOut) {
  Server s;
  const Fd channel = s.server.open_channel(0);
  {
    const Fd first = open_store_connection(channel.get(), soon());
    std::string commands = kHandshake;
    for (int i = 0; i < 2000; ++i)
      commands += command(Command::kSet, piece(std::to_string(i)) + piece(""));
    write_all(first.get(), commands);
  }
  const Fd second = open_store_connection(channel.get(), soon());
  s.run_for(100);
  EXPECT_EQ(s.exchange(second, kHandshake + command(Command::kNumKeys)),
            number<std::int64_t>(2000));
}

TEST(StoreServer, TheBytesOfAllTcpConnectionsAreBounded) {
  Server s({.tcp_bytes = 1u << 20, .listen_after = std::chrono::milliseconds(10)});
  const Fd channel = s.server.open_channel(3);
  s.run_until_listening();
  const std::string large(3u << 20, 'v');
  const std::string half =
      kHandshake + command(Command::kSet, piece("k") + piece(large)).substr(0, 700u << 10);
  const Fd small = s.connect_tcp(), first = s.connect_tcp(), second = s.connect_tcp();
  EXPECT_EQ(s.exchange(small, kHandshake + kPing), kPong);
  const Sender a(first, half);
  s.run_for(200);
  const Sender b(second, half);
  EXPECT_EQ(s.receive(first), "");
  s.run_for(200);
  ASSERT_EQ(s.said.size(), 1u);
  EXPECT_THAT(s.said[0], HasSubstr("TCP connections of the store hold more than 1048576 bytes"));
  // The others stay, and ranks have their own bound.
  char byte = 0;
  EXPECT_EQ(::recv(second.get(), &byte, 1, MSG_DONTWAIT), -1);
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_EQ(s.exchange(small, kPing), kPong);
  const Fd rank = open_store_connection(channel.get(), soon());
  const Sender c(rank, kHandshake + command(Command::kSet, piece("k") + piece(large)) + kPing);
  EXPECT_EQ(s.receive(rank), kPong);
}

TEST(StoreServer, RepliesThatATcpClientDoesNotReadAreBoundedToo) {
  Server s({.tcp_bytes = 20u << 20, .listen_after = std::chrono::milliseconds(10)});
  s.run_until_listening();
  const std::string value(store::kMaxValueBytes, 'v');
  std::vector<Fd> clients;
  for (int i = 0; i < 8; ++i) clients.push_back(s.connect_tcp());
  const Sender sender(clients[0],
                      kHandshake + command(Command::kSet, piece("k") + piece(value)) + kPing);
  EXPECT_EQ(s.receive(clients[0]), kPong);
  for (int i = 1; i < 8; ++i)
    write_all(clients[static_cast<std::size_t>(i)].get(),
              kHandshake + command(Command::kGet, piece("k")));
  for (int round = 0; round < Server::kRounds && s.said.empty(); ++round) s.run_for(10);
  ASSERT_FALSE(s.said.empty());
  EXPECT_THAT(s.said[0], HasSubstr("TCP connections of the store hold more than"));
  EXPECT_EQ(s.exchange(clients[0], kPing), kPong);
}

TEST(StoreServer, ATcpConnectionWithoutAHandshakeIsClosed) {
  Server s({.tcp_handshake = std::chrono::milliseconds(100),
            .listen_after = std::chrono::milliseconds(10)});
  s.run_until_listening();
  const Fd silent = s.connect_tcp(), slow = s.connect_tcp(), client = s.connect_tcp();
  write_all(slow.get(), kHandshake.substr(0, 3));
  EXPECT_EQ(s.exchange(client, kHandshake + kPing), kPong);
  s.run_for(200);
  EXPECT_EQ(s.receive(silent), "");
  EXPECT_EQ(s.receive(slow), "");
  EXPECT_EQ(s.exchange(client, kPing), kPong);
}

// A timer of an earlier server must not call a later one.
TEST(StoreServer, LeavesNoTimerBehind) {
  EventLoop loop;
  const HeldPort port = HeldPort::any(Reach::kLoopback);
  const auto run_for = [&](int ms) {
    loop.after(std::chrono::milliseconds(ms), [&] { loop.stop(); });
    loop.run();
  };
  std::optional<StoreServer> server;
  const auto start = [&](std::chrono::milliseconds listen_after) {
    server.emplace(
        loop, port, [](const std::string&) {}, StoreServerOptions{.listen_after = listen_after});
  };
  start(std::chrono::milliseconds(1));
  const Fd channel = server->open_channel(0);
  run_for(20);
  ASSERT_TRUE(server->listening());
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  std::vector<Fd> clients;
  const auto connect_without_descriptors = [&] {
    clients.push_back(connect_to(port.number()));
    rlimit none = before;
    {
      const Fd probe(::dup(0));
      none.rlim_cur = static_cast<rlim_t>(probe.get());
    }
    ::setrlimit(RLIMIT_NOFILE, &none);
    run_for(10);  // the server pauses
    ::setrlimit(RLIMIT_NOFILE, &before);
  };
  connect_without_descriptors();
  {
    const Fd connection = open_store_connection(channel.get(), soon());
    run_for(10);
    EXPECT_FALSE(server->listening());
  }
  clients.clear();
  run_for(10);
  EXPECT_TRUE(server->listening());
  connect_without_descriptors();  // within the first pause
  start(std::chrono::milliseconds(400));
  run_for(300);  // what fires now belongs to the first
  start(std::chrono::hours(1));
  run_for(200);  // and now to the second
  EXPECT_FALSE(server->listening());
}

// ---------------------------------------------------------------- the variable

TEST(StoreChannel, IsForTheProcessThatItWasMadeFor) {
  Server s;
  const Fd fd = s.server.open_channel(1);
  const StoreChannel channel{fd.get(), inode_of(fd.get()), 1, 2, 29500};
  ::setenv("LOCKSTEP_STORE_CHANNEL", channel.text().c_str(), 1);
  EXPECT_EQ(StoreChannel::from_env(), channel);
  EXPECT_TRUE(channel.intact());
  StoreChannel other = channel;
  other.inode += 1;  // the descriptor's number was reused
  EXPECT_FALSE(other.intact());
  other = channel;
  other.fd = 917;
  EXPECT_FALSE(other.intact());
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const Fd first(ends[0]), second(ends[1]);
  EXPECT_FALSE((StoreChannel{ends[0], inode_of(ends[0]), 1, 2, 29500}.intact()));
  for (const char* bad : {"7", "7:8:1:2", "x:8:1:2:3", "7:8:1:2:3:4", "-1:8:1:2:3", "7;8;1;2;3"}) {
    ::setenv("LOCKSTEP_STORE_CHANNEL", bad, 1);
    EXPECT_FALSE(StoreChannel::from_env()) << bad;
  }
  ::unsetenv("LOCKSTEP_STORE_CHANNEL");
  EXPECT_FALSE(StoreChannel::from_env());
}

// ---------------------------------------------------------------- several hosts

using Kind = StoreFrame::Kind;

StoreFrame decoded(const std::string& bytes) {
  StoreFrame frame;
  EXPECT_EQ(decode(bytes, frame), bytes.size());
  return frame;
}

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
