// Draws the chart that standard input describes as JSON, so that another language's XML parser can
// look at it: report_peer <chart.json >chart.svg
#include <cmath>
#include <cstdio>
#include <iostream>
#include <iterator>

#include "lockstep/core/document.h"
#include "observe/report/chart.h"

namespace lockstep::report {
namespace {

double number(const Node& node) {
  return node.is(NodeKind::kNull) ? NAN : as_real(node, "value");
}

std::string text(const Node& root, const char* key) {
  const Entry* entry = root.find(key);
  return entry == nullptr ? "" : as_string(entry->value, key);
}

bool flag(const Node& root, const char* key) {
  const Entry* entry = root.find(key);
  return entry != nullptr && as_bool(entry->value, key);
}

std::vector<double> numbers(const Node& list) {
  std::vector<double> values;
  for (const Node& item : list.items) values.push_back(number(item));
  return values;
}

std::vector<Part> parts(const Node& root) {
  std::vector<Part> found;
  for (const Node& item : root.at("parts").items)
    found.push_back({as_string(item, "part"), static_cast<Colour>(found.size() % 8)});
  return found;
}

Drawing lines(const Node& root) {
  LineChart chart{.title = text(root, "title"),
                  .x_label = text(root, "x_label"),
                  .y_label = text(root, "y_label"),
                  .x_scale = flag(root, "x_log") ? Scale::kLog : Scale::kLinear,
                  .y_scale = flag(root, "y_log") ? Scale::kLog : Scale::kLinear,
                  .x_from_zero = flag(root, "x_from_zero"),
                  .y_from_zero = flag(root, "y_from_zero"),
                  .whole_x = flag(root, "whole_x"),
                  .ticks_at_points = flag(root, "ticks_at_points")};
  for (const Node& item : root.at("lines").items) {
    Line line{.name = text(item, "name"),
              .marked = flag(item, "marked"),
              .reference = flag(item, "reference")};
    for (const Node& point : item.at("points").items)
      line.points.emplace_back(number(point.items[0]), number(point.items[1]));
    if (const Entry* labels = item.find("labels"))
      for (const Node& label : labels->value.items)
        line.labels.push_back(as_string(label, "label"));
    chart.lines.push_back(std::move(line));
  }
  if (const Entry* marks = root.find("marks"))
    for (const Node& mark : marks->value.items)
      chart.marks.push_back({number(mark.items[0]), as_string(mark.items[1], "mark")});
  return draw(chart);
}

Drawing bars(const Node& root) {
  BarChart chart{
      .title = text(root, "title"), .x_label = text(root, "x_label"), .parts = parts(root)};
  for (const Node& bar : root.at("bars").items)
    chart.bars.push_back({text(bar, "label"), numbers(bar.at("values"))});
  return draw(chart);
}

Drawing columns(const Node& root) {
  ColumnChart chart{
      .title = text(root, "title"), .x_label = text(root, "x_label"), .parts = parts(root)};
  for (const Node& column : root.at("columns").items)
    chart.columns.push_back(
        {number(column.at("from")), number(column.at("to")), numbers(column.at("values"))});
  return draw(chart);
}

int run() {
  const std::string input{std::istreambuf_iterator<char>(std::cin), {}};
  const Node root = parse_json(input, "stdin", {.bytes = 64u << 20, .nodes = 10'000'000});
  const std::string kind = text(root, "kind");
  const Drawing drawing = kind == "bars"      ? bars(root)
                          : kind == "columns" ? columns(root)
                                              : lines(root);
  const std::string svg = svg_file({drawing});
  return std::fwrite(svg.data(), 1, svg.size(), stdout) == svg.size() ? 0 : 1;
}

}  // namespace
}  // namespace lockstep::report

int main() {
  return lockstep::report::run();
}
