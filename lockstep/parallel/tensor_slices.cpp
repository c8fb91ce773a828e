#include "lockstep/parallel/tensor_slices.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
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

 private:
  void reduce(const at::Tensor& tensor, ReduceOp op) {
    const ledger::PhaseScope communication(ledger::Phase::kCommunication);
    world_.all_reduce(tensor, op).wait();
  }
  World world_;
};

// The ranges of rank `rank` of each part: in the whole, and one after the other in its slice.
template <typename Body>
void each_range(const nn::Sliced::Cut& cut, int rank, int ranks, const Body& body) {
  std::int64_t whole = 0, own = 0;
  for (const std::int64_t part : cut.parts) {
    const nn::Range range = nn::slice_range(part, rank, ranks);
    body(nn::Range{whole + range.begin, range.length}, nn::Range{own, range.length});
    whole += part;
    own += range.length;
  }
}

std::vector<std::int64_t> slice_sizes(const nn::Sliced::Cut& cut, at::IntArrayRef whole, int rank,
                                      int ranks) {
  std::vector<std::int64_t> sizes = whole.vec();
  std::int64_t length = 0;
  each_range(cut, rank, ranks, [&](nn::Range, nn::Range own) { length += own.length; });
  sizes[static_cast<std::size_t>(cut.dimension)] = length;
  return sizes;
}

}  // namespace

TensorSlices::TensorSlices(torch::nn::Module& module, World all, World line)
    : line_(std::move(line)), sliced_(dynamic_cast<nn::Sliced*>(&module)) {
  const auto refusal = refusal_of([&] { check(module); });
  const auto other = find_other_line(
      all, {.component = kTensorParallel, .what = "this module", .refusal = refusal}, describe());
  if (other)
    throw UsageError(kTensorParallel,
                     "rank {} has '{}', but rank 0 has '{}'. Ranks hold slices of one model. Build "
                     "the same one on every rank.",
                     other->rank, other->here, other->first);
  model_.broadcast(all, 0);
  if (line_.size() == 1) return;
  group_ = c10::make_intrusive<WorldGroup>(line_);
  const at::NoGradGuard no_grad;
  for (SlicedParameter& p : parameters_)
    if (p.cut)
      p.slice = at::empty(slice_sizes(*p.cut, p.sizes, line_.rank(), line_.size()),
                          p.tensor.options().requires_grad(false));
  cut();
}

TensorSlices::~TensorSlices() = default;

void TensorSlices::check(torch::nn::Module& module) {
  if (sliced_ == nullptr)
    throw UsageError(kTensorParallel,
                     "the module {} cannot be divided into slices. Derive it from nn::Sliced "
                     "(lockstep/nn/tensor_group.h), as the bundled language models are.",
                     module.name());
  model_ = ModelTensors(parameters_of(module), buffers_of(module), {});
  for (const ModelParameter& p : model_.parameters())
    parameters_.push_back({.name = p.name, .tensor = p.tensor, .sizes = p.tensor.sizes().vec()});
  if (line_.size() == 1) return;
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
  }
}

std::string TensorSlices::describe() const {
  std::string text;
  for (const SlicedParameter& p : parameters_)
    text += fmt::format(
        "{}: {}, shape [{}]{}{}\n", p.name, c10::toString(p.tensor.scalar_type()),
        fmt::join(p.sizes, ", "), p.tensor.requires_grad() ? "" : ", frozen",
        p.cut ? fmt::format(", cut [{}] of {}", fmt::join(p.cut->parts, ", "), p.cut->dimension)
              : "");
  return text + model_.describe_buffers();
}

at::Tensor TensorSlices::slice_of(const SlicedParameter& p, const at::Tensor& whole) const {
  if (!p.cut || line_.size() == 1) return whole;
  std::vector<at::Tensor> ranges;
  each_range(*p.cut, line_.rank(), line_.size(), [&](nn::Range in_whole, nn::Range) {
    ranges.push_back(whole.narrow(p.cut->dimension, in_whole.begin, in_whole.length));
  });
  return at::cat(ranges, p.cut->dimension);
}

// Slices may differ by a row, so each travels in the room of the largest.
at::Tensor TensorSlices::whole_of(const SlicedParameter& p, const at::Tensor& slice) {
  if (!p.cut || line_.size() == 1) return slice;
  const int ranks = line_.size();
  std::vector<std::vector<std::int64_t>> sizes;
  std::int64_t room = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    sizes.push_back(slice_sizes(*p.cut, p.sizes, rank, ranks));
    room = std::max(room, c10::multiply_integers(sizes.back()));
  }
  const at::Tensor mine = at::zeros({room}, slice.options());
  mine.narrow(0, 0, slice.numel()).copy_(slice.reshape({-1}));
  const at::Tensor all = at::empty({ranks, room}, slice.options());
  line_.all_gather(all, mine).wait();
  at::Tensor whole = at::empty(p.sizes, slice.options());
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& its = sizes[static_cast<std::size_t>(rank)];
    const at::Tensor theirs = all[rank].narrow(0, 0, c10::multiply_integers(its)).view(its);
    each_range(*p.cut, rank, ranks, [&](nn::Range in_whole, nn::Range own) {
      whole.narrow(p.cut->dimension, in_whole.begin, in_whole.length)
          .copy_(theirs.narrow(p.cut->dimension, own.begin, own.length));
    });
  }
  return whole;
}

void TensorSlices::show(bool whole) {
  for (SlicedParameter& p : parameters_)
    if (p.cut) {
      if (whole_ && !whole) p.whole = p.tensor.detach();  // as it is now
      p.tensor.set_data(whole ? p.whole : p.slice);
    }
}

void TensorSlices::gather() {
  if (std::exchange(whole_, true)) return;
  const ledger::PhaseScope communication(ledger::Phase::kCommunication);
  const at::NoGradGuard no_grad;
  for (SlicedParameter& p : parameters_)
    if (p.cut) p.whole = whole_of(p, p.slice);
  show(/*whole=*/true);
  sliced_->set_tensor_group(nullptr);
}

// Somebody may have written the parameters while they were whole: a checkpoint was loaded.
void TensorSlices::cut() {
  if (!group_ || !std::exchange(whole_, false)) return;
  const at::NoGradGuard no_grad;
  for (SlicedParameter& p : parameters_)
    if (p.cut) p.slice.copy_(slice_of(p, p.tensor.detach()));
  show(/*whole=*/false);
  for (SlicedParameter& p : parameters_) p.whole = at::Tensor();
  sliced_->set_tensor_group(group_);
}

}  // namespace lockstep::parallel
