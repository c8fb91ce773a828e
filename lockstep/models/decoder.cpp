#include "lockstep/models/decoder.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <optional>
#include <tuple>

#include "lockstep/nn/functional.h"

namespace lockstep::models::detail {
namespace {

// In memory of its own, also where two stages are on one device; gradients take the same way back.
at::Tensor copied(const at::Tensor& x, c10::Device device) {
  return x.to(x.options().device(device), /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

Pass begin_pass(const at::Tensor& ids, KvCache* cache, std::int64_t window) {
  const std::int64_t past = cache != nullptr ? cache->length() : 0;
  const std::int64_t total = past + ids.size(1);
  Pass pass{.cache = cache, .causal = past == 0};
  const bool cut = window > 0 && total > window;
  if (!cut && (past == 0 || ids.size(1) == 1)) return pass;
  pass.causal = false;
  const at::Tensor seen = torch::arange(total, ids.options());
  const at::Tensor own = torch::arange(past, total, ids.options()).unsqueeze(1);
  pass.mask = seen <= own;
  if (cut) pass.mask = pass.mask.logical_and(seen > own - window);
  return pass;
}

at::Tensor by_head(const at::Tensor& x, std::int64_t heads) {
  return x.view({x.size(0), x.size(1), heads, x.size(2) / heads}).transpose(1, 2);
}

at::Tensor attend(const at::Tensor& queries, at::Tensor keys, at::Tensor values, const Pass& pass,
                  std::size_t layer, double dropout) {
  if (pass.cache != nullptr) std::tie(keys, values) = pass.cache->append(layer, keys, values);
  const std::optional<at::Tensor> mask =
      pass.mask.defined() ? std::optional<at::Tensor>(pass.mask) : std::nullopt;
  const auto y = torch::scaled_dot_product_attention(
      queries, keys, values, mask, dropout, pass.causal, /*scale=*/std::nullopt,
      /*enable_gqa=*/queries.size(1) != keys.size(1));
  return y.transpose(1, 2).reshape({y.size(0), y.size(2), y.size(1) * y.size(3)});
}

at::Tensor attend_fused(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                        const Pass& pass, double dropout) {
  if (!pass.causal) return attend(queries, keys, values, pass, 0, dropout);
  const auto y = nn::attention(queries, keys, values, {.causal = true, .dropout = dropout});
  return y.transpose(1, 2).reshape({y.size(0), y.size(2), y.size(1) * y.size(3)});
}

at::Tensor Residual::total() const {
  if (!delta.defined()) return sum;
  return delta_bias.defined() ? sum + (delta + delta_bias.to(delta.scalar_type())) : sum + delta;
}

FusedTypes fused_types(c10::Device device, const at::Tensor& weight, bool residual_in_fp32) {
  const at::ScalarType compute = at::autocast::is_autocast_enabled(device.type())
                                     ? at::autocast::get_autocast_dtype(device.type())
                                     : weight.scalar_type();
  const bool wide = compute == at::kHalf || (residual_in_fp32 && compute == at::kBFloat16);
  return {compute, wide ? at::kFloat : compute};
}

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

at::Tensor run_blocks(const torch::nn::ModuleListImpl& blocks, at::Tensor x, Pass pass,
                      const BlockRunner& runner) {
  for (const auto& module : blocks) {
    const auto block = std::dynamic_pointer_cast<DecoderBlock>(module);
    if (block->copy_input_to) {
      x = copied(x, *block->copy_input_to);
      for (at::Tensor* shared : {&pass.mask, &pass.cos, &pass.sin})
        if (shared->defined()) *shared = shared->to(*block->copy_input_to);
    }
    if (runner) {
      x = runner([block, pass](
                     const std::vector<at::Tensor>& in) { return block->forward(in.at(0), pass); },
                 {x});
    } else {
      x = block->forward(x, pass);
    }
    if (block->copy_output_to) x = copied(x, *block->copy_output_to);
  }
  return x;
}

Residual run_blocks_fused(const torch::nn::ModuleListImpl& blocks, at::Tensor x, const Pass& pass,
                          const BlockRunner& runner) {
  Residual residual{.sum = std::move(x)};
  for (const auto& module : blocks) {
    const auto block = std::dynamic_pointer_cast<DecoderBlock>(module);
    if (!runner) {
      block->forward_fused(residual, pass);
      continue;
    }
    const auto whole = [block, pass](const std::vector<at::Tensor>& in) {
      Residual part{.sum = in.at(0)};
      block->forward_fused(part, pass);
      return part.total();
    };
    residual = {.sum = runner(whole, {residual.sum})};
  }
  return residual;
}

Linear make_linear(LinearOptions options, const ParameterOptions& parameters) {
  if (!parameters.draw)
    options.deviation(0).tensors(
        at::TensorOptions().dtype(parameters.dtype).device(parameters.device));
  return Linear(options);
}

torch::nn::Embedding make_embedding(std::int64_t rows, std::int64_t width,
                                    const ParameterOptions& parameters) {
  torch::nn::EmbeddingOptions options(rows, width);
  if (!parameters.draw)
    options._weight(torch::zeros(
        {rows, width}, at::TensorOptions().dtype(parameters.dtype).device(parameters.device)));
  return torch::nn::Embedding(options);
}

void draw(at::Tensor weight, double deviation) {
  const torch::NoGradGuard no_grad;
  weight.normal_(0, deviation);
}

}  // namespace lockstep::models::detail
