// ReadingProgress with a manual clock.
#include <gtest/gtest.h>

#include <array>

#include "cli/commands.h"

namespace lockstep::cli {
namespace {

struct Output {
  std::FILE* file = std::tmpfile();
  ~Output() { std::fclose(file); }
  std::string text() const {
    std::array<char, 1000> bytes{};
    std::rewind(file);
    return {bytes.data(), std::fread(bytes.data(), 1, bytes.size(), file)};
  }
};

TEST(ReadingProgress, IsSilentForTwoSeconds) {
  const Output output;
  auto now = ReadingProgress::Clock::time_point{};
  ReadingProgress progress("a.json", output.file, [&] { return now; });
  progress(1, 100);
  now += std::chrono::milliseconds(1900);
  progress(50, 100);
  progress(100, 100);
  EXPECT_EQ(output.text(), "");
}

TEST(ReadingProgress, ThenReportsPeriodicallyAndAtTheEnd) {
  const Output output;
  auto now = ReadingProgress::Clock::time_point{};
  ReadingProgress progress("a.json", output.file, [&] { return now; });
  now += std::chrono::seconds(2);
  progress(20, 100);
  now += std::chrono::seconds(9);
  progress(40, 100);
  now += std::chrono::seconds(1);
  progress(60, 100);
  now += std::chrono::seconds(1);
  progress(100, 100);
  progress(100, 100);
  EXPECT_EQ(output.text(),
            "reading a.json: 20 % after 2 s\n"
            "reading a.json: 60 % after 12 s\n"
            "reading a.json: 100 % after 13 s\n");
}

}  // namespace
}  // namespace lockstep::cli
