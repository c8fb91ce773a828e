// Axes, numbers and text of charts. tests/report/chart_test.py reads whole charts as XML.
#include "observe/report/chart.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "observe/report/axis.h"
#include "observe/report/html.h"
#include "observe/report/markup.h"

namespace lockstep::report {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> texts(const Axis& axis, int count, bool whole = false) {
  std::vector<std::string> found;
  for (const Tick& tick : ticks(axis, count, whole)) found.push_back(tick.text);
  return found;
}

TEST(Axis, PlacesValuesOnBothScales) {
  const Axis linear{.low = 10, .high = 20, .from = 100, .to = 300};
  EXPECT_DOUBLE_EQ(linear.place(10), 100);
  EXPECT_DOUBLE_EQ(linear.place(15), 200);
  EXPECT_DOUBLE_EQ(linear.place(20), 300);
  const Axis log{.low = 1, .high = 100, .from = 0, .to = 10, .log = true};
  EXPECT_DOUBLE_EQ(log.place(10), 5);
  EXPECT_FALSE(log.holds(0));
  EXPECT_FALSE(log.holds(-1));
  EXPECT_FALSE(linear.holds(NAN));
  EXPECT_FALSE(linear.holds(INFINITY));
}

TEST(Axis, TicksHaveTheDigitsThatDistinguishThem) {
  EXPECT_THAT(texts({.low = 0, .high = 1}, 5), ElementsAre("0", "0.2", "0.4", "0.6", "0.8", "1.0"));
  EXPECT_THAT(texts({.low = 3.001, .high = 3.0031}, 4), ElementsAre("3.001", "3.002", "3.003"));
  EXPECT_THAT(texts({.low = 0, .high = 120000}, 4), ElementsAre("0", "50k", "100k"));
  EXPECT_THAT(texts({.low = 0, .high = 3e-4}, 3), ElementsAre("0", "1e-4", "2e-4", "3e-4"));
  EXPECT_THAT(texts({.low = -20, .high = 20}, 4), ElementsAre("-20", "-10", "0", "10", "20"));
  EXPECT_THAT(texts({.low = 1, .high = 4}, 6, true), ElementsAre("1", "2", "3", "4"));
  EXPECT_THAT(texts({.low = 0.5, .high = 2000, .log = true}, 6),
              ElementsAre("1", "10", "100", "1000"));
  EXPECT_THAT(texts({.low = 0.9, .high = 21, .log = true}, 6),
              ElementsAre("1", "2", "5", "10", "20"));
}

TEST(Axis, AnyRangeHasAnAxis) {
  const double huge = std::numeric_limits<double>::max();
  const double tiny = std::numeric_limits<double>::denorm_min();
  const std::vector<std::vector<double>> sets{
      {},           {0},       {7},        {-3, -3},          {NAN},         {huge, -huge},
      {tiny},       {0, tiny}, {1e299, 0}, {1e9, 1e9 + 1e-3}, {INFINITY, 1}, {-1e-300, 1e-300},
      {1e-320, 1e3}};
  for (const auto& values : sets) {
    for (const bool log : {false, true}) {
      for (const bool zero : {false, true}) {
        const Axis axis = axis_over(values, {.log = log, .from_zero = zero, .margin = 0.05});
        EXPECT_LT(axis.low, axis.high);
        const auto found = ticks(axis, 5, false);
        EXPECT_LE(found.size(), 30u);
        for (const Tick& tick : found) EXPECT_TRUE(std::isfinite(axis.place(tick.value)));
        for (const double value : values) {
          if (axis.holds(value)) {
            EXPECT_TRUE(std::isfinite(axis.place(value))) << value;
          }
        }
      }
    }
  }
}

TEST(Markup, NothingBecomesMarkup) {
  EXPECT_EQ(escape("<b a=\"1\" b='2'>&"), "&lt;b a=&quot;1&quot; b=&#39;2&#39;&gt;&amp;");
  EXPECT_EQ(escape(std::string("a\0b\x1b\n\t\x7f", 7)), "a\ufffdb\ufffd\n\t\ufffd");
  EXPECT_EQ(escape("\xff\xc3(\u00e4\uffff"), "\ufffd\ufffd(\u00e4\ufffd");
  EXPECT_EQ(shortened("\u00e4\u00f6\u00fc\u00df", 3), "\u00e4\u00f6\u2026");
  EXPECT_EQ(shortened("abc", 3), "abc");
}

TEST(Markup, NumbersAreForPeople) {
  EXPECT_EQ(number_text(0.03125), "0.03125");
  EXPECT_EQ(number_text(12.5), "12.5");
  EXPECT_EQ(number_text(-1234567.2), "-1,234,567");
  EXPECT_EQ(number_text(48210), "48,210");
  EXPECT_EQ(number_text(999.96), "1,000");
  EXPECT_EQ(number_text(NAN), "not a number");
  EXPECT_EQ(duration_text(1.25), "1.25 s");
  EXPECT_EQ(duration_text(200), "3 min 20 s");
  EXPECT_EQ(duration_text(18720), "5 h 12 min");
  EXPECT_EQ(time_text(0), "");
  EXPECT_EQ(time_text(1e9), "2001-09-09 01:46:40 UTC");
  EXPECT_EQ(percent_text(0.153), "15.3 %");
}

TEST(Html, APageLoadsNothingAndEscapesItsText) {
  const std::string hostile = "</title><script>alert(1)</script>";
  const std::string text =
      page(hostile, paragraph(hostile) + table({{hostile}, {{hostile}}}) + details(hostile, "") +
                        section(hostile, note(hostile)));
  EXPECT_THAT(text, Not(HasSubstr("<script")));
  EXPECT_THAT(text, HasSubstr("default-src 'none'"));
  EXPECT_THAT(text, HasSubstr("prefers-color-scheme:dark"));
  EXPECT_THAT(text, HasSubstr("&lt;/title&gt;&lt;script&gt;"));
}

TEST(Chart, NothingToDrawIsSaid) {
  EXPECT_THAT(draw(LineChart{}).body, HasSubstr("there are no values"));
  EXPECT_THAT(draw(BarChart{}).body, HasSubstr("there are no values"));
  EXPECT_THAT(draw(ColumnChart{}).body, HasSubstr("there are no values"));
  LineChart nan;
  nan.lines.push_back({.name = "a", .points = {{1, NAN}, {INFINITY, 2}}});
  EXPECT_THAT(draw(nan).body, HasSubstr("there are no values"));
}

}  // namespace
}  // namespace lockstep::report
