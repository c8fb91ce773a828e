#include "lockstep/nn/tensor_group.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/error.h"
#include "lockstep/nn/on_cuda.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The sum needs its own tensor: autograd may have given the same one to others.
at::Tensor summed(const at::Tensor& x, TensorGroup& group) {
  at::Tensor sum = x.detach().clone(at::MemoryFormat::Contiguous);
  group.sum(sum);
  return sum;
}

class EnterFunction : public torch::autograd::Function<EnterFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const TensorGroupPtr& group) {
    ctx->saved_data["group"] = c10::IValue::make_capsule(group);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto group =
        c10::static_intrusive_pointer_cast<TensorGroup>(ctx->saved_data["group"].toCapsule());
    return {summed(grads[0], *group), at::Tensor()};
  }
};

class EnterWeight : public torch::autograd::Function<EnterWeight> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& weight,
                            const TensorGroupPtr& group) {
    ctx->saved_data["group"] = c10::IValue::make_capsule(group);
    ctx->saved_data["weight"] = weight;
    return weight.view_as(weight);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto group =
        c10::static_intrusive_pointer_cast<TensorGroup>(ctx->saved_data["group"].toCapsule());
    group->note_partial(ctx->saved_data["weight"].toTensor());
    return {grads[0] * group->size(), at::Tensor()};
  }
};

class LeaveFunction : public torch::autograd::Function<LeaveFunction> {
 public:
  static at::Tensor forward(AutogradContext*, const at::Tensor& x, const TensorGroupPtr& group) {
    return summed(x, *group);
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) {
    return {grads[0], at::Tensor()};
  }
};

// Each element is one rank's value and zeros.
class JoinFunction : public torch::autograd::Function<JoinFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, std::int64_t dimension,
                            std::int64_t whole, const TensorGroupPtr& group) {
    const Range mine = group->range(whole);
    ctx->saved_data["dimension"] = dimension;
    ctx->saved_data["begin"] = mine.begin;
    ctx->saved_data["length"] = mine.length;
    auto sizes = x.sizes().vec();
    sizes[static_cast<std::size_t>(dimension)] = whole;
    const at::Tensor all = at::zeros(sizes, x.options());
    all.narrow(dimension, mine.begin, mine.length).copy_(x);
    group->sum(all);
    return all;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {grads[0]
                .narrow(ctx->saved_data["dimension"].toInt(), ctx->saved_data["begin"].toInt(),
                        ctx->saved_data["length"].toInt())
                .contiguous(),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// Targets that this rank has a column for, and which it is. Those of other ranks read column 0.
struct OwnTargets {
  at::Tensor are_mine;  // bool [rows]
  at::Tensor columns;   // [rows, 1]
};
OwnTargets own_targets(const at::Tensor& targets, const Range& mine) {
  const at::Tensor local = targets - mine.begin;
  const at::Tensor are_mine = local.ge(0).logical_and(local.lt(mine.length));
  return {are_mine, local.masked_fill(are_mine.logical_not(), 0).unsqueeze(1)};
}

class GroupCrossEntropy : public torch::autograd::Function<GroupCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits,
                            const at::Tensor& targets, std::int64_t vocabulary,
                            const TensorGroupPtr& group, std::int64_t ignore_index) {
    const detail::NoAutocast no_autocast;
    const OwnTargets own = own_targets(targets, group->range(vocabulary));
    const at::Tensor counted = targets.ne(ignore_index);
    const at::Tensor rows = detail::flat(logits.detach()).to(detail::sum_type(logits));
    const at::Tensor most = rows.amax(1);
    group->max(most);
    const at::Tensor shifted = rows - most.unsqueeze(1);
    const at::Tensor shares = shifted.exp();
    const at::Tensor both =
        at::stack({shares.sum(1), shifted.gather(1, own.columns).squeeze(1) * own.are_mine});
    group->sum(both);
    const at::Tensor count = counted.sum().to(rows.scalar_type());
    const at::Tensor loss = (both[0].log() - both[1]).masked_fill(counted.logical_not(), 0).sum();
    // The gradient of a row: its softmax, less one where the target is.
    shares.div_(both[0].unsqueeze(1));
    shares.scatter_add_(1, own.columns, -own.are_mine.to(shares.scalar_type()).unsqueeze(1));
    ctx->save_for_backward({shares, counted.to(shares.scalar_type()) / count});
    ctx->saved_data["sizes"] = logits.sizes().vec();
    detail::save_type(ctx, "type", logits);
    return loss / count;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const detail::NoAutocast no_autocast;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor gradient = saved[0] * (saved[1] * grads[0]).unsqueeze(1);
    return {
        gradient.view(ctx->saved_data["sizes"].toIntVector()).to(detail::saved_type(ctx, "type")),
        {},
        {},
        {},
        {}};
  }
};

}  // namespace

at::Tensor enter(const at::Tensor& x, const TensorGroupPtr& group) {
  return group ? EnterFunction::apply(x, group) : x;
}

at::Tensor enter_weight(const at::Tensor& weight, const TensorGroupPtr& group) {
  return group && weight.defined() ? EnterWeight::apply(weight, group) : weight;
}

at::Tensor leave(const at::Tensor& x, const TensorGroupPtr& group) {
  return group ? LeaveFunction::apply(x, group) : x;
}

at::Tensor join(const at::Tensor& x, std::int64_t dimension, std::int64_t whole,
                const TensorGroupPtr& group) {
  return group ? JoinFunction::apply(x, dimension, whole, group) : x;
}

// An id outside of the vocabulary goes to the first or the last rank, whose lookup refuses it.
at::Tensor own_embedding(const at::Tensor& ids, const at::Tensor& weight, std::int64_t vocabulary,
                         std::int64_t padding_index, const TensorGroupPtr& group) {
  if (!group) return at::embedding(weight, ids, padding_index);
  const Range mine = group->range(vocabulary);
  const at::Tensor local = ids - mine.begin;
  at::Tensor others = at::zeros_like(local, at::kBool);
  if (group->rank() > 0) others = others.logical_or(local.lt(0));
  if (group->rank() + 1 < group->size()) others = others.logical_or(local.ge(mine.length));
  const std::int64_t padding = padding_index - mine.begin;
  const bool pads = padding_index >= 0 && padding >= 0 && padding < mine.length;
  const at::Tensor rows = at::embedding(weight, local.masked_fill(others, 0), pads ? padding : -1);
  return rows.masked_fill(others.unsqueeze(-1), 0);
}

at::Tensor sliced_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                std::int64_t vocabulary, const TensorGroupPtr& group,
                                std::int64_t ignore_index) {
  const at::Tensor flat = targets.reshape(-1).to(logits.device(), at::kLong).contiguous();
  if (group) return GroupCrossEntropy::apply(logits, flat, vocabulary, group, ignore_index);
  return at::cross_entropy_loss(logits.flatten(0, -2), flat, {}, at::Reduction::Mean, ignore_index);
}

void Sliced::use_sequence_parallel(bool on) {
  if (was_cut_ && on != sequence_parallel_)
    throw UsageError("tensor_parallel",
                     "use_sequence_parallel({}) was called after the model was cut, when ranks "
                     "compared it. Ranks that differ would wait for each other. Call it before a "
                     "TensorParallel, a FullyShard or a Pipeline is made of the model.",
                     on);
  sequence_parallel_ = on;
}

}  // namespace lockstep::nn
