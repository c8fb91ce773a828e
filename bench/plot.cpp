#include "bench/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace lockstep::bench {
namespace {

constexpr double kWidth = 520, kHeight = 380;
constexpr double kLeft = 70, kRight = 16, kTop = 40, kBottom = 56;
constexpr double kLegend = 30;
// Distinguishable for colour-blind readers, and by their markers.
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"};
constexpr std::size_t kColourCount = std::size(kColours);

// One axis: maps values to positions between `from` and `to`.
struct Axis {
  double low, high, from, to;
  double place(double value) const {
    const double part = (std::log(value) - std::log(low)) / (std::log(high) - std::log(low));
    return from + part * (to - from);
  }
};

Axis axis_over(const std::vector<double>& values, double from, double to) {
  double low = std::numeric_limits<double>::max(), high = 0;
  for (const double value : values) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  if (!(high > 0)) low = high = 1;
  return {low / 1.3, high * 1.3, from, to};
}

std::string number(double value) {
  return value >= 1000 ? fmt::format("{:.0f}", value) : fmt::format("{:.3g}", value);
}

std::string y_axis(const Axis& y) {
  std::string out;
  const double first = std::pow(10, std::ceil(std::log10(y.low)));
  for (double tick = first; tick <= y.high; tick *= 10) {
    const double place = y.place(tick);
    out += fmt::format(R"(<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="#ddd"/>)"
                       R"(<text x="{:.1f}" y="{:.1f}" text-anchor="end">{}</text>)",
                       kLeft, place, kWidth - kRight, place, kLeft - 6, place + 4, number(tick));
  }
  return out;
}

std::string x_axis(const Axis& x, const Panel& panel) {
  std::set<double> values;
  for (const auto& line : panel.lines)
    for (const auto& point : line.points) values.insert(point.first);
  std::string out;
  double last = -100;
  for (const double value : values) {
    const double place = x.place(value);
    if (place - last < 38) continue;
    last = place;
    out += fmt::format(R"(<text x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>)", place,
                       kHeight - kBottom + 18, panel.x_text ? panel.x_text(value) : number(value));
  }
  return out;
}

std::string marker(std::size_t index, double x, double y) {
  const char* colour = kColours[index % kColourCount];
  if (index % 2 == 0)
    return fmt::format(R"(<circle cx="{:.1f}" cy="{:.1f}" r="3.5" fill="{}"/>)", x, y, colour);
  return fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="7" height="7" fill="{}"/>)", x - 3.5,
                     y - 3.5, colour);
}

std::string draw(const Panel& panel) {
  std::vector<double> xs, ys;
  for (const auto& line : panel.lines) {
    for (const auto& [x, y] : line.points) {
      xs.push_back(x);
      ys.push_back(y);
    }
  }
  const Axis x = axis_over(xs, kLeft, kWidth - kRight);
  const Axis y = axis_over(ys, kHeight - kBottom, kTop);
  std::string out = y_axis(y) + x_axis(x, panel);
  out += fmt::format(
      R"(<text x="{:.1f}" y="22" text-anchor="middle" font-weight="bold">{}</text>)"
      R"(<text x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>)"
      R"svg(<text transform="translate(16 {:.1f}) rotate(-90)" text-anchor="middle">{}</text>)svg",
      kWidth / 2, panel.title, (kLeft + kWidth - kRight) / 2, kHeight - 12, panel.x_label,
      (kTop + kHeight - kBottom) / 2, panel.y_label);
  for (std::size_t i = 0; i < panel.lines.size(); ++i) {
    std::string path, marks;
    for (const auto& [px, py] : panel.lines[i].points) {
      path += fmt::format("{:.1f},{:.1f} ", x.place(px), y.place(py));
      marks += marker(i, x.place(px), y.place(py));
    }
    out += fmt::format(R"(<polyline fill="none" stroke="{}" stroke-width="2" points="{}"/>{})",
                       kColours[i % kColourCount], path, marks);
  }
  return out;
}

std::string legend(const std::vector<Line>& lines) {
  std::string out;
  double x = kLeft;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    out += marker(i, x, kHeight + 8);
    out +=
        fmt::format(R"(<text x="{:.1f}" y="{:.1f}">{}</text>)", x + 9, kHeight + 12, lines[i].name);
    x += 30 + 7.2 * static_cast<double>(lines[i].name.size());
  }
  return out;
}

}  // namespace

std::string svg(const std::vector<Panel>& panels) {
  const double width = kWidth * static_cast<double>(panels.size());
  std::string out = fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" )"
      R"(height="{1:.0f}" font-family="sans-serif" font-size="12">)"
      R"(<rect width="100%" height="100%" fill="white"/>)",
      width, kHeight + kLegend);
  for (std::size_t i = 0; i < panels.size(); ++i)
    out += fmt::format(R"svg(<g transform="translate({:.0f} 0)">{}</g>)svg",
                       kWidth * static_cast<double>(i), draw(panels[i]));
  if (!panels.empty()) out += legend(panels[0].lines);
  return out + "</svg>\n";
}

}  // namespace lockstep::bench
