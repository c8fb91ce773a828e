// metrics.jsonl, read while a run writes it.
#include "lockstep/dashboard/metrics_tail.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "lockstep/io/files_for_test.h"

namespace lockstep::dashboard {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;

void append(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::app) << text << std::flush;
}

LiveSeries loss_of(const MetricsTail& tail) {
  for (const auto& [name, points] : tail.series())
    if (name == "loss") return points;
  return {};
}

TEST(MetricsTail, FollowsAFileThatGrowsIsTornAndIsReplaced) {
  const io::TemporaryDirectory folder;
  MetricsTail tail;
  tail.follow(folder.path());
  tail.read();  // there is none
  append(folder / "metrics.jsonl",
         "{\"step\": 1, \"loss\": 2.5, \"tokens_per_second\": 10, "
         "\"samples_per_second\": 3}\n"
         "{\"step\": 2, \"eval_loss\": 9}\nnot json\n[1]\n{\"step\": \"x\", \"loss\": 1}\n"
         "{\"step\": 2, \"loss\": \"NaN\"}\n{\"step\": 2, \"lo");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5)));
  EXPECT_THAT(tail.series(), ElementsAre(Pair("loss", ElementsAre(Pair(1, 2.5))),
                                         Pair("tokens_per_second", ElementsAre(Pair(1, 10.0))),
                                         Pair("samples_per_second", ElementsAre(Pair(1, 3.0))),
                                         Pair("eval_loss", ElementsAre(Pair(2, 9.0)))));
  append(folder / "metrics.jsonl", "ss\": 1.5}\n{\"step\": 3, \"loss\": 1}\n");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5), Pair(2, 1.5), Pair(3, 1.0)));
  // Resumed at step 1: the later lines are taken back, then written again.
  append(folder / "new", "{\"step\": 1, \"loss\": 2.5}\n{\"step\": 2, \"loss\": 0.5}\n");
  std::filesystem::rename(folder / "new", folder / "metrics.jsonl");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5), Pair(2, 0.5)));
}

TEST(MetricsTail, WhatIsNotFiniteIsAPointToo) {
  const io::TemporaryDirectory folder;
  MetricsTail tail;
  tail.follow(folder.path());
  append(folder / "metrics.jsonl", "{\"step\": 1, \"loss\": 2.5}\n{\"step\": 2, \"loss\": null}\n");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5), Pair(2, testing::IsNan())));
}

TEST(MetricsTail, IsBoundedAndTakesOnlyFiles) {
  const io::TemporaryDirectory folder;
  for (int step = 1; step <= 2000; ++step)
    append(folder / "metrics.jsonl", fmt::format("{{\"step\": {}, \"loss\": 1}}\n", step));
  append(folder / "metrics.jsonl", std::string(3u << 20, 'x'));
  MetricsTail tail;
  tail.follow(folder.path());
  for (int i = 0; i < 8; ++i) tail.read();
  append(folder / "metrics.jsonl", "\n{\"step\": 2001, \"loss\": 7}\n");
  tail.read();
  ASSERT_FALSE(loss_of(tail).empty());
  EXPECT_LE(loss_of(tail).size(), MetricsTail::kPoints);
  EXPECT_THAT(loss_of(tail).back(), Pair(2001, 7.0));
  const io::TemporaryDirectory other;
  ASSERT_EQ(::mkfifo((other / "metrics.jsonl").c_str(), 0600), 0);
  tail.follow(other.path());
  tail.read();  // does not wait for a writer
  EXPECT_THAT(loss_of(tail), IsEmpty());
}

TEST(MetricsTail, HasWhateverIsLoggedButTheSumOfTheRun) {
  const io::TemporaryDirectory folder;
  append(folder / "metrics.jsonl",
         "{\"step\": 2, \"epoch\": 0.5, \"accuracy\": 0.25, \"run_name\": \"a\"}\n"
         "{\"step\": 2, \"train_runtime\": 3, \"train_loss\": 1}\n");
  for (int i = 0; i < 40; ++i)
    append(folder / "metrics.jsonl", fmt::format("{{\"step\": 3, \"name_{}\": 1}}\n", i));
  MetricsTail tail;
  tail.follow(folder.path());
  tail.read();
  EXPECT_EQ(tail.series().size(), MetricsTail::kSeries);
  EXPECT_THAT(tail.series()[0], Pair("accuracy", ElementsAre(Pair(2, 0.25))));
  EXPECT_THAT(tail.series()[1], Pair("name_0", ElementsAre(Pair(3, 1.0))));
}

}  // namespace
}  // namespace lockstep::dashboard
