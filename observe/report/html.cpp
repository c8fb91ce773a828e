#include "observe/report/html.h"

#include <fmt/format.h>

#include "observe/report/markup.h"

namespace lockstep::report {
namespace {

constexpr const char* kStyle = R"(
:root{color-scheme:light dark;--page:#fff;--text:#1c1f24;--dim:#5b6472;--rule:#dfe2e6;
--band:#f5f6f8;--note:#fff6dc}
@media screen and (prefers-color-scheme:dark){:root{--page:#15181d;--text:#e4e7ec;--dim:#9aa3b0;
--rule:#343a44;--band:#1d2127;--note:#3a3216}}
body{margin:0 auto;padding:1.2rem;max-width:76rem;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.2rem 0 .6rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:1.8rem 0 .6rem;border-bottom:1px solid var(--rule);padding-bottom:.2rem}
p{margin:.4rem 0;overflow-wrap:anywhere}
.note{background:var(--note);padding:.4rem .7rem;border-radius:4px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;margin:.4rem 0}
th,td{padding:.25rem .7rem;border-bottom:1px solid var(--rule);text-align:left;vertical-align:top}
th{color:var(--dim);font-weight:600}
td:not(:first-child){overflow-wrap:anywhere;min-width:5.5rem}
tr:nth-child(even) td{background:var(--band)}
.numbers td:not(:first-child),.numbers th:not(:first-child){text-align:right;
font-variant-numeric:tabular-nums;white-space:nowrap}
.figures{display:flex;flex-wrap:wrap;align-items:flex-start;gap:1rem}
.chart{max-width:100%;height:auto}
summary{cursor:pointer;color:var(--dim)}
@media (max-width:30rem){body{padding:.8rem}th,td{padding:.25rem .4rem}}
)";

}  // namespace

std::string paragraph(const std::string& text) {
  return fmt::format("<p>{}</p>\n", escape(text));
}

std::string note(const std::string& text) {
  return fmt::format("<p class=\"note\">{}</p>\n", escape(text));
}

std::string table(const monitor::Table& table) {
  std::string out;
  if (!table.rows.empty()) {
    out = fmt::format("<div class=\"scroll\"><table{}>\n<tr>",
                      table.numbers ? " class=\"numbers\"" : "");
    for (const std::string& head : table.heads) out += fmt::format("<th>{}</th>", escape(head));
    out += "</tr>\n";
    for (const auto& row : table.rows) {
      out += "<tr>";
      for (const std::string& cell : row) out += fmt::format("<td>{}</td>", escape(cell));
      out += "</tr>\n";
    }
    out += "</table></div>\n";
  }
  for (const std::string& note : table.notes) out += paragraph(note);
  return out;
}

std::string figures(const std::vector<Drawing>& drawings) {
  std::string out = "<div class=\"figures\">\n";
  for (const Drawing& drawing : drawings) out += svg_element(drawing) + "\n";
  return out + "</div>\n";
}

std::string details(const std::string& summary, const std::string& html) {
  return fmt::format("<details><summary>{}</summary>\n{}</details>\n", escape(summary), html);
}

std::string section(const std::string& title, const std::string& html) {
  return fmt::format("<section>\n<h2>{}</h2>\n{}</section>\n", escape(title), html);
}

// The policy forbids scripts and everything that would have to be loaded, whatever a name in the
// page says.
std::string page(const std::string& title, const std::string& html) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
      "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{0}</title>\n<style>{1}{2}</style>\n</head>\n<body>\n<h1>{0}</h1>\n{3}</body>\n"
      "</html>\n",
      escape(title), kStyle, chart_style(), html);
}

}  // namespace lockstep::report
