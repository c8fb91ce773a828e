#include "lockstep/parallel/step_agreement.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"
#include "lockstep/core/text.h"

namespace lockstep::parallel {
namespace {

constexpr std::int64_t kHash = sizeof(std::uint64_t);
constexpr std::int64_t kHead = 1 + 2 * kHash;  // refused; the settings' hash; its complement

// Reads or sets a bool as a number.
template <typename Body>
void each_flag(std::string_view name, bool& flag, const Body& body) {
  double number = flag ? 1 : 0;
  body(name, number);
  flag = number != 0;
}

// Why a setting most likely differs over ranks, and what to do.
const char* advice_on(const std::string& setting) {
  if (setting.starts_with("lr"))
    return "Perhaps one of the two skipped a step() that the other took (a batch it skipped on "
           "its own), or its schedule counts its own batches. Call step() equally often on every "
           "rank "
           "(skip_non_finite leaves one out on all), and let schedules count steps.";
  if (setting.starts_with("loss_scale"))
    return "Perhaps one rank changed its scale because of an inf or nan that it alone has seen. "
           "Let step() update the GradScaler, or change it by what step() returns, which is the "
           "same on every rank.";
  return "Set it identically on every rank.";
}

}  // namespace

StepSettings StepSettings::of(const optim::StepOptions& options) {
  const bool scales = options.scaler != nullptr && options.scaler->enabled();
  return {.max_grad_norm = options.max_grad_norm,
          .loss_scale = scales ? options.scaler->get_scale() : 1,
          .want_grad_norm = options.want_grad_norm,
          .skip_non_finite = options.skip_non_finite || scales};
}

// The step's settings are of group -1.
void StepAgreement::each_setting(const Visit& visit) {
  const auto of_step = [&](std::string_view name, double& number) { visit(name, -1, number); };
  of_step("max_grad_norm", settings.max_grad_norm);
  of_step("loss_scale", settings.loss_scale);
  each_flag("want_grad_norm", settings.want_grad_norm, of_step);
  each_flag("skip_non_finite", settings.skip_non_finite, of_step);
  for (std::size_t group = 0; group < optimizer_.groups(); ++group) {
    optimizer_.options(group)->each_option(optim::OptionVisitor([&](const optim::Option& option) {
      visit(option.name, static_cast<int>(group), option.value);
    }));
  }
}

std::vector<double> StepAgreement::numbers() {
  std::vector<double> numbers;
  each_setting([&](std::string_view, int, double& number) { numbers.push_back(number); });
  for (std::size_t group = 0; group < optimizer_.groups(); ++group) {
    const std::string_view rule = optimizer_.options(group)->name();
    numbers.push_back(static_cast<double>(fingerprint(rule.data(), rule.size())));
  }
  return numbers;
}

// A line for each setting; the kinds of options come before their numbers.
std::string StepAgreement::show() {
  std::string text = fmt::format("groups: {}\n", optimizer_.groups());
  const auto of_group = [&](int group) {
    return group < 0 || optimizer_.groups() == 1 ? "" : fmt::format(" of group {}", group);
  };
  for (std::size_t group = 0; group < optimizer_.groups(); ++group)
    text += fmt::format("options of {}{}\n", optimizer_.options(group)->name(),
                        of_group(static_cast<int>(group)));
  each_setting([&](std::string_view name, int group, double& number) {
    text += fmt::format("{}{} = {}\n", name, of_group(group), number);
  });
  return text;
}

void StepAgreement::refuse_difference(const Check& check, const std::string& text) {
  const auto other = find_other_line(world_, check, text);
  if (!other) return;
  throw UsageError(component_,
                   "rank {} has '{}', but rank 0 has '{}'. Each rank steps its share of the "
                   "elements with its own options, so they must be equal. {}",
                   other->rank, other->here, other->first, advice_on(other->here));
}

void StepAgreement::agree_on_making(const std::exception_ptr& refusal,
                                    const std::string& parameters) {
  refuse_difference({.component = component_, .what = "to make the optimizer", .refusal = refusal},
                    show() + parameters);
}

at::Tensor StepAgreement::exchange(const Check& check, const at::Tensor& flags,
                                   const Details& details) {
  const at::Tensor message = at::zeros({kHead + flags.numel()}, at::kByte);
  auto* const refused = message.mutable_data_ptr<std::uint8_t>();
  auto* const hashes = refused + 1;
  *refused = check.refusal ? 1 : 0;
  if (!check.refusal) {
    const std::vector<double> mine = numbers();
    const std::uint64_t hash =
        31 * fingerprint(mine.data(), mine.size() * sizeof(double)) + details.print;
    for (std::int64_t i = 0; i < kHash; ++i) {
      hashes[i] = static_cast<std::uint8_t>(hash >> (8 * i));
      hashes[kHash + i] = static_cast<std::uint8_t>(~hashes[i]);
    }
    message.narrow(0, kHead, flags.numel()).copy_(flags);
  }
  if (world_.size() > 1) {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    world_.all_reduce(message, ReduceOp::kMax).wait();
  }
  if (*refused != 0) refuse_together(world_, check);
  // The greatest of the complements is the complement of the least.
  for (std::int64_t i = 0; i < kHash; ++i)
    if (hashes[i] + hashes[kHash + i] != 255)
      refuse_difference(check, show() + (details.text ? details.text() : ""));
  return message.narrow(0, kHead, flags.numel());
}

}  // namespace lockstep::parallel
