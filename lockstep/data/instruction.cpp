#include "lockstep/data/instruction.h"

#include <algorithm>
#include <numeric>
#include <set>

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

InstructionDataset::InstructionDataset(const std::vector<Instruction>& items,
                                       InstructionOptions options)
    : options_(std::move(options)) {
  if (options_.max_length < 2)
    throw UsageError("instructions", "{} is {}, and must be 2 or more.", options_.length_key,
                     options_.max_length);
  if (options_.pad_to_multiple_of < 1)
    throw UsageError("instructions", "pad_to_multiple_of is {}, and must be 1 or more.",
                     options_.pad_to_multiple_of);
  for (const Instruction& item : items) add(item);
  if (samples_.empty())
    throw UsageError("instructions",
                     "of {} samples none has anything to learn from: {} prompts alone fill "
                     "{} = {}. Raise {}.",
                     counts_.read, counts_.dropped, options_.length_key, options_.max_length,
                     options_.length_key);
  if (options_.padding == Padding::kPacked) pack();
}

void InstructionDataset::add(const Instruction& item) {
  const PromptAndResponse texts = apply(options_.prompt, item);
  const Tokens prompt = options_.encoder.encode(texts.prompt);
  Tokens response = options_.encoder.encode(texts.response);
  response.push_back(options_.encoder.end_of_text);
  ++counts_.read;
  // A row of its own gives one token away, since the last is only a target; a packed sample keeps
  // it, as the mark that the next one begins.
  const std::int64_t most = options_.max_length + (options_.padding == Padding::kPacked ? 0 : 1);
  const auto prompt_size = static_cast<std::int64_t>(prompt.size());
  const std::int64_t whole = prompt_size + static_cast<std::int64_t>(response.size());
  const std::int64_t kept = std::min(whole, most);
  if (prompt_size >= kept || kept < 2) {
    ++counts_.dropped;
    return;
  }
  if (kept < whole) ++counts_.truncated;
  samples_.push_back({static_cast<std::int64_t>(tokens_.size()), prompt_size, kept});
  counts_.tokens += kept;
  tokens_.insert(tokens_.end(), prompt.begin(), prompt.end());
  tokens_.insert(tokens_.end(), response.begin(),
                 response.begin() + static_cast<std::ptrdiff_t>(kept - prompt_size));
}

// Best fit, longest first: each sample goes into the fullest row that still has room.
void InstructionDataset::pack() {
  std::vector<std::int64_t> order(samples_.size());
  std::iota(order.begin(), order.end(), 0);
  const auto length = [this](std::int64_t i) {
    return samples_[static_cast<std::size_t>(i)].length;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return length(a) > length(b); });
  std::set<std::pair<std::int64_t, std::size_t>> room;  // tokens left, row
  for (const std::int64_t sample : order) {
    auto best = room.lower_bound({length(sample), 0});
    std::pair<std::int64_t, std::size_t> row{options_.max_length, rows_.size()};
    if (best == room.end()) {
      rows_.emplace_back();
    } else {
      row = *best;
      room.erase(best);
    }
    rows_[row.second].push_back(sample);
    row.first -= length(sample);
    if (row.first > 0) room.insert(row);
  }
}

std::int64_t InstructionDataset::size() const {
  return static_cast<std::int64_t>(rows_.empty() ? samples_.size() : rows_.size());
}

Example InstructionDataset::get(std::int64_t index, SampleRandom&) const {
  if (index < 0 || index >= size())
    throw UsageError("instructions", "there is no sample {} of {}.", index, size());
  const auto row = static_cast<std::size_t>(index);
  const bool packed = !rows_.empty();
  std::vector<std::int64_t> data;
  std::vector<std::int64_t> target;
  const auto append = [&](const Sample& sample) {
    const std::int32_t* tokens = tokens_.data() + sample.begin;
    for (std::int64_t t = 0; t + 1 < sample.length; ++t) {
      const bool learned = t + 1 >= sample.prompt || options_.train_on_prompt;
      data.push_back(tokens[t]);
      target.push_back(learned ? tokens[t + 1] : kIgnoredTarget);
    }
    if (!packed) return;
    data.push_back(tokens[sample.length - 1]);
    target.push_back(kIgnoredTarget);
  };
  if (packed)
    for (const std::int64_t sample : rows_[row]) append(samples_[static_cast<std::size_t>(sample)]);
  else
    append(samples_[row]);
  return {at::tensor(data, at::kLong), at::tensor(target, at::kLong)};
}

Batch InstructionDataset::collate(std::vector<Example> examples) const {
  std::int64_t length = options_.max_length;
  if (options_.padding == Padding::kLongest) {
    length = 0;
    for (const Example& example : examples) length = std::max(length, example.data.size(0));
    const std::int64_t multiple = options_.pad_to_multiple_of;
    length = (length + multiple - 1) / multiple * multiple;
  }
  for (Example& example : examples) {
    example.data = padded(example.data, length, options_.encoder.end_of_text);
    example.target = padded(example.target, length, kIgnoredTarget);
  }
  return stack(examples);
}

std::vector<std::int64_t> InstructionDataset::lengths() const {
  std::vector<std::int64_t> lengths;
  lengths.reserve(static_cast<std::size_t>(size()));
  for (const auto& row : rows_) {
    std::int64_t sum = 0;
    for (const std::int64_t sample : row) sum += samples_[static_cast<std::size_t>(sample)].length;
    lengths.push_back(sum);
  }
  if (rows_.empty())
    for (const Sample& sample : samples_) lengths.push_back(sample.length - 1);
  return lengths;
}

SamplerPtr InstructionDataset::length_grouped(std::int64_t batch, std::uint64_t seed) const {
  return std::make_shared<LengthGroupedSampler>(lengths(), batch, seed);
}

}  // namespace lockstep::data
