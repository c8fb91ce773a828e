#include "lockstep/models/causal_lm.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/models/decoder.h"
#include "lockstep/models/gpt.h"
#include "lockstep/models/llama.h"

namespace lockstep::models {

// ---------------------------------------------------------------- the cache

std::pair<at::Tensor, at::Tensor> KvCache::append(std::size_t layer, const at::Tensor& keys,
                                                  const at::Tensor& values) {
  if (layers_.size() <= layer) layers_.resize(layer + 1);
  Layer& held = layers_[layer];
  const std::int64_t time = keys.size(2);
  const std::int64_t total = held.length + time;
  const auto put = [&](at::Tensor& all, const at::Tensor& more) {
    if (!all.defined() || all.size(2) < total) {
      auto shape = more.sizes().vec();
      shape[2] = all.defined() ? std::max(total, 2 * all.size(2)) : std::max(total, capacity_);
      const at::Tensor larger = torch::empty(shape, more.options());
      if (held.length > 0) larger.narrow(2, 0, held.length).copy_(all.narrow(2, 0, held.length));
      all = larger;
    }
    all.narrow(2, held.length, time).copy_(more);
  };
  put(held.keys, keys);
  put(held.values, values);
  held.length = total;
  return {held.keys.narrow(2, 0, total), held.values.narrow(2, 0, total)};
}

// ---------------------------------------------------------------- any family

at::Tensor CausalLm::hidden_states(const at::Tensor& ids, KvCache* cache) {
  const bool limited = config_.gpt() != nullptr;  // rotary positions have no end
  const std::int64_t past = cache != nullptr ? cache->length() : 0;
  const std::int64_t most = config_.max_positions();
  if (ids.dim() != 2 || ids.scalar_type() != at::kLong || (limited && past + ids.size(1) > most)) {
    throw UsageError(limited ? "gpt" : "llama",
                     "input of shape [{}] and type {}{}. Token ids are int64 [batch, time]{}.",
                     fmt::join(ids.sizes(), ", "), c10::toString(ids.scalar_type()),
                     past > 0 ? fmt::format(" after {} tokens in the cache", past) : "",
                     limited ? fmt::format(", with time at most n_positions = {}", most) : "");
  }
  return run(ids, cache, cache != nullptr ? BlockRunner() : runner_);
}

at::Tensor CausalLm::logits(const at::Tensor& hidden_states) {
  const at::Tensor all = head(hidden_states);
  const std::int64_t size = config_.vocab_size();
  return all.size(-1) == size ? all : all.narrow(-1, 0, size);
}

std::int64_t CausalLm::parameter_count() const {
  std::int64_t count = 0;
  for (const auto& parameter : parameters()) count += parameter.numel();
  return count;
}

CausalLmPtr make_causal_lm(const CausalLmConfig& config, const ParameterOptions& options) {
  if (options.pad_vocab_to_multiple_of < 1)
    throw UsageError("models", "pad_vocab_to_multiple_of {} must be 1 or more.",
                     options.pad_vocab_to_multiple_of);
  CausalLmPtr model;
  if (config.gpt() != nullptr)
    model = std::make_shared<GptImpl>(config, options);
  else
    model = std::make_shared<LlamaImpl>(config, options);
  model->to(options.device, options.dtype);
  return model;
}

at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::cross_entropy_loss(logits.view({-1, logits.size(-1)}), targets.view({-1}));
}

// ---------------------------------------------------------------- what families share

namespace detail {

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

at::Tensor run_blocks(const torch::nn::ModuleListImpl& blocks, at::Tensor x, const Pass& pass,
                      const BlockRunner& runner) {
  for (const auto& module : blocks) {
    const auto block = std::dynamic_pointer_cast<DecoderBlock>(module);
    if (runner) {
      x = runner([block, pass](
                     const std::vector<at::Tensor>& in) { return block->forward(in.at(0), pass); },
                 {x});
    } else {
      x = block->forward(x, pass);
    }
  }
  return x;
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

void draw_rows(at::Tensor weight, std::int64_t vocab_size, double deviation) {
  const torch::NoGradGuard no_grad;
  const std::int64_t padding = weight.size(0) - vocab_size;
  if (padding == 0) {
    weight.normal_(0, deviation);
    return;
  }
  weight.narrow(0, 0, vocab_size).normal_(0, deviation);
  weight.narrow(0, vocab_size, padding).zero_();
}

}  // namespace detail
}  // namespace lockstep::models
