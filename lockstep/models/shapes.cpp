#include "lockstep/models/shapes.h"

#include <fmt/format.h>

#include <string>
#include <utility>

namespace lockstep::models {
namespace {

using Shapes = std::vector<io::TensorShape>;

// A weight and its bias; for norms both are as wide as what they normalise.
void add_pair(Shapes& all, const std::string& name, std::vector<std::int64_t> weight,
              std::int64_t bias) {
  all.push_back({.name = name + ".weight", .shape = std::move(weight)});
  all.push_back({.name = name + ".bias", .shape = {bias}});
}

}  // namespace

Shapes tensors_of(const GptConfig& c) {
  const std::int64_t width = c.n_embd;
  Shapes all;
  all.push_back({.name = "transformer.wte.weight", .shape = {c.vocab_size, width}});
  all.push_back({.name = "transformer.wpe.weight", .shape = {c.n_positions, width}});
  for (std::int64_t i = 0; i < c.n_layer; ++i) {
    const std::string block = fmt::format("transformer.h.{}.", i);
    add_pair(all, block + "ln_1", {width}, width);
    add_pair(all, block + "attn.c_attn", {width, 3 * width}, 3 * width);
    add_pair(all, block + "attn.c_proj", {width, width}, width);
    add_pair(all, block + "ln_2", {width}, width);
    add_pair(all, block + "mlp.c_fc", {width, 4 * width}, 4 * width);
    add_pair(all, block + "mlp.c_proj", {4 * width, width}, width);
  }
  add_pair(all, "transformer.ln_f", {width}, width);
  return all;
}

Shapes tensors_of(const MlpConfig& c) {
  Shapes all;
  Shapes buffers;
  std::int64_t width = c.inputs;
  std::int64_t place = 0;  // in the sequence, where what has no tensors counts too
  for (std::int64_t layer = 0; layer < c.layers; ++layer) {
    add_pair(all, fmt::format("net.{}", place++), {c.hidden, width}, c.hidden);
    if (c.batch_norm) {
      const std::string norm = fmt::format("net.{}", place++);
      add_pair(all, norm, {c.hidden}, c.hidden);
      buffers.push_back({.name = norm + ".running_mean", .shape = {c.hidden}});
      buffers.push_back({.name = norm + ".running_var", .shape = {c.hidden}});
      buffers.push_back(
          {.name = norm + ".num_batches_tracked", .dtype = io::DType::kI64, .shape = {}});
    }
    place += c.dropout > 0 ? 2 : 1;
    width = c.hidden;
  }
  add_pair(all, fmt::format("net.{}", place), {c.outputs, width}, c.outputs);
  all.insert(all.end(), buffers.begin(), buffers.end());
  return all;
}

}  // namespace lockstep::models
