#include "bench/stats.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::bench {

Summary summarize(std::vector<double> samples) {
  LOCKSTEP_ASSERT(!samples.empty());
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double q) {
    const double position = q * static_cast<double>(samples.size() - 1);
    const auto low = static_cast<std::size_t>(position);
    const auto high = std::min(low + 1, samples.size() - 1);
    const double part = position - std::floor(position);
    return samples[low] * (1 - part) + samples[high] * part;
  };
  return {samples.front(), at(0.25), at(0.5), at(0.75), at(0.99), samples.back()};
}

double median(std::vector<double> samples) {
  return summarize(std::move(samples)).p50;
}

std::string Table::text() const {
  std::vector<std::size_t> widths;
  for (const auto& head : heads_) widths.push_back(head.size());
  for (const auto& row : rows_)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string out;
    for (std::size_t i = 0; i < cells.size(); ++i)
      out += i == 0 ? fmt::format("{:<{}}", cells[i], widths[i])
                    : fmt::format("  {:>{}}", cells[i], widths[i]);
    return out + "\n";
  };
  std::string out = line(heads_);
  for (const auto& row : rows_) out += line(row);
  return out;
}

// A cell that contains a comma or a quote is quoted (RFC 4180).
std::string Table::csv() const {
  const auto line = [](const std::vector<std::string>& cells) {
    std::vector<std::string> out;
    for (const std::string& cell : cells) {
      const bool plain = cell.find_first_of(",\"\n") == std::string::npos;
      std::string quoted;
      for (const char c : cell) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
      out.push_back(plain ? cell : "\"" + quoted + "\"");
    }
    return fmt::format("{}\n", fmt::join(out, ","));
  };
  std::string out = line(heads_);
  for (const auto& row : rows_) out += line(row);
  return out;
}

void publish(const Table& table, const std::string& csv_path) {
  fmt::print("{}", table.text());
  if (csv_path.empty()) return;
  write_file_atomically(csv_path, table.csv());
  fmt::print("written to {}\n", csv_path);
}

}  // namespace lockstep::bench
