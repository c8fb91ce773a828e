#include "bench/harness.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "lockstep/comm/device.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"

namespace lockstep::bench {

// ---------------------------------------------------------------- figures

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

Summary over(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) ratios.push_back(a[i] / b[i]);
  return summarize(std::move(ratios));
}

double parse_scaled(const std::string& text, double kilo) {
  char* end = nullptr;
  double number = std::strtod(text.c_str(), &end);
  if (end == text.c_str()) return NAN;
  if (*end == '\0') return number;
  for (const char unit : {'k', 'm', 'g'}) {
    number *= kilo;
    if (std::tolower(*end) == unit) return end[1] == '\0' ? number : NAN;
  }
  return NAN;
}

// ---------------------------------------------------------------- the report

Row& Row::text(const std::string& head, std::string cell) {
  cells_.emplace_back(head, std::move(cell));
  return *this;
}

Row& Row::value(const std::string& key, const nlohmann::json& value) {
  values_[key] = value;
  return *this;
}

Row& Row::number(const std::string& head, std::optional<double> value, int decimals,
                 const std::string& key) {
  if (value && !key.empty()) values_[key] = *value;
  return text(head, value ? fmt::format("{:.{}f}", *value, decimals) : "-");
}

Row& Row::spread(const std::string& unit, const std::vector<double>& samples, int decimals,
                 const char* which) {
  const Summary s = summarize(samples);
  const std::map<std::string, double> members{{"min", s.min}, {"p25", s.p25}, {"p50", s.p50},
                                              {"p75", s.p75}, {"p99", s.p99}, {"max", s.max}};
  for (const std::string& name : split(which, ' '))
    number(unit.empty() ? name : name + " " + unit, members.at(name), decimals,
           unit.empty() ? name : name + "_" + unit);
  return *this;
}

Row& Row::ratio(const std::string& head, const Summary& ratio, const std::string& key) {
  const auto keyed = [&](const char* quartile) { return key.empty() ? key : key + quartile; };
  return number(head, ratio.p50, 3, key)
      .number("p25", ratio.p25, 3, keyed("_p25"))
      .number("p75", ratio.p75, 3, keyed("_p75"));
}

Report::Report(const std::string& benchmark, std::string title, nlohmann::json facts)
    : title_(std::move(title)), facts_(std::move(facts)) {
  facts_["benchmark"] = benchmark;
}

Row& Report::row(const std::string& name) {
  rows_.push_back(std::make_unique<Row>());
  return rows_.back()->text(title_, name).value("contender", name);
}

std::vector<std::vector<std::string>> Report::lines() const {
  std::vector<std::vector<std::string>> all(1);
  if (rows_.empty()) return {{title_}};
  for (const auto& cell : rows_.front()->cells_) all.front().push_back(cell.first);
  for (const auto& row : rows_) {
    all.emplace_back();
    for (const auto& cell : row->cells_) all.back().push_back(cell.second);
  }
  return all;
}

std::string Report::text() const {
  const auto all = lines();
  std::vector<std::size_t> widths(all.front().size());
  for (const auto& cells : all)
    for (std::size_t i = 0; i < cells.size(); ++i) widths[i] = std::max(widths[i], cells[i].size());
  std::string out;
  for (const auto& cells : all) {
    for (std::size_t i = 0; i < cells.size(); ++i)
      out += i == 0 ? fmt::format("{:<{}}", cells[i], widths[i])
                    : fmt::format("  {:>{}}", cells[i], widths[i]);
    out += "\n";
  }
  return out;
}

// A cell that contains a comma or a quote is quoted (RFC 4180).
std::string Report::csv() const {
  std::string out;
  for (auto cells : lines()) {
    for (std::string& cell : cells) {
      if (cell.find_first_of(",\"\n") == std::string::npos) continue;
      std::string quoted;
      for (const char c : cell) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
      cell = "\"" + quoted + "\"";
    }
    out += fmt::format("{}\n", fmt::join(cells, ","));
  }
  return out;
}

std::string Report::json() const {
  nlohmann::json document = facts_;
  for (const auto& row : rows_) document["rows"].push_back(row->values_);
  return document.dump(1) + "\n";
}

void Report::publish(const Options& options) const {
  fmt::print("{}", text());
  if (!options.csv.empty()) {
    write_file_atomically(options.csv, csv());
    fmt::print("written to {}\n", options.csv);
  }
  if (!options.json.empty()) write_file_atomically(options.json, json());
}

// Command lines of the benchmarks: CLI11 with the conventions of the other commands.

namespace {

std::string device_problem(const std::string& value) {
  const std::string number = value.starts_with("cuda:") ? value.substr(5) : "";
  const bool numbered = !number.empty() && number.size() < 4 &&
                        number.find_first_not_of("0123456789") == std::string::npos;
  if (value == "cpu" || value == "cuda" || numbered) return "";
  return fmt::format("'{}' is not a device; use cpu, cuda or cuda:N", value);
}

// The first word that no option took, if it looks like an option.
std::optional<std::string> unknown_option(const CLI::App& app) {
  for (const std::string& word : app.remaining()) {
    if (!word.starts_with("--")) continue;
    std::vector<std::string> known;
    for (const CLI::Option* option : app.get_options())
      for (const std::string& known_name : option->get_lnames()) known.push_back("--" + known_name);
    const auto meant = nearest(word, known);
    return fmt::format("there is no option {}{}", word,
                       meant ? fmt::format(" (did you mean {}?)", *meant) : "");
  }
  return std::nullopt;
}

}  // namespace

std::string positive_problem(const std::string& value) {
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (!value.empty() && *end == '\0' && std::isfinite(number) && number > 0) return "";
  return fmt::format("'{}' is not a number above zero", value);
}

void prepare_device(const std::string& device) {
  if (device == "cpu") return;
  const int visible = cuda_device_count();
  const auto colon = device.find(':');
  if ((colon == std::string::npos ? 0 : std::stoll(device.substr(colon + 1))) >= visible)
    throw UsageError("bench", "--device {}: {} CUDA device{} visible. Use --device cpu{}.", device,
                     visible, visible == 1 ? " is" : "s are",
                     visible > 0 ? ", or a smaller number" : "");
  load_cuda();
}

Options::Options(const std::string& about, bool publishes)
    : app_(std::make_unique<CLI::App>(about)), publishes_(publishes) {}
Options::~Options() = default;

template <typename T>
void Options::number(const char* name, T& value, double least, double most, const char* help) {
  CLI::Option* option = app_->add_option(name, value, help);
  if constexpr (std::is_same_v<T, double>)
    option->check(CLI::Range(least, most));
  else
    option->check(CLI::Range(static_cast<std::int64_t>(least), static_cast<std::int64_t>(most)));
  // What follows a list may be a file.
  if constexpr (std::is_same_v<T, std::vector<int>>)
    option->delimiter(',')->allow_extra_args(false);
}
template void Options::number(const char*, int&, double, double, const char*);
template void Options::number(const char*, std::int64_t&, double, double, const char*);
template void Options::number(const char*, double&, double, double, const char*);
template void Options::number(const char*, std::vector<int>&, double, double, const char*);

void Options::positive(const char* name, double& value, const char* help) {
  app_->add_option(name, value, help)->check(positive_problem, "POSITIVE");
}

void Options::text(const char* name, std::string& value, const char* help,
                   std::vector<std::string> choices) {
  CLI::Option* option = app_->add_option(name, value, help);
  if (!choices.empty()) option->check(CLI::IsMember(std::move(choices)));
}

void Options::list(const char* name, std::vector<std::string>& values, const char* help,
                   std::vector<std::string> choices) {
  CLI::Option* option =
      app_->add_option(name, values, help)->delimiter(',')->allow_extra_args(false);
  if (!choices.empty()) option->check(CLI::IsMember(std::move(choices)));
}

void Options::flag(const char* name, bool& value, const char* help) {
  app_->add_flag(name, value, help);
}

void Options::device(std::string& value) {
  app_->add_option("--device", value, "cpu, cuda or cuda:N")->check(device_problem);
}

std::optional<int> Options::parse(int argc, char** argv) {
  const std::string name = fmt::format("lockstep bench {}", argv[0]);
  app_->name(name);
  if (publishes_) {
    text("--csv", csv, "also write the table to this file");
    text("--json", json, "also write the figures, with those of every round, to this file");
  }
  for (CLI::Option* option : app_->get_options()) option->capture_default_str();
  app_->failure_message([&name](const CLI::App* failed, const CLI::Error& error) {
    return fmt::format("{}: {}. '{} --help' lists its options.\n", name,
                       unknown_option(*failed).value_or(error.what()), name);
  });
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    constexpr int kUsage = 2;  // CLI11 has a code of its own for each kind of mistake
    return app_->exit(error) == 0 ? 0 : kUsage;
  }
  return std::nullopt;
}

}  // namespace lockstep::bench
