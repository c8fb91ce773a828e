// A self-contained HTML page: text, tables and charts, with its style inside, without scripts and
// without anything to load. It follows the reader's light or dark setting and prints.
//
//   write_file_atomically("report.html", page("Run a", section("Loss", figures({draw(chart)}))));
//
// Functions take text and return HTML; whatever is text is escaped here and nowhere else.
#pragma once

#include <string>
#include <vector>

#include "lockstep/monitor/run_view.h"
#include "observe/report/chart.h"

namespace lockstep::report {

std::string paragraph(const std::string& text);
std::string note(const std::string& text);  // a remark that a reader should not miss
// Without its title.
std::string table(const monitor::Table& table);
std::string figures(const std::vector<Drawing>& drawings);
// Closed until the reader opens it.
std::string details(const std::string& summary, const std::string& html);
std::string section(const std::string& title, const std::string& html);
std::string page(const std::string& title, const std::string& html);

}  // namespace lockstep::report
