#include "observe/report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>

#include "lockstep/core/text.h"
#include "lockstep/monitor/metrics_file.h"
#include "observe/report/axis.h"
#include "observe/report/markup.h"

namespace lockstep::report {
namespace {

constexpr double kWidth = 560;
constexpr double kTop = 38, kRight = 18;
constexpr double kPlotHeight = 240;
constexpr double kCharacter = 6.8;  // of 12 px sans-serif, on the wide side
constexpr double kRow = 18;         // of a legend
constexpr double kBar = 26, kBarGap = 10;
constexpr std::size_t kMostMarked = 60;  // markers of more points cover the line

// By Colour. The first seven serve lines too; yellow on white is for fills alone.
struct Ink {
  const char* fill;
  const char* on;  // text on top of it
};
constexpr Ink kInks[] = {{"#0072b2", "#ffffff"}, {"#d55e00", "#000000"}, {"#009e73", "#000000"},
                         {"#cc79a7", "#000000"}, {"#56b4e9", "#000000"}, {"#e69f00", "#000000"},
                         {"#8a9099", "#000000"}, {"#f0e442", "#000000"}};
constexpr std::size_t kLineInks = 7;
constexpr std::size_t kReferenceInk = static_cast<std::size_t>(Colour::kGrey);
constexpr const char* kDashes[] = {"", "7 3", "2 3", "9 3 2 3"};

double text_width(std::string_view text) {
  std::string storage;
  return kCharacter * static_cast<double>(character_count(valid_utf8(text, storage)));
}

std::string fitting(std::string_view text, double width) {
  return shortened(text, static_cast<std::size_t>(std::max(4.0, width / kCharacter)));
}

std::string text_at(double x, double y, const char* anchor, std::string_view text,
                    const char* more = "") {
  return fmt::format(R"(<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>)", x, y, anchor,
                     more, escape(text));
}

// ---------------------------------------------------------------- frame

// Where the values are drawn.
struct Plot {
  double left = 0, right = 0, top = kTop, bottom = kTop + kPlotHeight;
  double width() const { return right - left; }
};

std::string title_of(const std::string& title) {
  return text_at(kWidth / 2, 20, "middle", fitting(title, kWidth / 1.15),
                 R"( font-weight="bold" font-size="13")");
}

std::string axis_titles(const Plot& plot, const std::string& x_label, const std::string& y_label) {
  std::string out = text_at((plot.left + plot.right) / 2, plot.bottom + 36, "middle",
                            fitting(x_label, plot.width()));
  if (!y_label.empty())
    out +=
        fmt::format(R"svg(<text transform="translate(14 {:.1f}) rotate(-90)" )svg"
                    R"(text-anchor="middle">{}</text>)",
                    (plot.top + plot.bottom) / 2, escape(fitting(y_label, plot.bottom - plot.top)));
  return out;
}

std::string grid_line(double x1, double y1, double x2, double y2, const char* kind = "grid") {
  const bool axis = std::string_view(kind) == "axis";
  return fmt::format(R"(<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" )"
                     R"(stroke="{}"/>)",
                     kind, x1, y1, x2, y2, axis ? "#555b66" : "#dfe2e6");
}

std::string y_ticks(const Plot& plot, const Axis& y, const std::vector<Tick>& ticks) {
  std::string out;
  for (const Tick& tick : ticks) {
    const double at = y.place(tick.value);
    out += grid_line(plot.left, at, plot.right, at) +
           text_at(plot.left - 6, at + 4, "end", tick.text, R"( class="y")");
  }
  return out;
}

// Those that would touch their neighbour are skipped.
std::string x_ticks(const Plot& plot, const Axis& x, const std::vector<Tick>& ticks) {
  std::string out;
  double end = -std::numeric_limits<double>::infinity();
  for (const Tick& tick : ticks) {
    const double at = x.place(tick.value), half = text_width(tick.text) / 2;
    if (at - half < end + 6) continue;
    end = at + half;
    out += grid_line(at, plot.bottom, at, plot.bottom + 4, "axis") +
           text_at(at, plot.bottom + 17, "middle", tick.text, R"( class="x")");
  }
  return out;
}

std::string frame(const Plot& plot) {
  return grid_line(plot.left, plot.bottom, plot.right, plot.bottom, "axis") +
         grid_line(plot.left, plot.top, plot.left, plot.bottom, "axis");
}

double widest(const std::vector<Tick>& ticks) {
  double width = 0;
  for (const Tick& tick : ticks) width = std::max(width, text_width(tick.text));
  return width;
}

// ---------------------------------------------------------------- legend

struct Entry {
  std::string sample;  // drawn around 0, 0; 22 px wide
  std::string name;
};

// In rows below the plot. Returns the height that it takes.
double add_legend(std::string& out, const std::vector<Entry>& entries, double left, double top) {
  double x = left, y = top;
  for (const Entry& entry : entries) {
    const std::string name = fitting(entry.name, kWidth - left - 60);
    const double width = 30 + text_width(name) + 12;
    if (x > left && x + width > kWidth) {
      x = left;
      y += kRow;
    }
    out +=
        fmt::format(R"svg(<g transform="translate({:.1f} {:.1f})">{}</g>)svg", x, y, entry.sample) +
        text_at(x + 28, y + 4, "start", name, R"( class="legend")");
    x += width;
  }
  return entries.empty() ? 0 : y - top + kRow;
}

std::vector<Entry> legend_of(const std::vector<Part>& parts) {
  std::vector<Entry> entries;
  for (const Part& part : parts)
    entries.push_back({fmt::format(R"(<rect x="8" y="-6" width="12" height="12" fill="{}"/>)",
                                   kInks[static_cast<std::size_t>(part.colour)].fill),
                       part.name});
  return entries;
}

Drawing finished(const std::string& title, const Plot& plot, std::string body,
                 const std::vector<Entry>& entries) {
  const double legend_top = plot.bottom + 58;
  const double legend = add_legend(body, entries, 16, legend_top);
  return {title, kWidth, legend_top - 8 + legend, std::move(body)};
}

Drawing without_values(const std::string& title, const Plot& plot, const std::string& body) {
  const std::string text = text_at((plot.left + plot.right) / 2, (plot.top + plot.bottom) / 2 + 4,
                                   "middle", "there are no values");
  return finished(title, plot, body + frame(plot) + text, {});
}

// ---------------------------------------------------------------- lines

struct Point {
  double x, y;
};

// The pieces between values that cannot be drawn.
std::vector<std::vector<Point>> placed(const Line& line, const Axis& x, const Axis& y) {
  std::vector<std::vector<Point>> pieces(1);
  // More points than a screen can show would only make the file large.
  for (const auto& [px, py] : monitor::thinned(line.points, 4 * static_cast<std::size_t>(kWidth))) {
    if (x.holds(px) && y.holds(py))
      pieces.back().push_back({x.place(px), y.place(py)});
    else if (!pieces.back().empty())
      pieces.emplace_back();
  }
  if (pieces.back().empty()) pieces.pop_back();
  return pieces;
}

std::string marker(std::size_t index, std::size_t ink, double x, double y) {
  if (index % 2 == 0)
    return fmt::format(R"(<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="3.5" fill="{}"/>)",
                       ink, x, y, kInks[ink].fill);
  return fmt::format(
      R"(<rect class="dot c{}" x="{:.1f}" y="{:.1f}" width="7" height="7" fill="{}"/>)", ink,
      x - 3.5, y - 3.5, kInks[ink].fill);
}

// How the line with this index is drawn.
struct Pen {
  Pen(const Line& line, std::size_t index)
      : index(index),
        ink(line.reference ? kReferenceInk : index % kLineInks),
        dash(line.reference ? "5 4" : kDashes[index / kLineInks % std::size(kDashes)]),
        marked(line.marked && line.points.size() <= kMostMarked) {}

  std::string stroke() const {
    return fmt::format(R"(class="line c{}" fill="none" stroke="{}" stroke-width="{}"{})", ink,
                       kInks[ink].fill, 1.8,
                       *dash != '\0' ? fmt::format(R"( stroke-dasharray="{}")", dash) : "");
  }
  std::string polyline(const std::vector<Point>& points) const {
    std::string path;
    for (const Point& point : points)
      path += fmt::format("{}{:.1f},{:.1f}", path.empty() ? "" : " ", point.x, point.y);
    return fmt::format(R"(<polyline {} points="{}"/>)", stroke(), path);
  }

  std::size_t index, ink;
  const char* dash;
  bool marked;
};

std::string draw_line(const Line& line, const Pen& pen, const Axis& x, const Axis& y) {
  std::string out;
  for (const auto& points : placed(line, x, y)) {
    if (points.size() > 1) out += pen.polyline(points);
    // A value alone between two gaps would not be seen.
    if (pen.marked || points.size() == 1)
      for (const Point& point : points) out += marker(pen.index, pen.ink, point.x, point.y);
  }
  return out;
}

double label_width(const std::vector<Line>& lines) {
  double width = 0;
  for (const Line& line : lines)
    for (const std::string& label : line.labels) width = std::max(width, text_width(label));
  return std::min(width, kWidth / 4);
}

// Below and to the right of each point, where a line that rises does not cross it.
std::string point_labels(const Line& line, const Axis& x, const Axis& y) {
  std::string out;
  for (std::size_t i = 0; i < std::min(line.labels.size(), line.points.size()); ++i) {
    const auto [px, py] = line.points[i];
    if (line.labels[i].empty() || !x.holds(px) || !y.holds(py)) continue;
    out += text_at(x.place(px) + 6, y.place(py) + 17, "start", fitting(line.labels[i], kWidth / 4));
  }
  return out;
}

std::string draw_marks(const std::vector<Mark>& marks, const Plot& plot, const Axis& x) {
  std::string out;
  double end = -std::numeric_limits<double>::infinity();
  for (const Mark& mark : marks) {
    if (!x.holds(mark.x)) continue;
    const double at = x.place(mark.x);
    if (at < plot.left - 0.5 || at > plot.right + 0.5) continue;
    out += fmt::format(R"(<line class="mark" x1="{0:.1f}" y1="{1:.1f}" x2="{0:.1f}" y2="{2:.1f}" )"
                       R"(stroke="#b00020" stroke-dasharray="2 3"><title>{3}</title></line>)",
                       at, plot.top, plot.bottom, escape(mark.label));
    const std::string label = shortened(mark.label, 24);
    const double width = text_width(label);
    const bool left = at + 4 + width > plot.right;
    const double from = left ? at - 4 - width : at + 4;
    if (from < end + 6 || from < plot.left) continue;
    end = from + width;
    out += text_at(left ? at - 4 : at + 4, plot.top + 12, left ? "end" : "start", label,
                   R"( class="mark")");
  }
  return out;
}

struct Ranges {
  std::vector<double> xs, ys;
};

Ranges ranges_of(const LineChart& chart) {
  Ranges ranges;
  const auto usable = [](double value, Scale scale) {
    return Axis{.log = scale == Scale::kLog}.holds(value);
  };
  for (const Line& line : chart.lines) {
    for (const auto& [x, y] : line.points) {
      if (!usable(x, chart.x_scale) || !usable(y, chart.y_scale)) continue;
      ranges.xs.push_back(x);
      ranges.ys.push_back(y);
    }
  }
  return ranges;
}

std::vector<Tick> x_ticks_of(const LineChart& chart, const Axis& x, const Ranges& ranges) {
  std::vector<Tick> found;
  if (chart.ticks_at_points) {
    for (const double value : std::set<double>(ranges.xs.begin(), ranges.xs.end()))
      found.push_back({value, plain_number(value)});
  } else {
    found = ticks(x, 7, chart.whole_x);
  }
  if (chart.x_text != nullptr)
    for (Tick& tick : found) tick.text = chart.x_text(tick.value);
  return found;
}

}  // namespace

Drawing draw(const LineChart& chart) {
  const Ranges ranges = ranges_of(chart);
  Axis y = axis_over(
      ranges.ys,
      {.log = chart.y_scale == Scale::kLog, .from_zero = chart.y_from_zero, .margin = 0.06});
  y.from = kTop + kPlotHeight;
  y.to = kTop;
  const auto rows = ticks(y, 5, false);
  const Plot plot{.left = 30 + widest(rows), .right = kWidth - kRight};
  Axis x = axis_over(ranges.xs, {.log = chart.x_scale == Scale::kLog,
                                 .from_zero = chart.x_from_zero,
                                 .margin = chart.ticks_at_points ? 0.06 : 0.02});
  x.from = plot.left;
  x.to = plot.right - label_width(chart.lines);
  std::string body = title_of(chart.title) + axis_titles(plot, chart.x_label, chart.y_label);
  std::vector<Entry> entries;
  if (ranges.xs.empty()) return without_values(chart.title, plot, body);
  body += y_ticks(plot, y, rows) + x_ticks(plot, x, x_ticks_of(chart, x, ranges)) + frame(plot) +
          draw_marks(chart.marks, plot, x);
  std::string labels;
  for (std::size_t i = 0; i < chart.lines.size(); ++i) {
    const Line& line = chart.lines[i];
    const Pen pen(line, i);
    body += draw_line(line, pen, x, y);
    labels += point_labels(line, x, y);
    entries.push_back({fmt::format(R"(<line {} x1="0" y1="0" x2="22" y2="0"/>)", pen.stroke()) +
                           (pen.marked ? marker(i, pen.ink, 11, 0) : ""),
                       line.name});
  }
  if (chart.lines.size() == 1 && !chart.lines[0].reference) entries.clear();
  return finished(chart.title, plot, body + labels, entries);
}

// ---------------------------------------------------------------- bars

namespace {

std::string draw_bar(const Bar& bar, const BarChart& chart, const Axis& x, double top) {
  std::string out;
  double sum = 0, before = 0;
  for (const double value : bar.values) sum += std::max(0.0, value);
  for (std::size_t i = 0; i < std::min(bar.values.size(), chart.parts.size()); ++i) {
    const double value = bar.values[i];
    if (!(value > 0)) continue;
    const double from = x.place(before), width = x.place(before + value) - from;
    const Ink& ink = kInks[static_cast<std::size_t>(chart.parts[i].colour)];
    const std::string share = fmt::format("{:.0f} %", 100 * value / sum);
    out += fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.0f}" fill="{}">)"
                       R"(<title>{}: {} ({})</title></rect>)",
                       from, top, width, kBar, ink.fill, escape(chart.parts[i].name),
                       plain_number(value), share);
    if (width > text_width(share) + 4)
      out += fmt::format(R"(<text class="on" x="{:.1f}" y="{:.1f}" text-anchor="middle" )"
                         R"(fill="{}">{}</text>)",
                         from + width / 2, top + kBar / 2 + 4, ink.on, share);
    before += value;
  }
  return out + text_at(x.place(sum) + 5, top + kBar / 2 + 4, "start", plain_number(sum));
}

}  // namespace

Drawing draw(const BarChart& chart) {
  double widest_label = 0, largest = 0;
  for (const Bar& bar : chart.bars) {
    double sum = 0;
    for (const double value : bar.values) sum += std::max(0.0, value);
    largest = std::max(largest, sum);
    widest_label = std::max(widest_label, text_width(bar.label));
  }
  const double left = std::min(widest_label, 150.0) + 16;
  const double rows = static_cast<double>(std::max<std::size_t>(chart.bars.size(), 1));
  const Plot plot{.left = left,
                  .right = kWidth - kRight - 46,
                  .bottom = kTop + kBarGap + rows * (kBar + kBarGap)};
  Axis x = axis_over({0, largest}, {.from_zero = true});
  x.from = plot.left;
  x.to = plot.right;
  std::string body = title_of(chart.title) + axis_titles(plot, chart.x_label, "");
  if (chart.bars.empty() || largest <= 0) return without_values(chart.title, plot, body);
  const auto columns = ticks(x, 6, false);
  for (const Tick& tick : columns)
    body += grid_line(x.place(tick.value), plot.top, x.place(tick.value), plot.bottom);
  body += x_ticks(plot, x, columns) + frame(plot);
  double top = kTop + kBarGap;
  for (const Bar& bar : chart.bars) {
    body += text_at(plot.left - 7, top + kBar / 2 + 4, "end", fitting(bar.label, left - 12)) +
            draw_bar(bar, chart, x, top);
    top += kBar + kBarGap;
  }
  return finished(chart.title, plot, std::move(body), legend_of(chart.parts));
}

Drawing draw(const ColumnChart& chart) {
  std::vector<double> ends;
  for (const Column& column : chart.columns) ends.insert(ends.end(), {column.from, column.to});
  Axis y{.low = 0, .high = 1, .from = kTop + kPlotHeight, .to = kTop};
  const std::vector<Tick> rows{
      {0, "0 %"}, {0.25, "25 %"}, {0.5, "50 %"}, {0.75, "75 %"}, {1, "100 %"}};
  const Plot plot{.left = 16 + widest(rows), .right = kWidth - kRight};
  Axis x = axis_over(ends, {});
  x.from = plot.left;
  x.to = plot.right;
  std::string body = title_of(chart.title) + axis_titles(plot, chart.x_label, "");
  if (ends.empty()) return without_values(chart.title, plot, body);
  std::vector<std::string> paths(chart.parts.size());
  for (const Column& column : chart.columns) {
    double sum = 0, before = 0;
    for (const double value : column.values) sum += std::max(0.0, value);
    if (!(sum > 0)) continue;
    const double from = x.place(column.from), to = x.place(column.to);
    for (std::size_t i = 0; i < std::min(paths.size(), column.values.size()); ++i) {
      const double share = std::max(0.0, column.values[i]) / sum;
      if (share <= 0) continue;
      const double low = y.place(before), high = y.place(before += share);
      // Edges as such, not widths: neighbours are rounded to the same place.
      paths[i] += fmt::format("M{0:.1f} {1:.1f}H{2:.1f}V{3:.1f}H{0:.1f}z", from, low, to, high);
    }
  }
  body += y_ticks(plot, y, rows);
  for (std::size_t i = 0; i < paths.size(); ++i)
    if (!paths[i].empty())
      body += fmt::format(R"(<path shape-rendering="crispEdges" fill="{}" d="{}"/>)",
                          kInks[static_cast<std::size_t>(chart.parts[i].colour)].fill, paths[i]);
  body += x_ticks(plot, x, ticks(x, 7, false)) + frame(plot);
  return finished(chart.title, plot, std::move(body), legend_of(chart.parts));
}

// ---------------------------------------------------------------- files

namespace {

constexpr const char* kFont = R"(font-family="sans-serif" font-size="12" fill="#1c1f24")";

std::string header_of(double width, double height, const std::string& title) {
  return fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {0:.0f} {1:.0f}" )"
      R"(width="{0:.0f}" height="{1:.0f}" role="img" aria-label="{2}" {3}>)",
      width, height, escape(title), kFont);
}

}  // namespace

// Attributes are the light colours, so that a viewer without CSS shows the chart as well. Blue and
// grey lines are too dark for a dark page.
std::string chart_style() {
  return "@media screen and (prefers-color-scheme:dark){"
         ".chart{fill:#e4e7ec}.chart .page{fill:#15181d}.chart .grid{stroke:#343a44}"
         ".chart .axis{stroke:#9aa3b0}.chart text.mark{fill:#ff8a9a}.chart "
         "line.mark{stroke:#ff8a9a}"
         ".chart .line.c0{stroke:#4da6e0}.chart .dot.c0{fill:#4da6e0}"
         ".chart .line.c6{stroke:#aab1bc}.chart .dot.c6{fill:#aab1bc}}";
}

std::string svg_element(const Drawing& drawing) {
  return header_of(drawing.width, drawing.height, drawing.title) + drawing.body + "</svg>";
}

std::string svg_file(const std::vector<Drawing>& drawings) {
  double width = 0, height = 0;
  std::string titles;
  for (const Drawing& drawing : drawings) {
    width += drawing.width;
    height = std::max(height, drawing.height);
    titles += (titles.empty() ? "" : "; ") + drawing.title;
  }
  std::string out = header_of(width, height, titles) +
                    fmt::format("<style>{}</style>", chart_style()) +
                    R"(<rect class="page" width="100%" height="100%" fill="white"/>)";
  double left = 0;
  for (const Drawing& drawing : drawings) {
    out += fmt::format(R"svg(<g transform="translate({:.0f} 0)">{}</g>)svg", left, drawing.body);
    left += drawing.width;
  }
  return out + "</svg>\n";
}

}  // namespace lockstep::report
