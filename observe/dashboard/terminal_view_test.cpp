// A run as text: what is shown, and that nobody's text steers the terminal.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"
#include "lockstep/monitor/run_view.h"
#include "observe/dashboard/run_summary.h"

namespace lockstep::dashboard {
namespace {

using testing::HasSubstr;
using testing::Not;

monitor::RunView two_ranks() {
  monitor::RunView view;
  view.id = "abc";
  view.record.emplace().facts.world_size = 2;
  view.started_s = 1000;
  view.time_s = 1000 + 3723;
  view.state = "running";
  for (int r = 0; r < 2; ++r) {
    monitor::RankState rank;
    rank.rank = r;
    rank.step = 120 + r;
    rank.step_ms = 21.5;
    rank.phase = "backward";
    monitor::Interval interval{.seconds = 1, .steps = 46};
    interval.host_s[ledger::index(ledger::Phase::kForward)] = 0.25;
    interval.host_s[ledger::index(ledger::Phase::kBackward)] = 0.75;
    interval.resident_bytes = 512u << 20;
    interval.process = monitor::ProcessRates{.cores = 1.02};
    rank.newest = interval;
    rank.position = monitor::Position{"all_reduce", 17, "started", 0.5};
    rank.log = {"first line", "last line"};
    view.ranks.push_back(rank);
  }
  for (int s = 1; s <= 20; ++s)
    view.metrics.push_back({.step = s, .values = {{"loss", 3.0 - 0.1 * s}}});
  view.metrics.push_back(
      {.step = 20, .values = {{"tokens_per_second", 18400.0}, {"learning_rate", 3e-4}}});
  return view;
}

std::string shown(const monitor::RunView& view, const TerminalOptions& options = {.columns = 140}) {
  return terminal_view(parse_snapshot(monitor::snapshot_json(view)), options);
}

TEST(TerminalView, ShowsRanksBudgetCurvesAndOutput) {
  const std::string text = shown(two_ranks());
  for (const char* part :
       {"lockstep abc  running  2 of 2 ranks run  1:02:03  step 121", "loss 1.000",
        "18.4 K tokens/s", "1.02 cores", "512 MiB", "all_reduce #17 started, 0.500 s",
        "backward 75 %, forward 25 %", "█", "▁", "output of rank 0", "  last line"})
    EXPECT_THAT(text, HasSubstr(part));
  EXPECT_THAT(text, Not(HasSubstr("\033")));
  monitor::RunView view = two_ranks();
  view.record->facts.total_steps = 1000;
  view.mean_step_s = 0.5;
  EXPECT_THAT(shown(view), HasSubstr("  step 121 of 1000  0:07:19 left  21.5 ms"));
  EXPECT_THAT(shown(view), HasSubstr("\nlearning_rate            3.00e-04"));
}

TEST(TerminalView, AFailedRankAndItsOutputStandOut) {
  monitor::RunView view = two_ranks();
  view.state = "failed";
  view.message = "rank 1 failed: killed by SIGKILL";
  view.ranks[1].status = monitor::RankStatus::kFailed;
  view.ranks[1].exit = "killed by SIGKILL";
  view.ranks[1].log = {"its last line"};
  const std::string text = shown(view, {.columns = 140, .colour = true});
  EXPECT_THAT(text, HasSubstr("rank 1 failed: killed by SIGKILL"));
  EXPECT_THAT(text, HasSubstr("\033[1;31m1     killed by SIGKILL"));
  EXPECT_THAT(text, HasSubstr("output of rank 1"));
  EXPECT_THAT(text, HasSubstr("  its last line"));
}

TEST(TerminalView, TheLineNamesRanksThatHaveStopped) {
  monitor::RunView view = two_ranks();
  view.ranks[1].status = monitor::RankStatus::kStopped;
  EXPECT_THAT(status_line(parse_snapshot(monitor::snapshot_json(view))),
              HasSubstr("  1 of 2 ranks run, rank 1 stopped  "));
  for (monitor::RankState& rank : view.ranks) rank.status = monitor::RankStatus::kFailed;
  EXPECT_THAT(status_line(parse_snapshot(monitor::snapshot_json(view))),
              HasSubstr("  0 of 2 ranks run, ranks 0, 1 failed  "));
}

TEST(TerminalView, AStallStandsInPlaceOfTheStepTime) {
  monitor::RunView view = two_ranks();
  EXPECT_THAT(shown(view), HasSubstr("  21.5 ms"));
  view.stall = monitor::Stall{12.4, "No step has ended for 12 s: rank 1 is stopped."};
  view.stall_table = monitor::StallTable{1, "", "[launch] stall: a table\n  1  T stopped\033[2J"};
  std::string text = shown(view);
  EXPECT_THAT(text, HasSubstr("lockstep abc  stalled  2 of 2"));
  EXPECT_THAT(text, HasSubstr("  no step for 12 s"));
  EXPECT_THAT(text, Not(HasSubstr("  21.5 ms")));
  EXPECT_THAT(text, HasSubstr("\nNo step has ended for 12 s: rank 1 is stopped.\n"));
  EXPECT_THAT(text, HasSubstr("\n[launch] stall: a table\n  1  T stopped"));
  EXPECT_THAT(text, Not(HasSubstr("\033")));
  view.stall.reset();
  EXPECT_THAT(shown(view), Not(HasSubstr("a table"))) << "they move again";
  view.state = "failed";
  EXPECT_THAT(shown(view), HasSubstr("a table"));
}

TEST(TerminalView, FindingsComeWithTheirRemedy) {
  monitor::RunView view = two_ranks();
  view.findings = {{.rule = "loader-bound",
                    .rank = 1,
                    .cause = "data",
                    .what = "It waits for batches.",
                    .evidence = "6 of 21 ms",
                    .remedy = "dataloader_num_workers: 4",
                    .gain = 0.2}};
  const std::string text = shown(view);
  EXPECT_THAT(text, HasSubstr("1 finding\n"));
  EXPECT_THAT(text, HasSubstr("loader-bound (rank 1): It waits for batches.\n"
                              "  dataloader_num_workers: 4"));
}

TEST(TerminalView, ControlCharactersOfOthersAreNotPrinted) {
  monitor::RunView view = two_ranks();
  const std::string hostile =
      "a\033]0;title\007b\033[2Jc\rd\xc2\x9b"
      "2Je\xe2\x80\xae"
      "f\b\xff";
  view.id = hostile;
  view.message = hostile;
  view.ranks[0].phase = hostile;
  view.ranks[0].log = {hostile};
  view.ranks[0].position->operation = hostile;
  view.findings = {
      {.rule = hostile, .cause = hostile, .what = hostile, .evidence = hostile, .remedy = hostile}};
  for (const std::string& text :
       {shown(view), status_line(parse_snapshot(monitor::snapshot_json(view)))})
    for (std::size_t at = 0; at < text.size();) {
      const char32_t c = next_character(text, at);
      EXPECT_TRUE(c == '\n' || (c >= 0x20 && c != 0x7f && !(c >= 0x80 && c < 0xa0) && c != 0x202e))
          << static_cast<unsigned>(c);
    }
}

TEST(TerminalView, FitsTheTerminal) {
  const std::string text = shown(two_ranks(), {.columns = 40, .rows = 7});
  std::istringstream lines(text);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count)
    EXPECT_LE(character_count(line), 40u) << line;
  EXPECT_EQ(count, 7);
}

TEST(TerminalView, SentencesAreWholeOnANarrowTerminal) {
  monitor::RunView view = two_ranks();
  view.state = "failed";
  view.message =
      "Rank 1 on n2 failed: killed by SIGKILL. SIGKILL comes from outside: often the kernel's "
      "out-of-memory killer (see dmesg), a scheduler's limit, or a person.";
  view.findings = {{.rule = "loader-bound",
                    .what = "The ranks wait for batches for half of the time of every step, on "
                            "all ranks.",
                    .remedy = "dataloader_num_workers: 4, which has the batches ready in time when "
                              "they are asked for"}};
  const std::string text = shown(view, {.columns = 80, .rows = 40});
  EXPECT_THAT(text, HasSubstr("  loss 1.000\n  18.4 K tokens/s  1 finding\n"));
  EXPECT_THAT(text, HasSubstr("scheduler's limit, or a person.\n"));
  EXPECT_THAT(text, HasSubstr("of the time of every step, on\n  all ranks.\n"));
  EXPECT_THAT(text, HasSubstr("when they are\n    asked for\n"));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(character_count(line), 80u) << line;
}

TEST(TerminalView, NumbersThatAreNotFiniteShow) {
  monitor::RunView view = two_ranks();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  view.metrics = {{.step = 1, .values = {{"loss", 2.0}}},
                  {.step = 2, .values = {{"loss", nan}}},
                  {.step = 3, .values = {{"loss", nan}, {"grad_norm", nan}}}};
  std::string text = shown(view);
  EXPECT_THAT(text, HasSubstr("  loss not finite"));
  EXPECT_THAT(text, HasSubstr("\ngrad_norm                not finite"));
  EXPECT_THAT(text, HasSubstr("\nThe loss is not finite since step 2. "));
  EXPECT_THAT(text, HasSubstr("skip_non_finite"));
  view.metrics.push_back({.step = 3, .values = {{"skipped_steps", 5}}});
  text = shown(view);
  EXPECT_THAT(text, HasSubstr("\nAt step 3 the gradient was not finite: 5 of the steps"));
  view.metrics.push_back({.step = 4, .values = {{"loss", 1.5}}});
  EXPECT_THAT(shown(view), Not(HasSubstr("the gradient was not finite"))) << "it is again";
}

TEST(TerminalView, OddStatesAreShownAsFarAsTheyGo) {
  for (const char* odd :
       {"{}", "[]", "7", R"({"run": 1, "ranks": {}, "series": [], "log": 3})",
        R"({"ranks": [1, {}, {"rank": "x", "budget": [], "gpu": 1, "position": 2}],
            "series": {"loss": [1, [2], [3, "nan"], [1, 2, 3]]}, "log": {"0": [1, {}]},
            "findings": [1, {}]})"})
    EXPECT_NO_THROW(terminal_view(parse_snapshot(odd))) << odd;
  EXPECT_THAT([] { parse_snapshot("<html>"); },
              testing::ThrowsMessage<CommError>(HasSubstr("sent no state of a run")));
}

}  // namespace
}  // namespace lockstep::dashboard
