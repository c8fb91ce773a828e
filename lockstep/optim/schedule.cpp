#include "lockstep/optim/schedule.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>

#include "lockstep/core/document.h"
#include "lockstep/core/error.h"
#include "lockstep/core/text.h"

namespace lockstep::optim {
namespace {

constexpr const char* kSchedule = "schedule";
using Factor = std::function<double(std::int64_t)>;

std::string kwarg_text(const ScheduleKwargs::mapped_type& value) {
  if (const auto* word = std::get_if<std::string>(&value)) return *word;
  if (const auto* list = std::get_if<std::vector<double>>(&value))
    return fmt::format("[{}]", fmt::join(*list, ", "));
  return fmt::format("{}", std::get<double>(value));
}

// The options of one schedule, read with a default or required.
class Kwargs {
 public:
  Kwargs(const ScheduleOptions& options, std::vector<std::string> known)
      : options_(options), known_(std::move(known)) {
    for (const auto& [key, value] : options.kwargs) {
      if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
      const std::string options_are =
          known_.empty() ? "It has none." : fmt::format("It has {}.", fmt::join(known_, ", "));
      throw UsageError(kSchedule, "{} has no option '{}'.{} {} Remove it from lr_scheduler_kwargs.",
                       options.name, key, did_you_mean(key, known_), options_are);
    }
  }

  std::optional<double> real(const char* key) const {
    const auto found = options_.kwargs.find(key);
    if (found == options_.kwargs.end()) return std::nullopt;
    const auto* value = std::get_if<double>(&found->second);
    if (value == nullptr) refuse(key, kwarg_text(found->second), "a number");
    return *value;
  }
  std::optional<std::int64_t> steps(const char* key) const {
    const auto value = real(key);
    if (!value) return std::nullopt;
    return whole(key, *value, "a whole number of steps, at least 0");
  }
  // Required and sorted. As in PyTorch, a step that is listed twice counts twice.
  std::vector<std::int64_t> list_of_steps(const char* key) const {
    const char* const wanted = "a list of whole numbers of steps, at least one";
    const auto found = options_.kwargs.find(key);
    const auto* list =
        found == options_.kwargs.end() ? nullptr : std::get_if<std::vector<double>>(&found->second);
    if (list == nullptr || list->empty())
      refuse(key, found == options_.kwargs.end() ? "(not given)" : kwarg_text(found->second),
             wanted);
    std::vector<std::int64_t> all;
    for (const double value : *list) all.push_back(whole(key, value, wanted));
    std::sort(all.begin(), all.end());
    return all;
  }
  // The factor that the rate is repeatedly multiplied by.
  double gamma(double otherwise) const {
    const double value = real("gamma").value_or(otherwise);
    if (!(value >= 0 && std::isfinite(value)))
      refuse("gamma", fmt::format("{}", value), "a number, at least 0");
    return value;
  }
  std::string word(const char* key, const char* otherwise,
                   const std::vector<std::string>& choices) const {
    const auto found = options_.kwargs.find(key);
    if (found == options_.kwargs.end()) return otherwise;
    const auto* value = std::get_if<std::string>(&found->second);
    if (value == nullptr || std::find(choices.begin(), choices.end(), *value) == choices.end())
      refuse(key, kwarg_text(found->second), fmt::format("{}", fmt::join(choices, ", ")));
    return *value;
  }
  [[noreturn]] void refuse(const char* key, const std::string& value,
                           const std::string& wanted) const {
    throw UsageError(kSchedule, "{} = {} of {} cannot be used. It must be {}.", key, value,
                     options_.name, wanted);
  }

 private:
  std::int64_t whole(const char* key, double value, const char* wanted) const {
    constexpr double kMax = 1e15;  // every whole number up to here is exactly a double
    if (!(value >= 0 && value <= kMax && std::floor(value) == value))
      refuse(key, fmt::format("{}", value), wanted);
    return static_cast<std::int64_t>(value);
  }

  const ScheduleOptions& options_;
  std::vector<std::string> known_;
};

double ratio(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(std::max<std::int64_t>(1, whole));
}

// A linear warm-up, then `rest`, which is also given the steps counted from the first one.
Factor after_warmup(std::int64_t warmup, Factor rest) {
  return [warmup, rest = std::move(rest)](std::int64_t step) {
    return step < warmup ? ratio(step, warmup) : rest(step);
  };
}

double half_wave(double cycles, double progress) {
  return 0.5 * (1.0 + std::cos(std::numbers::pi * cycles * 2.0 * progress));
}

Factor constant(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {});
  return [](std::int64_t) { return 1.0; };
}

Factor constant_with_warmup(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {});
  return after_warmup(options.warmup_steps, [](std::int64_t) { return 1.0; });
}

Factor linear(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {});
  const auto warmup = options.warmup_steps, total = options.total_steps;
  return after_warmup(warmup, [=](std::int64_t step) {
    return std::max(0.0, ratio(total - step, total - warmup));
  });
}

Factor cosine_down_to(const ScheduleOptions& options, double cycles, double floor) {
  const auto warmup = options.warmup_steps, total = options.total_steps;
  return after_warmup(warmup, [=](std::int64_t step) {
    const double wave = half_wave(cycles, ratio(step - warmup, total - warmup));
    return std::max(0.0, wave * (1 - floor) + floor);
  });
}

Factor cosine(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {"num_cycles"});
  return cosine_down_to(options, kwargs.real("num_cycles").value_or(0.5), 0.0);
}

Factor cosine_with_min_lr(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {"num_cycles", "min_lr", "min_lr_rate"});
  const auto lowest = kwargs.real("min_lr"), rate = kwargs.real("min_lr_rate");
  if (lowest.has_value() == rate.has_value())
    throw UsageError(kSchedule,
                     "cosine_with_min_lr needs either min_lr or min_lr_rate, and {} given. Set one "
                     "of them in kwargs (lr_scheduler_kwargs in a training file).",
                     rate ? "both are" : "neither is");
  return cosine_down_to(options, kwargs.real("num_cycles").value_or(0.5),
                        rate ? *rate : *lowest / options.lr);
}

Factor cosine_with_restarts(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {"num_cycles"});
  const double cycles = kwargs.real("num_cycles").value_or(1);
  const auto warmup = options.warmup_steps, total = options.total_steps;
  return after_warmup(warmup, [=](std::int64_t step) {
    const double progress = ratio(step - warmup, total - warmup);
    if (progress >= 1.0) return 0.0;
    const double in_cycle = std::fmod(cycles * progress, 1.0);
    return std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * in_cycle)));
  });
}

Factor polynomial(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {"lr_end", "power"});
  const double end = kwargs.real("lr_end").value_or(1e-7);
  const double power = kwargs.real("power").value_or(1.0);
  if (!(options.lr > end))
    throw UsageError(kSchedule,
                     "lr_end = {} of polynomial is not below the learning rate {}. The rate "
                     "falls to lr_end. Set a smaller one in lr_scheduler_kwargs.",
                     end, options.lr);
  const auto warmup = options.warmup_steps, total = options.total_steps;
  return after_warmup(warmup, [=, lr = options.lr](std::int64_t step) {
    if (step > total || total == warmup) return end / lr;
    const double remaining =
        1 - static_cast<double>(step - warmup) / static_cast<double>(total - warmup);
    return ((lr - end) * std::pow(remaining, power) + end) / lr;
  });
}

Factor inverse_sqrt(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {"timescale"});
  const auto warmup = options.warmup_steps;
  const std::int64_t scale = kwargs.steps("timescale").value_or(warmup > 0 ? warmup : 10'000);
  if (scale == 0) kwargs.refuse("timescale", "0", "at least 1");
  return after_warmup(warmup, [=](std::int64_t step) {
    return 1.0 / std::sqrt(static_cast<double>(step + scale - warmup) / static_cast<double>(scale));
  });
}

Factor warmup_stable_decay(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {"num_decay_steps", "num_stable_steps", "warmup_type", "decay_type",
                                "min_lr_ratio", "num_cycles"});
  const std::vector<std::string> shapes{"linear", "cosine", "1-sqrt"};
  const auto rise = kwargs.word("warmup_type", "linear", shapes);
  const auto fall = kwargs.word("decay_type", "cosine", shapes);
  const auto decay = kwargs.steps("num_decay_steps");
  if (!decay)
    throw UsageError(kSchedule,
                     "warmup_stable_decay needs num_decay_steps. It says how long the rate falls "
                     "at the end. Set it in lr_scheduler_kwargs.");
  const auto warmup = options.warmup_steps;
  const std::int64_t stable =
      kwargs.steps("num_stable_steps").value_or(options.total_steps - warmup - *decay);
  // Training that ends during its warm-up is a shortened trial, and allowed.
  if (stable < 0 && warmup < options.total_steps)
    throw UsageError(kSchedule,
                     "{} warm-up and {} decay steps are more than the {} steps of the training. "
                     "Nothing is left between them. Lower one of them.",
                     warmup, *decay, options.total_steps);
  const double floor = kwargs.real("min_lr_ratio").value_or(0);
  const double cycles = kwargs.real("num_cycles").value_or(0.5);
  const auto lifted = [floor](double factor) {
    return std::max(0.0, factor * (1.0 - floor) + floor);
  };
  return [=, decay = *decay](std::int64_t step) {
    if (step < warmup) {
      const double progress = ratio(step, warmup);
      if (rise == "linear") return lifted(progress);
      if (rise == "cosine") return lifted(0.5 * (1.0 - std::cos(std::numbers::pi * progress)));
      return lifted(1.0 - std::sqrt(1.0 - progress));
    }
    if (step < warmup + stable) return 1.0;
    if (step >= warmup + stable + decay) return floor;
    const double progress = ratio(step - warmup - stable, decay);
    if (fall == "linear") return lifted(1.0 - progress);
    if (fall == "cosine") return lifted(half_wave(cycles, progress));
    return lifted(1.0 - std::sqrt(progress));
  };
}

// gamma to the power of `times(steps since the warm-up)`: what PyTorch's schedulers compute step by
// step, as the second scheduler of a SequentialLR.
Factor power_of_gamma(std::int64_t warmup, double gamma, Factor times) {
  return after_warmup(warmup, [=, times = std::move(times)](std::int64_t step) {
    return std::pow(gamma, times(step - warmup));
  });
}

Factor step_decay(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {"step_size", "gamma"});
  const std::int64_t size = kwargs.steps("step_size").value_or(0);
  if (size == 0)
    throw UsageError(kSchedule,
                     "step needs step_size, at least 1. The rate is multiplied by gamma after "
                     "every step_size steps. Set it in kwargs (lr_scheduler_kwargs in a training "
                     "file).");
  return power_of_gamma(options.warmup_steps, kwargs.gamma(0.1),
                        [size](std::int64_t steps) { return static_cast<double>(steps / size); });
}

Factor multi_step_decay(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {"milestones", "gamma"});
  return power_of_gamma(
      options.warmup_steps, kwargs.gamma(0.1),
      [milestones = kwargs.list_of_steps("milestones")](std::int64_t steps) {
        return static_cast<double>(std::upper_bound(milestones.begin(), milestones.end(), steps) -
                                   milestones.begin());
      });
}

Factor exponential_decay(const ScheduleOptions& options) {
  const Kwargs kwargs(options, {"gamma"});
  if (!kwargs.real("gamma"))
    throw UsageError(kSchedule,
                     "exponential needs gamma. The rate is multiplied by it after every step. Set "
                     "it in kwargs (lr_scheduler_kwargs in a training file).");
  return power_of_gamma(options.warmup_steps, kwargs.gamma(1),
                        [](std::int64_t steps) { return static_cast<double>(steps); });
}

struct Kind {
  const char* name;
  Factor (*make)(const ScheduleOptions&);
  bool needs_total;
};
constexpr Kind kKinds[] = {
    {"constant", constant, false},
    {"constant_with_warmup", constant_with_warmup, false},
    {"linear", linear, true},
    {"cosine", cosine, true},
    {"cosine_with_restarts", cosine_with_restarts, true},
    {"cosine_with_min_lr", cosine_with_min_lr, true},
    {"polynomial", polynomial, true},
    {"inverse_sqrt", inverse_sqrt, false},
    {"warmup_stable_decay", warmup_stable_decay, true},
    {"step", step_decay, false},
    {"multi_step", multi_step_decay, false},
    {"exponential", exponential_decay, false},
};

void check(const ScheduleOptions& options, const Kind& kind) {
  if (options.warmup_steps < 0)
    throw UsageError(kSchedule, "warmup_steps = {} is negative. Use 0 for no warm-up.",
                     options.warmup_steps);
  if (!(options.lr > 0) || !std::isfinite(options.lr))
    throw UsageError(kSchedule,
                     "the learning rate {} is not a positive number. A schedule scales it.",
                     options.lr);
  // num_stable_steps replaces total_steps; every other schedule with an end needs the total.
  const bool given = options.kwargs.contains("num_stable_steps");
  if (kind.needs_total && options.total_steps <= 0 && !given)
    throw UsageError(
        kSchedule,
        "{} needs total_steps, and it is {}. The schedule ends there. Set it (max_steps "
        "in a training file), or use constant_with_warmup or inverse_sqrt, which have no end.",
        options.name, options.total_steps);
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Kind& kind : kKinds) all.emplace_back(kind.name);
    return all;
  }();
  return names;
}

bool schedule_has_end(std::string_view name) {
  return std::ranges::any_of(
      kKinds, [&](const Kind& kind) { return name == kind.name && kind.needs_total; });
}

ScheduleKwargs schedule_kwargs(const Node& node) {
  ScheduleKwargs kwargs;
  if (node.is(NodeKind::kNull)) return kwargs;
  for (const Entry& entry : as_map(node, "lr_scheduler_kwargs").entries) {
    const Node& value = entry.value;
    if (value.is(NodeKind::kNull)) continue;
    if (value.is(NodeKind::kString)) {
      kwargs.emplace(entry.key, value.text);
    } else if (value.is(NodeKind::kList)) {
      std::vector<double> list;
      for (const Node& item : value.items) list.push_back(as_real(item, entry.key));
      kwargs.emplace(entry.key, std::move(list));
    } else {
      kwargs.emplace(entry.key, as_real(value, entry.key));
    }
  }
  return kwargs;
}

Schedule make_schedule(const ScheduleOptions& options) {
  for (const Kind& kind : kKinds) {
    if (options.name != kind.name) continue;
    check(options, kind);
    Schedule schedule;
    schedule.name_ = options.name;
    schedule.factor_ = kind.make(options);
    return schedule;
  }
  throw UsageError(kSchedule, "there is no schedule '{}'.{} There are {}.", options.name,
                   did_you_mean(options.name, schedule_names()), fmt::join(schedule_names(), ", "));
}

}  // namespace lockstep::optim
