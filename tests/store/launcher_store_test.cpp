// The same operations on every store: c10d's HashStore and TCPStore, which define what is right,
// the launcher's store over its channel, and LibTorch's own TCP client at the launcher's store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "launcher/store_server.h"
#include "lockstep/comm/connect.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// The launcher's part, on a thread of this process.
class Launcher {
 public:
  explicit Launcher(launch::StoreServerOptions options = {.listen_after = 1ms})
      : stop_(::eventfd(0, EFD_CLOEXEC)) {
    std::promise<void> ready;
    thread_ = std::thread([this, options, &ready] {
      launch::EventLoop loop;
      launch::HeldPort port = launch::HeldPort::any(launch::Reach::kLoopback);
      std::optional<launch::StoreServer> server;
      server.emplace(loop, port, [](const std::string&) {}, options);
      port_ = port.number();
      channel_ = server->open_channel(0);
      loop.watch(stop_.get(), EPOLLIN, [&](std::uint32_t) {
        std::uint64_t ignored = 0;
        (void)!::read(stop_.get(), &ignored, sizeof ignored);
        if (pause_.load() == 0ms) return loop.stop();
        std::this_thread::sleep_for(pause_.exchange(0ms));
      });
      ready.set_value();
      loop.run();
    });
    ready.get_future().get();
  }
  ~Launcher() { stop(); }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // Answers nobody for this long.
  void pause(std::chrono::milliseconds time) {
    pause_ = time;
    write_all(stop_.get(), std::string_view("\1\0\0\0\0\0\0\0", 8));
    std::this_thread::sleep_for(100ms);
  }
  void stop() {
    if (!thread_.joinable()) return;
    write_all(stop_.get(), std::string_view("\1\0\0\0\0\0\0\0", 8));
    thread_.join();
  }
  StorePtr store() { return detail::open_launcher_store(channel_.get()); }
  StorePtr tcp_client() {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(port_);
    options.waitWorkers = false;
    options.timeout = 30s;
    options.useLibUV = true;  // it refuses queues otherwise
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }

 private:
  std::atomic<std::chrono::milliseconds> pause_{0ms};
  Fd stop_;
  Fd channel_;
  int port_ = 0;
  std::thread thread_;
};

std::vector<std::uint8_t> bytes(const std::string& text) {
  return {text.begin(), text.end()};
}
std::string text(const std::vector<std::uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

void run_operations(const StorePtr& store, bool queues) {
  const auto before = store->getNumKeys();
  store->set("a", "one");
  EXPECT_EQ(store->get_to_str("a"), "one");
  store->set("a", "");
  EXPECT_EQ(store->get_to_str("a"), "");
  EXPECT_EQ(store->add("n", 5), 5);
  EXPECT_EQ(store->add("n", -7), -2);
  EXPECT_EQ(store->get_to_str("n"), "-2");
  EXPECT_EQ(store->getNumKeys(), before + 2);
  EXPECT_TRUE(store->check({"a", "n"}));
  EXPECT_FALSE(store->check({"a", "missing"}));
  EXPECT_EQ(store->compareSet("c", "", "first"), "first");
  EXPECT_EQ(store->compareSet("c", "first", "second"), "second");
  EXPECT_EQ(store->compareSet("c", "first", "third"), "second");
  EXPECT_EQ(store->compareSet("never", "expected", "third"), "expected");
  EXPECT_TRUE(store->deleteKey("c"));
  EXPECT_FALSE(store->deleteKey("c"));
  store->append("log", bytes("x"));
  store->append("log", bytes("yz"));
  EXPECT_EQ(store->get_to_str("log"), "xyz");
  store->multiSet({"m1", "m2"}, {bytes("v1"), bytes(std::string(1 << 20, '\xff'))});
  const auto values = store->multiGet({"m2", "m1"});
  EXPECT_EQ(values.at(0).size(), 1u << 20);
  EXPECT_EQ(text(values.at(1)), "v1");
  EXPECT_TRUE(store->hasExtendedApi());
  const auto began = std::chrono::steady_clock::now();
  EXPECT_NE(error_of([&] { store->wait({"a", "missing"}, 200ms); }), "no error");
  EXPECT_GE(std::chrono::steady_clock::now() - began, 150ms);
  store->wait({"a"}, 100ms);  // it works after a wait that was given up
  c10d::PrefixStore prefixed("p", store);
  prefixed.set("a", std::string("inside"));
  EXPECT_EQ(store->get_to_str("p/a"), "inside");
  if (!queues) return;
  store->queuePush("q", bytes("1"));
  store->queuePush("q", bytes("2"));
  EXPECT_EQ(store->queueLen("q"), 2);
  EXPECT_EQ(text(store->queuePop("q", true)), "1");
  EXPECT_EQ(text(store->queuePop("q", false)), "2");
  EXPECT_THAT(error_of([&] { store->queuePop("q", false); }), HasSubstr("queue is empty"));
  const std::vector<std::string> keys = store->listKeys();
  EXPECT_THAT(std::set<std::string>(keys.begin(), keys.end()),
              UnorderedElementsAre("a", "n", "log", "m1", "m2", "p/a"));
}

TEST(LauncherStore, DoesWhatOtherStoresDo) {
  run_operations(c10::make_intrusive<c10d::HashStore>(), false);
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  options.useLibUV = true;
  run_operations(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options), true);
  Launcher launcher;
  run_operations(launcher.store(), true);
}

TEST(LauncherStore, AnswersLibTorchsOwnClient) {
  Launcher launcher;
  const StorePtr tcp = launcher.tcp_client();
  run_operations(tcp, true);
  // And both see one table; LibTorch's client puts a '/' before every key.
  const StorePtr ours = launcher.store();
  ours->set("/from ours", "1");
  EXPECT_EQ(tcp->get_to_str("from ours"), "1");
  EXPECT_EQ(tcp->clone()->add("both", 1), 1);
  EXPECT_EQ(ours->add("/both", 1), 2);
}

TEST(LauncherStore, AWaitInOneThreadDoesNotBlockTheOthers) {
  Launcher launcher;
  const StorePtr store = launcher.store();
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&, i] {
      const StorePtr mine = i % 2 == 0 ? store : store->clone();
      EXPECT_EQ(mine->get_to_str("late/" + std::to_string(i)), std::to_string(i));
      ++done;
    });
  }
  for (int i = 15; i >= 0; --i) {
    EXPECT_LT(done, 16 - i);
    store->set("late/" + std::to_string(i), std::to_string(i));
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(done, 16);
}

TEST(LauncherStore, ManyThreadsCountTogether) {
  Launcher launcher;
  const StorePtr store = launcher.store();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 200; ++k) store->add("count", 1);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(store->add("count", 0), 1600);
}

TEST(LauncherStore, ErrorsSayWhatHappened) {
  Launcher launcher;
  const StorePtr store = launcher.store();
  EXPECT_THAT(error_of([&] { store->set(std::string(9000, 'k'), "v"); }),
              HasSubstr("[store] a key of 9000 bytes is too long: 8192 are allowed"));
  EXPECT_THAT(error_of([&] { store->set("k", std::string(9 << 20, 'v')); }),
              HasSubstr("[store] a value of 9437184 bytes is too long"));
  EXPECT_THAT(error_of([&] { store->multiSet({"a"}, {}); }), HasSubstr("1 keys and 0 values"));
  EXPECT_THROW(store->wait({"never"}, 50ms), TimeoutError);
  EXPECT_THAT(error_of([&] { store->wait({"never"}, 50ms); }),
              HasSubstr("[store] waiting for never timed out after 50 ms"));
  store->set("text", "abc");
  EXPECT_THAT(error_of([&] { store->add("text", 1); }),
              HasSubstr("adding to text: the launcher has closed the connection"));
  EXPECT_EQ(store->get_to_str("text"), "abc");  // by another connection
}

TEST(LauncherStore, AStoppedLauncherDoesNotBlockSetters) {
  Launcher launcher;
  const StorePtr store = launcher.store();
  launcher.pause(1500ms);
  const auto began = std::chrono::steady_clock::now();
  store->set("a", "1");
  store->set("b", "2");
  EXPECT_LT(std::chrono::steady_clock::now() - began, 1200ms);
  EXPECT_EQ(store->get_to_str("b"), "2");  // waits for it
  EXPECT_EQ(store->add("n", 3), 3);
}

TEST(LauncherStore, EndsWhenTheLauncherDoes) {
  Launcher launcher;
  const StorePtr store = launcher.store();
  auto waiting = std::async(std::launch::async,
                            [&] { return error_of([&] { store->wait({"never"}, 60s); }); });
  ASSERT_EQ(waiting.wait_for(200ms), std::future_status::timeout);
  const auto began = std::chrono::steady_clock::now();
  launcher.stop();
  EXPECT_THAT(waiting.get(), AllOf(HasSubstr("waiting for never: the launcher has closed"),
                                   HasSubstr("It was killed")));
  EXPECT_THAT(error_of([&] { store->set("k", "v"); }), HasSubstr("[store]"));
  EXPECT_THAT(error_of([&] { launcher.store(); }),
              HasSubstr("the launcher does not take connections to its store"));
  EXPECT_LT(std::chrono::steady_clock::now() - began, 20s);
}

}  // namespace
}  // namespace lockstep
