#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/nn/divided.h"
#include "lockstep/nn/tensor_group.h"

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The parts of a sequence as they travel: each in the room of the longest.
class Rooms {
 public:
  Rooms(at::IntArrayRef whole, TensorGroup& group) : whole_(whole.vec()), group_(group) {
    auto longest = whole_;
    longest[1] = (whole_[1] + group.size() - 1) / group.size();
    room_ = c10::multiply_integers(longest);
  }

  at::Tensor gathered(const at::Tensor& part) const {
    at::Tensor mine = part.detach().reshape({-1});
    if (mine.numel() < room_) mine = at::constant_pad_nd(mine, {0, room_ - mine.numel()});
    const at::Tensor all = at::empty({group_.size(), room_}, part.options());
    group_.all_gather(all, mine);
    at::Tensor whole = at::empty(whole_, part.options());
    for (int rank = 0; rank < group_.size(); ++rank) of(whole, rank).copy_(in_room(all, rank));
    return whole;
  }

  at::Tensor reduced(const at::Tensor& whole) const {
    const at::Tensor all = at::zeros({group_.size(), room_}, whole.options());
    for (int rank = 0; rank < group_.size(); ++rank)
      in_room(all, rank).copy_(of(whole.detach(), rank));
    const at::Tensor mine = at::empty({room_}, whole.options());
    group_.reduce_scatter(mine, all);
    const auto sizes = sizes_of(group_.rank());
    return mine.narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
  }

 private:
  Range range(int rank) const { return slice_range(whole_[1], rank, group_.size()); }
  std::vector<std::int64_t> sizes_of(int rank) const {
    auto sizes = whole_;
    sizes[1] = range(rank).length;
    return sizes;
  }
  at::Tensor of(const at::Tensor& whole, int rank) const {
    return whole.narrow(1, range(rank).begin, range(rank).length);
  }
  at::Tensor in_room(const at::Tensor& all, int rank) const {
    const auto sizes = sizes_of(rank);
    return all[rank].narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
  }

  std::vector<std::int64_t> whole_;
  TensorGroup& group_;
  std::int64_t room_ = 0;
};

std::vector<std::int64_t> with_time(const at::Tensor& x, std::int64_t time) {
  auto sizes = x.sizes().vec();
  sizes[1] = time;
  return sizes;
}

TensorGroupPtr group_in(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<TensorGroup>(ctx->saved_data["group"].toCapsule());
}

// The memory of the whole sequence, alive as long as layers have saved it. Backward gathers it
// again, but no longer than they need it.
struct WholeMemory : torch::CustomClassHolder {
  c10::Storage storage() const { return c10::Storage(saved.lock()); }
  c10::weak_intrusive_ptr<c10::StorageImpl> saved{c10::intrusive_ptr<c10::StorageImpl>()};
  bool released = false;  // what was not is somebody else's to free
};
using WholeMemoryPtr = c10::intrusive_ptr<WholeMemory>;

WholeMemoryPtr memory_in(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<WholeMemory>(ctx->saved_data["memory"].toCapsule());
}

// A second derivative would need the whole sequence after its memory is free again.
void refuse_second_derivative() {
  if (at::GradMode::is_enabled())
    throw UsageError("nn",
                     "backward(create_graph=true) was called through an EnteredSequence, "
                     "whose gradients have no graph. Train without sequence_parallel.");
}

class EnterSequence : public torch::autograd::Function<EnterSequence> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, std::int64_t time,
                            const TensorGroupPtr& group, const WholeMemoryPtr& memory) {
    ctx->saved_data["group"] = c10::IValue::make_capsule(group);
    ctx->saved_data["memory"] = c10::IValue::make_capsule(memory);
    at::Tensor whole = Rooms(with_time(x, time), *group).gathered(x);
    memory->saved = whole.storage().getWeakStorageImpl();
    return whole;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_derivative();
    // Whatever was computed from it has its gradient; a graph that is kept still has it.
    const c10::Storage whole = memory_in(ctx)->storage();
    if (whole && memory_in(ctx)->released) empty_storage(whole);
    return {Rooms(grads[0].sizes(), *group_in(ctx)).reduced(grads[0]), {}, {}, {}};
  }
};

class LeaveSequence : public torch::autograd::Function<LeaveSequence> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const TensorGroupPtr& group) {
    ctx->saved_data["group"] = c10::IValue::make_capsule(group);
    ctx->saved_data["time"] = x.size(1);
    return Rooms(x.sizes(), *group).reduced(x);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto sizes = with_time(grads[0], ctx->saved_data["time"].toInt());
    return {Rooms(sizes, *group_in(ctx)).gathered(grads[0]), {}};
  }
};

// Between what was computed from the whole sequence and its gradients.
class ReleaseSequence : public torch::autograd::Function<ReleaseSequence> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& part, std::int64_t time,
                               const TensorGroupPtr& group, const WholeMemoryPtr& memory,
                               at::TensorList outputs) {
    ctx->save_for_backward({part});
    ctx->saved_data["time"] = time;
    ctx->saved_data["group"] = c10::IValue::make_capsule(group);
    ctx->saved_data["memory"] = c10::IValue::make_capsule(memory);
    memory->released = true;
    empty_storage(memory->storage());
    variable_list same;
    for (const at::Tensor& output : outputs) same.push_back(output.view_as(output));
    return same;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_derivative();
    const at::Tensor part = ctx->get_saved_variables()[0];
    const auto sizes = with_time(part, ctx->saved_data["time"].toInt());
    if (const c10::Storage whole = memory_in(ctx)->storage())
      fill_storage(whole, Rooms(sizes, *group_in(ctx)).gathered(part));
    variable_list all(4);
    all.insert(all.end(), grads.begin(), grads.end());
    return all;
  }
};

at::Tensor as_autocast(const at::Tensor& x) {
  const auto device = x.device().type();
  return at::autocast::is_autocast_enabled(device) ? x.to(at::autocast::get_autocast_dtype(device))
                                                   : x;
}

}  // namespace

at::Tensor leave_sequence(const at::Tensor& x, const TensorGroupPtr& group) {
  return group ? LeaveSequence::apply(x, group) : x;
}

EnteredSequence::EnteredSequence(const at::Tensor& x, std::int64_t time,
                                 const TensorGroupPtr& group) {
  if (!group || time == 0) {
    whole_ = enter(x, group);
    return;
  }
  group_ = group;
  part_ = as_autocast(x);
  const auto memory = c10::make_intrusive<WholeMemory>();
  memory_ = memory;
  whole_ = EnterSequence::apply(part_, time, group, memory);
}

std::vector<at::Tensor> EnteredSequence::release(std::vector<at::Tensor> outputs) const {
  const bool kept = std::ranges::any_of(outputs, [](const auto& y) { return y.requires_grad(); });
  if (!group_ || !kept) return outputs;
  return ReleaseSequence::apply(part_.detach(), whole_.size(1), group_,
                                c10::static_intrusive_pointer_cast<WholeMemory>(memory_),
                                at::TensorList(outputs));
}

at::Tensor sliced_dropout(const at::Tensor& x, double p, std::int64_t dimension, std::int64_t whole,
                          const TensorGroupPtr& group) {
  if (!group) return at::dropout(x, p, /*train=*/true);
  auto sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dimension < 0 ? dimension + x.dim() : dimension)] = whole;
  const Range mine = group->range(whole);
  const at::Tensor kept = at::empty(sizes, x.options())  // as ATen's dropout draws on a CPU
                              .bernoulli_(1 - p)
                              .narrow(dimension, mine.begin, mine.length)
                              .to(at::kBool);
  return x * kept * (p < 1 ? 1 / (1 - p) : 0);
}

}  // namespace lockstep::nn
