#include "lockstep/data/instruction.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

// Padding at the end of a row, to `length`.
at::Tensor padded(const at::Tensor& row, std::int64_t length, std::int64_t with) {
  if (row.size(0) == length) return row;
  at::Tensor full = at::full({length}, with, at::kLong);
  full.narrow(0, 0, row.size(0)).copy_(row);
  return full;
}

}  // namespace

Example InstructionDataset::get(std::int64_t index, SampleRandom&) const {
  const bool packed = rows_.options().padding == Padding::kPacked;
  std::vector<std::int64_t> data;
  std::vector<std::int64_t> target;
  for (const InstructionRows::Sample& sample : rows_.row(index)) {
    const auto tokens = rows_.tokens(sample);
    const auto learned = rows_.learned(sample);
    for (std::size_t t = 0; t + 1 < tokens.size(); ++t) {
      data.push_back(tokens[t]);
      target.push_back(learned[t + 1] != 0 ? tokens[t + 1] : kIgnoredTarget);
    }
    if (!packed) continue;
    data.push_back(tokens.back());
    target.push_back(kIgnoredTarget);
  }
  return {at::tensor(data, at::kLong), at::tensor(target, at::kLong)};
}

Batch InstructionDataset::collate(std::vector<Example> examples) const {
  const InstructionOptions& options = rows_.options();
  std::int64_t length = options.max_length;
  if (options.padding == Padding::kLongest) {
    length = 0;
    for (const Example& example : examples) length = std::max(length, example.data.size(0));
    const std::int64_t multiple = options.pad_to_multiple_of;
    const std::int64_t longest = length;
    length = (length + multiple - 1) / multiple * multiple;
    if (options.pad_at_most > 0) length = std::min(length, std::max(longest, options.pad_at_most));
  }
  for (Example& example : examples) {
    example.data = padded(example.data, length, options.encoder.end_of_text);
    example.target = padded(example.target, length, kIgnoredTarget);
  }
  return stack(examples);
}

SamplerPtr InstructionDataset::length_grouped(std::int64_t batch, std::uint64_t seed) const {
  return std::make_shared<LengthGroupedSampler>(lengths(), batch, seed);
}

}  // namespace lockstep::data
