#include "lockstep/optim/algorithms.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <type_traits>
#include <unordered_set>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/kernels/step.h"
#include "lockstep/optim/adamw_pass.h"
#include "lockstep/optim/option.h"

namespace lockstep::optim {

// ---------------------------------------------------------------- Adam, AdamW

namespace {

template <typename T, typename Options>
void adam_span(const kernels::Span<T>& span, const void* values) {
  const auto& o = *static_cast<const Options*>(values);
  const kernels::AdamTensors<T> tensors{span.param, span.state[0], span.state[1]};
  const kernels::AdamStep step{.lr = o.lr,
                               .beta1 = o.betas.first,
                               .beta2 = o.betas.second,
                               .eps = o.eps,
                               .weight_decay = o.weight_decay,
                               .step = span.step,
                               .decoupled = std::is_same_v<Options, AdamWOptions>};
  kernels::adam<T>(span.gradient, tensors, span.slice, step);
}

template <typename Options>
class AdamRule final : public RuleOf<Options> {
 public:
  using RuleOf<Options>::RuleOf;
  using RuleOf<Options>::options;

  bool needs_host_skip() const override { return false; }
  SpanKernels kernels() const override {
    return {&adam_span<float, Options>, &adam_span<double, Options>, &options};
  }

  void update(const std::vector<StepItem>& items, const at::Tensor& found) const override {
    if constexpr (std::is_same_v<Options, AdamWOptions>)
      if (options.bf16_state) return update_rounded(items, found);
    std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, steps;
    for (const StepItem& item : items) {
      params.push_back(item.param);
      grads.push_back(item.grad);
      exp_avgs.push_back(item.state[0]);
      exp_avg_sqs.push_back(item.state[1]);
      steps.push_back(item.step);
    }
    const std::optional<at::Tensor> found_inf =
        found.defined() ? std::optional(found) : std::nullopt;
    const auto call = [&](auto&& fused) {
      fused(params, grads, exp_avgs, exp_avg_sqs, std::vector<at::Tensor>{}, steps, options.lr,
            options.betas.first, options.betas.second, options.weight_decay, options.eps,
            /*amsgrad=*/false, /*maximize=*/false, std::optional<at::Tensor>{}, found_inf);
    };
    if constexpr (std::is_same_v<Options, AdamWOptions>) {
      call([](auto&&... args) { at::_fused_adamw_(args...); });
    } else {
      call([](auto&&... args) { at::_fused_adam_(args...); });
    }
  }

 private:
  // As they lie in memory, for which an item's tensors all have one layout.
  void update_rounded(const std::vector<StepItem>& items, const at::Tensor& found) const
    requires std::is_same_v<Options, AdamWOptions>
  {
    const auto flat = [](const at::Tensor& t) { return t.as_strided({t.numel()}, {1}); };
    std::vector<AdamWItem> all;
    for (const StepItem& item : items)
      all.push_back({.param = flat(item.param.detach()),
                     .grad = flat(item.grad),
                     .exp_avg = flat(item.state[0]),
                     .exp_avg_sq = flat(item.state[1]),
                     .step = item.step - 1,  // which the pass adds
                     .origin = item.origin});
    AdamWPass(std::move(all), {options}).update(found);
  }
};

// ---------------------------------------------------------------- SGD

template <typename T>
void sgd_span(const kernels::Span<T>& span, const void* values) {
  const auto& o = *static_cast<const SGDOptions*>(values);
  kernels::sgd<T>(span.gradient, {span.param, span.state[0]}, span.slice,
                  {.lr = o.lr,
                   .momentum = o.momentum,
                   .dampening = o.dampening,
                   .weight_decay = o.weight_decay,
                   .nesterov = o.nesterov,
                   .first = span.step == 1});
}

class SgdRule final : public RuleOf<SGDOptions> {
 public:
  using RuleOf::RuleOf;

  bool counts_steps() const override { return false; }
  // Momentum begins with the first gradient, undamped. If that step is skipped on the device, the
  // buffer stays zero, and the next step's `momentum * 0 + gradient` is the same. With dampening it
  // is not, so the host must know.
  bool needs_host_skip() const override { return options.momentum != 0 && options.dampening != 0; }
  SpanKernels kernels() const override { return {&sgd_span<float>, &sgd_span<double>, &options}; }

  // On the CPU kernels() steps float and double, so only 16-bit parameters come here. ATen's fused
  // kernel leaves most elements of those unchanged (LibTorch 2.11).
  void update(const std::vector<StepItem>& items, const at::Tensor& found_inf) const override {
    if (items[0].param.is_cpu()) {
      for (const StepItem& item : items) step_plainly(item);
    } else {
      step_fused(items, found_inf);
    }
  }

 private:
  // PyTorch's operators in PyTorch's order, which decides the bits.
  void step_plainly(const StepItem& item) const {
    at::Tensor change = item.grad;
    if (options.weight_decay != 0) change = change.add(item.param, options.weight_decay);
    if (options.momentum != 0) {
      const at::Tensor& momentum = item.state[0];
      if (item.is_first_step) {
        momentum.copy_(change);
      } else {
        momentum.mul_(options.momentum).add_(change, 1 - options.dampening);
      }
      change = options.nesterov ? change.add(momentum, options.momentum) : momentum;
    }
    item.param.add_(change, -options.lr);
  }

  // ATen's kernel cannot mix first steps with later ones.
  void step_fused(const std::vector<StepItem>& items, const at::Tensor& found_inf) const {
    for (const bool first : {true, false}) {
      std::vector<at::Tensor> params, grads, momenta;
      for (const StepItem& item : items) {
        if (item.is_first_step != first) continue;
        params.push_back(item.param);
        grads.push_back(item.grad);
        if (options.momentum != 0) momenta.push_back(item.state[0]);
      }
      if (params.empty()) continue;
      at::_fused_sgd_(params, grads, momenta, options.weight_decay, options.momentum, options.lr,
                      options.dampening, options.nesterov, /*maximize=*/false, first,
                      /*grad_scale=*/{},
                      found_inf.defined() ? std::optional(found_inf) : std::nullopt);
    }
  }
};

// ---------------------------------------------------------------- Lion

class LionRule final : public RuleOf<LionOptions> {
 public:
  using RuleOf::RuleOf;

  void update(const std::vector<StepItem>& items, const at::Tensor&) const override {
    for (const StepItem& item : items) {
      const at::Tensor& average = item.state[0];
      const at::Tensor direction = average.lerp(item.grad, 1 - options.betas.first).sign_();
      item.param.mul_(1 - options.lr * options.weight_decay).add_(direction, -options.lr);
      average.lerp_(item.grad, 1 - options.betas.second);
    }
  }
};

// ---------------------------------------------------------------- Muon

class MuonRule final : public RuleOf<MuonOptions> {
 public:
  using RuleOf::RuleOf;

  Granularity granularity() const override { return Granularity::kTensors; }
  bool counts_steps() const override { return false; }
  double cost(at::IntArrayRef sizes) const override {
    if (sizes.size() != 2) return 0;
    return static_cast<double>(sizes[0]) * static_cast<double>(sizes[1]) *
           static_cast<double>(std::min(sizes[0], sizes[1]));
  }
  std::vector<StateSpec> state(at::IntArrayRef sizes) const override {
    if (sizes.size() != 2)
      throw UsageError(MuonOptions::kName,
                       "a parameter of shape [{}] is not a matrix. Put it into a group of AdamW's; "
                       "muon_groups() makes both.",
                       fmt::join(sizes, ", "));
    return options.state(sizes);
  }

  void update(const std::vector<StepItem>& items, const at::Tensor&) const override {
    for (const StepItem& item : items) {
      const at::Tensor& momentum = item.state[0];
      momentum.lerp_(item.grad, 1 - options.momentum);
      const at::Tensor direction =
          orthogonal(options.nesterov ? item.grad.lerp(momentum, options.momentum) : momentum);
      item.param.mul_(1 - options.lr * options.weight_decay)
          .add_(direction, -options.lr * scale(item.param));
    }
  }

 private:
  double scale(const at::Tensor& param) const {
    const auto rows = static_cast<double>(param.size(0));
    const auto columns = static_cast<double>(param.size(1));
    if (options.match_rms_adamw) return 0.2 * std::sqrt(std::max(rows, columns));
    return std::sqrt(std::max(1.0, rows / columns));
  }

  // Brings all singular values near one. The polynomial is steep at zero, so small ones grow fast.
  at::Tensor orthogonal(const at::Tensor& matrix) const {
    const auto [a, b, c] = options.ns_coefficients;
    const bool tall = matrix.size(0) > matrix.size(1);
    at::Tensor x = matrix.to(at::kBFloat16);
    if (tall) x = x.t();
    x = x.div(x.norm().clamp_min(options.eps));
    for (std::int64_t i = 0; i < options.ns_steps; ++i) {
      const at::Tensor gram = x.mm(x.t());
      x = at::addmm(x, at::addmm(gram, gram, gram, b, c), x, a);
    }
    return tall ? x.t() : x;
  }
};

// ---------------------------------------------------------------- Adafactor

at::Tensor root_mean_square(const at::Tensor& values) {
  return values.norm() / std::sqrt(static_cast<double>(values.numel()));
}

class AdafactorRule final : public RuleOf<AdafactorOptions> {
 public:
  using RuleOf::RuleOf;

  // An update is bounded by its own norm, which takes the whole tensor.
  Granularity granularity() const override { return Granularity::kTensors; }

  void update(const std::vector<StepItem>& items, const at::Tensor&) const override {
    for (const StepItem& item : items) update_one(item);
  }

 private:
  void update_one(const StepItem& item) const {
    const at::Tensor grad = item.grad.to(item.state[0].scalar_type());
    const at::Tensor param = item.param.to(item.state[0].scalar_type());
    // Computed on the device, where the count is: the host does not wait for it.
    const at::Tensor steps = item.step.to(at::kDouble);
    const at::Tensor fresh = steps.pow(options.decay_rate);  // share of this step's squares
    at::Tensor change = normalized(item, grad, fresh);
    change = change / (root_mean_square(change) / options.clip_threshold).clamp_min(1);
    const at::Tensor rate = learning_rate(param, steps).to(param.scalar_type());
    change = change * rate;
    if (options.beta1 > 0) {
      const at::Tensor& average = item.state.back();
      change = average.mul_(options.beta1).add_(change, 1 - options.beta1);
    }
    at::Tensor result = param;
    if (options.weight_decay != 0) result = result - result * (rate * options.weight_decay);
    item.param.copy_(result - change);
  }

  // The gradient over the root of its second moment.
  at::Tensor normalized(const StepItem& item, const at::Tensor& grad,
                        const at::Tensor& fresh) const {
    const at::Tensor squares = grad.square() + options.eps.first;
    const auto average = [&](const at::Tensor& state, const at::Tensor& values) {
      state.mul_((1 - fresh).to(state.scalar_type())).add_(values * fresh.to(state.scalar_type()));
      return state;
    };
    if (grad.dim() < 2) return average(item.state[0], squares).rsqrt() * grad;
    const at::Tensor rows = average(item.state[0], squares.mean(-1));
    const at::Tensor columns = average(item.state[1], squares.mean(-2));
    const at::Tensor by_row = (rows / rows.mean(-1, /*keepdim=*/true)).rsqrt().unsqueeze(-1);
    return by_row * columns.unsqueeze(-2).rsqrt() * grad;
  }

  at::Tensor learning_rate(const at::Tensor& param, const at::Tensor& steps) const {
    at::Tensor rate = at::full_like(steps, options.lr);
    if (options.relative_step) {
      const at::Tensor least = options.warmup_init ? steps * 1e-6 : at::full_like(steps, 1e-2);
      rate = at::minimum(least, steps.rsqrt());
    }
    if (options.scale_parameter)
      rate = rate * root_mean_square(param).to(at::kDouble).clamp_min(options.eps.second);
    return rate;
  }
};

// ---------------------------------------------------------------- RMSprop

// PyTorch's operators in PyTorch's order, which decides the bits.
class RMSpropRule final : public RuleOf<RMSpropOptions> {
 public:
  using RuleOf::RuleOf;

  bool counts_steps() const override { return false; }
  void update(const std::vector<StepItem>& items, const at::Tensor&) const override {
    for (const StepItem& item : items) {
      const at::Tensor grad =
          options.weight_decay == 0 ? item.grad : item.grad.add(item.param, options.weight_decay);
      const at::Tensor& square_avg = item.state[0];
      square_avg.mul_(options.alpha).addcmul_(grad, grad, 1 - options.alpha);
      const at::Tensor divisor = square_avg.sqrt().add_(options.eps);
      if (options.momentum > 0) {
        item.state[1].mul_(options.momentum).addcdiv_(grad, divisor);
        item.param.add_(item.state[1], -options.lr);
      } else {
        item.param.addcdiv_(grad, divisor, -options.lr);
      }
    }
  }
};

}  // namespace

// ---------------------------------------------------------------- rules by their options

std::unique_ptr<UpdateRule> make_rule(const AdamWOptions& options) {
  return std::make_unique<AdamRule<AdamWOptions>>(options);
}
std::unique_ptr<UpdateRule> make_rule(const AdamOptions& options) {
  return std::make_unique<AdamRule<AdamOptions>>(options);
}
std::unique_ptr<UpdateRule> make_rule(const SGDOptions& options) {
  return std::make_unique<SgdRule>(options);
}
std::unique_ptr<UpdateRule> make_rule(const LionOptions& options) {
  return std::make_unique<LionRule>(options);
}
std::unique_ptr<UpdateRule> make_rule(const MuonOptions& options) {
  return std::make_unique<MuonRule>(options);
}
std::unique_ptr<UpdateRule> make_rule(const AdafactorOptions& options) {
  return std::make_unique<AdafactorRule>(options);
}
std::unique_ptr<UpdateRule> make_rule(const RMSpropOptions& options) {
  return std::make_unique<RMSpropRule>(options);
}

void SGDOptions::check() const {
  if (nesterov && (momentum <= 0 || dampening != 0))
    throw UsageError(kName,
                     "nesterov with momentum {} and dampening {}. Nesterov momentum needs momentum "
                     "above 0 and dampening 0. Set them, or leave nesterov off.",
                     momentum, dampening);
}

void AdafactorOptions::check() const {
  if (warmup_init && !relative_step)
    throw UsageError(kName, "warmup_init is for relative steps. Set relative_step, too.");
  if (clip_threshold <= 0)
    throw UsageError(kName, "clip_threshold {} must be above 0.", clip_threshold);
}

std::vector<ParamGroup> muon_groups(const torch::nn::Module& module, const MuonOptions& muon,
                                    const AdamWOptions& adamw) {
  std::unordered_set<at::TensorImpl*> ends;
  const auto add_embedding = [&](const torch::nn::Module& part) {
    if (const auto* embedding = part.as<torch::nn::EmbeddingImpl>())
      ends.insert(embedding->weight.unsafeGetTensorImpl());
    if (const auto* bag = part.as<torch::nn::EmbeddingBagImpl>())
      ends.insert(bag->weight.unsafeGetTensorImpl());
  };
  add_embedding(module);  // modules() lists itself only where a shared pointer holds it
  for (const auto& part : module.modules(/*include_self=*/false)) add_embedding(*part);
  for (const auto& item : module.named_parameters())
    if (is_named_as_embedding_or_head(item.key())) ends.insert(item.value().unsafeGetTensorImpl());
  ParamGroup matrices{{}, muon};
  std::vector<ParamGroup> groups;
  AdamWOptions marked = adamw;
  marked.weight_decay = 1;  // marks the group that has norms and biases
  for (ParamGroup group : decay_groups(module, marked)) {
    auto& options = group.options.as<AdamWOptions>();
    const bool decays = options.weight_decay != 0;
    if (decays) options.weight_decay = adamw.weight_decay;
    std::erase_if(group.params, [&](const at::Tensor& param) {
      const bool end = ends.contains(param.unsafeGetTensorImpl());
      if (!decays || end || param.dim() != 2) return false;
      matrices.params.push_back(param);
      return true;
    });
    if (!group.params.empty()) groups.push_back(std::move(group));
  }
  if (!matrices.params.empty()) groups.insert(groups.begin(), std::move(matrices));
  return groups;
}

}  // namespace lockstep::optim
