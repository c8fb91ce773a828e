#include "lockstep/core/map_reader.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/document_text.h"
#include "lockstep/core/problems.h"
#include "lockstep/core/spelling.h"
#include "lockstep/core/text.h"

namespace lockstep {
MapReader::MapReader(const Node& map, std::string what, Problems* problems)
    : map_(map), what_(std::move(what)), problems_(problems) {
  if (!map_.is(NodeKind::kNull)) as_map(map_, what_);
}

std::string MapReader::full_name(std::string_view key) const {
  return what_.empty() ? std::string(key) : fmt::format("{}.{}", what_, key);
}

const Node* MapReader::node(std::string_view key) {
  asked_.emplace_back(key);
  const Entry* entry = map_.find(key);
  return entry == nullptr || entry->value.is(NodeKind::kNull) ? nullptr : &entry->value;
}

template <typename Value, typename Read>
Value MapReader::read_or(std::string_view key, Value fallback, const Read& read) {
  const Node* found = node(key);
  if (found == nullptr) return fallback;
  if (problems_ == nullptr) return read(*found);
  Value value = fallback;
  return problems_->attempt([&] { value = read(*found); }) ? value : fallback;
}

bool MapReader::has(std::string_view key) {
  return node(key) != nullptr;
}

bool MapReader::boolean(std::string_view key, bool fallback) {
  return read_or(key, fallback, [&](const Node& found) { return as_bool(found, full_name(key)); });
}

std::int64_t MapReader::integer(std::string_view key, std::int64_t fallback, std::int64_t min,
                                std::int64_t max) {
  return read_or(key, fallback, [&](const Node& found) {
    const std::int64_t value = as_integer(found, full_name(key));
    if (value < min || value > max)
      refuse_at(found.location, "{} must be from {} to {}, and {} is not.", full_name(key), min,
                max, value);
    return value;
  });
}

double MapReader::real(std::string_view key, double fallback, double min, double max) {
  return read_or(key, fallback, [&](const Node& found) {
    const double value = as_real(found, full_name(key));
    if (!(value >= min && value <= max))
      refuse_at(found.location, "{} must be from {} to {}, and {} is not.", full_name(key), min,
                max, real_text(value));
    return value;
  });
}

std::string MapReader::text(std::string_view key, std::string fallback) {
  return read_or(key, std::move(fallback),
                 [&](const Node& found) { return as_string(found, full_name(key)); });
}

std::string MapReader::choice(std::string_view key, std::string fallback,
                              std::initializer_list<std::string_view> choices) {
  return read_or(key, std::move(fallback), [&](const Node& found) {
    const std::string value = as_string(found, full_name(key));
    const std::vector<std::string> names(choices.begin(), choices.end());
    if (std::find(names.begin(), names.end(), value) == names.end())
      refuse_at(found.location, "{} must be {}, and '{}' is {}.{}", full_name(key), listed(names),
                value, names.size() == 2 ? "neither" : "none of them", did_you_mean(value, names));
    return value;
  });
}

void MapReader::finish() const {
  Problems problems;
  for (const Entry& entry : map_.entries) {
    if (std::find(asked_.begin(), asked_.end(), entry.key) != asked_.end()) continue;
    if (problems.full()) break;
    problems.add(fmt::format("{}: {} has no key '{}'.{}", entry.location.text(), what_, entry.key,
                             did_you_mean(entry.key, asked_)));
  }
  if (problems_ != nullptr)
    problems_->add(problems);
  else
    problems.raise();
}

}  // namespace lockstep
