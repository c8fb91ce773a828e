#include "lockstep/parallel/tensor_slices.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/ledger.h"

namespace lockstep::parallel {
namespace {

class WorldGroup final : public nn::TensorGroup {
 public:
  explicit WorldGroup(World world) : world_(std::move(world)) {}
  int rank() const override { return world_.rank(); }
  int size() const override { return world_.size(); }
  void sum(const at::Tensor& tensor) override { reduce(tensor, ReduceOp::kSum); }
  void max(const at::Tensor& tensor) override { reduce(tensor, ReduceOp::kMax); }
  void all_gather(const at::Tensor& all, const at::Tensor& mine) override {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    world_.all_gather(all, mine).wait();
  }
  void reduce_scatter(const at::Tensor& mine, const at::Tensor& all) override {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    world_.reduce_scatter(mine, all).wait();
  }

 private:
  void reduce(const at::Tensor& tensor, ReduceOp op) {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    world_.all_reduce(tensor, op).wait();
  }
  World world_;
};

// It was made as a slice, and no rank has the whole.
bool is_slice(const at::Tensor& tensor) {
  const nn::Rows* const rows = nn::rows_of(tensor);
  return rows != nullptr && rows->slice != nullptr;
}

// A parameter of another rank's stage: it has a shape and no elements.
bool has_no_elements(const at::Tensor& tensor) {
  const nn::Rows* const rows = nn::rows_of(tensor);
  return rows != nullptr && rows->values.numel() < tensor.numel();
}

}  // namespace

nn::Slice slice_for(const nn::Sliced::Cut& cut, at::IntArrayRef whole, int rank, int ranks) {
  nn::Slice slice{.whole = whole.vec(), .dimension = cut.dimension};
  std::int64_t begin = 0;
  for (const std::int64_t part : cut.parts) {
    const nn::Range range = nn::slice_range(part, rank, ranks);
    slice.ranges.push_back({begin + range.begin, range.length});
    begin += part;
  }
  return slice;
}

TensorSlices::TensorSlices(torch::nn::Module& module, World line)
    : line_(std::move(line)), sliced_(dynamic_cast<nn::Sliced*>(&module)) {
  if (sliced_ == nullptr)
    throw UsageError(kTensorParallel,
                     "the module {} cannot be divided into slices. Derive it from nn::Sliced "
                     "(lockstep/nn/tensor_group.h), as the bundled language models are.",
                     module.name());
  model_ = ModelTensors(parameters_of(module), buffers_of(module), {});
  for (const ModelParameter& p : model_.parameters())
    parameters_.push_back({.name = p.name, .tensor = p.tensor, .sizes = nn::whole_sizes(p.tensor)});
  if (line_.size() == 1) return;
  add_cuts();
  group_ = c10::make_intrusive<WorldGroup>(line_);
}

TensorSlices::~TensorSlices() = default;

void TensorSlices::add_cuts() {
  for (nn::Sliced::Cut& cut : sliced_->cuts(line_.size())) {
    const auto p = std::ranges::find_if(parameters_, [&](const SlicedParameter& each) {
      return each.tensor.is_same(cut.parameter);
    });
    const bool fits = p != parameters_.end() && cut.dimension >= 0 &&
                      cut.dimension < static_cast<std::int64_t>(p->sizes.size()) &&
                      std::accumulate(cut.parts.begin(), cut.parts.end(), std::int64_t{0}) ==
                          p->sizes[static_cast<std::size_t>(cut.dimension)];
    if (!fits)
      throw UsageError(kTensorParallel,
                       "the module's cuts() have parts of [{}] along dimension {}, which no "
                       "parameter has{}. Give parameters of the module, with parts that add up to "
                       "the size.",
                       fmt::join(cut.parts, ", "), cut.dimension,
                       p == parameters_.end() ? "" : fmt::format(" ('{}')", p->name));
    p->cut = std::move(cut);
    p->mine = std::make_shared<nn::Slice>(slice_for(*p->cut, p->sizes, line_.rank(), line_.size()));
  }
  for (const SlicedParameter& p : parameters_)
    if (is_slice(p.tensor) && (!p.mine || *nn::rows_of(p.tensor)->slice != *p.mine))
      throw UsageError(kTensorParallel,
                       "the cuts() of a block and of the module differ in parameter '{}', which "
                       "was cut while the block was made. Let both give the same parts.",
                       p.name);
}

std::string TensorSlices::describe() const {
  std::string text = fmt::format("sequence_parallel: {}\n", sliced_->sequence_parallel());
  for (const SlicedParameter& p : parameters_)
    text += fmt::format(
        "{}: {}, shape [{}]{}{}\n", p.name, c10::toString(p.tensor.scalar_type()),
        fmt::join(p.sizes, ", "), p.tensor.requires_grad() ? "" : ", frozen",
        p.cut ? fmt::format(", cut [{}] of {}", fmt::join(p.cut->parts, ", "), p.cut->dimension)
              : "");
  return text + model_.describe_buffers();
}

const SlicedParameter* TensorSlices::find(const at::Tensor& tensor) const {
  const auto found = std::ranges::find_if(
      parameters_, [&](const SlicedParameter& p) { return p.cut && p.tensor.is_same(tensor); });
  return found == parameters_.end() ? nullptr : &*found;
}

at::Tensor TensorSlices::slice_of(const SlicedParameter& p, const at::Tensor& whole) const {
  return p.mine ? p.mine->of(whole) : whole;
}

// Slices may differ by a row, so each travels in the room of the largest.
at::Tensor TensorSlices::whole_of(const SlicedParameter& p, const at::Tensor& slice) {
  if (!p.cut) return slice;
  std::vector<nn::Slice> slices;
  std::int64_t room = 0;
  for (int rank = 0; rank < line_.size(); ++rank) {
    slices.push_back(slice_for(*p.cut, p.sizes, rank, line_.size()));
    room = std::max(room, c10::multiply_integers(slices.back().sizes()));
  }
  const at::Tensor mine = at::zeros({room}, slice.options());
  mine.narrow(0, 0, slice.numel()).copy_(slice.reshape({-1}));
  const at::Tensor all = at::empty({line_.size(), room}, slice.options());
  line_.all_gather(all, mine).wait();
  at::Tensor whole = at::empty(p.sizes, slice.options());
  for (std::size_t rank = 0; rank < slices.size(); ++rank) {
    const auto sizes = slices[rank].sizes();
    const at::Tensor theirs = all[static_cast<std::int64_t>(rank)]
                                  .narrow(0, 0, c10::multiply_integers(sizes))
                                  .view(sizes);
    std::int64_t next = 0;
    for (const nn::Range& range : slices[rank].ranges)
      whole.narrow(p.cut->dimension, range.begin, range.length)
          .copy_(theirs.narrow(p.cut->dimension, std::exchange(next, next + range.length),
                               range.length));
  }
  return whole;
}

void TensorSlices::gather() {
  if (std::exchange(whole_, true)) return;
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  const at::NoGradGuard no_grad;
  for (SlicedParameter& p : parameters_) {
    if (!p.cut) continue;
    p.slice = p.tensor.detach();
    p.tensor.set_data(whole_of(p, p.slice));
    nn::set_rows(p.tensor, nullptr);  // of the slice
  }
  sliced_->set_tensor_group(nullptr);
}

void TensorSlices::take(SlicedParameter& p) {
  if (p.slice.defined())
    p.slice.copy_(p.mine->of(p.tensor.detach()));
  else if (has_no_elements(p.tensor))  // it was not cut before
    p.slice = nn::divided(p.mine->sizes(), p.tensor.options().requires_grad(false),
                          c10::make_intrusive<nn::Rows>(nn::rows_of(p.tensor)->values, 0));
  else
    p.slice = p.mine->of(p.tensor.detach());
}

void TensorSlices::take() {
  const at::NoGradGuard no_grad;
  for (SlicedParameter& p : parameters_)
    if (whole_ && p.cut) take(p);
}

void TensorSlices::cut() {
  if (!group_ || !std::exchange(whole_, false)) return;
  const at::NoGradGuard no_grad;
  for (SlicedParameter& p : parameters_) {
    if (!p.cut || is_slice(p.tensor)) continue;
    take(p);
    p.tensor.set_data(std::exchange(p.slice, at::Tensor()));
  }
  sliced_->set_tensor_group(group_);
}

// Gradients have their parameters' types, and may be rows of them, in the host's memory.
void TensorSlices::average_gradients() {
  if (!group_) return;
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  const at::NoGradGuard no_grad;
  nn::TensorGroup::Parameters partial = group_->take_partial();
  std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
  for (const SlicedParameter& p : parameters_)
    if (partial.erase(p.tensor.unsafeGetTensorImpl()) > 0 && p.tensor.grad().defined())
      by_type[p.tensor.scalar_type()].push_back(p.tensor.grad());
  if (!partial.empty())
    throw UsageError(kTensorParallel,
                     "{} of the tensors that went through nn::enter_weight() are no parameters of "
                     "the module, so that nobody adds up their gradients. Give it parameters, and "
                     "what is computed from them to nn::enter().",
                     partial.size());
  for (const auto& [type, gradients] : by_type) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& each : gradients) flat.push_back(each.reshape({-1}).to(line_.device()));
    const at::Tensor all = at::cat(flat);
    line_.all_reduce(all, ReduceOp::kAvg).wait();
    std::int64_t next = 0;
    for (const at::Tensor& each : gradients)
      each.copy_(
          all.narrow(0, std::exchange(next, next + each.numel()), each.numel()).view(each.sizes()));
  }
}

void TensorSlices::check_backward() const {
  if (group_ && whole_)
    throw UsageError(kTensorParallel,
                     "a backward of whole parameters, which gathered() has left: gradients are of "
                     "slices. Call before_forward() before each forward that trains.");
}

void TensorSlices::check_rule(const optim::Rule& rule, const std::string& parameter) {
  if (rule->granularity() == optim::Granularity::kTensors)
    throw UsageError(kTensorParallel,
                     "{} steps whole matrices, and ranks have slices of '{}'. Use a rule that "
                     "steps elements (AdamW, Lion, SGD), or fsdp instead of tensor parallelism.",
                     rule->name(), parameter);
}

TensorSlices::AsSlices::AsSlices(TensorSlices* slices)
    : slices_(slices != nullptr && slices->group_ && slices->whole_ ? slices : nullptr) {
  if (slices_ == nullptr) return;
  for (const SlicedParameter& p : slices_->parameters_) {
    wholes_.push_back(p.cut ? p.tensor.detach() : at::Tensor());
    if (p.cut) at::Tensor(p.tensor).set_data(p.slice);
  }
}

TensorSlices::AsSlices::~AsSlices() {
  if (slices_ == nullptr) return;
  for (std::size_t i = 0; i < wholes_.size(); ++i)
    if (slices_->parameters_[i].cut) slices_->parameters_[i].tensor.set_data(wholes_[i]);
}

std::string slices_text(const Mesh& mesh) {
  const int ranks = mesh.size("tensor");
  return ranks > 1 ? fmt::format(", in slices on {} tensor parallel ranks", ranks) : "";
}

}  // namespace lockstep::parallel
