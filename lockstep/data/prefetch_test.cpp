// The threads behind the loader, without torch: order, running ahead, dropping, errors, deadlines.
#include "lockstep/data/prefetch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

Deadline soon() {
  return Deadline::after(std::chrono::seconds(60));
}

Thing number_thing(std::int64_t number) {
  return std::make_shared<std::int64_t>(number);
}

std::int64_t number_of(const Thing& thing) {
  return *std::static_pointer_cast<std::int64_t>(thing);
}

// Waits for something that another thread will do; a test that fails says so instead of hanging.
template <typename Condition>
bool eventually(Condition&& condition) {
  const Deadline deadline = soon();
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

TEST(Prefetcher, GivesThingsInOrderWhateverTheWorkersDo) {
  Prefetcher prefetcher{{.workers = 4, .ahead = 7}};
  for (const std::int64_t count : {0, 1, 2, 50, 333}) {
    prefetcher.start(count, [](std::int64_t number) {
      if (number % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
      return number_thing(number);
    });
    for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(number_of(prefetcher.next(soon())), i);
    EXPECT_EQ(prefetcher.next(soon()), nullptr);
    EXPECT_EQ(prefetcher.next(soon()), nullptr);
  }
}

TEST(Prefetcher, RunsAheadThatFarAndNoFurther) {
  Prefetcher prefetcher{{.workers = 3, .ahead = 5}};
  std::atomic<std::int64_t> most{-1}, made{0};
  prefetcher.start(100, [&](std::int64_t number) {
    std::int64_t seen = most;
    while (number > seen && !most.compare_exchange_weak(seen, number)) {
    }
    ++made;
    return number_thing(number);
  });
  ASSERT_TRUE(eventually([&] { return made == 5; }));
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_EQ(most, 4);  // 0 to 4, while nothing was taken
  prefetcher.next(soon());
  ASSERT_TRUE(eventually([&] { return made == 6; }));
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_EQ(most, 5);
}

TEST(Prefetcher, SeveralWorkersMakeAtTheSameTime) {
  Prefetcher prefetcher{{.workers = 3, .ahead = 3}};
  std::atomic<int> inside{0};
  prefetcher.start(3, [&](std::int64_t number) {
    ++inside;
    EXPECT_TRUE(eventually([&] { return inside == 3; }));  // only if all three are in here
    return number_thing(number);
  });
  EXPECT_EQ(number_of(prefetcher.next(soon())), 0);
}

TEST(Prefetcher, ADroppedRoundLeavesNothingBehind) {
  Prefetcher prefetcher{{.workers = 2, .ahead = 4}};
  for (int round = 0; round < 300; ++round) {
    prefetcher.start(1000,
                     [round](std::int64_t number) { return number_thing(1000 * round + number); });
    for (int i = 0; i < round % 4; ++i)
      ASSERT_EQ(number_of(prefetcher.next(soon())), 1000 * round + i);
    if (round % 2 == 0) prefetcher.drop();
  }
  prefetcher.drop();
  EXPECT_EQ(prefetcher.next(soon()), nullptr);
}

TEST(Prefetcher, DroppingDoesNotWaitForWhatIsBeingMade) {
  std::atomic<bool> release{false}, entered{false};
  Prefetcher prefetcher{{.workers = 2, .ahead = 2}};
  prefetcher.start(2, [&](std::int64_t number) {
    entered = true;
    EXPECT_TRUE(number != 0 || eventually([&] { return release.load(); }));
    return number_thing(-1);
  });
  ASSERT_TRUE(eventually([&] { return entered.load(); }));
  prefetcher.start(1, number_thing);  // the other worker makes it
  EXPECT_EQ(number_of(prefetcher.next(soon())), 0);
  release = true;
}

TEST(Prefetcher, AnErrorComesAtItsTurnAndTheNextRoundIsClean) {
  Prefetcher prefetcher{{.workers = 3, .ahead = 6}};
  for (int round = 0; round < 50; ++round) {
    prefetcher.start(10, [](std::int64_t number) {
      if (number == 4) throw std::runtime_error("four");
      return number_thing(number);
    });
    for (int i = 0; i < 4; ++i) ASSERT_EQ(number_of(prefetcher.next(soon())), i);
    try {
      prefetcher.next(soon());
      FAIL() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "four");
    }
    EXPECT_EQ(prefetcher.next(soon()), nullptr);
  }
}

TEST(Prefetcher, AWaitEndsAtItsDeadline) {
  std::atomic<bool> release{false};
  Prefetcher prefetcher{{.workers = 1, .ahead = 1}};
  prefetcher.start(1, [&](std::int64_t number) {
    EXPECT_TRUE(eventually([&] { return release.load(); }));
    return number_thing(number);
  });
  try {
    prefetcher.next(Deadline::after(milliseconds(20)));
    FAIL() << "no error";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), HasSubstr("[loader] batch 0 was not loaded within 20 ms"));
    EXPECT_GE(error.context().elapsed.count(), 20);
  }
  release = true;
  prefetcher.start(1, number_thing);
  EXPECT_EQ(number_of(prefetcher.next(soon())), 0);
}

TEST(Prefetcher, TheDestructorStopsWorkersThatAreBusy) {
  std::atomic<int> made{0};
  {
    Prefetcher prefetcher{{.workers = 4, .ahead = 8}};
    prefetcher.start(100'000, [&](std::int64_t number) {
      ++made;
      return number_thing(number);
    });
    prefetcher.next(soon());
  }
  const int then = made;
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(made, then);
}

TEST(Prefetcher, FreesTheMakerAndWhatItHolds) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  Prefetcher prefetcher{{.workers = 2, .ahead = 2}};
  prefetcher.start(5, [held](std::int64_t) -> Thing { return held; });
  held.reset();
  EXPECT_NE(prefetcher.next(soon()), nullptr);
  prefetcher.drop();
  EXPECT_TRUE(eventually([&] { return watch.expired(); }));
}

}  // namespace
}  // namespace lockstep::data
