// The store's protocol by its bytes.
#include "lockstep/rendezvous/store_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "lockstep/core/error.h"
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

  Table waits({.bytes = 5000});  // what a wait holds is given back with it
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
  queues.say(1, command(Command::kQueuePop, piece("0")));  // and is given back
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

}  // namespace
}  // namespace lockstep
