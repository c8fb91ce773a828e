// The parts of the link between launchers, each alone; tests/launch/hostile_test.py attacks whole
// launchers.
#include "launcher/node_link.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>

#include "launcher/host.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/rendezvous/rank_env.h"
#include "lockstep/rendezvous/secure_channel.h"

namespace lockstep::launch {
namespace {

using ::testing::HasSubstr;
using Kind = Message::Kind;
using Side = SecureContext::Side;

// ---------------------------------------------------------------- WorldLayout

TEST(WorldLayout, NodesMayBringDifferentNumbersOfRanksAndRoles) {
  const std::vector<NodeShare> nodes = {{2, "a"}, {3, "b"}, {1, "a"}, {4, "b"}};
  const int expected[4][4] = {{0, 10, 0, 3}, {2, 10, 0, 7}, {5, 10, 2, 3}, {6, 10, 3, 7}};
  for (int node = 0; node < 4; ++node) {
    const WorldLayout layout = layout_of(nodes, node);
    EXPECT_EQ(layout.first_rank, expected[node][0]);
    EXPECT_EQ(layout.world_size, expected[node][1]);
    EXPECT_EQ(layout.first_role_rank, expected[node][2]);
    EXPECT_EQ(layout.role_world_size, expected[node][3]);
  }
}

TEST(WorldLayout, WhatCannotBeAWorldIsRefused) {
  EXPECT_THAT(message_of([] { layout_of({}, 0); }), HasSubstr("node rank 0 is not one of 0"));
  EXPECT_THAT(message_of([] { layout_of({{1}}, -1); }), HasSubstr("node rank -1 is not one of 1"));
  EXPECT_THAT(message_of([] { layout_of({{1}, {0}}, 0); }), HasSubstr("0 ranks on node 1"));
  const std::vector<NodeShare> many(5000, {kMaxWorldSize});
  EXPECT_THAT(message_of([&] { layout_of(many, 0); }), HasSubstr("a world of 2000000"));
}

// ---------------------------------------------------------------- messages

TEST(NodeMessage, WhatCouldTurnAFailureIntoASuccessIsRefused) {
  Message message;
  const auto refusal = [&] { return message_of([&] { decode(encode(message)); }); };
  message.kind = Kind::kStop;
  for (const int signal : {0, -1, 1000}) {
    message.signal = signal;
    EXPECT_THAT(refusal(), HasSubstr("another launcher's 'signal'")) << signal;
  }
  message.signal = 15;
  EXPECT_EQ(refusal(), "(nothing thrown)");
  for (const int code : {0, 256, -256, 512}) {
    message = Message();
    message.kind = Kind::kFailed;
    message.failure.emplace().code = code;
    EXPECT_THAT(refusal(), HasSubstr("'failure.code'")) << code;
    message = Message();
    message.kind = Kind::kRefused;
    message.code = code;
    EXPECT_THAT(refusal(), HasSubstr("'code'")) << code;
    message.kind = Kind::kEnd;
    message.failure.emplace();
    EXPECT_THAT(refusal(), HasSubstr("'code'")) << code;
  }
}

TEST(NodeMessage, TheStartNamesTheSharesOfAllNodes) {
  Message message;
  message.kind = Kind::kStart;
  message.nodes = {{2, "a"}, {3, "b"}};
  EXPECT_EQ(decode(encode(message)).nodes, message.nodes);
  message.nodes[1].nproc = 0;
  EXPECT_THAT(message_of([&] { decode(encode(message)); }), HasSubstr("'nproc_per_node' (0)"));
}

TEST(NodeMessage, TextOfOthersCannotCommandATerminal) {
  Message message;
  message.text = "\x1b";
  message.failure.emplace();
  message.failure->stack = {"\x1b"};
  const Message copy = decode(encode(message));
  EXPECT_EQ(copy.text, R"(\x1b)");
  EXPECT_EQ(copy.failure->stack.at(0), R"(\x1b)");
}

// ---------------------------------------------------------------- NodeClient

TEST(NodeClient, OneThatIsClosedLooksForNobody) {
  EventLoop loop;
  const HeldPort port = HeldPort::any(Reach::kIpv4Loopback);
  port.listen();
  LaunchPlan plan;
  plan.nnodes = 2;
  plan.node_rank = 1;
  plan.master_addr = "127.0.0.1";
  plan.master_port = port.number();
  NodeClient client(loop, plan, "n1", {});
  client.connect();
  client.close();  // while the name is looked up
  loop.after(std::chrono::milliseconds(300), [&] { loop.stop(); });
  loop.run();
  EXPECT_FALSE(Fd(::accept4(port.sockets().front().get(), nullptr, nullptr, SOCK_CLOEXEC)));
}

// ---------------------------------------------------------------- SecretKey

class SecretFile : public ::testing::Test {
 protected:
  std::string put(std::string_view text, mode_t mode) {
    ::unlink(path_.c_str());
    const Fd file(::open(path_.c_str(), O_WRONLY | O_CREAT, 0600));
    write_all(file.get(), text);
    EXPECT_EQ(::fchmod(file.get(), mode), 0);
    return message_of([&] { SecretKey::from_file(path_); });
  }

  TemporaryDirectory directory_;
  std::string path_ = directory_ / "secret";
};

TEST_F(SecretFile, OnlyAPrivateOneOfSomeLengthIsTaken) {
  const std::string good = "0123456789abcdef";
  EXPECT_EQ(put(good, 0600), "(nothing thrown)");
  EXPECT_EQ(put(good, 0400), "(nothing thrown)");
  for (const mode_t mode : {0644, 0640, 0660, 0604, 0601, 0610})
    EXPECT_THAT(put(good, mode), HasSubstr("others on this host may use it")) << mode;
  EXPECT_THAT(put(good.substr(1) + "\n\n\n", 0600), HasSubstr("holds 15 bytes"));
  EXPECT_THAT(put("", 0600), HasSubstr("holds 0 bytes"));
  EXPECT_THAT(put(std::string(4097, 'x'), 0600), HasSubstr("too many"));
}

TEST_F(SecretFile, SpaceAroundItDoesNotCount) {
  put(" \t0123456789 abcdef\r\n", 0600);
  EXPECT_EQ(SecretKey::from_file(path_).bytes(), SecretKey("0123456789 abcdef").bytes());
  EXPECT_NE(SecretKey::from_file(path_).bytes(), SecretKey("0123456789abcdef").bytes());
}

// ---------------------------------------------------------------- SecureChannel

// Two channels joined by hand.
struct Pair {
  Pair(const SecretKey& server_key, const SecretKey& client_key, const std::string& identity)
      : server_context(Side::kServer, server_key, "run"),
        client_context(Side::kClient, client_key, identity),
        server(server_context.open()),
        client(client_context.open()) {
    client->start(to_server);
  }
  // Runs until both are silent.
  void exchange() {
    while (!to_server.empty() || !to_client.empty()) {
      const std::string first = std::exchange(to_server, {});
      if (!first.empty()) server_good = server->receive(first, at_server, to_client);
      const std::string second = std::exchange(to_client, {});
      answers += second;
      if (!second.empty()) client_good = client->receive(second, at_client, to_server);
    }
  }

  SecureContext server_context;
  SecureContext client_context;
  std::unique_ptr<SecureChannel> server;
  std::unique_ptr<SecureChannel> client;
  std::string to_server, to_client, at_server, at_client, answers;
  bool server_good = true;
  bool client_good = true;
};

const SecretKey kKey("0123456789abcdef");
const SecretKey kOther("0123456789abcdeF");

TEST(SecureChannel, CarriesWhatIsSentBeforeAndAfterTheHandshake) {
  Pair pair(kKey, kKey, "run");
  pair.client->send("early ", pair.to_server);
  EXPECT_EQ(pair.to_server.find("early"), std::string::npos);
  pair.exchange();
  EXPECT_TRUE(pair.server->established() && pair.client->established());
  const std::string large(100'000, 'x');
  pair.client->send(large, pair.to_server);
  pair.server->send("answer", pair.to_client);
  EXPECT_EQ(pair.to_server.find("xxxx"), std::string::npos);
  pair.exchange();
  EXPECT_EQ(pair.at_server, "early " + large);
  EXPECT_EQ(pair.at_client, "answer");
}

TEST(SecureChannel, AWrongKeyAndAWrongIdentityLookTheSame) {
  std::string answers[2];
  for (const bool wrong_key : {false, true}) {
    Pair pair(kKey, wrong_key ? kOther : kKey, wrong_key ? "run" : "another");
    pair.client->send("early", pair.to_server);
    pair.exchange();
    EXPECT_FALSE(pair.server_good || pair.client_good);
    EXPECT_TRUE(pair.server->wrong_key() && pair.client->wrong_key());
    EXPECT_FALSE(pair.server->established() || pair.client->established());
    EXPECT_EQ(pair.at_server, "");
    answers[wrong_key ? 1 : 0] = pair.answers;
  }
  EXPECT_EQ(answers[0], answers[1]);
  EXPECT_LT(answers[0].size(), 16u);
}

TEST(SecureChannel, WhatIsNotTlsIsRefused) {
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.0\r\n\r\n"), std::string(64, '\xff'),
        "\x16\x03\x01\x40" + std::string(40'000, 'x'), std::string(5, '\0')}) {
    Pair pair(kKey, kKey, "run");
    EXPECT_FALSE(pair.server->receive(bytes, pair.at_server, pair.to_client));
    EXPECT_FALSE(pair.server->wrong_key());
    EXPECT_NE(pair.server->problem(), "");
    EXPECT_FALSE(pair.server->receive("more", pair.at_server, pair.to_client));
    EXPECT_EQ(pair.at_server, "");
  }
}

}  // namespace
}  // namespace lockstep::launch
