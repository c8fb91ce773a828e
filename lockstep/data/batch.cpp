#include "lockstep/data/batch.h"

#include <ATen/ops/stack.h>
#include <fmt/format.h>

#include <sstream>

#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

std::string shape_text(const at::Tensor& tensor) {
  std::ostringstream text;
  if (tensor.defined())
    text << tensor.sizes() << ' ' << tensor.scalar_type();
  else
    text << "none";
  return text.str();
}

// By the dataset's indices where they are known, else by their positions in the batch.
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
  Batch batch;
  batch.data = stack_one(examples, &Example::data, "data");
  batch.target = stack_one(examples, &Example::target, "targets");
  batch.tokens = count_tokens(batch.target, static_cast<std::int64_t>(examples.size()));
  return batch;
}

std::int64_t count_tokens(const at::Tensor& target, std::int64_t samples) {
  const bool sequences = target.defined() && target.dim() >= 2 &&
                         at::isIntegralType(target.scalar_type(), /*includeBool=*/false);
  return sequences ? target.ne(kIgnoredTarget).sum().item<std::int64_t>() : samples;
}

}  // namespace lockstep::data
