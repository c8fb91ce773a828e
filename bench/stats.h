// Numbers a benchmark prints: medians and spread, never a single run.
#pragma once

#include <string>
#include <vector>

namespace lockstep::bench {

struct Summary {
  double min = 0, p25 = 0, p50 = 0, p75 = 0, p99 = 0, max = 0;
};
Summary summarize(std::vector<double> samples);
double median(std::vector<double> samples);

// A table for people, and the same rows for machines.
class Table {
 public:
  explicit Table(std::vector<std::string> heads) : heads_(std::move(heads)) {}
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const;
  std::string csv() const;

 private:
  std::vector<std::string> heads_;
  std::vector<std::vector<std::string>> rows_;
};

// Prints the table, and writes it to `csv_path` when that is not empty.
void publish(const Table& table, const std::string& csv_path);

}  // namespace lockstep::bench
