// Cross entropy whose gradient is computed with the loss, in place of the logits.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/nn/functional.h"
#include "lockstep/nn/on_cuda.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The targets that count, over all chunks.
struct TargetCount {
  at::Tensor count;  // one float
  at::Tensor scale;  // what each row's gradient is multiplied by, one float
};

TargetCount count_targets(const at::Tensor& targets, std::int64_t ignore_index,
                          at::ScalarType type) {
  if (targets.is_cuda() && targets.numel() > 0 && type == at::kFloat) {
    const at::Tensor both = at::empty({2}, targets.options().dtype(at::kFloat));
    if (const auto cuda = detail::OnCuda::with({both})) {
      cuda->check(
          cuda->table().count_targets(targets.const_data_ptr<std::int64_t>(), targets.numel(),
                                      ignore_index, both.mutable_data_ptr<float>(), cuda->stream()),
          "count_targets");
      return {both[0], both[1]};
    }
  }
  const at::Tensor count = targets.ne(ignore_index).sum().to(type);
  return {count, at::clamp_min(count, 1).reciprocal()};
}

// Replaces logits [rows, columns] by scale times the gradient of each row's loss, and returns the
// losses.
at::Tensor consume_aten(const at::Tensor& logits, const at::Tensor& targets,
                        const at::Tensor& scale, const CrossEntropyOptions& options) {
  const at::Tensor real = logits.narrow(1, 0, options.columns);
  at::Tensor values = real.to(detail::sum_type(logits));
  const at::Tensor valid = targets.ne(options.ignore_index).unsqueeze(1);
  const at::Tensor index = targets.unsqueeze(1).masked_fill(valid.logical_not(), 0);
  const at::Tensor log_sum = at::logsumexp(values, {1}, /*keepdim=*/true);
  const at::Tensor losses =
      (log_sum - values.gather(1, index)).masked_fill(valid.logical_not(), 0).squeeze(1);
  values = (values - log_sum).exp();
  values.scatter_add_(1, index, at::full_like(index, -1, values.options()));
  values = (values * scale).masked_fill(valid.logical_not(), 0);
  logits.narrow(1, options.columns, logits.size(1) - options.columns).zero_();
  real.copy_(values);
  return losses;
}

at::Tensor consume(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& scale,
                   const CrossEntropyOptions& options) {
  const auto cuda = detail::OnCuda::with({logits});
  if (!cuda || logits.size(1) % 8 != 0 || !targets.is_contiguous() ||
      scale.scalar_type() != at::kFloat)
    return consume_aten(logits, targets, scale, options);
  const at::Tensor losses = cuda->floats(logits.size(0));
  const at::Tensor next_row = cuda->bytes(sizeof(unsigned));
  cuda->check(cuda->table().cross_entropy(
                  {.logits = detail::mutable_data(logits),
                   .targets = targets.const_data_ptr<std::int64_t>(),
                   .losses = losses.mutable_data_ptr<float>(),
                   .scale = scale.const_data_ptr<float>(),
                   .next_row = static_cast<unsigned*>(detail::mutable_data(next_row)),
                   .rows = logits.size(0),
                   .ignore_index = options.ignore_index,
                   .columns = static_cast<int>(logits.size(1)),
                   .classes = static_cast<int>(options.columns),
                   .type = detail::type_of(logits)},
                  cuda->stream()),
              "cross_entropy");
  return losses;
}

// The 1 / count of the mean underflows in float16, so there it is left to backward.
bool scales_late(const at::Tensor& logits) {
  return logits.scalar_type() == at::kHalf;
}

at::Tensor early_scale(const TargetCount& total, bool late) {
  return late ? at::ones_like(total.scale) : total.scale;
}

// The factor that backward applies to the gradients.
at::Tensor late_factor(const at::Tensor& grad, const at::Tensor& scale, bool late) {
  return late ? grad * scale : grad;
}

void claim_backward(AutogradContext* ctx, const char* who) {
  if (ctx->saved_data["used"].toBool())
    throw UsageError(who,
                     "backward ran twice through one loss, whose gradient was handed over the "
                     "first time. Compute the loss again, or use torch::cross_entropy_loss.");
  ctx->saved_data["used"] = true;
}

// A chunk of logits has about this many bytes; its rows are a multiple of 128.
constexpr std::int64_t kChunkBytes = std::int64_t{512} << 20;

std::int64_t rows_of_chunk(std::int64_t asked, const at::Tensor& hidden, std::int64_t vocabulary) {
  if (asked > 0) return asked;
  const auto size = static_cast<std::int64_t>(hidden.element_size());
  return std::max<std::int64_t>(kChunkBytes / (vocabulary * size) / 128 * 128, 128);
}

class CrossEntropyFunction : public torch::autograd::Function<CrossEntropyFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits,
                            const at::Tensor& targets, std::int64_t ignore_index,
                            std::int64_t columns) {
    const detail::NoAutocast no_autocast;
    const CrossEntropyOptions options{ignore_index, columns};
    const TargetCount total = count_targets(targets, ignore_index, detail::sum_type(logits));
    // An alias outside of autograd. The version is raised, so that others that saved the logits
    // notice the change.
    at::Tensor gradient = detail::flat(logits.detach()).contiguous();
    const bool late = scales_late(logits);
    const at::Tensor losses = consume(gradient, targets, early_scale(total, late), options);
    if (gradient.is_alias_of(logits)) logits.unsafeGetTensorImpl()->bump_version();
    ctx->saved_data["gradient"] = gradient.view(logits.sizes());
    ctx->saved_data["scale"] = total.scale;
    ctx->saved_data["late"] = late;
    ctx->saved_data["used"] = false;
    return losses.sum() / total.count;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    claim_backward(ctx, "cross_entropy");
    const at::Tensor gradient = ctx->saved_data["gradient"].toTensor();
    ctx->saved_data["gradient"] = at::Tensor();
    detail::scale_(gradient, late_factor(grads[0], ctx->saved_data["scale"].toTensor(),
                                         ctx->saved_data["late"].toBool()));
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// Without a gradient to compute the logits are kept: chunks of them are consumed as copies.
at::Tensor loss_alone(const at::Tensor& logits, const at::Tensor& targets,
                      const CrossEntropyOptions& options) {
  const detail::NoAutocast no_autocast;
  const TargetCount total = count_targets(targets, options.ignore_index, detail::sum_type(logits));
  const at::Tensor rows = detail::flat(logits);
  const std::int64_t chunk = rows_of_chunk(0, logits, logits.size(-1));
  at::Tensor sum = at::zeros({}, logits.options().dtype(detail::sum_type(logits)));
  for (std::int64_t first = 0; first < rows.size(0); first += chunk) {
    const std::int64_t count = std::min(chunk, rows.size(0) - first);
    const at::Tensor copy = rows.narrow(0, first, count).clone(at::MemoryFormat::Contiguous);
    sum += consume(copy, targets.narrow(0, first, count), total.scale, options).sum();
  }
  return sum / total.count;
}

// Rows of logits that the kernels can read in vectors, and matrices that suit tensor cores: a
// product of an odd width runs at half the rate.
constexpr std::int64_t kVocabularyMultiple = 64;

std::int64_t padded_vocabulary(std::int64_t vocabulary) {
  return (vocabulary + kVocabularyMultiple - 1) / kVocabularyMultiple * kVocabularyMultiple;
}

struct HeadCall {
  // Matrices and a vector. The weight has hidden's dtype and may have rows of zeros beyond the
  // vocabulary.
  at::Tensor hidden, weight, targets;
  CrossEntropyOptions options;
  std::int64_t chunk_rows;
  at::Tensor dhidden, dweight;  // undefined where they are not wanted; dweight in float
};

// The loss; fills the gradients.
at::Tensor run_head(const HeadCall& call, const TargetCount& total, bool late) {
  const std::int64_t rows = call.hidden.size(0), vocabulary = call.weight.size(0);
  const std::int64_t chunk = std::min(rows_of_chunk(call.chunk_rows, call.hidden, vocabulary),
                                      std::max<std::int64_t>(rows, 1));
  const at::Tensor buffer =
      at::empty({chunk, padded_vocabulary(vocabulary)}, call.hidden.options());
  const at::Tensor scale = early_scale(total, late);
  at::Tensor sum = at::zeros({}, call.hidden.options().dtype(detail::sum_type(call.hidden)));
  for (std::int64_t first = 0; first < rows; first += chunk) {
    const std::int64_t count = std::min(chunk, rows - first);
    const at::Tensor padded = buffer.narrow(0, 0, count);
    at::Tensor logits = padded.narrow(1, 0, vocabulary);
    const at::Tensor hidden = call.hidden.narrow(0, first, count);
    at::mm_out(logits, hidden, call.weight.t());
    sum += consume(padded, call.targets.narrow(0, first, count), scale, call.options).sum();
    if (call.dhidden.defined()) {
      at::Tensor to = call.dhidden.narrow(0, first, count);
      at::mm_out(to, logits, call.weight);
    }
    if (call.dweight.defined()) detail::sum_product(logits.t(), hidden, call.dweight, first > 0);
  }
  return sum / total.count;
}

class HeadFunction : public torch::autograd::Function<HeadFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& targets,
                            const at::Tensor& weight_used, std::int64_t ignore_index,
                            std::int64_t columns, std::int64_t chunk_rows, bool wants_hidden,
                            bool wants_weight) {
    const detail::NoAutocast no_autocast;
    const auto type = detail::sum_type(hidden);
    HeadCall call{detail::flat(hidden).contiguous(),
                  weight_used,
                  targets,
                  {ignore_index, columns},
                  chunk_rows,
                  {},
                  {}};
    if (wants_hidden) call.dhidden = at::empty_like(call.hidden);
    if (wants_weight) {
      const auto options = hidden.options().dtype(type);
      const bool any = call.hidden.numel() > 0;
      const auto shape = weight_used.sizes();
      call.dweight = any ? at::empty(shape, options) : at::zeros(shape, options);
    }
    const bool late = scales_late(hidden);
    const TargetCount total = count_targets(targets, ignore_index, type);
    const at::Tensor loss = run_head(call, total, late);
    if (call.dhidden.defined()) call.dhidden = call.dhidden.view(hidden.sizes());
    ctx->saved_data["dhidden"] = call.dhidden;
    ctx->saved_data["dweight"] =
        call.dweight.defined() ? call.dweight.narrow(0, 0, weight.size(0)) : call.dweight;
    detail::save_type(ctx, "weight_type", weight);
    ctx->saved_data["scale"] = total.scale;
    ctx->saved_data["late"] = late;
    ctx->saved_data["used"] = false;
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    claim_backward(ctx, "linear_cross_entropy");
    const at::Tensor factor = late_factor(grads[0], ctx->saved_data["scale"].toTensor(),
                                          ctx->saved_data["late"].toBool());
    const auto take = [&](const char* name) {
      const at::Tensor gradient = ctx->saved_data[name].toTensor();
      ctx->saved_data[name] = at::Tensor();
      if (gradient.defined()) detail::scale_(gradient, factor);
      return gradient;
    };
    const at::Tensor dhidden = take("dhidden");
    at::Tensor dweight = take("dweight");
    if (dweight.defined()) dweight = dweight.to(detail::saved_type(ctx, "weight_type"));
    return {dhidden, dweight, {}, {}, {}, {}, {}, {}, {}};
  }
};

std::int64_t checked_columns(const char* who, const at::Tensor& logits, std::int64_t vocabulary,
                             const at::Tensor& targets, std::int64_t columns) {
  detail::require(logits.defined() && logits.dim() > 0 && logits.is_floating_point(), who,
                  "the first argument must be floating point with a last dimension", logits);
  detail::require(targets.defined() && !targets.is_floating_point() &&
                      targets.sizes() == logits.sizes().slice(0, logits.dim() - 1),
                  who, "targets must be integers, one for each row", logits, targets);
  detail::require(targets.device() == logits.device(), who,
                  "targets must be on the device of the first argument", logits, targets);
  if (vocabulary < 1 || columns < 0 || columns > vocabulary)
    throw UsageError(who,
                     "columns = {} is not within the {} columns of the logits. Set it to the "
                     "size of the real vocabulary, or to 0 for all.",
                     columns, vocabulary);
  return columns == 0 ? vocabulary : columns;
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const CrossEntropyOptions& options) {
  CrossEntropyOptions checked = options;
  checked.columns = checked_columns("cross_entropy", logits,
                                    logits.defined() && logits.dim() > 0 ? logits.size(-1) : 0,
                                    targets, options.columns);
  const at::Tensor rows = targets.reshape(-1).to(at::kLong).contiguous();
  if (!at::GradMode::is_enabled() || !logits.requires_grad())
    return loss_alone(logits, rows, checked);
  return CrossEntropyFunction::apply(logits, rows, checked.ignore_index, checked.columns);
}

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options) {
  constexpr const char* kWho = "linear_cross_entropy";
  detail::require(hidden.defined() && weight.defined() && weight.dim() == 2 && hidden.dim() > 0 &&
                      hidden.size(-1) == weight.size(1),
                  kWho, "weight must be [vocabulary, the last dimension of hidden]", hidden,
                  weight);
  if (options.chunk_rows < 0)
    throw UsageError(kWho, "chunk_rows = {} is negative. Use 0 to have it chosen.",
                     options.chunk_rows);
  const std::int64_t columns =
      checked_columns(kWho, hidden, weight.size(0), targets, options.columns);
  const at::Tensor used = detail::weight_for(
      kWho, hidden, weight, hidden.is_cuda() ? padded_vocabulary(weight.size(0)) : 0);
  const bool grad = at::GradMode::is_enabled();
  return HeadFunction::apply(hidden, weight, targets.reshape(-1).to(at::kLong).contiguous(), used,
                             options.ignore_index, columns, options.chunk_rows,
                             grad && hidden.requires_grad(), grad && weight.requires_grad());
}

}  // namespace lockstep::nn
