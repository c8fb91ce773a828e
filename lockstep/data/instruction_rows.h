// Instruction data as tokens: what is left of each sample within a length, which of its tokens are
// learned, and which samples share a row. Without torch, so that `lockstep config check` finds what
// training would find.
//
// Responses and completions are learned, and in chats what the assistant says: as TRL does with
// completion_only_loss and assistant_only_loss. A sample whose prompt alone fills a row teaches
// nothing and is skipped; one that is too long loses its end. What was lost is counted, and it is
// an error when nothing is left.
//
//   const InstructionRows rows(load_instructions("commonsense_170k.json"), {.max_length = 512});
//   for (const auto& sample : rows.row(0)) use(rows.tokens(sample), rows.learned(sample));
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/data/byte_tokenizer.h"
#include "lockstep/data/instruction_file.h"
#include "lockstep/data/tokenizer.h"

namespace lockstep::data {

enum class Padding {
  kLongest,    // to the longest in the batch
  kMaxLength,  // the same for all batches
  kPacked,     // several samples per row, as full as can be; rows have max_length
};

struct InstructionOptions {
  std::int64_t max_length = 512;          // tokens of a row; longer samples lose their end
  const char* length_key = "max_length";  // what its user calls it: for messages
  std::string source{};                   // where the samples come from: for messages
  Padding padding = Padding::kLongest;
  std::int64_t pad_to_multiple_of = 1;  // with kLongest
  std::int64_t pad_at_most = 0;         // the longest padding; 0: unlimited
  bool train_on_prompt = false;
  PromptTemplate prompt{};
  TextEncoder encoder{};
  std::optional<Tokenizer> chat{};  // for records that are chats: its template makes their text
};

struct InstructionCounts {
  std::int64_t read = 0;
  std::int64_t truncated = 0;  // lost some of the response
  std::int64_t dropped = 0;    // the prompt alone fills max_length: nothing to learn
  std::int64_t tokens = 0;     // used, over all samples
};

// Tokenizes at construction (the encoder decides about threads); then read-only for any thread.
class InstructionRows {
 public:
  struct Sample {
    std::int64_t begin;  // where its tokens begin among all
    std::int64_t length;
  };

  // UsageError when nothing is left to learn from, for a max_length below 2, and for chats without
  // a template. `progress` counts items, now and then.
  explicit InstructionRows(const std::vector<Instruction>& items, InstructionOptions options = {},
                           const ReadProgress& progress = {});

  std::int64_t size() const;                          // samples, or rows when packed
  std::vector<Sample> row(std::int64_t index) const;  // one sample, or several when packed
  std::span<const std::int32_t> tokens(const Sample& sample) const;
  std::span<const std::uint8_t> learned(const Sample& sample) const;  // 0 or 1 for each token
  std::vector<std::int64_t> lengths() const;                          // of a model's input, per row
  RecordKind kind() const { return kind_; }                           // of the items

  const InstructionOptions& options() const { return options_; }
  const InstructionCounts& counts() const { return counts_; }

 private:
  void add(const Instruction& item);
  void add_text(const PromptAndResponse& texts);
  void add_chat(const Instruction& item);
  void add_tokens(const Tokens& tokens, std::vector<std::uint8_t> learned);
  void pack();

  InstructionOptions options_;
  InstructionCounts counts_;
  RecordKind kind_ = RecordKind::kInstruction;
  Tokens tokens_;
  std::vector<std::uint8_t> learned_;  // one for each of tokens_
  std::vector<Sample> samples_;
  std::vector<std::vector<std::int64_t>> rows_;  // when packed: samples of each row
};

}  // namespace lockstep::data
