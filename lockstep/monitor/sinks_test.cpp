#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "lockstep/core/helpers_for_test.h"
#include "lockstep/monitor/prometheus.h"

namespace lockstep::monitor {
namespace {

using testing::HasSubstr;

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
