#include "observe/dashboard/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>

#include "lockstep/core/error.h"
#include "lockstep/io/file.h"

namespace lockstep::dashboard {
namespace {

std::string_view page_body(std::string_view path) {
  const auto found = std::ranges::find(page_files(), path, &PageFile::path);
  LOCKSTEP_ASSERT(found != page_files().end());
  return found->body;
}

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    const auto byte = [&](std::size_t i) {
      return at + i < bytes.size() ? static_cast<unsigned char>(bytes[at + i]) : 0u;
    };
    const unsigned three = byte(0) << 16 | byte(1) << 8 | byte(2);
    for (const unsigned shift : {18u, 12u, 6u, 0u}) text += kDigits[three >> shift & 63];
  }
  for (std::size_t i = bytes.size(); i % 3 != 0; ++i) text[text.size() - (3 - i % 3)] = '=';
  return text;
}

// The form in which a Content-Security-Policy identifies an element's text.
std::string hash_source(std::string_view text) {
  const std::string hex = io::sha256(std::as_bytes(std::span(text)));
  std::string digest;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    digest += static_cast<char>(std::strtol(hex.substr(i, 2).c_str(), nullptr, 16));
  return "'sha256-" + base64(digest) + "'";
}

void replace_all(std::string& text, std::string_view what, std::string_view with) {
  LOCKSTEP_ASSERT(text.find(what) != std::string::npos);
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += with.size())
    text.replace(at, what.size(), with);
}

// Nine digits distinguish seconds of a year and bytes of a tensor, and keep the file short.
Node point_number(double value) {
  if (!std::isfinite(value)) return Node{};
  return real_node(std::strtod(fmt::format("{:.9g}", value).c_str(), nullptr));
}

Node line_node(const ChartLine& line) {
  std::vector<Node> points;
  for (const auto& [x, y] : monitor::thinned(line.points, monitor::MetricsFile::kPoints))
    points.push_back(list_node({point_number(x), point_number(y)}));
  return map_node({{"name", text_node(line.name)},
                   {"points", list_node(std::move(points))},
                   {"reference", bool_node(line.reference)},
                   {"labels", texts_node(line.labels)}});
}

Node column_node(const ChartColumn& column) {
  std::vector<Node> numbers{point_number(column.from), point_number(column.to)};
  for (const double share : column.shares)
    numbers.push_back(point_number(std::round(1e4 * share) / 1e4));
  return list_node(std::move(numbers));
}

template <typename Item, typename Make>
Node nodes(const std::vector<Item>& items, const Make& make) {
  std::vector<Node> list;
  for (const Item& item : items) list.push_back(make(item));
  return list_node(std::move(list));
}

}  // namespace

std::string page_file(const Node& state) {
  const std::string_view style = page_body("/page.css");
  const std::string script = fmt::format("{}{}", page_body("/charts.js"), page_body("/page.js"));
  std::string page(page_body("/"));
  replace_all(page, "/icon.svg", "data:image/svg+xml;base64," + base64(page_body("/icon.svg")));
  replace_all(
      page, "<meta charset=\"utf-8\">",
      fmt::format("<meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" "
                  "content=\"default-src 'none'; script-src {}; style-src {}; img-src data:; "
                  "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
                  "trusted-types 'none'\">",
                  hash_source(script), hash_source(style)));
  replace_all(page, "<link rel=\"stylesheet\" href=\"/page.css\">",
              fmt::format("<style>{}</style>", style));
  for (const char* file : {"charts", "page"})
    replace_all(page, fmt::format("<script src=\"/{}.js\" defer></script>\n", file), "");
  // Escapes the data, so that no name in it can close its element.
  std::string data = to_json(state);
  if (data.find('<') != std::string::npos) replace_all(data, "<", "\\u003c");
  replace_all(page, "</body>",
              fmt::format("<script type=\"application/json\" id=\"data\">{}</script>\n"
                          "<script>{}</script>\n</body>",
                          data, script));
  return page;
}

Node charts_node(const std::vector<Chart>& charts) {
  return nodes(charts, [](const Chart& chart) {
    return map_node({{"title", text_node(chart.title)},
                     {"x_label", text_node(chart.x_label)},
                     {"y_label", text_node(chart.y_label)},
                     {"lines", nodes(chart.lines, line_node)},
                     {"parts", texts_node(chart.parts)},
                     {"columns", nodes(chart.columns, column_node)},
                     {"log", bool_node(chart.log)},
                     {"from_zero", bool_node(chart.from_zero)},
                     {"dots", bool_node(chart.dots)},
                     {"x_ticks", nodes(chart.x_ticks,
                                       [](const auto& tick) {
                                         return list_node(
                                             {point_number(tick.first), text_node(tick.second)});
                                       })},
                     {"note", text_node(chart.note)}});
  });
}

Node tables_node(const std::vector<monitor::Table>& tables) {
  return nodes(tables, [](const monitor::Table& table) {
    return map_node({{"title", text_node(table.title)},
                     {"heads", texts_node(table.heads)},
                     {"rows", nodes(table.rows, texts_node)},
                     {"notes", texts_node(table.notes)},
                     {"numbers", bool_node(table.numbers)}});
  });
}

}  // namespace lockstep::dashboard
