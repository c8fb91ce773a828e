// What a dashboard sends, drawn by `lockstep monitor`: whatever it is, the terminal gets lines that
// fit and no control characters. The same bytes as a Host header and as an address are refused, or
// are something that a foreign page cannot send.
#include <sstream>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"
#include "observe/dashboard/http.h"
#include "observe/dashboard/run_summary.h"
#include "tests/fuzz/driver.h"

namespace {

using namespace lockstep;
using fuzz::require;

void draw(const std::string& text) {
  constexpr int kColumns = 40;
  std::string drawn;
  try {
    const Node snapshot = dashboard::parse_snapshot(text);
    drawn = dashboard::terminal_view(snapshot, {.columns = kColumns, .rows = 20});
    dashboard::status_line(snapshot);
  } catch (const CommError&) {
    return;  // not JSON
  }
  require(!invalid_utf8(drawn), "what is not UTF-8 is printed");
  std::istringstream lines(drawn);
  for (std::string line; std::getline(lines, line);) {
    require(character_count(line) <= kColumns, "a line that does not fit");
    for (std::size_t at = 0; at < line.size();) {
      const char32_t character = next_character(line, at);
      require(character >= 0x20 && (character < 0x7f || character >= 0xa0), "a control character");
    }
  }
}

}  // namespace

int fuzz_one(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  draw(text);
  if (dashboard::host_allowed(text, "127.0.0.1")) {
    const char first = static_cast<char>(text[0] | 0x20);
    require(first == 'l' || text.starts_with("127.") || text.starts_with("["), "a foreign Host");
  }
  try {
    const dashboard::DashboardUrl url = dashboard::parse_dashboard_url(text);
    require(url.port > 0 && url.port <= 65535 && !url.host.empty(), "an address of nothing");
    for (const char c : url.host + url.token)
      require(c != '\r' && c != '\n' && c != ' ', "an address that adds a header");
  } catch (const UsageError&) {
  }
  try {
    dashboard::parse_listen_address(text, "--dashboard");
  } catch (const UsageError&) {
  }
  return 0;
}
