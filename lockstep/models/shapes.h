// The sizes of the bundled models, and the tensors that follow from them, without torch: weights in
// a file are compared with a model, and the room for a checkpoint is counted, before either exists.
//
//   for (const io::TensorShape& tensor : tensors_of(GptConfig{.n_layer = 2}))
//     fmt::print("{} [{}]\n", tensor.name, fmt::join(tensor.shape, ", "));
//
// gpt_test.cpp compares them with the modules themselves. Values and functions without state.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/io/safetensors.h"

namespace lockstep::models {

// The defaults are the model of 124 million parameters.
struct GptConfig {
  std::int64_t n_layer = 12;
  std::int64_t n_head = 12;
  std::int64_t n_embd = 768;
  std::int64_t vocab_size = 50257;
  std::int64_t n_positions = 1024;  // the longest sequence
};

struct MlpConfig {
  std::int64_t inputs = 20;
  std::int64_t hidden = 64;
  std::int64_t layers = 1;  // hidden ones
  std::int64_t outputs = 10;
  double dropout = 0;
  bool batch_norm = false;
};

// Parameters, then buffers, each in the module's order.
std::vector<io::TensorShape> tensors_of(const GptConfig& config);
std::vector<io::TensorShape> tensors_of(const MlpConfig& config);

}  // namespace lockstep::models
