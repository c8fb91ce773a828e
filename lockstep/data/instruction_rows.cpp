#include "lockstep/data/instruction_rows.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

// How many tokens two texts begin with in common, where one text is the beginning of the other. A
// token with characters on both sides of the border between prompt and response does not count: it
// is the first that is learned.
std::size_t common(const Tokens& beginning, const Tokens& whole) {
  const auto border = std::mismatch(beginning.begin(), beginning.end(), whole.begin(), whole.end());
  return static_cast<std::size_t>(border.first - beginning.begin());
}

// How many of a text's tokens have all of their characters before `at`. How a tokenizer encodes the
// last of them may depend on the next character: GPT-2's takes two line ends as one token where
// nothing follows.
template <typename Encode>
std::size_t tokens_before(const Encode& encode, std::string_view text, std::size_t at,
                          const Tokens& whole) {
  const Tokens alone = encode(text.substr(0, at));
  const std::size_t count = common(alone, whole);
  if (count == alone.size() || at == text.size()) return count;
  std::string longer(text.substr(0, at));
  longer += static_cast<unsigned char>(text[at]) < 0x80 ? text[at] : 'a';  // a letter like others
  const Tokens followed = encode(longer);
  return std::max(count, std::min(common(followed, whole), followed.size() - 1));
}

}  // namespace

InstructionRows::InstructionRows(const std::vector<Instruction>& items, InstructionOptions options,
                                 const ReadProgress& progress)
    : options_(std::move(options)) {
  if (options_.max_length < 2)
    throw UsageError("instructions", "{} is {}, and must be 2 or more.", options_.length_key,
                     options_.max_length);
  if (options_.pad_to_multiple_of < 1)
    throw UsageError("instructions", "pad_to_multiple_of is {}, and must be 1 or more.",
                     options_.pad_to_multiple_of);
  if (!items.empty()) kind_ = items.front().kind;
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
  ++counts_.read;
  if (item.kind == RecordKind::kChat)
    add_chat(item);
  else
    add_text(apply(options_.prompt, item));
}

void InstructionRows::add_text(const PromptAndResponse& texts) {
  // Encoded as the one text that a model will see.
  const std::int32_t end = options_.encoder.end_of_text;
  Tokens prompt = options_.encoder.encode(texts.prompt);
  if (!prompt.empty() && prompt.back() == end) prompt.pop_back();  // the encoder's own
  Tokens tokens = options_.encoder.encode(texts.prompt + texts.response);
  const std::size_t border = common(prompt, tokens);
  if (tokens.empty() || tokens.back() != end) tokens.push_back(end);
  std::vector<std::uint8_t> learned(tokens.size(), 1);
  std::fill_n(learned.begin(), border, 0);
  add_tokens(tokens, std::move(learned));
}

// The template has written every special token, so nothing is added to its text.
void InstructionRows::add_chat(const Instruction& item) {
  if (!options_.chat)
    throw UsageError("instructions",
                     "{}the records are chats, whose text a model's chat template makes. Name that "
                     "model's folder as the tokenizer (data.tokenizer of a training file).",
                     options_.source.empty() ? "" : options_.source + ": ");
  const Tokenizer& chat = *options_.chat;
  const auto encode = [&](std::string_view text) {
    const auto ids = chat.encode(text, {.add_special_tokens = false});
    return Tokens(ids.begin(), ids.end());
  };
  const std::span<const ChatMessage> messages = item.messages;
  const ChatText whole = chat.chat_text(messages);
  const std::string_view text = whole.text;
  const Tokens tokens = encode(text);
  std::vector<std::uint8_t> learned(tokens.size(), 0);
  if (item.given > 0) {
    const ChatText prompt =
        chat.chat_text(messages.first(item.given), {.add_generation_prompt = true});
    const std::size_t border = common(encode(prompt.text), tokens);
    std::fill(learned.begin() + static_cast<std::ptrdiff_t>(border), learned.end(), 1);
  } else {
    for (const ChatText::Range& answer : whole.answers) {
      const std::size_t begin = tokens_before(encode, text, answer.begin, tokens);
      const std::size_t end = tokens_before(encode, text, answer.end, tokens);
      for (std::size_t t = begin; t < end; ++t) learned[t] = 1;
    }
  }
  add_tokens(tokens, std::move(learned));
}

void InstructionRows::add_tokens(const Tokens& tokens, std::vector<std::uint8_t> learned) {
  // An unpacked row loses one token, since the last is only a target; a packed sample keeps it, as
  // the mark that the next one begins.
  const std::int64_t most = options_.max_length + (options_.padding == Padding::kPacked ? 0 : 1);
  const auto whole = static_cast<std::int64_t>(tokens.size());
  const std::int64_t length = std::min(whole, most);
  const auto used = static_cast<std::ptrdiff_t>(length);
  // The first token is never a target.
  if (length < 2 ||
      std::find(learned.begin() + 1, learned.begin() + used, 1) == learned.begin() + used) {
    ++counts_.dropped;
    return;
  }
  if (length < whole) ++counts_.truncated;
  if (options_.train_on_prompt) std::fill(learned.begin(), learned.end(), 1);
  samples_.push_back({static_cast<std::int64_t>(tokens_.size()), length});
  counts_.tokens += length;
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.begin() + used);
  learned_.insert(learned_.end(), learned.begin(), learned.begin() + used);
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

std::span<const std::uint8_t> InstructionRows::learned(const Sample& sample) const {
  return std::span<const std::uint8_t>(learned_).subspan(static_cast<std::size_t>(sample.begin),
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
