// What one rank throws, on all ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "lockstep/comm/numbers.h"
#include "lockstep/core/error.h"
#include "lockstep/core/helpers_for_test.h"
#include "lockstep/testing/worlds.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing::run_threads;

TEST(Agree, LeaderFirst) {
  std::atomic<bool> leader_done{false};
  run_threads(3, [&](World& world) {
    leader_first(world, [&] {
      if (world.is_leader()) {
        std::this_thread::sleep_for(milliseconds(50));
        leader_done = true;
      } else {
        EXPECT_TRUE(leader_done);
      }
    });
  });
  std::atomic<int> others{0};
  run_threads(3, [&](World& world) {
    const auto fail = [&] {
      leader_first(world, [&] {
        if (world.is_leader()) throw std::runtime_error("disk full");
        ++others;
      });
    };
    if (world.is_leader()) {
      EXPECT_EQ(message_of<std::runtime_error>(fail), "disk full");
    } else {
      EXPECT_EQ(message_of<Error>(fail), "[world] rank 0: disk full");
    }
    EXPECT_EQ(all_reduce(world, 1), 3) << "the world itself is well";
  });
  EXPECT_EQ(others, 0);
}

TEST(Agree, AgreeFailsOnAllRanksWhenOneFails) {
  run_threads(3, [](World& world) {
    const auto names = agree(world, [&] { return std::to_string(world.rank()); });
    EXPECT_EQ(names, (std::vector<std::string>{"0", "1", "2"}));
    const auto fail = [&] {
      agree(world, [&] {
        if (world.rank() == 1) throw std::runtime_error("disk full");
      });
    };
    if (world.rank() == 1) {
      EXPECT_EQ(message_of<std::runtime_error>(fail), "disk full");
    } else {
      EXPECT_EQ(message_of<Error>(fail), "[world] rank 1: disk full");
    }
    EXPECT_EQ(all_reduce(world, 1), 3) << "the world itself still works";
  });
  World alone;
  EXPECT_EQ(agree(alone, [] { return std::string("x"); }), std::vector<std::string>{"x"});
}

// So that all ranks catch the same, and a report knows whose error it was.
template <typename Kind>
void expect_same_kind(const Kind& error) {
  run_threads(3, [&](World& world) {
    for (const int who : {0, 1}) {
      const auto body = [&] {
        if (world.rank() == who) throw error;
      };
      try {
        who == 0 ? leader_first(world, body) : agree(world, body);
        ADD_FAILURE() << "rank " << world.rank() << " did not throw";
      } catch (const Kind& caught) {
        const auto* of_peer = dynamic_cast<const detail::FromPeer*>(&caught);
        ASSERT_EQ(of_peer == nullptr ? world.rank() : of_peer->rank(), who);
        const std::string want = fmt::format("[world] rank {}: {}", who, error.what());
        EXPECT_EQ(caught.what(), of_peer == nullptr ? error.what() : want);
      }
    }
  });
}

TEST(Agree, AnErrorOfOneRankHasItsKindOnAllRanks) {
  expect_same_kind(UsageError("test", "wrong."));
  expect_same_kind(SystemError("test", "cannot write", ENOSPC));
  expect_same_kind(CommError("test", "gone."));
  expect_same_kind(TimeoutError("test", "late."));
  expect_same_kind(InternalError("test", "a bug."));
}

}  // namespace
}  // namespace lockstep
