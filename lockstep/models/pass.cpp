#include "lockstep/models/pass.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <vector>

namespace lockstep::models::detail {

at::Tensor activate(Activation activation, const at::Tensor& x) {
  switch (activation) {
    case Activation::kGeluTanh:
      return torch::gelu(x, "tanh");
    case Activation::kGelu:
      return torch::gelu(x);
    case Activation::kRelu:
      return torch::relu(x);
    case Activation::kSilu:
      break;
  }
  return torch::silu(x);
}

Linear make_linear(const Projection& projection, const ParameterOptions& parameters,
                   bool adaptable) {
  LinearOptions options(projection.in, projection.out());
  options.bias(projection.bias).layout(projection.layout).deviation(projection.deviation);
  options.adaptable(adaptable).nf4(parameters.nf4 && adaptable);
  if (!parameters.draw)
    options.deviation(0).tensors(
        at::TensorOptions().dtype(parameters.dtype).device(parameters.device));
  return Linear(options);
}

at::ScalarType compute_type(c10::Device device, at::ScalarType otherwise) {
  return at::autocast::is_autocast_enabled(device.type())
             ? at::autocast::get_autocast_dtype(device.type())
             : otherwise;
}

void draw(at::Tensor weight, double deviation) {
  const torch::NoGradGuard no_grad;
  weight.normal_(0, deviation);
}

namespace {

// Slow rotations have their frequency divided by `factor`, fast ones keep it, and those between are
// interpolated.
at::Tensor llama3_frequencies(const at::Tensor& plain, const RopeConfig& rope) {
  const auto length = static_cast<double>(rope.original_max_position_embeddings);
  const double low = rope.low_freq_factor, high = rope.high_freq_factor;
  const at::Tensor waves = 2 * std::numbers::pi / plain;
  const at::Tensor scaled = torch::where(waves > length / low, plain / rope.factor, plain);
  const at::Tensor share = (length / waves - low) / (high - low);
  const at::Tensor between = (1 - share) * scaled / rope.factor + share * scaled;
  const at::Tensor is_between =
      (waves < length / high).logical_not().logical_and((waves > length / low).logical_not());
  return torch::where(is_between, between, scaled);
}

// The pair that makes this many turns in the original positions.
double yarn_pair(double turns, double width, const RopeConfig& rope) {
  const auto length = static_cast<double>(rope.original_max_position_embeddings);
  return width * std::log(length / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(rope.rope_theta));
}

// Pairs before `low` keep their frequency, and those from `high` on have it divided by the factor;
// between them it is interpolated.
at::Tensor yarn_frequencies(const at::Tensor& powers, double width, const RopeConfig& rope) {
  double low = yarn_pair(rope.beta_fast, width, rope);
  double high = yarn_pair(rope.beta_slow, width, rope);
  if (rope.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, width - 1);
  if (low == high) high += 0.001;
  const at::Tensor pairs = torch::arange(powers.size(0), at::kFloat);
  const at::Tensor kept = 1 - torch::clamp((pairs - low) / (high - low), 0, 1);
  return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept;
}

at::Tensor divisors(const std::vector<double>& values) {
  return torch::tensor(values, at::kDouble).to(at::kFloat);
}

}  // namespace

RotaryAngles::RotaryAngles(const Rotary& rotary) : rope_(rotary.scaling) {
  const std::int64_t width = rotary.width;
  const at::Tensor powers = torch::pow(
      rope_.rope_theta, torch::arange(0, width, 2, at::kFloat) / static_cast<double>(width));
  frequencies_ = 1.0 / powers;
  if (rope_.type == "linear") frequencies_ = frequencies_ / rope_.factor;
  if (rope_.type == "llama3") frequencies_ = llama3_frequencies(frequencies_, rope_);
  if (rope_.type == "yarn")
    frequencies_ = yarn_frequencies(powers, static_cast<double>(width), rope_);
  if (rope_.type == "longrope") {
    frequencies_ = 1.0 / (divisors(rope_.short_factor) * powers);
    long_frequencies_ = 1.0 / (divisors(rope_.long_factor) * powers);
  }
}

std::pair<at::Tensor, at::Tensor> RotaryAngles::find(const RotaryPositions& wanted) {
  const std::int64_t end = wanted.past + wanted.time;
  const bool beyond = long_frequencies_.defined() && end > rope_.original_max_position_embeddings;
  const auto length = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(end)));
  const at::Device device = wanted.like.device();
  const at::ScalarType type = c10::typeMetaToScalarType(wanted.like.dtype());
  auto& [cos, sin] = tables_[{device.str(), type, length, beyond, wanted.halves}];
  if (!cos.defined()) {
    const torch::NoGradGuard no_grad;
    const at::Tensor chosen = (beyond ? long_frequencies_ : frequencies_).to(device);
    at::Tensor angles = torch::arange(length, chosen.options()).unsqueeze(1) * chosen;
    if (!wanted.halves) angles = torch::cat({angles, angles}, 1);
    cos = (angles.cos() * rope_.attention_factor).to(type);
    sin = (angles.sin() * rope_.attention_factor).to(type);
  }
  return {cos.narrow(0, wanted.past, wanted.time), sin.narrow(0, wanted.past, wanted.time)};
}

}  // namespace lockstep::models::detail
