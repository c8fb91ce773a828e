#include "lockstep/optim/rule_state.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/ranges.h>

#include <typeinfo>

#include "lockstep/core/error.h"

namespace lockstep::optim {

// ---------------------------------------------------------------- rules

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

// FNV-1a.
std::uint32_t origin_named(std::string_view parameter) {
  std::uint32_t hash = 2166136261u;
  for (const char c : parameter) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

// ---------------------------------------------------------------- the state of a parameter

const at::Tensor& RuleState::operator[](std::string_view name) const {
  static const at::Tensor none;
  for (std::size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return tensors[i];
  return none;
}

void RuleState::add(std::string name, at::Tensor tensor) {
  names.push_back(std::move(name));
  tensors.push_back(std::move(tensor));
}

void RuleState::assign(const RuleState& other) {
  if (step.defined()) step.copy_(other.step.reshape({}));
  for (std::size_t i = 0; i < other.names.size(); ++i) {
    const at::Tensor& mine = (*this)[other.names[i]];
    if (mine.defined()) {
      mine.copy_(other.tensors[i]);
    } else {
      add(other.names[i], other.tensors[i]);
    }
  }
}

void RuleState::serialize(torch::serialize::InputArchive& archive) {
  for (const std::string& key : archive.keys()) {
    at::Tensor tensor;
    archive.read(key, tensor);
    if (key == "step") {
      step = tensor;
    } else {
      add(key, tensor);
    }
  }
}

void RuleState::serialize(torch::serialize::OutputArchive& archive) const {
  if (step.defined()) archive.write("step", step);
  for (std::size_t i = 0; i < names.size(); ++i) archive.write(names[i], tensors[i]);
}

const RuleState* find_state(const torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  const auto slot = optimizer.state().find(param.unsafeGetTensorImpl());
  return slot == optimizer.state().end() ? nullptr
                                         : static_cast<const RuleState*>(slot->second.get());
}

const RuleState& ensure_state(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                              const UpdateRule& rule) {
  static const RuleState none;
  const std::vector<StateSpec> specs = rule.state(param.sizes());
  if (find_state(optimizer, param) == nullptr) {
    if (specs.empty() && !rule.counts_steps()) return none;
    auto fresh = std::make_unique<RuleState>();
    if (rule.counts_steps())
      fresh->step = at::zeros({}, param.options().dtype(at::kFloat).requires_grad(false));
    optimizer.state()[param.unsafeGetTensorImpl()] = std::move(fresh);
  }
  auto& held = static_cast<RuleState&>(*optimizer.state()[param.unsafeGetTensorImpl()]);
  // The options may have changed since, so that the rule needs more state.
  for (const StateSpec& spec : specs)
    if (!held[spec.name].defined()) held.add(spec.name, detail::make_state(spec, param));
  return held;
}

// ---------------------------------------------------------------- the rule of a group

void GroupRule::serialize(torch::serialize::InputArchive& archive) {
  rule->each_option(OptionVisitor([&](const Option& option) {
    c10::IValue value;
    if (!archive.try_read(std::string(option.name), value)) {
      if (option.kind == Option::Kind::kFlag) return;  // of a later release
      throw UsageError(rule->name(),
                       "the archive has no option '{}'. It was probably saved by another "
                       "optimizer.",
                       option.name);
    }
    option.value = value.isBool() ? (value.toBool() ? 1 : 0) : value.toScalar().toDouble();
  }));
}

void GroupRule::serialize(torch::serialize::OutputArchive& archive) const {
  Rule(rule)->each_option(OptionVisitor([&](const Option& option) {
    c10::IValue value(option.value);
    if (option.kind == Option::Kind::kFlag) value = c10::IValue(option.value != 0);
    if (option.kind == Option::Kind::kCount)
      value = c10::IValue(static_cast<std::int64_t>(option.value));
    archive.write(std::string(option.name), value);
  }));
}

namespace detail {

std::string shape_of(const at::Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
}

Rule& rule_of(std::string_view who, torch::optim::OptimizerParamGroup& group) {
  auto* const options = dynamic_cast<GroupRule*>(&group.options());
  if (options == nullptr)
    throw UsageError(
        who,
        "a parameter group has options of another optimizer. It was probably added "
        "with torch::optim's own options. Make the group with optim::AdamW::group(), or "
        "that of its rule.");
  return options->rule;
}

void check_groups(std::string_view who, std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const Rule& rule = rule_of(who, groups[g]);
    const std::string& before = static_cast<GroupRule&>(groups[g].options()).made_with;
    if (rule->name() != before)
      throw UsageError(who,
                       "group {} has options of another optimizer: it was made with {}, whose "
                       "state {} cannot use. Make a new optimizer.",
                       g, before, rule->name());
    rule->check();
  }
}

void check_group(std::string_view who, std::size_t group, std::size_t count) {
  if (group < count) return;
  throw UsageError(who, "there is no group {}. Groups count from 0; there {} {}.", group,
                   count == 1 ? "is" : "are", count);
}

at::Tensor make_state(const StateSpec& spec, const at::Tensor& param) {
  const auto dtype = dtype_of(spec, param.scalar_type());
  if (at::IntArrayRef(spec.sizes) == param.sizes())
    return at::zeros_like(param, param.options().dtype(dtype).requires_grad(false));
  return at::zeros(spec.sizes, param.options().dtype(dtype).requires_grad(false));
}

const at::Tensor& StateReader::find(const std::string& name) {
  known_.insert(name);
  const auto found = state_.find(name);
  if (found == state_.end())
    throw UsageError(
        who_, "the state has no '{}'. It belongs to another model or another optimizer.", name);
  if (!found->second.defined())
    throw UsageError(who_, "'{}' is an undefined tensor in the state.", name);
  return found->second;
}

const at::Tensor& StateReader::tensor(const std::string& name, at::IntArrayRef sizes) {
  const at::Tensor& found = find(name);
  if (found.sizes() != sizes)
    throw UsageError(who_,
                     "'{}' has shape {} in the state, but [{}] is wanted. The state belongs to "
                     "another model.",
                     name, shape_of(found), fmt::join(sizes, ", "));
  return found;
}

const at::Tensor& StateReader::number(const std::string& name) {
  const at::Tensor& found = find(name);
  if (found.numel() != 1)
    throw UsageError(who_, "'{}' is not one number in the state. The state is damaged.", name);
  return found;
}

void StateReader::finish() const {
  for (const auto& [name, tensor] : state_)
    if (!known_.contains(name))
      throw UsageError(who_,
                       "the state holds '{}', which this optimizer has no place for. It belongs to "
                       "another model or another optimizer.",
                       name);
}

}  // namespace detail

}  // namespace lockstep::optim
