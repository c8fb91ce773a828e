// Instruction data as batches of tokens: prompt and response joined, targets of the prompt masked,
// padded or packed to a length.
//
// `target[t]` is the token after `data[t]`, as for token shards, and it is kIgnoredTarget (-100)
// wherever nothing is to be learned: the prompt, the padding, and the border between two packed
// samples. A causal model needs no attention mask for padding on the right.
//
//   auto dataset = std::make_shared<InstructionDataset>(load_instructions("commonsense_170k.json"),
//                                                       InstructionOptions{.max_length = 512});
//   auto loader = data::loader(dataset, world, {.batch_size = 8,
//                                               .sampler = dataset->length_grouped(8, seed)});
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/data/instruction_file.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {

// Tokenizes at construction (InstructionRows); then read-only for any thread.
class InstructionDataset : public Dataset {
 public:
  // UsageError when nothing is left to learn from, or for a max_length below 2.
  explicit InstructionDataset(const std::vector<Instruction>& items,
                              InstructionOptions options = {})
      : rows_(items, std::move(options)) {}
  explicit InstructionDataset(InstructionRows rows) : rows_(std::move(rows)) {}

  std::int64_t size() const override { return rows_.size(); }  // samples, or rows when packed
  Example get(std::int64_t index, SampleRandom& random) const override;
  Batch collate(std::vector<Example> examples) const override;

  const InstructionCounts& counts() const { return rows_.counts(); }
  std::vector<std::int64_t> lengths() const { return rows_.lengths(); }
  // Batches samples of similar length together; `batch` as for LengthGroupedSampler.
  SamplerPtr length_grouped(std::int64_t batch, std::uint64_t seed) const;

 private:
  InstructionRows rows_;
};

}  // namespace lockstep::data
