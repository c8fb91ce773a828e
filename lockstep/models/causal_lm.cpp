#include "lockstep/models/causal_lm.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/kernels/cuda/table.h"
#include "lockstep/models/decoder.h"
#include "lockstep/models/device_map.h"
#include "lockstep/models/linear.h"
#include "lockstep/nn/functional.h"
#include "lockstep/nn/nf4.h"
#include "lockstep/nn/tensor_group.h"

namespace lockstep::models {
namespace {

at::Tensor soft_capped(const at::Tensor& logits, double cap) {
  return cap > 0 ? torch::tanh(logits / cap) * cap : logits;
}

}  // namespace

CausalLm::CausalLm(CausalLmConfig given, const ParameterOptions& options)
    : config_(std::move(given)) {
  const DecoderSpec& spec = config_.spec();
  decoder_ = register_module(spec.prefix, std::make_shared<detail::Decoder>(spec, options));
  if (spec.tied) return;
  ParameterOptions of_head = options;
  of_head.nf4 = false;
  head_ = register_module(spec.head.name, detail::make_linear(spec.head, of_head));
  // Drawn a second time, so that a seed keeps giving the same initial weights.
  if (options.draw) detail::draw(head_->weight, spec.head.deviation);
}

at::Tensor CausalLm::hidden_states(const at::Tensor& ids, KvCache* cache) {
  const at::Tensor hidden = decode(ids, cache, /*router_logits=*/nullptr);
  const std::int64_t sequence = sequence_of(ids, cache);
  return sequence > 0 && stage().last ? nn::join(hidden, 1, sequence, tensor_group()) : hidden;
}

std::int64_t CausalLm::sequence_of(const at::Tensor& ids, const KvCache* cache) const {
  const bool divided = sequence_parallel() && tensor_group() && cache == nullptr &&
                       ids.size(1) >= tensor_group()->size();
  return divided ? ids.size(1) : 0;
}

at::Tensor CausalLm::decode(const at::Tensor& ids, KvCache* cache,
                            std::vector<at::Tensor>* router_logits) {
  const bool limited = config_.spec().positions_end();
  const std::int64_t past = cache != nullptr ? cache->length() : 0;
  const std::int64_t most = config_.max_positions();
  if (ids.dim() != 2 || ids.scalar_type() != at::kLong || (limited && past + ids.size(1) > most)) {
    throw UsageError(config_.spec().family,
                     "input of shape [{}] and type {}{}. Token ids are int64 [batch, time]{}.",
                     fmt::join(ids.sizes(), ", "), c10::toString(ids.scalar_type()),
                     past > 0 ? fmt::format(" after {} tokens in the cache", past) : "",
                     limited ? fmt::format(", with time at most n_positions = {}", most) : "");
  }
  return decoder_->forward(placement_ ? ids.to(placement_->input) : ids,
                           {.cache = cache,
                            .runner = cache != nullptr || !runner_ ? nullptr : &runner_,
                            .parts = parts_,
                            .fused = cache == nullptr && fused_on(ids.device()),
                            .residual_in_fp32 = residual_in_fp32_,
                            .router_logits = router_logits,
                            .stage = &stage(),
                            .tensor = tensor_group(),
                            .sequence = sequence_of(ids, cache)});
}

void CausalLm::run_blocks_with(BlockRunner runner, const BlockParts& parts) {
  check_parts(parts, config_.spec());
  runner_ = std::move(runner);
  parts_ = parts;
}

nn::Staged::Parts CausalLm::parts() const {
  Parts parts = decoder_->parts();
  const std::vector<at::Tensor> head =
      head_ != nullptr ? head_->parameters() : std::vector{decoder_->token_weight()};
  parts.last.insert(parts.last.end(), head.begin(), head.end());
  return parts;
}

std::vector<nn::Sliced::Cut> CausalLm::cuts(int ranks) const {
  constexpr const char* kWho = "tensor_parallel";
  if (placement_)
    throw UsageError(kWho,
                     "a device map has split the model over the devices of this rank. Use one of "
                     "the two.");
  std::map<std::string, TensorCut> by_name;
  for (TensorCut& cut : tensor_cuts(config_.spec(), ranks)) by_name.emplace(cut.name, cut);
  std::set<std::string> known;
  for (const io::TensorShape& tensor : tensors_of(config_.spec())) known.insert(tensor.name);
  for (const auto& item : named_modules())
    if (const auto* linear = item.value()->as<LinearImpl>();
        linear != nullptr && linear->has_lora()) {
      known.insert({item.key() + ".lora_A.weight", item.key() + ".lora_B.weight"});
      const auto base = by_name.find(item.key() + ".weight");
      if (base == by_name.end()) continue;
      // The adapter's factor along the side by which the weight is cut.
      const bool out =
          (base->second.dimension == 0) == (linear->options.layout() == WeightLayout::kOutIn);
      const std::string factor = item.key() + (out ? ".lora_B.weight" : ".lora_A.weight");
      by_name.emplace(factor, TensorCut{factor, out ? 0 : 1, base->second.parts});
    }
  std::vector<Cut> cuts;
  for (const auto& item : named_parameters()) {
    if (!known.contains(item.key()))
      throw UsageError(
          kWho,
          "parameter '{}' was added to the model, so it is not known how to divide it. Train "
          "without it, or with fsdp or a pipeline.",
          item.key());
    if (const auto cut = by_name.find(item.key()); cut != by_name.end())
      cuts.push_back({item.value(), cut->second.dimension, cut->second.parts});
  }
  return cuts;
}

bool CausalLm::fused_on(c10::Device device) const {
  if (placement_) return false;  // activations move between its devices
  return fused_.value_or(device.is_cuda() && kernels::cuda::table() != nullptr);
}

const at::Tensor* CausalLm::head_weight() const {
  if (head_ == nullptr) return &decoder_->token_weight();
  return head_->has_lora() ? nullptr : &head_->weight;
}

at::Tensor CausalLm::loss(const at::Tensor& ids, const at::Tensor& targets,
                          at::Tensor* all_logits) {
  const std::optional<ExpertsSpec>& experts = config_.spec().block.mlp.experts;
  const double share = experts ? experts->load_balancing : 0;
  if (share != 0 && (!stage().first || !stage().last))
    throw UsageError(config_.spec().family,
                     "the load balancing loss is taken over the routers of all blocks, and each "
                     "stage of a pipeline has some of them. Set output_router_logits to false.");
  std::vector<at::Tensor> routers;
  const at::Tensor hidden = decode(ids, nullptr, share != 0 ? &routers : nullptr);
  if (!stage().last) return hidden;
  const std::int64_t sequence = sequence_of(ids);
  at::Tensor loss;
  if (all_logits != nullptr) {
    *all_logits = logits(sequence > 0 ? nn::join(hidden, 1, sequence, tensor_group()) : hidden);
    loss = next_token_loss(*all_logits, targets);
  } else {
    loss = cross_entropy(hidden, targets, sequence);
  }
  if (routers.empty()) return loss;
  return loss + share * detail::load_balancing_loss(routers, *experts).to(loss.device());
}

at::Tensor CausalLm::cross_entropy(const at::Tensor& hidden, const at::Tensor& targets,
                                   std::int64_t sequence) {
  const at::Tensor* const weight = head_weight();
  const bool fused = fused_on(hidden.device()) && weight != nullptr;
  const double cap = config_.spec().logit_soft_cap;
  if (tensor_group()) {
    const nn::EnteredSequence in(hidden, sequence, tensor_group());
    const at::Tensor own =
        fused ? soft_capped(nn::linear(in.whole(), *weight, {}), cap) : own_logits(in.whole());
    return nn::sliced_cross_entropy(in.release({own})[0], targets, config_.vocab_size(),
                                    tensor_group());
  }
  if (!fused) return next_token_loss(logits(hidden), targets);
  if (cap > 0)  // which the loss in chunks does not know
    return next_token_loss(soft_capped(nn::linear(hidden, *weight, {}), cap), targets);
  return nn::linear_cross_entropy(hidden, *weight, targets.to(hidden.device()));
}

at::Tensor CausalLm::logits(const at::Tensor& hidden_states) {
  at::Tensor in = hidden_states;
  if (placement_ && placement_->copy_to_head)
    in = in.to(in.options().device(*placement_->copy_to_head), /*non_blocking=*/false,
               /*copy=*/true);
  return nn::join(own_logits(nn::enter(in, tensor_group())), in.dim() - 1, config_.vocab_size(),
                  tensor_group());
}

at::Tensor CausalLm::own_logits(const at::Tensor& hidden) {
  return soft_capped(head_ != nullptr ? head_->forward(hidden, true, tensor_group())
                                      : torch::linear(hidden, decoder_->token_weight()),
                     config_.spec().logit_soft_cap);
}

void CausalLm::to(c10::Device device, c10::ScalarType dtype, bool non_blocking) {
  if (placement_)
    to(dtype, non_blocking);
  else
    Module::to(device, dtype, non_blocking);
}

void CausalLm::to(c10::Device device, bool non_blocking) {
  if (!placement_) Module::to(device, non_blocking);
}

std::int64_t CausalLm::parameter_count() const {
  std::int64_t count = 0;
  for (const auto& parameter : parameters())
    if (!nn::is_nf4(parameter)) count += parameter.numel();
  for (const auto& part : modules())
    if (const auto* linear = part->as<LinearImpl>(); linear != nullptr && linear->options.nf4())
      count += linear->options.in_features() * linear->options.out_features();
  return count;
}

c10::Device device_of(const std::string& device) {
  if (device.starts_with("cpu")) return c10::kCPU;
  const c10::Device gpu(device);
  const auto gpus = static_cast<int>(torch::cuda::device_count());
  if (!gpu.is_cuda() || gpu.index() < 0 || gpu.index() >= gpus)
    throw UsageError("models",
                     "the device map names {}, and this process sees {} GPU{}. Check "
                     "CUDA_VISIBLE_DEVICES, or write cpu.",
                     device, gpus, gpus == 1 ? "" : "s");
  return gpu;
}

void place(CausalLm& model, const DeviceMap& map) {
  const auto modules = model.named_modules("", /*include_self=*/false);
  std::size_t blocks = 0;
  std::vector<c10::Device> devices;  // all of them are there before anything is moved
  for (const DeviceMap::Part& part : map.parts) {
    devices.push_back(device_of(part.device));
    const auto* module = modules.find(part.name);
    blocks += module != nullptr && (*module)->as<detail::DecoderBlock>() != nullptr;
    const bool tied_head = &part == &map.parts.back() && model.config().tied();
    if (module == nullptr && !tied_head)
      throw UsageError("models", "the device map names {}, which the model does not have.",
                       part.name);
  }
  if (blocks != static_cast<std::size_t>(model.config().layers()))
    throw UsageError("models", "the device map has {} blocks, and the model {}.", blocks,
                     model.config().layers());
  CausalLm::Placement placement{.input = devices.front()};
  detail::DecoderBlock* last = nullptr;
  for (std::size_t i = 0; i < map.parts.size(); ++i) {
    const bool border = i > 0 && map.parts[i].device != map.parts[i - 1].device;
    const auto copy_to = border ? std::optional(devices[i]) : std::nullopt;
    const auto* module = modules.find(map.parts[i].name);
    if (module != nullptr) (*module)->to(devices[i]);
    auto* block = module != nullptr ? (*module)->as<detail::DecoderBlock>() : nullptr;
    if (block != nullptr) {
      block->copy_input_to = copy_to;
      block->copy_output_to.reset();
      last = block;
    } else if (i + 1 == map.parts.size()) {
      placement.copy_to_head = copy_to;
    } else if (last != nullptr) {  // the norm
      last->copy_output_to = copy_to;
    }
  }
  model.placement_ = placement;
}

at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::cross_entropy_loss(logits.flatten(0, -2), targets.to(logits.device()).flatten());
}

std::pair<at::Tensor, at::Tensor> KvCache::append(std::size_t layer, const at::Tensor& keys,
                                                  const at::Tensor& values) {
  const torch::NoGradGuard no_grad;
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

namespace {

at::Tensor penalized(const at::Tensor& logits, const std::vector<std::int64_t>& text,
                     double penalty) {
  const at::Tensor seen = torch::tensor(text, at::kLong);
  const at::Tensor theirs = logits.gather(0, seen);
  return logits.scatter(0, seen, torch::where(theirs < 0, theirs * penalty, theirs / penalty));
}

std::int64_t sampled(const at::Tensor& logits, const GenerateOptions& options,
                     at::Generator& generator) {
  auto [sorted, order] = (logits / options.temperature).sort(/*dim=*/-1, /*descending=*/true);
  // Keeps tokens as likely as the last one of top_k.
  if (options.top_k > 0 && options.top_k < sorted.size(0))
    sorted = sorted.masked_fill(sorted < sorted[options.top_k - 1], -INFINITY);
  at::Tensor shares = sorted.softmax(-1);
  // Drops a token when those before it already reach top_p; the first one always stays.
  const at::Tensor before = shares.cumsum(-1) - shares;
  if (options.top_p < 1) shares = shares * (before < std::max(options.top_p, 1e-12));
  return order[torch::multinomial(shares, 1, false, generator).item<std::int64_t>()]
      .item<std::int64_t>();
}

// The token that continues `text`; `logits` are those of its last token.
std::int64_t chosen(const at::Tensor& logits, const std::vector<std::int64_t>& text,
                    const GenerateOptions& options, at::Generator& generator) {
  at::Tensor scores = logits.to(at::kCPU, at::kFloat);
  if (options.repetition_penalty != 1) scores = penalized(scores, text, options.repetition_penalty);
  return options.temperature == 0 ? scores.argmax().item<std::int64_t>()
                                  : sampled(scores, options, generator);
}

void check_generate(const CausalLm& model, const std::vector<std::int64_t>& ids,
                    const GenerateOptions& o) {
  const std::int64_t size = model.config().vocab_size();
  if (ids.empty())
    throw UsageError("generate", "there is no token to continue. Give at least one.");
  for (const std::int64_t id : ids)
    if (id < 0 || id >= size)
      throw UsageError("generate", "the token {} is outside of the vocabulary of {}.", id, size);
  if (o.max_new_tokens < 0 || !(o.temperature >= 0) || o.top_k < 0 ||
      !(o.top_p > 0 && o.top_p <= 1) || !(o.repetition_penalty > 0))
    throw UsageError("generate",
                     "max_new_tokens {}, temperature {} and top_k {} must be at least 0, top_p {} "
                     "in (0, 1], and repetition_penalty {} above 0.",
                     o.max_new_tokens, o.temperature, o.top_k, o.top_p, o.repetition_penalty);
  const auto length = static_cast<std::int64_t>(ids.size());
  const std::int64_t most = model.config().max_positions();
  if (model.config().spec().positions_end() && length + o.max_new_tokens > most + 1)
    throw UsageError("generate",
                     "{} tokens and {} new ones are more than the model's n_positions {}. Lower "
                     "max_new_tokens, or shorten the text.",
                     length, o.max_new_tokens, most);
}

}  // namespace

std::vector<std::int64_t> generate(CausalLm& model, const std::vector<std::int64_t>& ids,
                                   const GenerateOptions& options) {
  check_generate(model, ids, options);
  struct Mode {
    explicit Mode(CausalLm& m) : model(m), training(m.is_training()) { model.eval(); }
    ~Mode() { model.train(training); }
    CausalLm& model;
    bool training;
  } const mode(model);
  const torch::NoGradGuard no_grad;
  const auto device = model.parameters().front().device();
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  const auto row = [&](const std::vector<std::int64_t>& tokens) {
    return torch::tensor(tokens, at::kLong).unsqueeze(0).to(device);
  };
  KvCache cache;
  std::vector<std::int64_t> all = ids;
  at::Tensor next = row(all);
  std::vector<std::int64_t> made;
  for (std::int64_t i = 0; i < options.max_new_tokens; ++i) {
    const std::int64_t limit = model.config().spec().cache_limit;
    if (limit > 0 && cache.length() == limit) {
      cache = KvCache();
      next = row(all);
    }
    const at::Tensor hidden = model.hidden_states(next, &cache);
    const at::Tensor logits = model.logits(hidden.slice(1, -1)).flatten();
    made.push_back(chosen(logits, all, options, generator));
    if (std::ranges::find(options.eos, made.back()) != options.eos.end()) break;
    if (options.stop && options.stop(made)) break;
    all.push_back(made.back());
    next = row({made.back()});
  }
  return made;
}

}  // namespace lockstep::models
