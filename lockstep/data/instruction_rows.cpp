#include "lockstep/data/instruction_rows.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::data {

InstructionRows::InstructionRows(const std::vector<Instruction>& items, InstructionOptions options,
                                 const ReadProgress& progress)
    : options_(std::move(options)) {
  if (options_.max_length < 2)
    throw UsageError("instructions", "{} is {}, and must be 2 or more.", options_.length_key,
                     options_.max_length);
  if (options_.pad_to_multiple_of < 1)
    throw UsageError("instructions", "pad_to_multiple_of is {}, and must be 1 or more.",
                     options_.pad_to_multiple_of);
  constexpr std::size_t kStride = 1024;
  for (std::size_t i = 0; i < items.size(); ++i) {
    add(items[i]);
    if (progress && (i + 1) % kStride == 0) progress(i + 1, items.size());
  }
  const std::string where = options_.source.empty() ? "" : options_.source + ": ";
  if (items.empty())
    throw UsageError("instructions", "{}there are no samples. Give a file that has some.", where);
  if (samples_.empty())
    throw UsageError("instructions",
                     "{}of {} samples none has anything to learn from: {} prompts alone fill "
                     "{} = {}. Raise {}.",
                     where, counts_.read, counts_.dropped, options_.length_key, options_.max_length,
                     options_.length_key);
  if (options_.padding == Padding::kPacked) pack();
}

void InstructionRows::add(const Instruction& item) {
  const PromptAndResponse texts = apply(options_.prompt, item);
  // Encoded as the one text that a model will see. A token that has characters of both is the
  // first of the response.
  const std::int32_t end = options_.encoder.end_of_text;
  Tokens prompt = options_.encoder.encode(texts.prompt);
  if (!prompt.empty() && prompt.back() == end) prompt.pop_back();  // the encoder's own
  Tokens tokens = options_.encoder.encode(texts.prompt + texts.response);
  const auto border = std::mismatch(prompt.begin(), prompt.end(), tokens.begin(), tokens.end());
  if (tokens.empty() || tokens.back() != end) tokens.push_back(end);
  ++counts_.read;
  // A row of its own gives one token away, since the last is only a target; a packed sample keeps
  // it, as the mark that the next one begins.
  const std::int64_t most = options_.max_length + (options_.padding == Padding::kPacked ? 0 : 1);
  const auto prompt_size = static_cast<std::int64_t>(border.first - prompt.begin());
  const auto whole = static_cast<std::int64_t>(tokens.size());
  const std::int64_t length = std::min(whole, most);
  if (prompt_size >= length || length < 2) {
    ++counts_.dropped;
    return;
  }
  if (length < whole) ++counts_.truncated;
  samples_.push_back({static_cast<std::int64_t>(tokens_.size()), prompt_size, length});
  counts_.tokens += length;
  tokens_.insert(tokens_.end(), tokens.begin(),
                 tokens.begin() + static_cast<std::ptrdiff_t>(length));
}

// Best fit, longest first: each sample goes into the fullest row that still has room.
void InstructionRows::pack() {
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

std::int64_t InstructionRows::size() const {
  return static_cast<std::int64_t>(rows_.empty() ? samples_.size() : rows_.size());
}

std::vector<InstructionRows::Sample> InstructionRows::row(std::int64_t index) const {
  if (index < 0 || index >= size())
    throw UsageError("instructions", "there is no sample {} of {}.", index, size());
  const auto at = static_cast<std::size_t>(index);
  if (rows_.empty()) return {samples_[at]};
  std::vector<Sample> row;
  for (const std::int64_t sample : rows_[at])
    row.push_back(samples_[static_cast<std::size_t>(sample)]);
  return row;
}

std::span<const std::int32_t> InstructionRows::tokens(const Sample& sample) const {
  return std::span<const std::int32_t>(tokens_).subspan(static_cast<std::size_t>(sample.begin),
                                                        static_cast<std::size_t>(sample.length));
}

std::vector<std::int64_t> InstructionRows::lengths() const {
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

}  // namespace lockstep::data
