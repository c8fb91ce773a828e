// metrics.jsonl, read while a run writes it.
#include "lockstep/monitor/metrics_file.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "lockstep/core/helpers_for_test.h"

namespace lockstep::monitor {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;

void append(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::app) << text << std::flush;
}

Curve loss_of(const MetricsFile& file) {
  return curve_of(file.lines(), "loss");
}

MetricsFile newest_in(const io::TemporaryDirectory& folder) {
  return MetricsFile(folder / "metrics.jsonl", MetricsFile::Part::kNewest);
}

TEST(MetricsFile, FollowsAFileThatGrowsIsTornAndIsReplaced) {
  const io::TemporaryDirectory folder;
  MetricsFile tail = newest_in(folder);
  tail.read();  // there is none
  append(folder / "metrics.jsonl",
         "{\"step\": 1, \"loss\": 2.5, \"tokens_per_second\": 10, "
         "\"samples_per_second\": 3}\n"
         "{\"step\": 2, \"eval_loss\": 9}\nnot json\n[1]\n{\"step\": \"x\", \"loss\": 1}\n"
         "{\"step\": 2, \"loss\": \"NaN\"}\n{\"step\": 2, \"lo");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5)));
  EXPECT_THAT(metric_names(tail.lines()),
              ElementsAre("loss", "tokens_per_second", "samples_per_second", "eval_loss"));
  EXPECT_THAT(curve_of(tail.lines(), "eval_loss"), ElementsAre(Pair(2, 9.0)));
  EXPECT_EQ(tail.problem(), "3 of 7 lines of metrics.jsonl cannot be read (the first is line 3).");
  append(folder / "metrics.jsonl", "ss\": 1.5}\n{\"step\": 3, \"loss\": 1}\n");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5), Pair(2, 1.5), Pair(3, 1.0)));
  // Resumed at step 1: the later lines are taken back, then written again.
  append(folder / "new", "{\"step\": 1, \"loss\": 2.5}\n{\"step\": 2, \"loss\": 0.5}\n");
  std::filesystem::rename(folder / "new", folder / "metrics.jsonl");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5), Pair(2, 0.5)));
}

TEST(MetricsFile, WhatIsNotFiniteIsAPointToo) {
  const io::TemporaryDirectory folder;
  MetricsFile tail = newest_in(folder);
  append(folder / "metrics.jsonl", "{\"step\": 1, \"loss\": 2.5}\n{\"step\": 2, \"loss\": null}\n");
  tail.read();
  EXPECT_THAT(loss_of(tail), ElementsAre(Pair(1, 2.5), Pair(2, testing::IsNan())));
}

TEST(MetricsFile, IsBoundedAndTakesOnlyFiles) {
  const io::TemporaryDirectory folder;
  for (int step = 1; step <= 2000; ++step)
    append(folder / "metrics.jsonl", fmt::format("{{\"step\": {}, \"loss\": 1}}\n", step));
  append(folder / "metrics.jsonl", std::string(3u << 20, 'x'));
  MetricsFile tail = newest_in(folder);
  for (int i = 0; i < 8; ++i) tail.read();
  append(folder / "metrics.jsonl", "\n{\"step\": 2001, \"loss\": 7}\n");
  tail.read();
  ASSERT_FALSE(loss_of(tail).empty());
  EXPECT_LE(loss_of(tail).size(), 5 * MetricsFile::kPoints);
  EXPECT_THAT(loss_of(tail).back(), Pair(2001, 7.0));
  const io::TemporaryDirectory other;
  ASSERT_EQ(::mkfifo((other / "metrics.jsonl").c_str(), 0600), 0);
  MetricsFile pipe = newest_in(other);
  pipe.read();  // does not wait for a writer
  EXPECT_THAT(pipe.lines(), IsEmpty());
  EXPECT_FALSE(pipe.there());
}

TEST(MetricsFile, HasWhateverIsLoggedButTheSumOfTheRun) {
  const io::TemporaryDirectory folder;
  append(folder / "metrics.jsonl",
         "{\"step\": 2, \"epoch\": 0.5, \"accuracy\": 0.25, \"run_name\": \"a\"}\n"
         "{\"step\": 2, \"train_runtime\": 3, \"train_loss\": 1}\n");
  for (int i = 0; i < 40; ++i)
    append(folder / "metrics.jsonl", fmt::format("{{\"step\": 3, \"name_{}\": 1}}\n", i));
  MetricsFile tail = newest_in(folder);
  tail.read();
  const auto names = metric_names(tail.lines());
  EXPECT_EQ(names.size() + 2, MetricsFile::kNames) << "the last line's two are known, not drawn";
  EXPECT_EQ(names[0], "accuracy");
  EXPECT_THAT(curve_of(tail.lines(), "accuracy"), ElementsAre(Pair(2, 0.25)));
  EXPECT_EQ(names[1], "name_0");
  MetricsFile all(folder / "metrics.jsonl");
  all.read();
  EXPECT_EQ(metric_names(all.lines()).size(), 41u);
}

// Steps are logged one by one, evaluations are rare.
TEST(MetricsFile, RareNamesKeepTheirPointsAmongManyLines) {
  const io::TemporaryDirectory folder;
  MetricsFile tail = newest_in(folder);
  for (int part = 0; part < 10; ++part) {
    std::string lines = fmt::format("{{\"step\": {}, \"eval_loss\": 1}}\n", 1000 * part);
    for (int step = 1; step < 1000; ++step)
      lines += fmt::format("{{\"step\": {}, \"loss\": 1}}\n", 1000 * part + step);
    append(folder / "metrics.jsonl", lines);
    tail.read();
  }
  EXPECT_LE(tail.lines().size(), 5 * MetricsFile::kPoints);
  EXPECT_EQ(curve_of(tail.lines(), "eval_loss").size(), 10u);
  EXPECT_GE(loss_of(tail).size(), MetricsFile::kPoints);
  EXPECT_THAT(loss_of(tail).back(), Pair(9999, 1.0));
}

TEST(MetricsFile, ALastLineWithoutItsEndCountsOnce) {
  const io::TemporaryDirectory folder;
  append(folder / "metrics.jsonl", "{\"step\": 1, \"loss\": 2}\n{\"step\": 2, \"loss\": 1}");
  MetricsFile file(folder / "metrics.jsonl");
  file.read();
  EXPECT_EQ(file.lines().size(), 2u);
  append(folder / "metrics.jsonl", "\n{\"step\": 3, \"loss\": 0.5}\n");
  file.read();
  EXPECT_THAT(loss_of(file), ElementsAre(Pair(1, 2.0), Pair(2, 1.0), Pair(3, 0.5)));
  EXPECT_EQ(file.problem(), "");
}

TEST(Thinned, ExtremesGapsAndTheLastPointStay) {
  Curve curve;
  for (int step = 0; step < 10'000; ++step) curve.emplace_back(step, 1);
  curve[4321].second = 9;
  curve[7000].second = -9;
  curve[8000].second = std::nan("");
  EXPECT_EQ(thinned(curve, 10'000).size(), 10'000u);
  const Curve few = thinned(curve, 500);
  EXPECT_LE(few.size(), 500u);
  EXPECT_THAT(few, testing::Contains(Pair(4321, 9)));
  EXPECT_THAT(few, testing::Contains(Pair(7000, -9)));
  EXPECT_THAT(few, testing::Contains(Pair(8000, testing::IsNan())));
  EXPECT_EQ(few.back().first, 9999);
  EXPECT_TRUE(std::ranges::is_sorted(few, {}, &Curve::value_type::first));
}

}  // namespace
}  // namespace lockstep::monitor
