// Whether another process can use a port that the launcher holds.
#include "launcher/ports.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <set>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"

namespace lockstep::launch {
namespace {

using ::testing::HasSubstr;

// What another user's program, or a second job, would do.
Fd take_port(const char* host, int port, bool reuse_port = false) {
  const std::string text(host);
  const bool six = text.find(':') != std::string::npos;
  Fd fd(::socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (reuse_port) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = htons(static_cast<std::uint16_t>(port));
  ::inet_pton(AF_INET, host, &four.sin_addr);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = four.sin_port;
  ::inet_pton(AF_INET6, host, &address.sin6_addr);
  const int bound = six ? ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address)
                        : ::bind(fd.get(), reinterpret_cast<sockaddr*>(&four), sizeof four);
  if (bound != 0) fd.reset();
  return fd;
}

TEST(HeldPort, NobodyCanBindItWhetherItListensOrNot) {
  std::vector<HeldPort> held;
  std::set<int> numbers;
  for (int i = 0; i < 200; ++i) {
    held.push_back(HeldPort::any(Reach::kLoopback));
    numbers.insert(held.back().number());
  }
  EXPECT_EQ(numbers.size(), 200u);
  held.push_back(HeldPort::any(Reach::kNetwork));
  const bool has_ipv6 = held[0].sockets().size() == 2;
  for (const int round : {0, 1, 2}) {
    for (const int i : {0, 200}) {
      const HeldPort& port = held[static_cast<std::size_t>(i)];
      if (round == 1) port.listen();
      if (round == 2) port.stop_listening();
      for (const char* host : {"127.0.0.1", "0.0.0.0", "::", "::1"}) {
        if (std::strcmp(host, "::1") == 0 && !has_ipv6) continue;
        for (const bool reuse_port : {false, true})
          EXPECT_FALSE(take_port(host, port.number(), reuse_port)) << host << " " << round;
      }
    }
  }
}

TEST(HeldPort, AnAskedPortThatIsInUseNamesWhoHasIt) {
  const HeldPort free = HeldPort::any();
  const auto refusal = [&] { return message_of([&] { HeldPort::exactly(free.number()); }); };
  const std::string flag = fmt::format("--master-port={} cannot be used: ", free.number());
  EXPECT_THAT(refusal(), HasSubstr(flag + "another process has bound it. Choose another port"));
  free.listen();
  EXPECT_THAT(refusal(), HasSubstr(flag + fmt::format("pid {} (", ::getpid())));
  EXPECT_THAT(refusal(), HasSubstr(" listens there. Choose another port"));
}

// The end that closes first remembers a connection for a minute.
TEST(HeldPort, AnAskedPortIsTakenBesideWhatAnEarlierRunLeft) {
  int number = 0;
  Fd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  {
    const HeldPort earlier = HeldPort::any(Reach::kIpv4Loopback);
    number = earlier.number();
    earlier.listen();
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(number));
    ASSERT_EQ(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    const Fd accepted(::accept(earlier.sockets()[0].get(), nullptr, nullptr));
    ASSERT_TRUE(accepted);
  }
  char byte = 0;
  EXPECT_EQ(::read(client.get(), &byte, 1), 0);
  client.reset();
  const HeldPort port = HeldPort::exactly(number, Reach::kLoopback);
  EXPECT_FALSE(take_port("127.0.0.1", number));  // although SO_REUSEADDR was needed
  port.listen();
  EXPECT_FALSE(take_port("127.0.0.1", number));
}

// Another process may bind a socket to a port before the launcher does.
TEST(HeldPort, ASocketThatWasBoundBeforeCannotListen) {
  const int number = HeldPort::any(Reach::kIpv4Loopback).number();
  const Fd prepared = take_port("127.0.0.1", number);
  ASSERT_TRUE(prepared);
  const HeldPort port = HeldPort::exactly(number, Reach::kLoopback);
  EXPECT_NE(::listen(prepared.get(), 5), 0);
  port.listen();
  EXPECT_NE(::listen(prepared.get(), 5), 0);
  port.stop_listening();
  EXPECT_NE(::listen(prepared.get(), 5), 0);
}

}  // namespace
}  // namespace lockstep::launch
