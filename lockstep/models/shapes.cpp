#include "lockstep/models/shapes.h"

#include <fmt/format.h>

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

// The running statistics of a batch norm.
void add_statistics(Shapes& buffers, const std::string& norm, std::int64_t width) {
  buffers.push_back({.name = norm + ".running_mean", .shape = {width}});
  buffers.push_back({.name = norm + ".running_var", .shape = {width}});
  buffers.push_back({.name = norm + ".num_batches_tracked", .dtype = io::DType::kI64, .shape = {}});
}

// A convolution without bias and the batch norm after it, whose statistics are buffers.
void add_convolution(Shapes& all, Shapes& buffers, const std::string& convolution,
                     const std::string& norm, std::vector<std::int64_t> shape) {
  const std::int64_t width = shape.front();
  all.push_back({.name = convolution + ".weight", .shape = std::move(shape)});
  add_pair(all, norm, {width}, width);
  add_statistics(buffers, norm, width);
}

}  // namespace

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
      add_statistics(buffers, norm, c.hidden);
    }
    place += c.dropout > 0 ? 2 : 1;
    width = c.hidden;
  }
  add_pair(all, fmt::format("net.{}", place), {c.outputs, width}, c.outputs);
  all.insert(all.end(), buffers.begin(), buffers.end());
  return all;
}

std::vector<std::int64_t> ResNetConfig::blocks() const {
  switch (depth) {
    case 18:
      return {2, 2, 2, 2};
    case 34:
    case 50:
      return {3, 4, 6, 3};
    case 101:
      return {3, 4, 23, 3};
    case 152:
      return {3, 8, 36, 3};
    default:
      return {};
  }
}

Shapes tensors_of(const ResNetConfig& c) {
  Shapes all;
  Shapes buffers;
  add_convolution(all, buffers, "conv1", "bn1", {64, 3, 7, 7});
  std::int64_t in = 64;
  std::int64_t width = 64;
  const auto stages = c.blocks();
  for (std::size_t stage = 0; stage < stages.size(); ++stage, width *= 2) {
    const std::int64_t out = width * c.expansion();
    for (std::int64_t i = 0; i < stages[stage]; ++i, in = out) {
      const std::string block = fmt::format("layer{}.{}.", stage + 1, i);
      const auto add = [&](int number, std::int64_t from, std::int64_t to, std::int64_t size) {
        add_convolution(all, buffers, fmt::format("{}conv{}", block, number),
                        fmt::format("{}bn{}", block, number), {to, from, size, size});
      };
      if (c.expansion() == 1) {
        add(1, in, width, 3);
        add(2, width, width, 3);
      } else {
        add(1, in, width, 1);
        add(2, width, width, 3);
        add(3, width, out, 1);
      }
      if (i == 0 && (stage > 0 || in != out))
        add_convolution(all, buffers, block + "downsample.0", block + "downsample.1",
                        {out, in, 1, 1});
    }
  }
  add_pair(all, "fc", {c.num_classes, in}, c.num_classes);
  all.insert(all.end(), buffers.begin(), buffers.end());
  return all;
}

}  // namespace lockstep::models
