// The Python backend's message matcher, without Python: when the array of a receive is released.
#include "python/csrc/message_matcher.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <thread>

#include "lockstep/comm/shm/worlds_for_test.h"

namespace lockstep::python {
namespace {

using shm::for_test::make_engine;
using shm::for_test::MapStore;
using shm::for_test::soon;

// A page whose first write takes as long as the test wants.
std::atomic<bool> inside{false};
std::atomic<bool> released{false};
void* page = nullptr;
std::size_t page_bytes = 0;

void on_write(int) {
  inside = true;
  for (int i = 0; i < 20'000 && !released; ++i) ::usleep(1000);
  ::mprotect(page, page_bytes, PROT_READ | PROT_WRITE);
  inside = false;
}

template <typename Condition>
bool becomes(const Condition& condition) {
  const Deadline limit = soon();
  while (!condition() && !limit.expired()) ::usleep(1000);
  return condition();
}

// A receive from anyone is given up at its deadline while another thread copies the contents.
TEST(MessageMatcher, AnAbandonedReceiveIsNotWrittenAnyMore) {
  page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  page = ::mmap(nullptr, page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = on_write;
  ASSERT_EQ(::sigaction(SIGSEGV, &action, &before), 0);

  MapStore kv;
  std::atomic<int> stage{0};
  std::thread peer([&] {
    auto engine = make_engine(kv, 1, 2);
    const auto matcher = std::make_shared<MessageMatcher>(*engine);
    const std::vector<std::byte> contents(page_bytes, std::byte{7});
    becomes([&] { return stage >= 1; });
    const auto first = engine->send(contents.data(), 1, 0);
    becomes([&] { return stage >= 2; });
    // Like matcher->send(), but with a pause between the two: contents that are there when their
    // receive is posted are copied by the posting thread, under the matcher's lock.
    const struct {
      std::int64_t tag = 0;
      std::uint64_t bytes = 0;
    } envelope{0, contents.size()};
    const auto announced = engine->send(&envelope, sizeof envelope, 0);
    becomes([&] { return stage >= 3; });
    const auto sent = engine->send(contents.data(), contents.size(), 0);
    // Ends when rank 0 gives up, which breaks the engine. A while later the write may continue: by
    // then a receive that does not wait for it has ended.
    std::byte never{};
    EXPECT_THROW(engine->recv(&never, 1, 0)->wait(soon()), CommError);
    ::usleep(200'000);
    released = true;
    becomes([&] { return stage >= 4; });
    matcher->close(std::move(engine));
  });
  auto engine = make_engine(kv, 0, 2);
  const auto matcher = std::make_shared<MessageMatcher>(*engine);
  // A thread that waits for something carries out everything, once a first message shows it at
  // work.
  const shm::StartOptions waited{.deadline = soon(), .caller_waits = true};
  const auto barrier = engine->barrier(waited);
  std::byte first{};
  const auto seen = engine->recv(&first, 1, 1, waited);
  std::thread waiter([&] { EXPECT_THROW(barrier->wait(soon()), CommError); });
  stage = 1;
  EXPECT_TRUE(becomes([&] { return seen->done(); }));
  const auto receive = matcher->receive({page, page_bytes, MessageMatcher::kAnyone, 0, nullptr});
  stage = 2;
  EXPECT_TRUE(becomes([&] { return receive->matched(); })) << "the envelope did not arrive";
  stage = 3;
  EXPECT_TRUE(becomes([] { return inside.load(); })) << "the contents did not arrive";
  matcher->wait(*receive, Deadline::after(std::chrono::milliseconds(50)));
  EXPECT_FALSE(inside) << "the array is still written";
  EXPECT_TRUE(receive->done());
  EXPECT_NE(shm::for_test::text_of(receive->error()).find("timed out after 50 ms"),
            std::string::npos);
  waiter.join();
  stage = 4;
  peer.join();
  matcher->close(std::move(engine));
  ::sigaction(SIGSEGV, &before, nullptr);
  ::munmap(page, page_bytes);
}

}  // namespace
}  // namespace lockstep::python
