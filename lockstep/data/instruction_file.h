// Instruction data as people store it (commonsense_170k.json, Alpaca): a JSON list of objects or
// one object per line, each with instruction, input, output and answer. Without torch.
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

namespace lockstep::data {

struct Instruction {
  std::string instruction{};
  std::string input{};
  std::string output{};
  std::string answer{};

  bool operator==(const Instruction&) const = default;
};

// How much of how much is done. Of a file in bytes: after each MiB or so, and at the end.
using ReadProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

// `name` stands for the file in messages. A text that begins with '[' is a list, any other is one
// object per line (empty lines are skipped). "instruction" and "output" must be there.
std::vector<Instruction> parse_instructions(std::string_view text, const std::string& name,
                                            const ReadProgress& progress = {});
std::vector<Instruction> load_instructions(const std::string& path,
                                           const ReadProgress& progress = {});

// A prompt and its answer out of texts with {instruction}, {input}, {output} and {answer}; what
// stands before the answer is the prompt.
struct PromptTemplate {
  std::string prompt = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n";
  std::string prompt_without_input = "### Instruction:\n{instruction}\n\n### Response:\n";
  std::string response = "{output}";
};

struct PromptAndResponse {
  std::string prompt;
  std::string response;
};

// UsageError for a field in braces that there is not; "{{" and "}}" are braces.
PromptAndResponse apply(const PromptTemplate& format, const Instruction& item);

}  // namespace lockstep::data
