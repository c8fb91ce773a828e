#include "lockstep/models/spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/text.h"
#include "lockstep/models/shapes.h"

namespace lockstep::models {
namespace {

using Tensors = std::vector<io::TensorShape>;

void add_norm(Tensors& all, const std::string& above, const NormSpec& norm) {
  all.push_back({.name = above + norm.name + ".weight", .shape = {norm.width}});
  if (norm.kind == NormKind::kLayer)
    all.push_back({.name = above + norm.name + ".bias", .shape = {norm.width}});
}

void add_norm(Tensors& all, const std::string& above, const std::optional<NormSpec>& norm) {
  if (norm) add_norm(all, above, *norm);
}

void add_projection(Tensors& all, const std::string& above, const Projection& projection) {
  const std::int64_t in = projection.in, out = projection.out();
  all.push_back({.name = above + projection.name + ".weight",
                 .shape = projection.layout == WeightLayout::kInOut ? std::vector{in, out}
                                                                    : std::vector{out, in}});
  if (projection.bias) all.push_back({.name = above + projection.name + ".bias", .shape = {out}});
}

// Calls `add` with the module and the projection of each matrix, in the order of parameters.
template <typename Add>
void each_projection(const MlpSpec& mlp, const std::string& above, const Add& add) {
  const std::string own = above + mlp.name + ".";
  const auto perceptron = [&](const std::string& module) {
    for (const Projection& one : mlp.in) add(module, one);
    add(module, mlp.out);
  };
  if (!mlp.experts) return perceptron(own);
  add(own, mlp.experts->router);
  for (std::int64_t i = 0; i < mlp.experts->count(); ++i)
    perceptron(fmt::format("{}{}.{}.", own, mlp.experts->list, i));
}

void add_block(Tensors& all, const std::string& above, const BlockSpec& b) {
  if (b.norms_first) add_norm(all, above, b.attention_norm);
  const std::string attention = above + b.attention.name + ".";
  for (const Projection& one : b.attention.in) add_projection(all, attention, one);
  add_projection(all, attention, b.attention.out);
  add_norm(all, attention, b.attention.query_norm);
  add_norm(all, attention, b.attention.key_norm);
  if (b.norms_first) add_norm(all, above, b.mlp_norm);
  each_projection(b.mlp, above, [&](const std::string& module, const Projection& one) {
    add_projection(all, module, one);
  });
  if (!b.norms_first) add_norm(all, above, b.attention_norm);
  add_norm(all, above, b.attention_after);
  if (!b.norms_first) add_norm(all, above, b.mlp_norm);
  add_norm(all, above, b.mlp_after);
}

std::string block_name(const DecoderSpec& spec, std::int64_t layer) {
  return fmt::format("{}.{}.{}", spec.prefix, spec.blocks, layer);
}

// "1, 2 or 4"
std::string divisors_text(std::int64_t number) {
  std::vector<std::string> all;
  for (std::int64_t each = 1; each <= number; ++each)
    if (number % each == 0) all.push_back(std::to_string(each));
  return listed(all);
}

void check_divides(const DecoderSpec& spec, int ranks) {
  constexpr const char* kWho = "tensor_parallel";
  const AttentionSpec& attention = spec.block.attention;
  if (attention.heads % ranks != 0 || attention.key_value_heads % ranks != 0)
    throw UsageError(kWho,
                     "{} attention heads and {} heads of keys and values are not divided by a "
                     "degree of {}: every rank computes as many. Choose one that divides both "
                     "(tensor_parallel_degree): {}.",
                     attention.heads, attention.key_value_heads, ranks,
                     divisors_text(std::gcd(attention.heads, attention.key_value_heads)));
  for (const std::int64_t width : {spec.vocabulary, spec.block.mlp.out.in})
    if (width < ranks)
      throw UsageError(kWho,
                       "a vocabulary of {} and a perceptron of width {} leave some of {} ranks "
                       "without a slice. Choose a lower degree.",
                       spec.vocabulary, spec.block.mlp.out.in, ranks);
}

// "Column parallel": each rank computes some of the outputs.
void cut_outputs(std::vector<TensorCut>& all, const std::string& name, const Projection& one) {
  all.push_back({name + ".weight", one.layout == WeightLayout::kInOut ? 1 : 0, one.parts});
  if (one.bias) all.push_back({name + ".bias", 0, one.parts});
}

// "Row parallel": each rank takes some of the inputs. The bias is added to the sum, on every rank.
void cut_inputs(std::vector<TensorCut>& all, const std::string& name, const Projection& one) {
  all.push_back({name + ".weight", one.layout == WeightLayout::kInOut ? 0 : 1, {one.in}});
}

}  // namespace

std::int64_t Projection::out() const {
  return std::accumulate(parts.begin(), parts.end(), std::int64_t{0});
}

Tensors tensors_of(const DecoderSpec& spec) {
  const std::string above = spec.prefix + ".";
  Tensors all;
  all.push_back(
      {.name = above + spec.embedding + ".weight", .shape = {spec.vocabulary, spec.width}});
  if (!spec.positions.empty())
    all.push_back(
        {.name = above + spec.positions + ".weight", .shape = {spec.max_positions, spec.width}});
  for (std::int64_t i = 0; i < spec.layers(); ++i)
    add_block(all, block_name(spec, i) + ".", spec.block);
  add_norm(all, above, spec.last);
  if (!spec.tied) add_projection(all, "", spec.head);
  return all;
}

std::vector<std::string> embedding_names(const DecoderSpec& spec) {
  std::vector<std::string> names{fmt::format("{}.{}", spec.prefix, spec.embedding)};
  if (!spec.positions.empty()) names.push_back(fmt::format("{}.{}", spec.prefix, spec.positions));
  return names;
}

std::vector<std::string> part_names(const DecoderSpec& spec) {
  std::vector<std::string> names = embedding_names(spec);
  for (std::int64_t i = 0; i < spec.layers(); ++i) names.push_back(block_name(spec, i));
  names.push_back(fmt::format("{}.{}", spec.prefix, spec.last.name));
  names.push_back(spec.head.name);
  return names;
}

std::vector<std::string> linear_layers(const DecoderSpec& spec) {
  std::vector<std::string> names;
  for (std::int64_t i = 0; i < spec.layers(); ++i) {
    const std::string block = block_name(spec, i) + ".";
    const auto add = [&](const std::string& module, const Projection& one) {
      names.push_back(module + one.name);
    };
    const AttentionSpec& attention = spec.block.attention;
    for (const Projection& one : attention.in) add(block + attention.name + ".", one);
    add(block + attention.name + ".", attention.out);
    if (!spec.block.mlp.experts) each_projection(spec.block.mlp, block, add);
  }
  if (!spec.tied) names.push_back(spec.head.name);
  return names;
}

std::vector<std::string> routers_and_experts(const DecoderSpec& spec) {
  std::vector<std::string> names;
  if (!spec.block.mlp.experts) return names;
  for (std::int64_t i = 0; i < spec.layers(); ++i)
    each_projection(spec.block.mlp, block_name(spec, i) + ".",
                    [&](const std::string& module, const Projection& one) {
                      names.push_back(module + one.name);
                    });
  return names;
}

std::vector<TensorCut> tensor_cuts(const DecoderSpec& spec, int ranks) {
  check_divides(spec, ranks);
  std::vector<TensorCut> all;
  all.push_back({fmt::format("{}.{}.weight", spec.prefix, spec.embedding), 0, {spec.vocabulary}});
  for (std::int64_t i = 0; i < spec.layers(); ++i)
    for (TensorCut& cut : tensor_cuts(spec.block)) {
      cut.name = fmt::format("{}.{}", block_name(spec, i), cut.name);
      all.push_back(std::move(cut));
    }
  if (!spec.tied) cut_outputs(all, spec.head.name, spec.head);
  return all;
}

std::vector<TensorCut> tensor_cuts(const BlockSpec& block) {
  const std::string attention = block.attention.name + ".", mlp = block.mlp.name + ".";
  std::vector<TensorCut> all;
  for (const Projection& one : block.attention.in) cut_outputs(all, attention + one.name, one);
  cut_inputs(all, attention + block.attention.out.name, block.attention.out);
  const auto cut_perceptron = [&](const std::string& above) {
    for (const Projection& one : block.mlp.in) cut_outputs(all, above + one.name, one);
    cut_inputs(all, above + block.mlp.out.name, block.mlp.out);
  };
  const std::optional<ExpertsSpec>& experts = block.mlp.experts;
  if (!experts) cut_perceptron(mlp);
  for (std::int64_t i = 0; experts && i < experts->count(); ++i)
    cut_perceptron(fmt::format("{}{}.{}.", mlp, experts->list, i));
  return all;
}

BlockParts block_parts(const std::vector<std::string>& names) {
  const auto has = [&](const char* name) { return std::ranges::count(names, name) > 0; };
  return {has("swiglu"), has("norm"), has("mlp"), has("attention")};
}

std::string names_of(const BlockParts& parts) {
  std::string text;
  for (const auto& [on, name] :
       {std::pair(parts.swiglu, "swiglu"), std::pair(parts.norm, "norm"),
        std::pair(parts.mlp, "mlp"), std::pair(parts.attention, "attention")})
    if (on) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

void check_parts(const BlockParts& parts, const DecoderSpec& spec) {
  const MlpSpec& mlp = spec.block.mlp;
  if (mlp.experts && (parts.mlp || parts.swiglu))
    throw UsageError(spec.family,
                     "gradient_checkpointing.parts has {}, and the model has experts, which only "
                     "run again with their block. Write gradient_checkpointing: true.",
                     parts.mlp ? "mlp" : "swiglu");
  if (parts.swiglu && !(mlp.gated() && mlp.activation == Activation::kSilu))
    throw UsageError(spec.family,
                     "gradient_checkpointing.parts has swiglu, and the model's perceptron has "
                     "another activation. Write mlp, which runs all of it again.");
}

std::int64_t unused_by_a_token(const DecoderSpec& spec) {
  const MlpSpec& mlp = spec.block.mlp;
  if (!mlp.experts) return 0;
  std::int64_t expert = mlp.out.in * mlp.out.out();
  for (const Projection& one : mlp.in) expert += one.in * one.out();
  return spec.layers() * (mlp.experts->count() - mlp.experts->per_token) * expert;
}

// ---------------------------------------------------------------- ResNets

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
