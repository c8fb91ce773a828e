// UpdateRule: how a step changes one parameter. AdamW is a rule, and so are SGD, Lion and Muon.
//
// A rule knows nothing about ranks, groups, clipping, loss scales, schedules, files or graphs. It
// says which state it has for a parameter and whether a parameter may be split, and it has one
// function; the rest follows for every rule: Optimizer (optimizer.h) steps it in a loop of your own
// and in the Trainer, and the optimizers of FullyShard with the state divided over ranks.
//
//   class TigerRule final : public RuleOf<TigerOptions> { ... update() ... };
//   std::unique_ptr<UpdateRule> make_rule(const TigerOptions& options);   // a rule of your own
//
// docs/extending.md walks through one. A rule is a value: copies are independent. One thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/kernels/step.h"
#include "lockstep/optim/option.h"
#include "lockstep/optim/options.h"

namespace lockstep::optim {

// The dtype of a tensor of state for a parameter of this dtype.
inline at::ScalarType dtype_of(const StateSpec& spec, at::ScalarType param) {
  if (spec.bfloat16) return at::kBFloat16;
  return spec.at_least_float && at::isReducedFloatingType(param) ? at::kFloat : param;
}

// Whether a parameter may be stepped in parts, as a flat run of elements. Muon's may not: it needs
// whole matrices, which a sharded optimizer distributes over ranks.
enum class Granularity { kElements, kTensors };

using StateTensors = c10::SmallVector<at::Tensor, 2>;

// Where an item's elements are in the model, for rules that round stochastically: the same however
// ranks divide it.
struct Origin {
  std::uint32_t parameter = 0;  // origin_named() of its name
  std::int64_t begin = 0;       // the first element, in the parameter
};
std::uint32_t origin_named(std::string_view parameter);

// One item of update(): a whole parameter or, for an elementwise rule, a flat slice of
// one.
struct StepItem {
  at::Tensor param;
  at::Tensor grad;     // averaged, unscaled and clipped, in the parameter's strides; only to read
  StateTensors state;  // in the order of UpdateRule::state()
  at::Tensor step;     // a float on the parameter's device: how often it was stepped, including now
  bool is_first_step = false;  // its state is new
  Origin origin{};
};

// A StepItem's update as plain functions on CPU memory, for elementwise rules with kernels of their
// own and up to four state tensors. Null where there is none.
struct SpanKernels {
  kernels::SpanKernel<float> float32 = nullptr;
  kernels::SpanKernel<double> float64 = nullptr;
  const void* options = nullptr;  // passed to the kernels
};

class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  virtual std::unique_ptr<UpdateRule> clone() const = 0;
  virtual void assign(const UpdateRule& other) = 0;  // must have the same type

  virtual std::string_view name() const = 0;
  virtual void each_option(const OptionVisitor& visit) = 0;
  std::vector<std::pair<std::string_view, double>> options_now() const;  // name and value
  virtual void check() const = 0;  // UsageError names an option out of range

  virtual std::vector<StateSpec> state(at::IntArrayRef sizes) const = 0;
  virtual Granularity granularity() const { return Granularity::kElements; }
  // Estimated work; whole tensors are distributed so that ranks get equal totals.
  virtual double cost(at::IntArrayRef sizes) const;
  // False: "<parameter>.step" is 1 once there is state, and StepItem::step is undefined.
  virtual bool counts_steps() const { return true; }

  // All items have one dtype and one device. Parameters and state are written in place. Where
  // `found_inf`, a float on the device, is defined and not zero, nothing may change; rules that
  // ignore it return true from needs_host_skip(): the host then reads it and skips the call.
  virtual void update(const std::vector<StepItem>& items, const at::Tensor& found_inf) const = 0;
  virtual bool needs_host_skip() const { return true; }
  virtual SpanKernels kernels() const { return {}; }

 protected:
  UpdateRule() = default;
  UpdateRule(const UpdateRule&) = default;
  UpdateRule& operator=(const UpdateRule&) = default;
};

// The parts of a rule that follow from its options struct.
template <typename Options>
class RuleOf : public UpdateRule {
 public:
  explicit RuleOf(const Options& values) : options(values) {}
  std::unique_ptr<UpdateRule> clone() const override { return make_rule(options); }
  void assign(const UpdateRule& other) override {
    options = dynamic_cast<const RuleOf&>(other).options;
  }
  std::string_view name() const override { return Options::kName; }
  void each_option(const OptionVisitor& visit) override { options.each(visit); }
  void check() const override;
  // None, unless the options or the rule say which.
  std::vector<StateSpec> state([[maybe_unused]] at::IntArrayRef sizes) const override {
    if constexpr (requires { options.state(sizes); }) return options.state(sizes);
    return {};
  }

  Options options;
};

// A rule as a value, made from its options: ParamGroup{params, AdamWOptions{.lr = 3e-4}}. Assigning
// one of the same kind changes the options where they are, so references to them stay valid.
class Rule {
 public:
  template <typename Options>
    requires requires(const Options& options) { make_rule(options); }
  Rule(const Options& options) : rule_(make_rule(options)) {}  // NOLINT: an implicit conversion
  Rule(const Rule& other) : rule_(other.rule_->clone()) {}
  Rule(Rule&&) = default;
  Rule& operator=(const Rule& other);
  Rule& operator=(Rule&& other) noexcept = default;

  UpdateRule* operator->() { return rule_.get(); }
  const UpdateRule* operator->() const { return rule_.get(); }
  const UpdateRule& operator*() const { return *rule_; }

  template <typename Options>
  bool is() const {
    return dynamic_cast<RuleOf<Options>*>(rule_.get()) != nullptr;
  }
  // UsageError where it is another rule.
  template <typename Options>
  Options& as() {
    auto* const found = dynamic_cast<RuleOf<Options>*>(rule_.get());
    if (found == nullptr) refuse_other(Options::kName);
    return found->options;
  }
  template <typename Options>
  const Options& as() const {
    return const_cast<Rule*>(this)->as<Options>();
  }

  // An option by its name. UsageError where the rule has none of that name (has() asks first), and
  // for a number that is not valid for a flag or a count; check() looks at ranges.
  bool has(std::string_view option) const;
  double get(std::string_view option) const;
  void set(std::string_view option, double value);

 private:
  [[noreturn]] void refuse_other(std::string_view wanted) const;
  [[noreturn]] void refuse_option(std::string_view option) const;
  std::unique_ptr<UpdateRule> rule_;
};

namespace detail {
void check_options(std::string_view who, const std::function<void(const OptionVisitor&)>& each);
}

template <typename Options>
void RuleOf<Options>::check() const {
  Options values = options;
  detail::check_options(Options::kName, [&](const OptionVisitor& visit) { values.each(visit); });
  if constexpr (requires { values.check(); }) values.check();
}

}  // namespace lockstep::optim
