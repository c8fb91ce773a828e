// Instruction data as batches of tokens: prompt and response joined, targets of the prompt masked,
// padded or packed to a length.
//
// The one hard idea: target[t] is the token after data[t], as for token shards, and it is
// kIgnoredTarget (-100) wherever nothing is to be learned: the prompt, the padding, and the border
// between two packed samples. A causal model needs no attention mask for padding on the right.
//
//   auto dataset = std::make_shared<InstructionDataset>(load_instructions("commonsense_170k.json"),
//                                                       InstructionOptions{.max_length = 512});
//   auto loader = data::loader(dataset, world, {.batch_size = 8,
//                                               .sampler = dataset->length_grouped(8, seed)});
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/data/byte_tokenizer.h"
#include "lockstep/data/dataset.h"
#include "lockstep/data/instruction_file.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {

enum class Padding {
  kLongest,    // to the longest of the batch
  kMaxLength,  // all batches alike
  kPacked,     // several samples per row, as full as can be; rows have max_length
};

struct InstructionOptions {
  std::int64_t max_length = 512;          // tokens of a row; longer samples lose their end
  const char* length_key = "max_length";  // what its user calls it: for messages
  Padding padding = Padding::kLongest;
  std::int64_t pad_to_multiple_of = 1;  // with kLongest
  bool train_on_prompt = false;
  PromptTemplate prompt{};
  TextEncoder encoder{};
};

struct InstructionCounts {
  std::int64_t read = 0;
  std::int64_t truncated = 0;  // lost some of the response
  std::int64_t dropped = 0;    // the prompt alone fills max_length: nothing to learn
  std::int64_t tokens = 0;     // kept, over all samples
};

// Tokenizes at construction (in parallel is the encoder's affair); then read-only for any thread.
class InstructionDataset : public Dataset {
 public:
  // UsageError when nothing is left to learn from, or for a max_length below 2.
  explicit InstructionDataset(const std::vector<Instruction>& items,
                              InstructionOptions options = {});

  std::int64_t size() const override;  // samples, or rows when packed
  Example get(std::int64_t index, SampleRandom& random) const override;
  Batch collate(std::vector<Example> examples) const override;

  const InstructionCounts& counts() const { return counts_; }
  std::vector<std::int64_t> lengths() const;  // of data, per sample or row
  // Samples of like length in one batch; `batch` as for LengthGroupedSampler.
  SamplerPtr length_grouped(std::int64_t batch, std::uint64_t seed) const;

 private:
  struct Sample {
    std::int64_t begin;   // in tokens_
    std::int64_t prompt;  // tokens of the prompt, the first of the sample
    std::int64_t length;
  };
  void add(const Instruction& item);
  void pack();

  InstructionOptions options_;
  InstructionCounts counts_;
  Tokens tokens_;
  std::vector<Sample> samples_;
  std::vector<std::vector<std::int64_t>> rows_;  // when packed: samples of each row
};

}  // namespace lockstep::data
