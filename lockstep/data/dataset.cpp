#include "lockstep/data/dataset.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>

#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

class CallableDataset : public Dataset {
 public:
  CallableDataset(std::int64_t size, GetExample get) : size_(size), get_(std::move(get)) {}

  std::int64_t size() const override { return size_; }
  Example get(std::int64_t index, SampleRandom& random) const override {
    return get_(index, random);
  }

 private:
  std::int64_t size_;
  GetExample get_;
};

}  // namespace

Batch Dataset::collate(std::vector<Example> examples) const {
  return stack(examples);
}

std::optional<Batch> Dataset::get_batch(Indices, const RandomKey&) const {
  return std::nullopt;
}

at::Generator generator(SampleRandom& random) {
  return at::make_generator<at::CPUGeneratorImpl>(random());
}

TensorDataset::TensorDataset(at::Tensor data, at::Tensor targets)
    : data_(std::move(data)), targets_(std::move(targets)) {
  if (!data_.defined() || data_.dim() == 0)
    throw UsageError("data", "a TensorDataset needs data whose first dimension counts samples.");
  if (targets_.defined() && (targets_.dim() == 0 || targets_.size(0) != data_.size(0)))
    throw UsageError("data",
                     "a TensorDataset has {} samples and {} targets. The first dimensions must be "
                     "equal.",
                     data_.size(0), targets_.dim() == 0 ? 1 : targets_.size(0));
}

std::int64_t TensorDataset::size() const {
  return data_.size(0);
}

Example TensorDataset::get(std::int64_t index, SampleRandom&) const {
  return {data_.select(0, index), targets_.defined() ? targets_.select(0, index) : at::Tensor()};
}

std::optional<Batch> TensorDataset::get_batch(Indices indices, const RandomKey&) const {
  const at::Tensor wanted =
      at::tensor(at::ArrayRef<std::int64_t>(indices.data(), indices.size()), at::kLong)
          .to(data_.device());
  return detail::batch_of(
      {data_.index_select(0, wanted),
       targets_.defined() ? targets_.index_select(0, wanted.to(targets_.device())) : at::Tensor()},
      static_cast<std::int64_t>(indices.size()));
}

DatasetPtr make_dataset(std::int64_t size, GetExample get) {
  if (size < 0) throw UsageError("data", "a dataset cannot have {} samples.", size);
  if (!get) throw UsageError("data", "make_dataset() was given no function to get samples with.");
  return std::make_shared<CallableDataset>(size, std::move(get));
}

namespace detail {

Batch batch_of(Example stacked, std::int64_t samples) {
  Batch batch;
  batch.data = std::move(stacked.data);
  batch.target = std::move(stacked.target);
  batch.tokens = count_tokens(batch.target, samples);
  return batch;
}

Example only_sample(const Example& stacked) {
  return {stacked.data.select(0, 0),
          stacked.target.defined() ? stacked.target.select(0, 0) : at::Tensor()};
}

void check_sized(bool sized) {
  if (!sized)
    throw UsageError("data",
                     "this dataset of torch::data does not know its size, so it cannot be divided "
                     "among ranks. Use one whose size() is set, or make_dataset(size, function).");
}

}  // namespace detail

namespace {

std::string shape_text(const at::Tensor& tensor) {
  return tensor.defined() ? c10::str(tensor.sizes(), ' ', tensor.scalar_type()) : "none";
}

// Names samples by their indices in the dataset where known, else by their positions in the batch.
std::string names_of(const std::vector<Example>& examples, std::size_t other) {
  const std::int64_t index = examples[other].index;
  if (index < 0) return fmt::format("samples 0 and {} of a batch", other);
  return fmt::format("samples {} and {} of the dataset", examples.front().index, index);
}

at::Tensor stack_one(const std::vector<Example>& examples, at::Tensor Example::*member,
                     const char* what) {
  const at::Tensor& first = examples.front().*member;
  std::vector<at::Tensor> tensors;
  tensors.reserve(examples.size());
  for (std::size_t i = 0; i < examples.size(); ++i) {
    const at::Tensor& tensor = examples[i].*member;
    const bool fits = tensor.defined() == first.defined() &&
                      (!first.defined() || (tensor.sizes() == first.sizes() &&
                                            tensor.scalar_type() == first.scalar_type()));
    if (!fits)
      throw UsageError("data",
                       "{} cannot be stacked: their {} differ ({} and {}). Make them equal in the "
                       "dataset, or give LoaderOptions::collate a function that pads.",
                       names_of(examples, i), what, shape_text(first), shape_text(tensor));
    tensors.push_back(tensor);
  }
  return first.defined() ? at::stack(tensors) : at::Tensor();
}

}  // namespace

Batch Batch::to(c10::Device device, bool non_blocking) const {
  Batch moved = *this;
  if (data.defined()) moved.data = data.to(device, non_blocking);
  if (target.defined()) moved.target = target.to(device, non_blocking);
  return moved;
}

Batch stack(const std::vector<Example>& examples) {
  if (examples.empty()) throw UsageError("data", "a batch of no samples cannot be stacked.");
  return detail::batch_of({stack_one(examples, &Example::data, "data"),
                           stack_one(examples, &Example::target, "targets")},
                          static_cast<std::int64_t>(examples.size()));
}

std::int64_t count_tokens(const at::Tensor& target, std::int64_t samples) {
  const bool sequences = target.defined() && target.dim() >= 2 &&
                         at::isIntegralType(target.scalar_type(), /*includeBool=*/false);
  return sequences ? target.ne(kIgnoredTarget).sum().item<std::int64_t>() : samples;
}

}  // namespace lockstep::data
