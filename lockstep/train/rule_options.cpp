#include "lockstep/train/rule_options.h"

#include <fmt/ranges.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/optim/option.h"

namespace lockstep::train {
namespace {

// optim_args, as Hugging Face's Trainer reads it: "momentum=0.9,nesterov=true".
template <typename Options>
void apply_args(Options& options, const std::string& text) {
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    std::erase(part, ' ');
    const std::size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    std::string value = equals == std::string::npos ? "" : part.substr(equals + 1);
    if (value == "true" || value == "True") value = "1";
    if (value == "false" || value == "False") value = "0";
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    const bool is_number = !value.empty() && *end == '\0';
    bool found = false;
    std::vector<std::string_view> known;
    options.each(optim::OptionVisitor([&](const optim::Option& option) {
      known.push_back(option.name);
      if (option.name != name || !is_number) return;
      found = true;
      if (!option.accepts(number))
        throw UsageError(
            Options::kName, "option {} cannot be {}. It is {}.", name, number,
            option.kind == optim::Option::Kind::kFlag ? "true or false" : "a whole number");
      option.value = number;
    }));
    if (!found)
      throw UsageError("trainer",
                       "optim_args: '{}' is not an option of {} with a number. Write name=value "
                       "with names of: {}.",
                       part, Options::kName, fmt::join(known, ", "));
  }
}

template <typename Options>
Options adam(const TrainingArguments& a) {
  Options options;
  options.lr = a.learning_rate;
  options.betas = {a.adam_beta1, a.adam_beta2};
  options.eps = a.adam_epsilon;
  options.weight_decay = a.weight_decay;
  return options;
}

RuleOptions by_keys(const TrainingArguments& a) {
  if (a.optim == "sgd")
    return optim::SGDOptions{
        .lr = a.learning_rate, .momentum = a.momentum, .weight_decay = a.weight_decay};
  if (a.optim == "lion")
    return optim::LionOptions{.lr = a.learning_rate,
                              .betas = {a.adam_beta1, a.adam_beta2},
                              .weight_decay = a.weight_decay};
  if (a.optim == "adafactor")
    return optim::AdafactorOptions{.lr = a.learning_rate, .weight_decay = a.weight_decay};
  if (a.optim == "rmsprop")
    return optim::RMSpropOptions{.lr = a.learning_rate, .weight_decay = a.weight_decay};
  // One learning rate serves both of its rules.
  if (a.optim == "muon")
    return optim::MuonOptions{
        .lr = a.learning_rate, .weight_decay = a.weight_decay, .match_rms_adamw = true};
  if (a.optim == "adam") return adam<optim::AdamOptions>(a);
  return adamw_options(a);
}

}  // namespace

optim::AdamWOptions adamw_options(const TrainingArguments& arguments) {
  auto options = adam<optim::AdamWOptions>(arguments);
  options.bf16_state = arguments.optim_state_dtype == "bfloat16";
  return options;
}

RuleOptions rule_options(const TrainingArguments& arguments) {
  RuleOptions options = by_keys(arguments);
  if (arguments.optim_args)
    std::visit([&](auto& rule) { apply_args(rule, *arguments.optim_args); }, options);
  return options;
}

std::uint64_t state_bytes(const TrainingArguments& arguments,
                          const std::vector<io::TensorShape>& trained) {
  const RuleOptions rule = rule_options(arguments);
  const bool muon = std::holds_alternative<optim::MuonOptions>(rule);
  const RuleOptions rest = muon ? RuleOptions(adamw_options(arguments)) : rule;
  std::uint64_t bytes = 0;
  for (const io::TensorShape& tensor : trained) {
    const bool matrix = tensor.shape.size() == 2 &&
                        !optim::is_named_as_embedding_or_head(tensor.name) &&
                        !optim::is_named_as_norm_or_bias(tensor.name);
    const auto specs = std::visit([&](const auto& options) { return options.state(tensor.shape); },
                                  matrix ? rule : rest);
    for (const optim::StateSpec& spec : specs)
      bytes += (spec.bfloat16 ? 2 : sizeof(float)) * static_cast<std::uint64_t>(spec.numel());
  }
  return bytes;
}

}  // namespace lockstep::train
