// Data to fine-tune on as people store it: a JSON list of objects or one object per line. Without
// torch. The objects of a file are of one kind:
//
//   {"instruction": ..., "input": ..., "output": ..., "answer": ...}   commonsense_170k, Alpaca
//   {"prompt": TEXT, "completion": TEXT}                               TRL's prompt, completion,
//   {"prompt": MESSAGES, "completion": MESSAGES}                       as texts or as messages
//   {"messages": [{"role": "user", "content": TEXT}, ...]}             chats
//
//   for (const Instruction& item : load_instructions("commonsense_170k.json")) ...
//
// Read strictly: a mistake is a UsageError with file, line and column. Other keys are skipped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/data/chat_message.h"

namespace lockstep::data {

enum class RecordKind {
  kInstruction,  // a PromptTemplate makes the text of it
  kCompletion,   // prompt and completion, as they are in `instruction` and `output`
  kChat,         // a model's chat template makes the text of it
};

struct Instruction {
  std::string instruction{};
  std::string input{};
  std::string output{};
  std::string answer{};
  RecordKind kind = RecordKind::kInstruction;
  std::vector<ChatMessage> messages{};  // for a chat
  // This many of them are the prompt of a completion, and the others are learned. 0: the
  // assistant's messages are learned.
  std::size_t given = 0;

  bool operator==(const Instruction&) const = default;
};

// How much of the total is done, in bytes for a file: after each MiB or so, and at the end.
using ReadProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

// `name` stands for the file in messages. A text that begins with '[' is a list, any other is one
// object per line (empty lines are skipped). An object with "instruction" and "output" is an
// instruction, whatever else it has; then "prompt" and "completion" count, then "messages".
std::vector<Instruction> parse_instructions(std::string_view text, const std::string& name,
                                            const ReadProgress& progress = {});
std::vector<Instruction> load_instructions(const std::string& path,
                                           const ReadProgress& progress = {});

// A prompt and its answer out of texts with {instruction}, {input}, {output} and {answer}; what
// comes before the answer is the prompt.
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

}  // namespace lockstep::data
