#include "lockstep/optim/rule.h"

#include "lockstep/core/error.h"

namespace lockstep::optim {

double UpdateRule::cost(at::IntArrayRef sizes) const {
  return static_cast<double>(c10::multiply_integers(sizes));
}

bool Rule::visit(std::string_view option, const std::function<void(const Option&)>& body) const {
  bool found = false;
  rule_->each_option(OptionVisitor([&](const Option& each) {
    if (each.name != option) return;
    found = true;
    body(each);
  }));
  return found;
}

bool Rule::has(std::string_view option) const {
  return visit(option, [](const Option&) {});
}

double Rule::get(std::string_view option) const {
  double value = 0;
  if (!visit(option, [&](const Option& found) { value = found.value; }))
    throw UsageError(rule_->name(), "there is no option '{}'.", option);
  return value;
}

void Rule::set(std::string_view option, double value) const {
  if (!visit(option, [&](const Option& found) { found.value = value; }))
    throw UsageError(rule_->name(), "there is no option '{}'.", option);
}

void Rule::refuse_other(std::string_view wanted) const {
  throw UsageError(rule_->name(), "its options were asked for as those of {}.", wanted);
}

void detail::check_options(std::string_view who,
                           const std::function<void(const OptionVisitor&)>& each) {
  each(OptionVisitor([&](const Option& option) {
    if (option.range.contains(option.value)) return;
    throw UsageError(who, "option {} cannot be {}. It is out of its range. See {}Options.",
                     option.name, option.value, who);
  }));
}

}  // namespace lockstep::optim
