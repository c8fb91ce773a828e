#include "lockstep/optim/rule.h"

#include <fmt/ranges.h>

#include <typeinfo>

#include "lockstep/core/error.h"

namespace lockstep::optim {

double UpdateRule::cost(at::IntArrayRef sizes) const {
  return static_cast<double>(c10::multiply_integers(sizes));
}

std::vector<std::pair<std::string_view, double>> UpdateRule::options_now() const {
  std::vector<std::pair<std::string_view, double>> values;
  // A visitor may write, this one does not.
  const_cast<UpdateRule*>(this)->each_option(
      OptionVisitor([&](const Option& option) { values.emplace_back(option.name, option.value); }));
  return values;
}

Rule& Rule::operator=(const Rule& other) {
  if (rule_ && typeid(*rule_) == typeid(*other.rule_)) {
    rule_->assign(*other.rule_);
  } else {
    rule_ = other.rule_->clone();
  }
  return *this;
}

bool Rule::has(std::string_view option) const {
  for (const auto& [name, value] : rule_->options_now())
    if (name == option) return true;
  return false;
}

double Rule::get(std::string_view option) const {
  for (const auto& [name, value] : rule_->options_now())
    if (name == option) return value;
  refuse_option(option);
}

void Rule::set(std::string_view option, double value) {
  bool found = false;
  rule_->each_option(OptionVisitor([&](const Option& each) {
    if (each.name != option) return;
    found = true;
    if (!each.accepts(value))
      throw UsageError(rule_->name(), "option {} cannot be {}. It is {}.", option, value,
                       each.kind == Option::Kind::kFlag ? "true or false" : "a whole number");
    each.value = value;
  }));
  if (!found) refuse_option(option);
}

void Rule::refuse_option(std::string_view option) const {
  std::vector<std::string_view> names;
  for (const auto& [name, value] : rule_->options_now()) names.push_back(name);
  throw UsageError(rule_->name(), "there is no option '{}'. There are: {}.", option,
                   fmt::join(names, ", "));
}

void Rule::refuse_other(std::string_view wanted) const {
  throw UsageError(
      rule_->name(),
      "its options are not {}'s. Ask for those of the rule that the group was made with: "
      "optimizer.Optimizer::options(group).",
      wanted);
}

void detail::check_options(std::string_view who,
                           const std::function<void(const OptionVisitor&)>& each) {
  each(OptionVisitor([&](const Option& option) {
    if (option.kind == Option::Kind::kFlag || option.range.contains(option.value)) return;
    throw UsageError(who, "option {} cannot be {}. It is out of its range. See {}Options.",
                     option.name, option.value, who);
  }));
}

}  // namespace lockstep::optim
