// Fine-tuning data: its file formats, and its conversion to rows of tokens. Without torch, so that
// `lockstep config check` finds the mistakes that training would find.
//
// A file is a JSON list of objects or has one object per line. Its objects are of one kind:
//
//   {"instruction": ..., "input": ..., "output": ..., "answer": ...}   commonsense_170k, Alpaca
//   {"prompt": TEXT, "completion": TEXT}                               TRL's prompt, completion,
//   {"prompt": MESSAGES, "completion": MESSAGES}                       as texts or as messages
//   {"messages": [{"role": "user", "content": TEXT}, ...]}             chats
//
//   const InstructionRows rows(load_instructions("commonsense_170k.json"), {.max_length = 512});
//   for (const auto& sample : rows.row(0)) use(rows.tokens(sample), rows.learned(sample));
//
// Read strictly: a mistake is a UsageError with file, line and column. Other keys are skipped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/data/tokenizer.h"

namespace lockstep::data {

enum class RecordKind {
  kInstruction,  // PromptTemplate renders its text
  kCompletion,   // prompt and completion, as they are in `instruction` and `output`
  kChat,         // the model's chat template renders its text
};

struct Instruction {
  std::string instruction{};
  std::string input{};
  std::string output{};
  std::string answer{};
  RecordKind kind = RecordKind::kInstruction;
  std::vector<ChatMessage> messages{};  // for a chat
  // The first `given` messages are the prompt of a completion; the others are learned. 0: the
  // assistant's messages are learned.
  std::size_t given = 0;

  bool operator==(const Instruction&) const = default;
};

// How much of the total is done, in bytes for a file: after each MiB or so, and at the end.
using ReadProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

// `name` stands for the file in messages. A text that begins with '[' is a list, any other is one
// object per line (empty lines are skipped). An object's kind is the first that its keys allow: an
// instruction ("instruction" and "output"), a completion, a chat.
std::vector<Instruction> parse_instructions(std::string_view text, const std::string& name,
                                            const ReadProgress& progress = {});
std::vector<Instruction> load_instructions(const std::string& path,
                                           const ReadProgress& progress = {});

// A prompt and its answer, rendered from {instruction}, {input}, {output} and {answer}; the text
// before the answer is the prompt.
struct PromptTemplate {
  std::string prompt = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n";
  std::string prompt_without_input = "### Instruction:\n{instruction}\n\n### Response:\n";
  std::string response = "{output}";
};

struct PromptAndResponse {
  std::string prompt;
  std::string response;
};

// UsageError for an unknown field in braces; "{{" and "}}" are braces. A completion is used as it
// is, without the template. Not for chats.
PromptAndResponse apply(const PromptTemplate& format, const Instruction& item);

enum class Padding {
  kLongest,    // to the longest in the batch
  kMaxLength,  // the same for all batches
  kPacked,     // several samples per row, as full as can be; rows have max_length
};

struct InstructionOptions {
  std::int64_t max_length = 512;          // tokens of a row; longer samples lose their end
  const char* length_key = "max_length";  // the name of max_length in messages
  std::string source{};                   // the file or data set in messages
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

// The tokens of each sample, truncated to a length; which of them are learned; and which samples
// share a row. As in TRL with completion_only_loss and assistant_only_loss, responses and
// completions are learned, and in chats the assistant's messages. A sample whose prompt alone fills
// a row is dropped; a longer one is truncated at its end. Tokenizes at construction (the encoder
// decides about threads); then read-only for any thread.
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
  void add_text(const PromptAndResponse& texts);
  void add_chat(const Instruction& item);
  void add_tokens(const Tokens& tokens, std::vector<std::uint8_t> learned);
  void pack();

  InstructionOptions options_;
  std::string where_;  // begins messages
  InstructionCounts counts_;
  RecordKind kind_ = RecordKind::kInstruction;
  Tokens tokens_;
  std::vector<std::uint8_t> learned_;  // one for each of tokens_
  std::vector<Sample> samples_;
  std::vector<std::vector<std::int64_t>> rows_;  // when packed: samples of each row
};

}  // namespace lockstep::data
