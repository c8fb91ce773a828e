#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <thread>

#include "lockstep/core/child_for_test.h"
#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/thrown_for_test.h"
#include "lockstep/monitor/chrome_trace.h"
#include "lockstep/monitor/prometheus.h"
#include "lockstep/monitor/resource_metrics.h"
#include "lockstep/monitor/sink_queue.h"

namespace lockstep::monitor {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::Not;
using Clock = std::chrono::steady_clock;

// ------------------------------------------------------------------ the queue

TEST(SinkQueue, WhatFindsNoRoomIsDroppedAndCounted) {
  std::atomic<bool> blocked{true}, entered{false};
  std::atomic<int> consumed{0};
  std::vector<int> order;
  {
    SinkQueue<int> queue({.capacity = 8}, [&](const std::vector<int>& batch) {
      entered = true;
      while (blocked) std::this_thread::sleep_for(1ms);
      for (const int item : batch) order.push_back(item);
      consumed += static_cast<int>(batch.size());
    });
    EXPECT_TRUE(queue.push(0));
    EXPECT_FALSE(queue.flush(50ms));
    while (!entered) std::this_thread::sleep_for(1ms);  // the consumer has it, and does not return
    const auto begin = Clock::now();
    int accepted = 1;
    for (int i = 1; i <= 1000; ++i) accepted += queue.push(i) ? 1 : 0;
    EXPECT_LT(Clock::now() - begin, 10s);  // nobody waited for the consumer
    EXPECT_EQ(accepted, 9);
    EXPECT_EQ(queue.dropped(), 1001u - 9u);
    blocked = false;
    EXPECT_TRUE(queue.flush(30s));
    EXPECT_EQ(consumed, 9);
    EXPECT_TRUE(queue.push(1001));
  }
  EXPECT_EQ(consumed, 10);  // the destructor lets the last one through
  EXPECT_EQ(order.back(), 1001);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(SinkQueue, AConsumerThatHangsDoesNotHoldUpTheEnd) {
  const auto release = std::make_shared<std::atomic<bool>>(false);
  const auto begin = Clock::now();
  {
    SinkQueue<int> queue({.interval = 1ms, .end_limit = 50ms}, [release](const std::vector<int>&) {
      while (!*release) std::this_thread::sleep_for(1ms);
    });
    queue.push(1);
    std::this_thread::sleep_for(20ms);
  }
  EXPECT_LT(Clock::now() - begin, 20s);
  *release = true;
}

TEST(SinkQueue, ManyProducers) {
  std::atomic<int> consumed{0};
  std::uint64_t dropped = 0;
  {
    SinkQueue<int> queue({.capacity = 64, .interval = 1ms}, [&](const std::vector<int>& batch) {
      consumed += static_cast<int>(batch.size());
    });
    std::vector<std::thread> producers;
    for (int i = 0; i < 4; ++i)
      producers.emplace_back([&] {
        for (int k = 0; k < 5000; ++k) queue.push(k);
      });
    for (std::thread& producer : producers) producer.join();
    EXPECT_TRUE(queue.flush(30s));
    dropped = queue.dropped();
  }
  EXPECT_EQ(static_cast<std::uint64_t>(consumed) + dropped, 20000u);
}

// ------------------------------------------------------------------ Chrome's trace

class Trace : public testing::Test {
 protected:
  Trace() {
    path_ = std::filesystem::temp_directory_path() /
            ("lockstep_trace_" + std::to_string(::getpid()) + ".json");
  }
  ~Trace() override { std::filesystem::remove(path_); }

  // The strict reader: anything but one whole array is an error.
  std::vector<Node> events() const {
    return parse_json(read_file(path_), path_, {.bytes = 64u << 20, .nodes = 10'000'000}).items;
  }
  std::string path_;
};

TEST_F(Trace, HasSpansCountersAndNames) {
  const Clock::time_point begin{1234567890123ns};
  ChromeTrace trace(path_, {.rank = 3});
  EXPECT_EQ(events().size(), 1u);  // whole from the beginning
  trace.thread_name(1, "back\"ward\n");
  trace.complete(
      {.name = "bucket 3", .category = "comm", .thread = 1, .begin = begin, .end = begin + 1500ns});
  trace.counter("memory", begin, {{"used", 31.5}, {"bad", std::nan("")}});
  ASSERT_TRUE(trace.flush(30s));
  const auto all = events();
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(to_json(all[0]),
            R"({"name":"process_name","ph":"M","pid":3,"tid":1,"args":{"name":"rank 3"}})");
  EXPECT_EQ(as_string(all[1].at("args").at("name"), ""), "back\"ward\n");
  EXPECT_EQ(all[2].at("ts").text, "1234567890.123");
  EXPECT_EQ(all[2].at("dur").text, "1.500");
  EXPECT_EQ(as_string(all[2].at("ph"), ""), "X");
  EXPECT_EQ(as_string(all[2].at("cat"), ""), "comm");
  EXPECT_EQ(as_integer(all[2].at("pid"), ""), 3);
  EXPECT_EQ(as_integer(all[2].at("tid"), ""), 2);  // Perfetto does not take 0
  EXPECT_EQ(as_real(all[3].at("args").at("used"), ""), 31.5);
  EXPECT_EQ(as_real(all[3].at("args").at("bad"), ""), 0);
  EXPECT_EQ(trace.dropped(), 0u);
}

TEST_F(Trace, IsWholeWheneverItIsRead) {
  std::size_t seen = 0;
  {
    ChromeTrace trace(path_, {.capacity = 64});
    for (int round = 0; round < 50; ++round) {
      for (int i = 0; i < 40; ++i)
        trace.complete({.name = "step", .begin = Clock::now(), .end = Clock::now()});
      ASSERT_TRUE(trace.flush(30s));
      const std::size_t now = events().size();
      EXPECT_GE(now, seen);
      seen = now;
    }
    EXPECT_EQ(seen + trace.dropped(), 2001u);
  }
}

TEST_F(Trace, EndsAtItsLimitAndSaysHowManyAreMissing) {
  {
    ChromeTrace trace(path_, {.max_bytes = 4096});
    for (int i = 0; i < 200; ++i) trace.complete({.name = "step"});
    ASSERT_TRUE(trace.flush(30s));
    EXPECT_EQ(events().size() + trace.dropped(), 201u);
    EXPECT_GT(trace.dropped(), 100u);
  }
  EXPECT_LE(std::filesystem::file_size(path_), 4096u);
}

// The kernel cuts a write short at the limit of the file's size, as a full disk does.
CHILD(fills_the_disk) {
  ::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{8192, 8192};
  ::setrlimit(RLIMIT_FSIZE, &limit);
  ChromeTrace trace(std::getenv("TRACE"));
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 10; ++i) trace.complete({.name = "step"});
    trace.flush(30s);
  }
  return trace.dropped() > 0 ? 0 : 1;
}

TEST_F(Trace, AFullDiskLeavesAWholeFile) {
  child_for_test::Child child("fills_the_disk", {{"TRACE", path_}});
  EXPECT_EQ(child.wait(), 0) << child.output();
  EXPECT_THAT(child.output(), HasSubstr("cannot be written (File too large)."));
  EXPECT_GT(events().size(), 10u);
}

TEST_F(Trace, AFolderThatIsNotThere) {
  EXPECT_THROW(ChromeTrace("/nowhere/trace.json"), SystemError);
}

// ------------------------------------------------------------------ Prometheus

TEST(PrometheusPage, HasHelpTypeAndEscapedLabels) {
  Prometheus page;
  const Metric loss{"lockstep_loss", "Loss of\nthe \"last\" \\ step."};
  page.set(loss, {{"rank", "0"}, {"host", "a\"b\\c\nd\xff"}}, 1.25);
  page.set(loss, {{"host", "a\"b\\c\nd\xff"}, {"rank", "0"}}, 0.5);  // the same series
  page.set({"lockstep_steps_total", "Steps.", MetricType::kCounter}, {}, 12345678901234);
  page.set(loss, {{"rank", "1"}}, std::numeric_limits<double>::infinity());
  page.set(loss, {{"rank", "2"}}, std::nan(""));
  EXPECT_EQ(page.text(),
            "# HELP lockstep_loss Loss of\\nthe \"last\" \\\\ step.\n"
            "# TYPE lockstep_loss gauge\n"
            "lockstep_loss{host=\"a\\\"b\\\\c\\nd\xEF\xBF\xBD\",rank=\"0\"} 0.5\n"
            "lockstep_loss{rank=\"1\"} +Inf\n"
            "lockstep_loss{rank=\"2\"} NaN\n"
            "# HELP lockstep_steps_total Steps.\n"
            "# TYPE lockstep_steps_total counter\n"
            "lockstep_steps_total 12345678901234\n");
}

TEST(PrometheusPage, RefusesNamesThatPrometheusDoesNotTake) {
  Prometheus page;
  const auto error = [&](const Metric& metric, const Labels& labels = {}) {
    return message_of([&] { page.set(metric, labels, 0); });
  };
  EXPECT_THAT(error({"1st", ""}), HasSubstr("[prometheus] '1st' cannot be the name of a metric."));
  EXPECT_THAT(error({"a-b", ""}), HasSubstr("'a-b' cannot"));
  EXPECT_THAT(error({"", ""}), HasSubstr("'' cannot"));
  page.set({"a", "A."}, {}, 1);
  EXPECT_THAT(error({"a", "A.", MetricType::kCounter}),
              HasSubstr("a is on the page already, as a gauge with the help 'A.'."));
  EXPECT_THAT(error({"a", "A."}, {{"__x", ""}}), HasSubstr("'__x' cannot be the name of a label."));
  EXPECT_THAT(error({"a", "A."}, {{"x:y", ""}}), HasSubstr("'x:y' cannot"));
}

TEST(PrometheusPage, ShowsWhatTheSamplersRead) {
  Prometheus page;
  GpuReading gpu{.utilisation_percent = 97, .memory_used_bytes = 1024};
  gpu.clock_reasons = 0x40;
  const auto sample =
      std::make_shared<GpuSample>(GpuSample{.gpus = {gpu, GpuReading{.problem = "GPU is lost"}}});
  publish(page, GpuSnapshot{.gpus = {{.index = 0, .uuid = "GPU-a"}, {.index = 1, .uuid = "GPU-b"}},
                            .newest = sample,
                            .xid_counts = {{{1, 79}, 2}}});
  publish(page, 2, read_process(::getpid()).value());
  publish(page, 2, CgroupSample{.cpu_limit_cores = 1.5, .throttled_s = 2.5});
  const std::string text = page.text();
  for (const char* line : {
           "lockstep_gpu_driver_up 1\n",
           "lockstep_gpu_up{gpu=\"0\",uuid=\"GPU-a\"} 1\n",
           "lockstep_gpu_up{gpu=\"1\",uuid=\"GPU-b\"} 0\n",
           "lockstep_gpu_utilization_ratio{gpu=\"0\",uuid=\"GPU-a\"} 0.97\n",
           "lockstep_gpu_memory_used_bytes{gpu=\"0\",uuid=\"GPU-a\"} 1024\n",
           "{gpu=\"0\",reason=\"hardware thermal slowdown\",uuid=\"GPU-a\"} 1\n",
           "{gpu=\"0\",reason=\"idle\",uuid=\"GPU-a\"} 0\n",
           "lockstep_gpu_xid_events_total{gpu=\"1\",xid=\"79\"} 2\n",
           "lockstep_process_threads{rank=\"2\"} ",
           "lockstep_process_cpu_seconds_total{mode=\"user\",rank=\"2\"} ",
           "lockstep_cgroup_cpu_limit_cores{rank=\"2\"} 1.5\n",
           "lockstep_cgroup_throttled_seconds_total{rank=\"2\"} 2.5\n",
       })
    EXPECT_THAT(text, HasSubstr(line));
}

}  // namespace
}  // namespace lockstep::monitor
